"""What the sections about results share: the run's members as they were merged, the merge itself, and losses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from ensemble.analysis.metrics import METRICS, USUAL, Bootstrap, Interval, Metric, Scored
from ensemble.analysis.predictions import Predictions, as_merged, calibrations_of
from ensemble.common.errors import DataError, EnsembleError
from ensemble.common.text import listed
from ensemble.data.table import Truth
from ensemble.merging.blocks import block_spans, weights_by_bin, weights_of_rows
from ensemble.merging.methods import METHODS
from ensemble.merging.methods.base import Block, Members, MergeMethod, Values

if TYPE_CHECKING:
    from ensemble.analysis.report.base import ReportData

Rows: TypeAlias = npt.NDArray[np.int64]
# How far a merge that is made again may be from what stands in ensemble.csv.
_SAME = 1e-6


class Results:
    """A run's predictions, and its merge made again with other members or other values of them.

    Attributes:
        predictions: as the run left them.
        names, values: of the members, in the order of the config; float64 [rows, labels] each, before calibration.
        truth: None where it is not known.
        weights: float64 [members], for what needs one number each: of weights by label or length bin their mean.
        calibrations: of the members that have one.
    """

    def __init__(self, data: ReportData) -> None:
        self._data = data
        self.predictions: Predictions = data.predictions
        self.names = (*self.predictions.members,)
        self.values = [*self.predictions.members.values()]
        self.activation = self.predictions.activation
        self.labels = self.predictions.labels
        self.truth: Truth | None = self.predictions.truth
        self.ensemble = self.predictions.ensemble
        given = {one.name: one.weight for one in data.report.members}
        self._given = [given[name] for name in self.names]
        self.weights: Values = weights_by_bin(self._given, self.labels, self._bins).mean(axis=(1, 2))
        self.calibrations = {
            name: one for name, one in calibrations_of(data.report).items() if name in self.names
        }
        self._scored: dict[tuple[str, int], Scored | str] = {}  # of what is scored again and again

    @property
    def metrics(self) -> tuple[str, ...]:
        """Those that are shown, the one that decides first."""
        return ("log_loss", "accuracy") if self.activation == "softmax" else USUAL[self.activation]

    @property
    def loss(self) -> Metric:
        """The metric that decides: less is better."""
        return METRICS[self.metrics[0]]

    @property
    def method(self) -> type[MergeMethod]:
        """Of the merge; what is so of most where its package is not there any more."""
        try:
            return METHODS.load(str(self._data.report.ensemble.get("method", "mean")))
        except EnsembleError:
            return MergeMethod

    @property
    def no_loss(self) -> str:
        """Why nothing is said of how large the loss of the merged values is."""
        given = self._data.report.ensemble.get("method")
        what = "predictions" if self.activation == "none" else "probabilities"
        loss = self.loss.name.replace("_", " ")
        return f"the values that {given} gives are no {what}, so that {loss} is not for them"

    def scored(self, metric: Metric, values: Values, rows: Rows | None = None) -> Scored | str:
        """A metric of float64 [rows, labels], of rows with values alone; or why it has none.

        Scores of the same ``rows`` of the table (None: all) are paired, as long as the same values are there.
        """
        assert self.truth is not None
        key = (metric.name, id(values))
        is_kept = rows is None and any(
            values is one for one in (self.ensemble, *self.values, *self.as_merged, *self.as_ruled)
        )
        if is_kept and key in self._scored:
            return self._scored[key]
        there = ~np.isnan(values).any(axis=1)
        truth = self.truth if rows is None else self.truth[rows]
        found: Scored | str
        try:
            if rows is None and there.all():
                found = self._bootstrap.score(metric, values)
            else:
                found = Bootstrap(truth[there], self.activation).score(metric, values[there])
        except DataError as error:
            found = str(error)
        if is_kept:
            self._scored[key] = found
        return found

    def difference(
        self, metric: Metric, values: Values, others: Values, rows: Rows | None = None
    ) -> Interval | str:
        """How much the metric of ``values`` is above that of ``others``, on the rows that both have."""
        both = ~(np.isnan(values).any(axis=1) | np.isnan(others).any(axis=1))
        if not both.all():
            rows = np.flatnonzero(both) if rows is None else rows[both]
            values, others = values[both], others[both]
        one, other = self.scored(metric, values, rows), self.scored(metric, others, rows)
        if isinstance(one, str):
            return one
        return other if isinstance(other, str) else one.minus(other)

    @property
    def gain(self) -> tuple[str, Interval] | None:
        """The best member and how much its log loss is above the ensemble's, as the run itself has told it."""
        gain = self._data.report.gain
        if gain is None or gain.low is None or gain.high is None or gain.best_member not in self.names:
            return None
        is_of_these = self.loss.name == "log_loss" and self.ensemble is not None and self.truth is not None
        return (gain.best_member, Interval(gain.gain, gain.low, gain.high)) if is_of_these else None

    @cached_property
    def _bootstrap(self) -> Bootstrap:
        assert self.truth is not None
        return Bootstrap(self.truth, self.activation)

    @cached_property
    def as_ruled(self) -> list[Values]:
        """What each member alone would give with the run's rules: what is held against the ensemble."""
        if self.predictions.rules is None:
            return self.as_merged
        found = [values.copy(order="F") for values in self.as_merged]
        for values in found:
            self._apply_rules(values)
        return found

    def _apply_rules(self, values: Values, rows: Rows | None = None) -> None:
        """Change float64 [rows, labels] in place by the run's rules; a row of NaN stays one."""
        if (rules := self.predictions.rules) is None:
            return
        if rows is not None:
            rules = rules.taken(rows)
        is_there = np.asarray(~np.isnan(values).any(axis=1))
        rules.apply(0, values, rules.are_exclusive(self.activation, self.method), is_there)

    @cached_property
    def as_merged(self) -> list[Values]:
        """The members' values with the calibration that the config gives them."""
        return [*as_merged(self.predictions, self.calibrations).values()]

    def merged(
        self,
        members: Sequence[Values],
        without: int | None = None,
        rows: Rows | None = None,
    ) -> Values:
        """The run's merge of these values, with its method, weights and rules: float64 [rows, labels].

        Args:
            members: as they are merged, in the order of ``names``; float64 [rows, labels] each.
            without: the member by number that is taken as if it had no row; rows that no other has become NaN.
            rows: of the table, those of the values, where they are not of all.
        """
        settings = dict(self._data.report.ensemble)
        kind = METHODS.load(str(settings["method"]))
        names = Members(
            self.names,
            tuple(map(self.predictions.activations.__getitem__, self.names)),
            self.labels,
            (*self._given,),
        )
        method = kind(kind.Settings.model_validate(settings), names)
        shape = members[0].shape
        if kind.needs_first_pass:
            for span in block_spans(*shape):
                method.look(self._block(members, *span, without, rows))
        weights = weights_by_bin(self._given, self.labels, self._bins)
        found = np.empty(shape)
        for start, stop in block_spans(*shape):
            block = self._block(members, start, stop, without, rows)
            found[start:stop] = method.merge(block, weights_of_rows(weights, self._edges, block.text_bytes))
        self._apply_rules(found, rows)
        return found

    @cached_property
    def merge_problem(self) -> str:
        """Why the merge cannot be made again; empty where it gives what the run has written."""
        if self.ensemble is None:
            return "the run has merged nothing"
        try:
            again = self.merged(self.as_merged)
        except Exception as error:  # of a method of any package
            return f"the merge cannot be repeated ({error})"
        known = ~np.isnan(again[:, 0])  # not rows that ``fill`` has filled in
        furthest = float(np.abs(again[known] - self.ensemble[known]).max(initial=0.0))
        lacking = [one.name for one in self._data.report.members if one.name not in self.names]
        missing = f"; there are no complete predictions of {listed(lacking)}" if lacking else ""
        if furthest > _SAME * max(1.0, float(np.abs(self.ensemble).max())):
            return (
                "to merge the members' files by the config again gives other values than stand in ensemble.csv "
                f"(by up to {furthest:.2g}){missing}"
            )
        return ""

    def sample(self, most: int) -> Rows | None:
        """So many rows at the same distance; None where there are no more."""
        count = self.predictions.rows
        if count <= most:
            return None
        return np.asarray(np.linspace(0, count - 1, max(2, most)).round().astype(np.int64))

    def _block(
        self,
        members: Sequence[Values],
        start: int,
        stop: int,
        without: int | None,
        rows: Rows | None,
    ) -> Block:
        # Each member's columns in one piece.
        values = np.empty((len(members), members[0].shape[1], stop - start)).swapaxes(1, 2)
        for number, one in enumerate(members):
            values[number] = np.nan if number == without else one[start:stop]
        is_present = np.asarray(~np.isnan(values).any(axis=2))
        if rows is None:
            ids, lengths = self.predictions.ids.slice(start, stop - start), self._text_bytes[start:stop]
        else:
            ids, lengths = self.predictions.ids.take(rows[start:stop]), self._text_bytes[rows[start:stop]]
        return Block(start, ids, values, is_present, lengths)

    @property
    def _edges(self) -> Sequence[int]:
        return self._data.report.ensemble.get("length_bins") or ()

    @property
    def _bins(self) -> int:
        return len(self._edges) + 1

    @cached_property
    def _text_bytes(self) -> npt.NDArray[np.int64]:
        """UTF-8 bytes of each row's text, 0 where nobody asks."""
        if not self._edges:
            return np.zeros(self.predictions.rows, np.int64)
        if len(found := self._data.text_bytes) != self.predictions.rows:
            raise DataError(f"{self._data.report.table} has changed since the run")
        return found
