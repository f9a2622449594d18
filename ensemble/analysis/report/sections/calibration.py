"""Whether the probabilities, as they were merged, keep their promise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from ensemble.analysis.calibration import Kind, fit_temperature
from ensemble.analysis.metrics import ECE_BINS, METRICS, Interval
from ensemble.analysis.reliability import BINS, Reliability, overconfidence, reliability
from ensemble.analysis.report.base import ReportData, Section, html, notes, paragraphs, table
from ensemble.analysis.report.pictures import MUTED, SERIES, WIDTH, picture
from ensemble.analysis.report.results import Results
from ensemble.analysis.report.wording import ENSEMBLE, number, row_name, shortened, with_interval
from ensemble.data.table import Truth
from ensemble.merging.methods.base import Values

# With fewer rows of a member no temperature is fitted; with more, as many as this bound allows are taken.
_MIN_ROWS = 50
_MAX_VALUES = 150_000
_MAX_PANELS = 6
# Bins with fewer predictions are left out of the picture: their accuracy says nothing.
_MIN_IN_BIN = 10
# Smaller gaps are shown as 0.
_MIN_GAP = 0.0005


@dataclass(frozen=True)
class _Calibration:
    """How far the ensemble or a member keeps its promise; ``gap`` is mean confidence minus accuracy."""

    name: str
    gap: Interval
    error: float
    diagram: Reliability
    temperature: str


class Calibration(Section):
    title: ClassVar[str] = "Calibration"

    def html(self, data: ReportData) -> Markup:
        results, truth = data.results, data.results.truth
        if results.activation == "none":
            return html("<p>These values are no probabilities, so there is nothing to calibrate.</p>")
        if truth is None:
            return html(
                "<p>Without true labels nobody can say whether these probabilities keep their promise.</p>"
            )
        order = np.argsort(-results.mean_weights, kind="stable")
        values = {results.names[place]: results.values[place] for place in order}
        if results.ensemble is not None and results.method.gives_probabilities:
            values = {ENSEMBLE: results.ensemble} | values
        calibrations = [
            _calibration(results, name, of_name, truth)
            for name, of_name in values.items()
            if not np.isnan(of_name).all()
        ]
        is_exclusive = results.activation == "softmax"
        gap_name = "confidence \N{MINUS SIGN} accuracy"
        if not is_exclusive:
            gap_name = "probability \N{MINUS SIGN} frequency"
        remarks = [
            f"Members are shown as they were merged. ECE: the expected calibration error, of {ECE_BINS} bins; the "
            f"diagrams have {BINS}.",
            "Temperature: the one that fits these labels best; 1 needs no change, more makes a member less sure. "
            "ensemble fit can fit temperatures together with weights and says what they gain on held-out rows. "
            f"Fewer than {_MIN_ROWS} rows are too few for one.",
        ]
        rows = [
            (
                row_name(item.name),
                with_interval("accuracy", item.gap, is_difference=True),
                number(item.error),
                item.temperature,
            )
            for item in calibrations
        ]
        return (
            paragraphs([_verdict(calibrations[0], gap_name)])
            + _picture(calibrations, is_exclusive)
            + table(["", gap_name, "ECE", "temperature"], rows)
            + notes(remarks)
        )


def _calibration(results: Results, name: str, values: Values, truth: Truth) -> _Calibration:
    activation = results.activation
    rows = np.flatnonzero(~np.isnan(values).any(axis=1))
    temperature = ""
    if name != ENSEMBLE and len(rows) >= _MIN_ROWS:
        some = rows[:: -(-values.shape[1] * len(rows) // _MAX_VALUES)]
        kind: Kind = "sigmoid" if activation == "sigmoid" else "softmax"
        temperature = number(fit_temperature(values[some], truth[some], kind), 2)
    return _Calibration(
        name=name,
        gap=overconfidence(values, activation, truth),
        error=METRICS["ece"].value(truth[rows], values[rows], activation=activation),
        diagram=reliability(values, activation, truth),
        temperature=temperature,
    )


def _verdict(first: _Calibration, gap_name: str) -> Markup:
    kind = "neither over- nor underconfident, as far as these rows tell"
    if first.gap.excludes_zero and abs(first.gap.value) >= _MIN_GAP:
        kind = "overconfident" if first.gap.value > 0 else "underconfident"
    return html(
        "{{ who }} is {{ kind }}: mean {{ what }} is {{ gap }}.",
        who="The ensemble" if first.name == ENSEMBLE else first.name,
        kind=kind,
        what=gap_name,
        gap=with_interval("accuracy", first.gap, is_difference=True),
    )


def _picture(calibrations: Sequence[_Calibration], is_exclusive: bool) -> Markup:
    panels = calibrations[:_MAX_PANELS]
    across = min(len(panels), 2)
    down = -(-len(panels) // 2)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, panel in zip(grid.flat, panels, strict=False):
            diagram = panel.diagram
            filled = diagram.counts >= _MIN_IN_BIN
            x, y = 100 * diagram.confidence[filled], 100 * diagram.accuracy[filled]
            axes.plot([0, 100], [0, 100], color=MUTED, linewidth=0.8, linestyle="--")
            axes.plot(x, y, color=SERIES[0])
            axes.vlines(x, 100 * diagram.low[filled], 100 * diagram.high[filled], color=SERIES[0], alpha=0.5)
            sizes = 4 + 40 * np.sqrt(diagram.counts[filled] / diagram.counts.max())
            axes.scatter(x, y, sizes, color=SERIES[0], zorder=3)
            axes.set_title(shortened(panel.name, 22))
            axes.set(xlim=(0, 102), ylim=(0, 102), aspect="equal")
        figure.supxlabel("confidence (%)" if is_exclusive else "probability (%)", fontsize=8, color=MUTED)
        figure.supylabel("right (%)" if is_exclusive else "came true (%)", fontsize=8, color=MUTED)

    text = (
        "Confidence against how often it was right, in bins of 10 points. On the dashed line both are the same; "
        "below it the promises are too high. The larger the dot, the more rows; bins of fewer than "
        f"{_MIN_IN_BIN} are left out. Lines are 95 % intervals."
    )
    if len(calibrations) > len(panels):
        text += f" The first {len(panels)} of {len(calibrations)}; the table has all."
    width = WIDTH if across > 1 else 240
    return picture(draw, "Reliability diagrams", text, height=30 + 200 * down, width=width)
