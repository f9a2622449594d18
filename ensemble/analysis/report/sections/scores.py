"""Members and the ensemble: how good each is, and whether the ensemble is better than its best member."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from ensemble.analysis.metrics import Interval
from ensemble.analysis.report.base import (
    ENSEMBLE,
    METRIC_NAMES,
    NOTHING,
    ReportData,
    Section,
    html,
    metric_text,
    notes,
    paragraphs,
    percent,
    shortened,
    table,
    with_interval,
)
from ensemble.analysis.report.pictures import INK, MUTED, SERIES, picture
from ensemble.analysis.report.results import MergedRows
from ensemble.common.text import plural
from ensemble.config.values import weight_text
from ensemble.merging.methods.base import Values

_DIFFERENCE = "member \N{MINUS SIGN} ensemble"
# Metrics that go by which label is first, not by how much: also for merge methods that give no probabilities.
_OF_RANKS = ("accuracy", "auc")


class Scores(Section):
    title: ClassVar[str] = "Members and the ensemble"

    def html(self, data: ReportData) -> Markup:
        results = data.results
        gaps = _gaps(results)
        lines, cells = _verdict(results, gaps), _cells(results, gaps)
        remarks = list(results.predictions.remarks)
        if data.report.fitted_on is not None:
            lines.append(f"The ensemble: {data.report.fitted_on.text}.")
        if results.truth is not None:
            remarks.append(
                "In brackets 95 % intervals (bootstrap over rows). Those of differences are paired: the same rows "
                "count for both. The best member comes first."
            )
            if results.predictions.rules is not None:
                remarks.append("The members' scores are without the rules, all else is with them.")
        names = [METRIC_NAMES[metric.name] for metric in results.metrics]
        return (
            paragraphs(lines)
            + _picture(METRIC_NAMES[results.loss.name], gaps)
            + table(["", *names, _DIFFERENCE, "weight", "rows"], cells)
            + notes([*remarks, *sorted(results.problems)])
        )


def _gaps(results: MergedRows) -> dict[str, Interval]:
    """Return how far each member's loss is above the ensemble's, with the run's rules for both, the least first."""
    if results.truth is None or results.ensemble is None or not results.method.gives_probabilities:
        return {}
    gaps = {}
    for name, values in zip(results.names, results.as_ruled, strict=True):
        gap = results.difference(values, results.ensemble)
        if gap is not None:
            gaps[name] = gap
    return dict(sorted(gaps.items(), key=lambda item: item[1].value))


def _rows_of(values: Values) -> int:
    return int((~np.isnan(values).any(axis=1)).sum())


def _verdict(results: MergedRows, gaps: Mapping[str, Interval]) -> list[str | Markup]:
    """Return whether the ensemble is better than its best member, in a sentence or two."""
    metric = results.loss.name
    name, ensemble = METRIC_NAMES[metric], results.ensemble
    if results.truth is None:
        return [
            "Without true labels nobody can say how good these predictions are, only how alike.",
            "Set data.label_column (or label_columns) for a table that has them, and this page shows metrics with "
            "intervals and calibration.",
        ]
    if ensemble is None:
        return ["The run has merged nothing, so there are only its members to look at."]
    if not results.method.gives_probabilities:
        what = "predictions" if results.activation == "none" else "probabilities"
        return [f"The ensemble has no {name}: the values that {results.method_name} gives are no {what}."]
    ruled = dict(zip(results.names, results.as_ruled, strict=True))
    whole = [member for member in gaps if _rows_of(ruled[member]) == _rows_of(ensemble)]
    if not whole:
        return ["No member has all rows, so none can be compared with the whole ensemble."]
    best = whole[0]
    gap = gaps[best]
    score, best_score = results.score(results.loss, ensemble), results.score(results.loss, ruled[best])
    assert score is not None
    assert best_score is not None
    rules = " with the same rules" if results.predictions.rules is not None else ""
    first = (
        f"The ensemble's {name} is {metric_text(metric, score.value)}; its best member, {best}, has "
        f"{metric_text(metric, best_score.value)}{rules}"
    )
    if len(results.names) == 1 and gap.value == 0:
        return [f"{first}: a single member is the ensemble."]
    kind, verdict = "", f"over {plural(_rows_of(ensemble), 'row')} that is no more than noise"
    if gap.excludes_zero:
        kind, verdict = ("good", "better") if gap.value > 0 else ("bad", "worse")
    sentence = html(
        '{{ first }}: <strong class="{{ kind }}">{{ verdict }}</strong> ({{ best }} \N{MINUS SIGN} ensemble: '
        "{{ size }}).",
        first=first,
        kind=kind,
        verdict=verdict,
        best=best,
        size=with_interval(metric, gap, is_difference=True),
    )
    if kind != "bad":
        return [sentence]
    command = f"ensemble fit CONFIG {results.method.fit_options}".rstrip()
    advice = "{{ best }} alone is better than these weights. <code>{{ command }}</code> finds better ones."
    return [sentence, html(advice, best=best, command=command)]


