"""Show the scores of members and ensemble, and whether the ensemble is better than its best member."""

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
    percent,
    shortened,
    with_interval,
)
from ensemble.analysis.report.pictures import INK, MUTED, SERIES, picture
from ensemble.config.values import weight_text
from ensemble.pipeline.ending import answer_texts, gain_text

_DIFFERENCE = "member \N{MINUS SIGN} ensemble"


class Scores(Section):
    title: ClassVar[str] = "Members and the ensemble"

    def html(self, data: ReportData) -> Markup:
        predictions = data.predictions
        loss = METRIC_NAMES[data.metrics[0].name]
        gaps = _gaps(data)
        headers = ["", _DIFFERENCE, "weight", "rows"]
        lines: list[str] = []
        ranking_remarks: list[str] = []
        if predictions.truth is not None:
            headers[1:1] = [METRIC_NAMES[metric.name] for metric in data.metrics]
            lines = [gain_text(data.report), *answer_texts(data.report)]
            if predictions.ensemble is None:
                lines = ["The run has merged nothing, so there are only its members to look at."]
            elif not data.method.gives_probabilities:
                method = data.report.ensemble["method"]
                lines = [f"The ensemble has no {loss}: the values that {method} gives are no probabilities."]
            ranking_remarks = predictions.ranking_remarks(data.metrics)
        if data.report.fitted_on is not None:
            lines.append(f"The ensemble: {data.report.fitted_on.text}.")
        cells = _cells(data, gaps)  # before the problems, which it can add to
        return self.render(
            lines=[*filter(None, lines)],
            picture=_picture(loss, gaps),
            headers=headers,
            cells=cells,
            predictions=predictions,
            ranking_remarks=ranking_remarks,
            problems=sorted(data.problems),
        )


def _gaps(data: ReportData) -> dict[str, Interval]:
    """Return how far each member's loss is above the ensemble's, with the run's rules for both, the least first."""
    truth, ensemble = data.predictions.truth, data.predictions.ensemble
    if truth is None or ensemble is None or not data.method.gives_probabilities:
        return {}
    gaps = {}
    for name, values in data.as_ruled.items():
        gap = data.score(data.metrics[0], values, ensemble)
        if gap is not None:
            gaps[name] = gap
    return dict(sorted(gaps.items(), key=lambda item: item[1].value))


def _cells(data: ReportData, gaps: Mapping[str, Interval]) -> list[list[object]]:
    """Return the table's rows: the ensemble, then the members, the best first."""
    predictions, weights = data.predictions, {}
    total = sum(data.mean_weights.values())
    for member in data.report.members:
        weights[member.name] = weight_text(member.weight)
        if isinstance(member.weight, int | float) and member.name in data.mean_weights:
            weights[member.name] = percent(data.mean_weights[member.name] / total)
    rows: list[tuple[float, list[object]]] = []
    for name, values in data.values_of_all.items():
        is_ensemble = name == ENSEMBLE
        place = -np.inf if is_ensemble else np.inf
        cells: list[object] = [html("<strong>{{ name }}</strong>", name=name) if is_ensemble else name]
        for metric in data.metrics if predictions.truth is not None else ():
            score = None
            # Ranks have these metrics, too.
            if not is_ensemble or data.method.gives_probabilities or metric.name in ("accuracy", "auc"):
                score = data.score(metric, values)
            cells.append(NOTHING if score is None else with_interval(metric.name, score))
            if score is not None and metric is data.metrics[0] and not is_ensemble:
                place = score.value
        gap = "" if name not in gaps else with_interval(data.metrics[0].name, gaps[name], True)
        count = int((~np.isnan(values).any(axis=1)).sum())
        rows.append((place, [*cells, gap, weights.get(name, ""), f"{count:,}"]))
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
