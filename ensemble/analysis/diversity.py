"""How alike members are: what they decide, how their values move together, and who is right where they differ.

All of it comes from one pass over the rows in blocks, as products of matrices: 30 members are no slower per pair
than two.  A pair is compared on the rows that both have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap

import numpy as np
import numpy.typing as npt

from ensemble.analysis.calibration import one_hot
from ensemble.common.protocol import Activation
from ensemble.data.table import Truth
from ensemble.merging.blocks import block_spans
from ensemble.merging.methods.base import Values

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Diversity:
    """Pairs of members; every array is [members, members], NaN where a pair has nothing to compare.

    Attributes:
        rows: that both have.
        decisions: what both have decided: a row's first label, or with "sigmoid" each label by itself (0.5 is yes).
        same: of these, how many are the same; ``decisions`` and ``same`` are 0 where values are no probabilities.
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
        """The share of decisions that are the same."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.same / self.decisions)


def diversity(members: Sequence[Values], activation: Activation, truth: Truth | None = None) -> Diversity:
    """Compare members pair by pair.

    Args:
        members: float64 [rows, labels] each; a row of NaN is one that the member does not have.
        activation: "softmax" where a row's labels exclude each other, "sigmoid" where they do not, "none" for
            values that are no probabilities.
        truth: label numbers, int64 [rows], or values, float64 [rows, labels].
    """
    pairs = (len(members), len(members))
    true_values = None if truth is None else one_hot(truth, members[0].shape[1])
    is_present = [~np.isnan(values[:, 0]) for values in members]
    decisions, same, only_right = (np.zeros(pairs) for _ in range(3))
    kappa = np.full(pairs, np.nan)
    if activation != "none":
        decisions, same, kappa, only_right = _compare_decisions(members, activation, true_values)
    has_right = truth is not None and activation != "none"
    return Diversity(
        rows=np.array([[(ours & theirs).sum() for theirs in is_present] for ours in is_present]),
        decisions=decisions.astype(np.int64),
        same=same.astype(np.int64),
        kappa=kappa,
        correlation=_correlation(members, None),
        error_correlation=None if true_values is None else _correlation(members, true_values),
        only_right=only_right.astype(np.int64) if has_right else None,
    )


def _compare_decisions(
    members: Sequence[Values], activation: Activation, true_values: Values | None
) -> tuple[Values, Values, Values, Values]:
    """Return ``decisions``, ``same``, ``kappa`` and ``only_right`` of ``Diversity``."""
    shape = (len(members), len(members))
    classes = members[0].shape[1] if activation == "softmax" else 2
    counts, same, right, both_right = (np.zeros(shape) for _ in range(4))
    chosen = np.zeros((classes, *shape))  # decisions of a member for a class in rows of another
    for part in starmap(slice, block_spans(*members[0].shape)):
        block = np.stack([values[part] for values in members])
        decided = _decided(block, activation)
        # float32 counts whole numbers up to 2^24 exactly, more than a block has.
        present = np.repeat(~np.isnan(block[:, :, 0]), decided.shape[2], axis=1).astype(np.float32)
        decided = decided.reshape(len(members), -1)
        counts += present @ present.T
        for number in range(classes):
            is_chosen = (decided == number) * present
            same += is_chosen @ is_chosen.T
            chosen[number] += is_chosen @ present.T
        if true_values is not None:
            is_right = (decided == _decided(true_values[part], activation).ravel()) * present
            right += is_right @ present.T
            both_right += is_right @ is_right.T
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = chosen / counts
        chance = (shares * shares.transpose(0, 2, 1)).sum(axis=0)
        kappa = (same / counts - chance) / (1 - chance)
    return counts, same, np.where(np.isfinite(kappa), kappa, np.nan), right - both_right


def _decided(values: Values, activation: Activation) -> Counts:
    """Return the first label, [..., rows, 1], or with "sigmoid" which labels are likely, [..., rows, labels]."""
    if activation == "softmax":
        return np.asarray(values.argmax(axis=-1)[..., None])
    return np.asarray(values >= 0.5, np.int64)


def _correlation(members: Sequence[Values], true_values: Values | None) -> Values:
    """Return Pearson's correlations of values, or of errors, [members, members]; NaN if one of two is constant."""
    shape = (len(members), len(members))
    cells, sums, squares, products = (np.zeros(shape) for _ in range(4))
    # Numbers far from 0 keep their digits if they are counted from some number near them.
    shifts = np.array([values[~np.isnan(values[:, 0])][:1].sum() / values.shape[1] for values in members])
    if true_values is not None:
        shifts = shifts - true_values[:1].mean()
    for part in starmap(slice, block_spans(*members[0].shape)):
        block = np.stack([values[part] for values in members]) - shifts[:, None, None]
        if true_values is not None:
            block -= true_values[part]
        present = ~np.isnan(block)
        block[~present] = 0.0
        flat, is_there = block.reshape(len(members), -1), present.reshape(len(members), -1).astype(np.float64)
        cells += is_there @ is_there.T
        sums += flat @ is_there.T
        squares += np.square(flat) @ is_there.T
        products += flat @ flat.T
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = squares - np.square(sums) / cells
        spread[spread <= 1e-13 * squares] = np.nan  # a constant, but for rounding
        together = products - sums * sums.T / cells
        return np.asarray(np.clip(together / np.sqrt(spread * spread.T), -1.0, 1.0))
