"""Compare the merged probabilities with how often they are right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from matplotlib.figure import Figure

from ensemble.analysis.metrics import ECE_BINS, METRICS
from ensemble.analysis.report.base import ENSEMBLE, ReportData, Section, number, shortened, with_interval
from ensemble.analysis.report.pictures import MUTED, SERIES, picture
from ensemble.analysis.weights import fit_temperature, one_hot
from ensemble.common.protocol import Activation
from ensemble.data.table import Truth
from ensemble.merging.methods.base import Values
from ensemble.merging.scoring import Interval, Resamples

# Of a diagram.
_BINS = 10
# With fewer rows of a member no temperature is fitted.
_MIN_ROWS = 50
# Bins with fewer predictions are left out of the picture: their accuracy says nothing.
_MIN_IN_BIN = 10


@dataclass(frozen=True)
class Reliability:
    """Hold bins of equal width from 0 to 1, without their lower edge; every array is [bins].

    Attributes:
        counts: predictions in the bin: rows by the probability of their first label, or with "sigmoid" all cells.
        confidence: their mean probability; NaN in an empty bin.
        accuracy: the share of them that came true; NaN in an empty bin.
        low, high: the 95 % bootstrap interval of ``accuracy``.
        overconfidence: mean confidence minus the share that came true, over all predictions.
    """

    counts: npt.NDArray[np.int64]
    confidence: Values
    accuracy: Values
    low: Values
    high: Values
    overconfidence: Interval


class Calibration(Section):
    title: ClassVar[str] = "Calibration"

    def html(self, data: ReportData) -> Markup:
        predictions = data.predictions
        truth, activation = predictions.truth, predictions.activation
        if activation == "none" or truth is None:
            return self.render(activation=activation, has_truth=truth is not None)
        values_of = {}
        if predictions.ensemble is not None and data.method.gives_probabilities:
            values_of[ENSEMBLE] = predictions.ensemble
        for name in sorted(predictions.members, key=lambda name: -data.mean_weights[name]):
            values_of[name] = predictions.members[name]
        diagrams: dict[str, Reliability] = {}
        cells: list[list[object]] = []
        for name, values in values_of.items():
            rows = np.flatnonzero(~np.isnan(values).any(axis=1))
            if not len(rows):
                continue
            values, true = values[rows], truth[rows]
            diagrams[name] = reliability(values, activation, true)
            temperature = ""
            if name != ENSEMBLE and len(rows) >= _MIN_ROWS:
                fitted_to = data.calibrated.members[name][rows]
                possible = predictions.post.taken(rows).possible
                temperature = number(fit_temperature(fitted_to, true, activation, possible), 2)
            gap = with_interval("accuracy", diagrams[name].overconfidence, is_difference=True)
            cells.append([name, gap, number(METRICS["ece"].value(true, values, activation)), temperature])
        quantity, rate = "confidence", "accuracy"
        if activation == "sigmoid":
            quantity, rate = "probability", "frequency"
        name, diagram = next(iter(diagrams.items()))
        verdict = "neither over- nor underconfident, as far as these rows tell"
        if diagram.overconfidence.excludes_zero:
            verdict = "overconfident" if diagram.overconfidence.value > 0 else "underconfident"
        return self.render(
            activation=activation,
            has_truth=True,
            who="The ensemble" if name == ENSEMBLE else name,
            verdict=verdict,
            gap_name=f"{quantity} \N{MINUS SIGN} {rate}",
            gap=with_interval("accuracy", diagram.overconfidence, is_difference=True),
            picture=_picture(diagrams, quantity),
            cells=cells,
            ece_bins=ECE_BINS,
            bins=_BINS,
            min_rows=_MIN_ROWS,
        )


def _picture(diagrams: Mapping[str, Reliability], quantity: str) -> Markup:
    panels = list(diagrams.items())[:6]
    across, down = min(len(panels), 2), -(-len(panels) // 2)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, (name, diagram) in zip(grid.flat, panels, strict=False):
            filled = diagram.counts >= _MIN_IN_BIN
            x, y = 100 * diagram.confidence[filled], 100 * diagram.accuracy[filled]
            axes.plot([0, 100], [0, 100], color=MUTED, linewidth=0.8, linestyle="--")
            axes.plot(x, y, color=SERIES[0])
            axes.vlines(x, 100 * diagram.low[filled], 100 * diagram.high[filled], color=SERIES[0], alpha=0.5)
            sizes = 4 + 40 * np.sqrt(diagram.counts[filled] / diagram.counts.max())
            axes.scatter(x, y, sizes, color=SERIES[0], zorder=3)
            axes.set_title(shortened(name, 22))
            axes.set(xlim=(0, 102), ylim=(0, 102), aspect="equal")
        figure.supxlabel(f"{quantity} (%)", fontsize=8, color=MUTED)
        figure.supylabel("came true (%)", fontsize=8, color=MUTED)

    text = (
        f"The {quantity} and how often it came true, in bins of 10 points. On the dashed line both are the same; "
        "below it probabilities are too high. The larger the dot, the more rows; bins of fewer than "
        f"{_MIN_IN_BIN} are left out. Lines are 95 % intervals."
    )
    if len(diagrams) > len(panels):
        text += f" The first {len(panels)} of {len(diagrams)}; the table has all."
    return picture(draw, "Reliability diagrams", text, height=30 + 200 * down)


def reliability(values: Values, activation: Activation, truth: Truth) -> Reliability:
    """Sort probabilities, [rows, labels], into bins: of "softmax" those of each row's first label, else all."""
    confidence, came_true = values, one_hot(truth, values.shape[1])
    if activation == "softmax":
        first = values.argmax(axis=1)[:, None]
        confidence = np.take_along_axis(values, first, axis=1)
        came_true = np.take_along_axis(came_true, first, axis=1)
    resamples = Resamples(len(values))
    bin_of = np.searchsorted(np.linspace(0.0, 1.0, _BINS + 1)[1:-1], confidence)
    counts, confidences = np.zeros(_BINS, np.int64), np.full(_BINS, np.nan)
    intervals = []
    for place in range(_BINS):
        is_in = bin_of == place
        counts[place] = is_in.sum()
        if counts[place]:
            confidences[place] = confidence[is_in].mean()
        columns = np.column_stack([(came_true * is_in).sum(axis=1), is_in.sum(axis=1)])
        by_group = resamples.by_group(slice(None), columns)
        intervals.append(resamples.mean(by_group[:, 0], by_group[:, 1]))
    differences = (confidence - came_true).mean(axis=1, keepdims=True)
    return Reliability(
        counts=counts,
        confidence=confidences,
        accuracy=np.array([interval.value for interval in intervals]),
        low=np.array([interval.low for interval in intervals]),
        high=np.array([interval.high for interval in intervals]),
        overconfidence=resamples.mean(resamples.by_group(slice(None), differences)[:, 0]),
    )
