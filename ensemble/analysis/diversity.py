"""Compare members pair by pair: their decisions, their correlations, and who is right where they differ."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ensemble.analysis.calibration import one_hot
from ensemble.common.protocol import Activation
from ensemble.data.table import Truth
from ensemble.merging.methods.base import Values


@dataclass(frozen=True)
class Pair:
    """Compare two members on the rows that both have.

    Attributes:
        correlation: Pearson's of the values - truth, or without a truth of the values, over all rows and labels;
            NaN if a member is constant.
        decisions: of both: a row's first label, or with "sigmoid" each label by itself (0.5 is yes); 0 if values
            are no probabilities.
        differ: how many of these are different.
        kappa: Cohen's, the agreement beyond chance: (same - chance) / (1 - chance), where chance is that of two
            raters with the same frequencies (Cohen 1960); NaN if there are no decisions or only one.
        only_first: decisions in which only the first member is right; so is ``only_second``; 0 without a truth.
    """

    rows: int
    correlation: float
    decisions: int = 0
    differ: int = 0
    kappa: float = float("nan")
    only_first: int = 0
    only_second: int = 0

    @property
    def difference(self) -> float:
        """Return the share of decisions that are different."""
        return self.differ / self.decisions if self.decisions else float("nan")


def compare_pair(first: Values, second: Values, activation: Activation, truth: Truth | None = None) -> Pair:
    """Compare the values of two members, float64 [rows, labels]; a row of NaN is one that a member lacks.

    Args:
        activation: "none" for values that are no probabilities.
        truth: label numbers, int64 [rows], or values, float64 [rows, labels].
    """
    is_in_both = ~np.isnan(first[:, 0] + second[:, 0])
    first, second = first[is_in_both], second[is_in_both]
    rows = len(first)
    if truth is None:
        correlation = _correlation(first, second)
    else:
        true_values = one_hot(truth[is_in_both], first.shape[1])
        correlation = _correlation(first - true_values, second - true_values)
    if activation == "none" or not rows:
        return Pair(rows, correlation)
    ours, theirs = _decisions(first, activation), _decisions(second, activation)
    only_first = only_second = 0
    if truth is not None:
        right = _decisions(true_values, activation)
        only_first = int(((ours == right) & (theirs != right)).sum())
        only_second = int(((ours != right) & (theirs == right)).sum())
    classes = max(int(ours.max()), int(theirs.max())) + 1
    chance = (
        float(np.bincount(ours, minlength=classes) @ np.bincount(theirs, minlength=classes)) / len(ours) ** 2
    )
    same = float((ours == theirs).mean())
    return Pair(
        rows=rows,
        correlation=correlation,
        decisions=len(ours),
        differ=int((ours != theirs).sum()),
        kappa=(same - chance) / (1 - chance) if chance < 1 else float("nan"),
        only_first=only_first,
        only_second=only_second,
    )


def _decisions(values: Values, activation: Activation) -> npt.NDArray[np.int64]:
    """Return the first label of each row, or with "sigmoid" whether each label is likely."""
    if activation == "softmax":
        return np.asarray(values.argmax(axis=1))
    return np.asarray(values >= 0.5, np.int64).ravel()


def _correlation(first: Values, second: Values) -> float:
    """Return Pearson's correlation of all cells; NaN if either is constant."""
    if not len(first) or min(np.ptp(first), np.ptp(second)) <= 1e-12:
        return float("nan")
    return float(np.corrcoef(first.ravel("F"), second.ravel("F"))[0, 1])
