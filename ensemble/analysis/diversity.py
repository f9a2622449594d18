"""Compare members pair by pair: their decisions, their correlations, and who is right where they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np
import numpy.typing as npt

from ensemble.analysis.calibration import one_hot
from ensemble.common.protocol import Activation
from ensemble.data.table import Truth
from ensemble.merging.methods.base import Values

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Diversity:
    """Pairs of members; every array is [members, members], NaN where a pair has nothing to compare.

    Attributes:
        rows: that both have.
        decisions: of both: a row's first label, or with "sigmoid" each label by itself (0.5 is yes).
        same: how many of these are the same; both are 0 if values are no probabilities.
        kappa: Cohen's, the agreement beyond chance: (same - chance) / (1 - chance), where chance is that of two
            raters with the same frequencies (Cohen 1960).
        correlation: Pearson's of the values, over all rows and labels.
        error_correlation: Pearson's of value - truth; None without a truth.
        only_right: decisions in which the row's member is right and the column's is not; None without a truth.
    """

    rows: Counts
    decisions: Counts
    same: Counts
    kappa: Values
    correlation: Values
    error_correlation: Values | None
    only_right: Counts | None

    @property
    def agreement(self) -> Values:
        """Return the share of decisions that are the same."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.same / self.decisions)


def diversity(members: Sequence[Values], activation: Activation, truth: Truth | None = None) -> Diversity:
    """Compare members pair by pair, each pair on the rows that both have.

    Args:
        members: float64 [rows, labels] each; a row of NaN is one that the member does not have.
        activation: "softmax" where a row's labels exclude each other, "sigmoid" where they do not, "none" for
            values that are no probabilities.
        truth: label numbers, int64 [rows], or values, float64 [rows, labels].
    """
    shape = (len(members), len(members))
    true_values = None if truth is None else one_hot(truth, members[0].shape[1])
    is_present = [~np.isnan(values[:, 0]) for values in members]
    rows, decisions, same, only_right = (np.zeros(shape, np.int64) for _ in range(4))
    kappa, correlation, error_correlation = (np.full(shape, np.nan) for _ in range(3))
    for i, j in combinations_with_replacement(range(len(members)), 2):
        is_in_both = is_present[i] & is_present[j]
        both = slice(None) if is_in_both.all() else is_in_both  # a slice copies nothing
        first, second = members[i][both], members[j][both]
        rows[i, j] = rows[j, i] = len(first)
        correlation[i, j] = correlation[j, i] = _correlation(first, second)
        if true_values is not None:
            known = true_values[both]
            error_correlation[i, j] = error_correlation[j, i] = _correlation(first - known, second - known)
        if activation == "none":
            continue
        ours, theirs = _decisions(first, activation), _decisions(second, activation)
        decisions[i, j] = decisions[j, i] = len(ours)
        same[i, j] = same[j, i] = (ours == theirs).sum()
        kappa[i, j] = kappa[j, i] = _kappa(ours, theirs)
        if true_values is not None:
            right = _decisions(known, activation)
            only_right[i, j] = ((ours == right) & (theirs != right)).sum()
            only_right[j, i] = ((ours != right) & (theirs == right)).sum()
    return Diversity(
        rows=rows,
        decisions=decisions,
        same=same,
        kappa=kappa,
        correlation=correlation,
        error_correlation=None if truth is None else error_correlation,
        only_right=None if truth is None or activation == "none" else only_right,
    )


def _decisions(values: Values, activation: Activation) -> Counts:
    """Return the first label of each row, or with "sigmoid" whether each label is likely."""
    if activation == "softmax":
        return np.asarray(values.argmax(axis=1))
    return np.asarray(values >= 0.5, np.int64).ravel()


def _kappa(ours: Counts, theirs: Counts) -> float:
    """Return Cohen's kappa; NaN if there are no decisions, or both decide the same always."""
    if not len(ours):
        return float("nan")
    classes = int(max(ours.max(), theirs.max())) + 1
    shares = [np.bincount(each, minlength=classes) / len(ours) for each in (ours, theirs)]
    chance = float(shares[0] @ shares[1])
    return float(((ours == theirs).mean() - chance) / (1 - chance)) if chance < 1 else float("nan")


def _correlation(first: Values, second: Values) -> float:
    """Return Pearson's correlation of all cells; NaN if either is constant."""
    if any(len(values) < 1 or np.ptp(values) <= 1e-12 for values in (first, second)):
        return float("nan")
    return float(np.corrcoef(first.ravel("F"), second.ravel("F"))[0, 1])
