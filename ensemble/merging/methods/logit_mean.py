"""The weighted mean of log odds, for labels that do not exclude each other: sigmoid members.

    logit p(k)  =  sum over members i of w_i * logit p_i(k),        logit p = ln(p / (1 - p))

with w_i the weight over the sum of the weights of the members that have the row.  It is the geometric mean of the
odds p / (1 - p), which is what ``geometric_mean`` makes of sigmoid members, with the same care for zeros and ones.
Where a row has one label, logits are only known up to a number for each row, and their mean is the geometric mean
of the probabilities: so softmax members are refused.

V. A. Satopaa, J. Baron, D. P. Foster, B. A. Mellers, P. E. Tetlock and L. H. Ungar, "Combining multiple probability
predictions using a simple logit model", International Journal of Forecasting 30 (2014), 344-356.
"""

from __future__ import annotations

from collections.abc import Iterator

from ensemble.merging.methods.geometric_mean import GeometricMean


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
