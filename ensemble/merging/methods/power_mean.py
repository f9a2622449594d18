"""Merge by the weighted power mean, which is between the smallest and the largest of the members' values.

    p(k)  =  (sum over members i of w_i * p_i(k) ** power) ** (1 / power)

with w_i the weight over the sum of the weights of the members that have the row. If labels exclude each other, rows
are then scaled to a sum of 1. ``power: 1`` is the mean. The larger the power, the more the most confident member
counts for a label; below 1 the least confident member counts more. As the power approaches 0, the result approaches
the geometric mean; 0 itself is refused, because ``geometric_mean`` is that method. With a negative power, zeros
count as the smallest normal number.

P. S. Bullen, "Handbook of Means and Their Inequalities" (2003), chapter III.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Ge, Le
from pydantic import AfterValidator, Field

from ensemble.config import EnsembleConfig
from ensemble.config.values import MustBe
from ensemble.merging.methods.base import Block, MergeMethod, Values
from ensemble.merging.methods.weighted_mean import scaled, weighted_mean

_MAX_POWER = 1000


def _not_0(value: float) -> float:
    if value == 0:
        raise ValueError
    return value


class PowerMeanSettings(EnsembleConfig):
    """The weighted power mean of the members' probabilities."""

    # Above 1 members that give a label much count for more, below 1 members that give it little.
    power: Annotated[
        float,
        Ge(-_MAX_POWER),
        Le(_MAX_POWER),
        AfterValidator(_not_0),
        MustBe(f"a number from -{_MAX_POWER} to {_MAX_POWER}, and not 0, which is method: geometric_mean"),
    ] = Field(examples=["2"])


class PowerMean(MergeMethod):
    """See the module; sigmoid values are taken label by label."""

    Settings = PowerMeanSettings
    settings: PowerMeanSettings
    takes_raw_values = False

    def merge(self, block: Block, weights: Values) -> Values:
        power = self.settings.power
        counts = block.is_present[:, :, None] & (weights > 0)
        # By logarithms, from which the largest is taken: powers may be too small for a number.
        logs = np.where(
            counts, power * np.log(np.maximum(block.probabilities, np.finfo(np.float64).tiny)), -np.inf
        )
        most = logs.max(axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):  # rows that nobody has, and weights of 0
            means = weighted_mean(weights, (np.exp(values - most) for values in logs), block.is_present)
            values = np.exp((np.log(means) + most) / power)
        return scaled(values) if self.members.are_exclusive else values
