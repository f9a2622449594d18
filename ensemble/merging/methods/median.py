"""Merge by the weighted median of the members' values: one member that is far off cannot move it far.

For each label the members are put in order of their values. The median is the value at which half of the weight is
reached; if exactly half is reached, it is the middle between that value and the next one. With equal weights that
is the usual median; a weight of 2 counts a value twice. If labels exclude each other, rows are scaled to a sum of
1; a row whose medians are all 0 gives all labels the same value.

F. Y. Edgeworth, "On a New Method of Reducing Observations Relating to Several Quantities", Philosophical Magazine
25 (1888), 184-191.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ensemble.merging.methods.base import Block, MergeMethod, Values
from ensemble.merging.methods.weighted_mean import scaled

# By how much sums of weights may miss half of the whole, relative.
_ROUNDING = 1e-12


class Median(MergeMethod):
    """See the module; sigmoid and raw values are taken label by label and stay as they are."""

    def merge(self, block: Block, weights: Values) -> Values:
        order = block.probabilities.argsort(axis=0)  # NaN comes last
        values = np.take_along_axis(block.probabilities, order, axis=0)
        counted = np.broadcast_to(weights * block.is_present[:, :, None], order.shape)
        reached = np.take_along_axis(counted, order, axis=0).cumsum(axis=0)
        half = reached[-1] / 2

        def at(is_beyond: npt.NDArray[np.bool_]) -> Values:
            first = is_beyond.argmax(axis=0)[None]
            return np.asarray(np.take_along_axis(values, first, axis=0)[0])

        lower, upper = at(reached >= half * (1 - _ROUNDING)), at(reached > half * (1 + _ROUNDING))
        median = np.where(lower == upper, lower, (lower + upper) / 2)
        median[(half == 0).any(axis=1)] = np.nan
        return scaled(median) if self.members.are_exclusive else median