def _cells(results: MergedRows, gaps: Mapping[str, Interval]) -> list[list[object]]:
    """Return the table's rows: the ensemble, then the members, the best first."""
    weights = {ENSEMBLE: ""}
    shares = (results.mean_weights / results.mean_weights.sum()).tolist()
    for name, weight, share in zip(results.names, results.weights, shares, strict=True):
        weights[name] = percent(share) if isinstance(weight, int | float) else weight_text(weight)
    values_of = dict(zip(results.names, results.values, strict=True))
    if results.ensemble is not None:
        values_of[ENSEMBLE] = results.ensemble
    rows: list[tuple[float, list[object]]] = []
    for name, values in values_of.items():
        has_loss = name != ENSEMBLE or results.method.gives_probabilities
        scores = {
            metric.name: results.score(metric, values) if has_loss or metric.name in _OF_RANKS else None
            for metric in results.metrics
        }
        loss = scores.get(results.loss.name)
        cells: list[object] = [html("<strong>{{ name }}</strong>", name=name) if name == ENSEMBLE else name]
        for metric, score in scores.items():
            cells.append(NOTHING if score is None else with_interval(metric, score.interval))
        gap = gaps.get(name)
        cells.append("" if gap is None else with_interval(results.loss.name, gap, is_difference=True))
        cells += [weights[name], f"{_rows_of(values):,}"]
        place = np.inf if loss is None else loss.value
        rows.append((-np.inf if name == ENSEMBLE else place, cells))
    rows.sort(key=lambda row: row[0])
    return [cells for _, cells in rows]


def _picture(name: str, gaps: Mapping[str, Interval]) -> Markup:
    """Draw the differences with their intervals below each other, and a line at 0."""
    if not gaps:
        return Markup()

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for place, gap in enumerate(gaps.values()):
            colour = SERIES[0] if gap.value >= 0 else SERIES[1]
            if not gap.excludes_zero:
                colour = MUTED
            axes.plot([gap.low, gap.high], [place, place], color=colour, linewidth=2.2, alpha=0.6)
            axes.plot([gap.value], [place], marker="o" if gap.value >= 0 else "D", markersize=5, color=colour)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(gaps)), [shortened(member, 18) for member in gaps])
        axes.set_ylim(len(gaps) - 0.3, -0.7)
        axes.tick_params(length=0)
        axes.locator_params(axis="x", nbins=5)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"{name}, {_DIFFERENCE}")

    text = (
        f"The {name} of each member minus the ensemble's, with 95 % intervals: right of 0 the ensemble is better, "
        "left of it the member. Grey: no more than noise."
    )
    return picture(draw, f"{name}, {_DIFFERENCE}", text, height=50 + 22 * len(gaps))
