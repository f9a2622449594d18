"""Whether probabilities can be taken at their word, before and after the calibration that the merge uses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from ensemble.analysis.calibration import Kind, calibrated, fit_temperature
from ensemble.analysis.metrics import ECE_BINS, METRICS, Interval
from ensemble.analysis.reliability import BINS, Reliability, overconfidence, reliability
from ensemble.analysis.report.base import ReportData, Section, html, table
from ensemble.analysis.report.pictures import MUTED, SERIES, picture
from ensemble.analysis.report.results import Results, Rows
from ensemble.analysis.report.shown import (
    MAX_MEMBERS,
    MAX_NAME,
    METRIC_NAMES,
    NOTHING,
    metric_text,
    number,
    points,
    shortened,
    with_interval,
)
from ensemble.common.errors import DataError
from ensemble.common.text import plural
from ensemble.merging.methods.base import Values

_FOLDS = 5
# Fewer rows of a member bear no temperature.
_MIN_ROWS = 50
# Of a member, that temperatures are fitted to; more would change them in the third digit.
_MAX_CELLS = 1_000_000
_MAX_ROWS = 50_000
_MAX_PANELS = 6
# Bins of fewer are left out of the picture: their accuracy says nothing.
_MIN_IN_BIN = 10
_ENSEMBLE = "ensemble"


@dataclass(frozen=True)
class _One:
    """A member or the ensemble; ``after``, ``change`` and ``temperature`` are None where there is nothing to show.

    ``change`` is the loss after less that before, on the same rows.
    """

    name: str
    before: Reliability
    after: Reliability | None
    errors: tuple[float, float | None]
    gaps: tuple[Interval, Interval | None]
    change: Interval | None
    temperature: str


class Calibration(Section):
    title: ClassVar[str] = "Calibration"

    def html(self, data: ReportData) -> Markup:
        results = data.results
        if results.activation == "none":
            return html("<p>These values are no probabilities, so there is nothing to calibrate.</p>")
        if results.truth is None:
            return html(
                "<p>Without true labels nobody can say whether these probabilities keep their word.</p>"
            )
        is_set = bool(results.calibrations)
        rows = None if is_set else results.sample(min(_MAX_ROWS, _MAX_CELLS // len(results.labels)))
        shown, why = [*_compared(results, rows)], ""
        if not is_set and all(one.after is None for one in shown):
            why = f"Fewer than {_MIN_ROWS} rows bear no temperature."
            if len(results.names) > MAX_MEMBERS:
                why = f"Temperatures are left out: they are fitted for at most {MAX_MEMBERS} members."
        return html(
            """
{% for line in lines %}<p class="{{ 'say' if loop.first }}">{{ line }}</p>
{% endfor %}
{{ picture }}{{ table }}
<p class="note">{{ what }} {{ why }}</p>
""",
            lines=[*_lines(results, shown, is_set)],
            picture=_picture(shown[:_MAX_PANELS], len(shown), results.activation == "softmax"),
            table=_table(results, shown, is_set),
            what=(
                "Before: the members' files. After: with the calibration of the config, as they were merged."
                if is_set
                else "Before: the members' files, as they were merged: the config sets no calibration. After: what "
                f"a temperature would do that is fitted on other rows ({_FOLDS}-fold cross-validation"
                + ("" if rows is None else f" over {plural(len(rows), 'row')} at the same distance")
                + ")."
            ),
            why=f"ECE: the expected calibration error, of {ECE_BINS} bins; the diagrams have {BINS}. {why}",
        )


def _compared(results: Results, rows: Rows | None) -> Iterator[_One]:
    """The ensemble, where there is one, and the members by their weights."""
    truth = results.truth
    assert truth is not None
    part = truth if rows is None else truth[rows]
    raw = results.values if rows is None else [values[rows] for values in results.values]
    after: dict[str, Values] = {}
    temperatures: dict[str, str] = {}
    if results.calibrations:
        for name, values in zip(results.names, results.as_merged, strict=True):
            given = results.calibrations.get(name)
            if given is not None:
                after[name] = values
                by_label = bool(given.scale or given.bias)
                temperatures[name] = "by label" if by_label else number(given.temperature, 3)
    elif len(results.names) <= MAX_MEMBERS:
        kind: Kind = "sigmoid" if results.activation == "sigmoid" else "softmax"
        for name, values in zip(results.names, raw, strict=True):
            there = np.flatnonzero(~np.isnan(values).any(axis=1))
            if len(there) < _MIN_ROWS:
                continue
            after[name] = np.full(values.shape, np.nan)
            folds = np.random.default_rng(0).permutation(len(there)) % _FOLDS
            for fold in range(_FOLDS):
                fitted, held = there[folds != fold], there[folds == fold]
                temperature = fit_temperature(values[fitted], part[fitted], kind)
                after[name][held] = calibrated(values[held], temperature, kind)
            temperatures[name] = number(fit_temperature(values[there], part[there], kind), 3)
    if results.ensemble is not None and results.method.gives_probabilities:
        own = results.ensemble if rows is None else results.ensemble[rows]
        merged: Values | None = None
        if not results.merge_problem and after:
            if results.calibrations:
                own, merged = results.merged(raw), own
            else:
                changed = [after.get(name, values) for name, values in zip(results.names, raw, strict=True)]
                merged = results.merged(changed, rows=rows)
        if merged is not None and np.isnan(merged).any():  # rows that nobody has were filled in
            merged = np.where(np.isnan(merged), own, merged)
        yield _one(results, _ENSEMBLE, own, merged, rows, "")
    by_weight = sorted(range(len(raw)), key=lambda place: -results.weights[place])
    for place in by_weight:
        name = results.names[place]
        if not np.isnan(raw[place]).all():
            yield _one(results, name, raw[place], after.get(name), rows, temperatures.get(name, ""))


def _one(
    results: Results, name: str, before: Values, after: Values | None, rows: Rows | None, temperature: str
) -> _One:
    assert results.truth is not None
    truth = results.truth if rows is None else results.truth[rows]

    def error(values: Values) -> float:
        there = ~np.isnan(values).any(axis=1)
        try:
            return METRICS["ece"].value(truth[there], values[there], activation=results.activation)
        except DataError:
            return np.nan

    def gap(values: Values) -> Interval:
        return overconfidence(values, results.activation, truth)

    change = None if after is None else results.difference(results.loss, after, before, rows)
    return _One(
        name,
        reliability(before, results.activation, truth),
        None if after is None else reliability(after, results.activation, truth),
        (error(before), None if after is None else error(after)),
        (gap(before), None if after is None else gap(after)),
        change if isinstance(change, Interval) else None,
        temperature,
    )


def _lines(results: Results, shown: list[_One], is_set: bool) -> Iterator[str]:
    first = shown[0]
    before, after = first.gaps
    gap = after if is_set and after is not None else before
    size = points(abs(gap.value)).lstrip("+")
    name = "the ensemble" if first.name == _ENSEMBLE else first.name
    who = "The ensemble" if first.name == _ENSEMBLE else first.name
    is_exclusive = results.activation == "softmax"
    if not gap.excludes_zero:
        what = f"mean {_gap_name(is_exclusive)}"
        said = (
            f"As far as these rows tell, {name} is neither "
            f"over- nor underconfident ({what}: {points(gap.value)}, {points(gap.low)} to {points(gap.high)})"
        )
    elif not is_exclusive:
        word = "higher" if gap.value > 0 else "lower"
        said = f"{who}'s probabilities are {size} {word} on average than how often labels come true"
    elif gap.value > 0:
        said = f"{who} is overconfident: {size} surer than it is right"
    else:
        said = f"{who} is underconfident: {size} less sure than it is right"
    yield f"{said}."
    if (change := first.change) is None or first.name != _ENSEMBLE:
        return
    loss = METRIC_NAMES[results.loss.name]
    size = metric_text(results.loss.name, abs(change.value))
    fall = f"{size} {'lower' if change.value < 0 else 'higher'}"
    noise = "" if change.excludes_zero else ", which is no more than noise"
    if is_set:
        yield f"With the calibration of the config the ensemble's {loss} is {fall} than without{noise}."
    else:
        yield f"With a temperature for each member the ensemble's {loss} would be {fall}{noise}." + (
            " To set them, run ensemble fit." if change.high < 0 else " None is needed."
        )


def _gap_name(is_exclusive: bool) -> str:
    return "confidence \N{MINUS SIGN} accuracy" if is_exclusive else "probability \N{MINUS SIGN} frequency"


def _picture(panels: list[_One], count: int, is_exclusive: bool) -> Markup:

    def draw(figure: Figure) -> None:
        across = min(len(panels), 2)
        grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, one in zip(grid.flat, panels, strict=False):
            axes.plot([0, 100], [0, 100], color=MUTED, linewidth=0.8, linestyle="--", label="_")
            for found, colour, label, face in (
                (one.before, SERIES[1], "before", "none"),
                (one.after, SERIES[0], "after", SERIES[0]),
            ):
                if found is None:
                    continue
                x, y = 100 * found.confidence, 100 * found.accuracy
                filled = found.counts >= _MIN_IN_BIN
                axes.plot(x[filled], y[filled], color=colour, linewidth=1.1, label="_")
                if found is (one.after or one.before):
                    ends = 100 * found.low[filled], 100 * found.high[filled]
                    axes.vlines(x[filled], *ends, color=colour, linewidth=1, alpha=0.5)
                sizes = 6 + 50 * np.sqrt(found.counts[filled] / found.counts.max())
                axes.scatter(
                    x[filled], y[filled], sizes, facecolors=face, edgecolors=colour, label=label, zorder=3
                )
            axes.set_title(shortened(one.name, 22))
            axes.set_xlim(0, 102)
            axes.set_ylim(0, 102)
            axes.set_aspect("equal")
        grid[0, 0].legend(loc="upper left", fontsize=7, frameon=False, markerscale=0.6)
        figure.supxlabel("confidence (%)" if is_exclusive else "probability (%)", fontsize=8.5, color=MUTED)
        figure.supylabel("right (%)" if is_exclusive else "came true (%)", fontsize=8.5, color=MUTED)

    left_out = f" Of {count}, the {len(panels)} first; the table has all." if count > len(panels) else ""
    down = -(-len(panels) // 2)
    return picture(
        draw,
        "Reliability diagrams",
        "Confidence against how often it was right, in bins of 10 points; on the dashed line they are the same, "
        "below it promises are too high. The larger the dot, the more rows; bins of fewer than "
        f"{_MIN_IN_BIN} are left out. Lines are 95 % intervals.{left_out}",
        height=40 + 275 * down,
        width=560 if len(panels) > 1 else 320,
        narrow_height=40 + 165 * down,
    )


def _table(results: Results, shown: list[_One], is_set: bool) -> Markup:
    loss = METRIC_NAMES[results.loss.name]
    rows: list[list[object]] = []
    for one in shown:
        before, after = one.errors
        gap, _ = one.gaps
        rows.append(
            [
                html("<strong>{{ name }}</strong>", name=one.name)
                if one.name == _ENSEMBLE
                else shortened(one.name, MAX_NAME),
                with_interval("accuracy", gap, is_difference=True),
                number(before),
                NOTHING if after is None else number(after),
                one.temperature,
                with_interval(results.loss.name, one.change, is_difference=True) if one.change else NOTHING,
            ]
        )
    calibration = "calibration" if is_set else "temperature"
    headers = [
        "",
        _gap_name(results.activation == "softmax"),
        "ECE before",
        "after",
        calibration,
        f"{loss}, after \N{MINUS SIGN} before",
    ]
    return table(headers, rows)
