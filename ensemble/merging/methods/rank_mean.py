"""Merge by the weighted mean of ranks, for members that order rows alike but differ in how sure they are.

    r_i(row, k)  =  (rank - 1/2) / rows       rank: the place of p_i(row, k) among member i's values for label k,
                                              from 1; equal values have the mean of their places
    result       =  sum over members i of w_i * r_i

with w_i the weight over the sum of the weights of the members that have the row. Results are numbers from 0 to 1
that order the rows of a label, which is all that AUC needs. They are no probabilities, and rows do not sum to 1. If
a member has only some rows, these are ranked. A rank depends on all other rows of the table.

All values are kept as ranks between the two passes: 8 bytes for each row, member and label.

J. D. Gibbons and S. Chakraborti, "Nonparametric Statistical Inference", 4th edition (2003), section 5.5
(mid-ranks).
"""

from __future__ import annotations

import numpy as np

from ensemble.config import EnsembleConfig
from ensemble.merging.methods.base import Block, Members, MergeMethod, Values
from ensemble.merging.methods.weighted_mean import weighted_mean


class RankMean(MergeMethod):
    """See the module; softmax, sigmoid and raw values alike."""

    gives_probabilities = False
    needs_first_pass = True

    def __init__(self, settings: EnsembleConfig, members: Members) -> None:
        super().__init__(settings, members)
        self._blocks: dict[int, Values] = {}  # by the first row; values, then ranks
        self._are_ranks = False

    def look(self, block: Block) -> None:
        self._blocks[block.start] = block.probabilities.copy(order="K")

    def merge(self, block: Block, weights: Values) -> Values:
        if not self._are_ranks:
            self._rank()
        return weighted_mean(weights, self._blocks.pop(block.start), block.is_present)

    def _rank(self) -> None:
        blocks = [*self._blocks.values()]
        for member, label in np.ndindex(len(self.members.names), len(self.members.labels)):
            column = np.concatenate([block[member, :, label] for block in blocks])
            is_present = ~np.isnan(column)
            column[is_present] = _shares(column[is_present])
            ends = np.cumsum([block.shape[1] for block in blocks])[:-1]
            for block, ranks in zip(blocks, np.split(column, ends), strict=True):
                block[member, :, label] = ranks
        self._are_ranks = True


def _shares(values: Values) -> Values:
    """Return (rank - 1/2) / count of each value, [count]."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    shares: Values = ((counts.cumsum() - counts / 2) / max(1, len(values)))[which]
    return shares
