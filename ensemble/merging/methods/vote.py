"""Merge by weighted majority voting: each member votes for a label, and a label gets its share of the votes.

    softmax   a member votes for its likeliest label; equally likely ones share its vote
    sigmoid   a member votes for each label above 1/2, and with half a vote for one at 1/2
    result    p(k)  =  sum over members i of w_i * vote_i(k)

with w_i the weight over the sum of the weights of the members that have the row. Results are shares of the votes,
rounded to 12 digits: weights of 0.1 and 0.2 are as much as one of 0.3, which they are not in floating point.
If two labels have the same share, the one that comes first in ``labels`` counts as the likeliest, as in
scikit-learn's VotingClassifier. A label without a vote gets 0, which log loss punishes.

L. Lam and C. Y. Suen, "Application of majority voting to pattern recognition", IEEE Transactions on Systems, Man,
and Cybernetics A 27 (1997), 553-568.
"""

from __future__ import annotations

import numpy as np

from ensemble.common.protocol import Activation
from ensemble.merging.methods.base import Block, MergeMethod, Values
from ensemble.merging.methods.weighted_mean import scaled, weighted_mean


class Vote(MergeMethod):
    """See the module.  Where labels exclude each other and have weights of their own, rows are scaled to 1."""

    takes_raw_values = False
    gives_probabilities = False

    def merge(self, block: Block, weights: Values) -> Values:
        with np.errstate(invalid="ignore"):  # rows that a member lacks
            votes = map(_votes, block.probabilities, self.members.activations)
            shares = weighted_mean(weights, votes, block.is_present)
        shares = shares.round(12)
        return scaled(shares) if weights.shape[2] > 1 and self.members.are_exclusive else shares


def _votes(values: Values, activation: Activation) -> Values:
    if activation == "sigmoid":
        return np.asarray(((values > 0.5) + 1.0 * (values >= 0.5)) / 2)
    is_top = values == values.max(axis=1)[:, None]
    return np.asarray(is_top / is_top.sum(axis=1)[:, None])
