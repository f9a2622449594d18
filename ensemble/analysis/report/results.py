"""What the sections about results share: the run's members as they were merged, and their scores."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ensemble.analysis.metrics import METRICS, USUAL, Bootstrap, Interval, Metric
from ensemble.analysis.predictions import Predictions, as_merged
from ensemble.common.errors import DataError
from ensemble.merging.blocks import weights_by_bin
from ensemble.merging.methods.base import Values
from ensemble.pipeline.ending import merge_method_of
from ensemble.pipeline.run_report import RunReport


class MergedRows:
    """A run's predictions as they were merged.

    Attributes:
        predictions: as the run left them.
        names: of the members, in the order of the config, as all that follows.
        values: of each member, float64 [rows, labels], with the calibration of the config.
        weights: as the config has them.
        mean_weights: float64 [members]; of weights by label or length their mean.
        method: of the merge.
        truth: None if the true labels are not known.
        metrics: those that are shown, first the loss that decides.
        problems: why a metric is not defined, a sentence each; filled by ``score``.
    """

    def __init__(self, report: RunReport, predictions: Predictions) -> None:
        self.predictions = predictions
        self.names = tuple(predictions.members)
        self.values = list(as_merged(predictions, report).values())
        self.activation = predictions.activation
        self.labels = predictions.labels
        self.truth = predictions.truth
        self.ensemble = predictions.ensemble
        weights = {member.name: member.weight for member in report.members}
        self.weights = [weights[name] for name in self.names]
        bins = len(report.ensemble.get("length_bins") or ()) + 1
        self.mean_weights: Values = weights_by_bin(self.weights, self.labels, bins).mean(axis=(1, 2))
        self.method = merge_method_of(report)
        self.metrics = [METRICS[name] for name in USUAL[self.activation]]
        self.problems: set[str] = set()

    @cached_property
    def as_ruled(self) -> list[Values]:
        """Return what each member alone would give with the run's rules, to compare with the ensemble."""
        rules = self.predictions.rules
        if rules is None:
            return self.values
        ruled = [values.copy(order="F") for values in self.values]
        is_exclusive = rules.are_exclusive(self.activation, self.method)
        for values in ruled:
            rules.apply(0, values, is_exclusive, np.asarray(~np.isnan(values).any(axis=1)))
        return ruled

    def score(self, metric: Metric, values: Values, others: Values | None = None) -> Interval | None:
        """Return a metric over the rows that have values, or how far it is above that of ``others``.

        It is None if it is not defined for these rows.
        """
        both = [values] if others is None else [values, others]
        bootstrap, parts = self._bootstrap.of_common_rows(*both)
        try:
            scores = [bootstrap.score(metric, part) for part in parts]
        except DataError as error:
            self.problems.add(str(error))
            return None
        return scores[0].interval if others is None else scores[0].minus(scores[1])

    @cached_property
    def _bootstrap(self) -> Bootstrap:
        assert self.truth is not None
        return Bootstrap(self.truth, self.activation)
