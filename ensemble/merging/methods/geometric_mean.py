"""The weighted geometric mean of probabilities, scaled to be probabilities again: a logarithmic opinion pool.

    softmax   p(k)  ~  prod over members i of p_i(k) ** w_i             scaled to sum to 1 over the labels k
    sigmoid   p(k)  =  yes / (yes + no), yes the product of p_i(k) ** w_i, no that of (1 - p_i(k)) ** w_i

with w_i the weight over the sum of the weights of the members that have the row.  Members that are sure count for
more than in the mean, and one that gives a label 0 rules it out.  Where the members rule out everything, every
label of a row or both yes and no, their zeros count as the smallest normal number instead.

C. Genest and J. V. Zidek, "Combining Probability Distributions: A Critique and an Annotated Bibliography",
Statistical Science 1 (1986), 114-135.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

import numpy as np

from ensemble.merging.methods.base import Block, MergeMethod, Values
from ensemble.merging.methods.weighted_mean import weighted_mean

_MIN_LOG = float(np.log(np.finfo(np.float64).tiny))


class GeometricMean(MergeMethod):
    """See the module.  With a sigmoid member all labels are taken one by one, those of softmax members, too."""

    fit_options = ""

    def problems(self) -> Iterator[str]:
        yield from self.problems_of_raw_values()

    def merge(self, block: Block, weights: Values) -> Values:
        def mean_log(log: Callable[[Values], Values], smallest: float = -inf) -> Values:
            logs = (np.maximum(log(values), smallest) for values in block.probabilities)
            return weighted_mean(weights, logs, block.is_present)

        # log 0 is -inf, and exp of much is inf: both are meant.
        with np.errstate(divide="ignore", over="ignore"):
            if self.members.are_exclusive:
                logs = mean_log(np.log)
                ruled_out = np.isneginf(logs).all(axis=1)
                if ruled_out.any():
                    logs[ruled_out] = mean_log(np.log, _MIN_LOG)[ruled_out]
                logs -= logs.max(axis=1)[:, None]  # so that not all products are too small for a number
                odds = np.exp(logs, out=logs)
                odds /= odds.sum(axis=1)[:, None]
                return odds
            yes, no = mean_log(np.log), mean_log(_log_of_rest)
            ruled_out = np.isneginf(yes) & np.isneginf(no)
            if ruled_out.any():
                yes[ruled_out] = mean_log(np.log, _MIN_LOG)[ruled_out]
                no[ruled_out] = mean_log(_log_of_rest, _MIN_LOG)[ruled_out]
            merged: Values = 1.0 / (1.0 + np.exp(no - yes))
            return merged


def _log_of_rest(values: Values) -> Values:
    rest: Values = np.log1p(-values)
    return rest
