"""Merge by the weighted geometric mean, scaled to be probabilities again: a logarithmic opinion pool.

    softmax   p(k)  ~  prod over members i of p_i(k) ** w_i             scaled to sum to 1 over the labels k
    sigmoid   p(k)  =  yes / (yes + no), yes the product of p_i(k) ** w_i, no that of (1 - p_i(k)) ** w_i

with w_i the weight over the sum of the weights of the members that have the row. Members that are sure count for
more than in the mean. Probabilities are clipped to float64's epsilon (2.2e-16), those of sigmoid members also to 1
- epsilon, as in calibration, stacking and log loss. So a member that is wrongly sure costs its weight times 36 nats
and cannot rule a label out, and the log loss stays convex in the weights, which ``fit`` relies on.

``logit_mean`` is the same for labels that do not exclude each other: the weighted mean of log odds. It refuses
softmax members, because their logits are only known up to a constant for each row.

C. Genest and J. V. Zidek, "Combining Probability Distributions: A Critique and an Annotated Bibliography",
Statistical Science 1 (1986), 114-135.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ensemble.merging.calibration import EPSILON, features, probabilities_of
from ensemble.merging.methods.base import Block, MergeMethod, Values
from ensemble.merging.methods.weighted_mean import weighted_mean


class GeometricMean(MergeMethod):
    """See the module.  With a sigmoid member all labels are taken one by one, those of softmax members, too."""

    takes_raw_values = False
    fit_options = ""

    def merge(self, block: Block, weights: Values) -> Values:
        if self.members.are_exclusive:
            logs = (features(values, "softmax") for values in block.probabilities)
            return probabilities_of(weighted_mean(weights, logs, block.is_present), ["softmax"])
        clipped = [np.clip(values, EPSILON, 1 - EPSILON) for values in block.probabilities]
        yes = weighted_mean(weights, (np.log(values) for values in clipped), block.is_present)
        no = weighted_mean(weights, (np.log1p(-values) for values in clipped), block.is_present)
        return probabilities_of(yes - no, ["sigmoid"])


class LogitMean(GeometricMean):
    """See the module."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        exclusive = self.members.with_activation("softmax")
        if exclusive:
            yield (
                "ensemble.method: logit_mean is for labels that do not exclude each other, and softmax "
                f"probabilities come from {', '.join(exclusive)}; use geometric_mean, which is the same there"
            )
