"""What the sections about results share: the run's members as they were merged, and their scores."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ensemble.analysis.metrics import METRICS, USUAL, Bootstrap, Interval, Metric, Scored
from ensemble.analysis.predictions import Predictions, as_merged
from ensemble.common.errors import DataError, EnsembleError
from ensemble.merging.blocks import weights_by_bin
from ensemble.merging.methods import METHODS
from ensemble.merging.methods.base import MergeMethod, Values
from ensemble.pipeline.run_report import RunReport


class MergedRows:
    """A run's predictions as they were merged.

    Attributes:
        predictions: as the run left them.
        names: of the members, in the order of the config, as all that follows.
        values: of each member, float64 [rows, labels], with the calibration of the config.
        weights: as the config has them.
        mean_weights: float64 [members]; of weights by label or length their mean.
        method: of the merge; the base class if the package of the method is no longer installed.
        truth: None if the true labels are not known.
        loss: the metric that decides.
        metrics: those that are shown; none without the true labels.
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
        self.method_name = str(report.ensemble.get("method", "mean"))
        try:
            self.method = METHODS.load(self.method_name)
        except EnsembleError:
            self.method = MergeMethod  # type: ignore[type-abstract]
        metrics = [METRICS[name] for name in USUAL[self.activation]]
        self.loss = metrics[0]
        self.metrics = [] if self.truth is None else metrics
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

    def score(self, metric: Metric, values: Values) -> Scored | None:
        """Return a metric over the rows that have values; None if it is not defined."""
        scores = self._scores(metric, values)
        return None if scores is None else scores[0]

    def difference(self, values: Values, others: Values) -> Interval | None:
        """Return how far the loss of ``values`` is above that of ``others``, over the rows that both have."""
        scores = self._scores(self.loss, values, others)
        return None if scores is None else scores[0].minus(scores[1])

    def _scores(self, metric: Metric, *values: Values) -> list[Scored] | None:
        assert self.truth is not None
        rows = ~np.any([np.isnan(part).any(axis=1) for part in values], axis=0)
        try:
            if rows.all():
                return [self._bootstrap.score(metric, part) for part in values]
            bootstrap = Bootstrap(self.truth[rows], self.activation)
            return [bootstrap.score(metric, part[rows]) for part in values]
        except DataError as error:
            self.problems.add(str(error))
            return None

    @cached_property
    def _bootstrap(self) -> Bootstrap:
        assert self.truth is not None
        return Bootstrap(self.truth, self.activation)
