"""Members and the ensemble: how good each is, and whether the ensemble is better than its best member."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from ensemble.analysis.metrics import Interval, Scored
from ensemble.analysis.report import wording
from ensemble.analysis.report.base import ReportData, Section, html, notes, paragraphs, table
from ensemble.analysis.report.pictures import INK, MUTED, SERIES, picture
from ensemble.analysis.report.results import Results
from ensemble.common.text import plural
from ensemble.config.values import weight_text
from ensemble.merging.methods.base import Values

_DIFFERENCE = "member \N{MINUS SIGN} ensemble"
# Metrics that go by which label is first, not by how much: also for merge methods that give no probabilities.
_OF_RANKS = ("accuracy", "auc")


@dataclass(frozen=True)
class _Row:
    """The ensemble or a member.

    ``scores`` holds its metrics, or the reasons why they are not defined; without true labels there are none.
    ``difference`` is how far its loss is above the ensemble's, with the run's rules for both.
    """

    name: str
    values: Values
    scores: dict[str, Scored | str]
    difference: Interval | None = None

    @property
    def loss(self) -> float:
        first = next(iter(self.scores.values()), "")
        return np.inf if isinstance(first, str) else first.value

    @property
    def count(self) -> int:
        """Return how many rows have values."""
        return int((~np.isnan(self.values).any(axis=1)).sum())


class Scores(Section):
    title: ClassVar[str] = "Members and the ensemble"

    def html(self, data: ReportData) -> Markup:
        results = data.results
        rows = _rows(results)
        lines, remarks = _verdict(results, rows), list(results.predictions.remarks)
        if data.report.fitted_on is not None:
            lines.append(f"The ensemble: {data.report.fitted_on.text}.")
        if results.truth is not None:
            remarks.append(
                "In brackets 95 % intervals (bootstrap over rows). Those of differences are paired: the same rows "
                "count for both. The best member comes first."
            )
            if results.predictions.rules is not None:
                remarks.append("The members' scores are without the rules, all else is with them.")
        problems = {score for row in rows for score in row.scores.values() if isinstance(score, str)}
        return (
            paragraphs(lines)
            + _picture(results.loss.name, rows)
            + _table(results, rows)
            + notes([*remarks, *sorted(problems - {""})])
        )


def _rows(results: Results) -> list[_Row]:
    """Return the ensemble, then the members, the best first."""
    ensemble, has_loss = results.ensemble, results.method.gives_probabilities
    metrics = [] if results.truth is None else results.metrics
    rows = []
    for name, values, ruled in zip(results.names, results.values, results.as_ruled, strict=True):
        difference = None
        if metrics and ensemble is not None and has_loss:
            difference = results.difference(ruled, ensemble)
        scores = {metric.name: results.score(metric, values) for metric in metrics}
        rows.append(_Row(name, values, scores, difference))
    rows.sort(key=lambda row: row.loss)
    if ensemble is not None:
        scores = {
            metric.name: results.score(metric, ensemble) if has_loss or metric.name in _OF_RANKS else ""
            for metric in metrics
        }
        rows.insert(0, _Row(wording.ENSEMBLE, ensemble, scores))
    return rows


def _verdict(results: Results, rows: Sequence[_Row]) -> list[str | Markup]:
    """Return whether the ensemble is better than its best member, in a sentence or two."""
    metric = results.loss.name
    name = wording.METRIC_NAMES[metric]
    if results.truth is None:
        return [
            "Without true labels nobody can say how good these predictions are, only how alike.",
            "Set data.label_column (or label_columns) for a table that has them, and this page shows metrics with "
            "intervals and calibration.",
        ]
    if results.ensemble is None:
        return ["The run has merged nothing, so there are only its members to look at."]
    if not results.method.gives_probabilities:
        what = "predictions" if results.activation == "none" else "probabilities"
        return [f"The ensemble has no {name}: the values that {results.method_name} gives are no {what}."]
    gaps = {row.name: row.difference for row in rows if row.difference and row.count == rows[0].count}
    if not gaps:
        return ["No member has all rows, so none can be compared with the whole ensemble."]
    best = min(gaps, key=lambda who: gaps[who].value)
    gap, best_score = gaps[best], results.score(results.loss, results.as_ruled[results.names.index(best)])
    assert isinstance(best_score, Scored)
    rules = " with the same rules" if results.predictions.rules is not None else ""
    first = (
        f"The ensemble's {name} is {wording.metric_text(metric, rows[0].loss)}; its best member, {best}, has "
        f"{wording.metric_text(metric, best_score.value)}{rules}"
    )
    if len(results.names) == 1 and gap.value == 0:
        return [f"{first}: a single member is the ensemble."]
    kind, verdict = "", f"over {plural(rows[0].count, 'row')} that is no more than noise"
    if gap.excludes_zero:
        kind, verdict = ("good", "better") if gap.value > 0 else ("bad", "worse")
    size = wording.with_interval(metric, gap, is_difference=True)
    lines: list[str | Markup] = [
        html(
            '{{ first }}: <strong class="{{ kind }}">{{ verdict }}</strong> ({{ best }} \N{MINUS SIGN} ensemble: '
            "{{ size }}).",
            first=first,
            kind=kind,
            verdict=verdict,
            best=best,
            size=size,
        )
    ]
    if kind == "bad":
        command = f"ensemble fit CONFIG {results.method.fit_options}".rstrip()
        advice = (
            "{{ best }} alone is better than these weights. <code>{{ command }}</code> finds better ones."
        )
        lines.append(html(advice, best=best, command=command))
    return lines


def _table(results: Results, rows: Sequence[_Row]) -> Markup:
    shares = results.mean_weights / results.mean_weights.sum()
    weights = {
        name: wording.percent(share) if isinstance(weight, int | float) else weight_text(weight)
        for name, weight, share in zip(results.names, results.weights, shares.tolist(), strict=True)
    }
    cells: list[list[object]] = []
    for row in rows:
        metrics = [
            wording.NOTHING if isinstance(score, str) else wording.with_interval(metric, score.interval)
            for metric, score in row.scores.items()
        ]
        difference: str | Markup = ""
        if row.difference is not None:
            difference = wording.with_interval(results.loss.name, row.difference, is_difference=True)
        cells.append(
            [wording.row_name(row.name), *metrics, difference, weights.get(row.name, ""), f"{row.count:,}"]
        )
    headers = map(wording.metric_heading, rows[0].scores)
    return table(["", *headers, _DIFFERENCE, "weight", "rows"], cells)


def _picture(metric: str, rows: Sequence[_Row]) -> Markup:
    """Draw the differences with their intervals below each other, and a line at 0."""
    gaps = [(row.name, row.difference) for row in rows if row.difference is not None]
    if not gaps:
        return Markup()

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for place, (_, gap) in enumerate(gaps):
            colour = SERIES[0] if gap.value >= 0 else SERIES[1]
            if not gap.excludes_zero:
                colour = MUTED
            axes.plot([gap.low, gap.high], [place, place], color=colour, linewidth=2.2, alpha=0.6)
            axes.plot([gap.value], [place], marker="o" if gap.value >= 0 else "D", markersize=5, color=colour)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(gaps)), [wording.shortened(name, 18) for name, _ in gaps])
        axes.set_ylim(len(gaps) - 0.3, -0.7)
        axes.tick_params(length=0)
        axes.locator_params(axis="x", nbins=5)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"{wording.metric_heading(metric)}, {_DIFFERENCE}")

    name = wording.METRIC_NAMES[metric]
    text = (
        f"The {name} of each member minus the ensemble's, with 95 % intervals: right of 0 the ensemble is better, "
        "left of it the member. Grey: no more than noise."
    )
    return picture(draw, f"{name}, {_DIFFERENCE}", text, height=50 + 22 * len(gaps))
