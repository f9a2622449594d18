"""How sure the ensemble is, how right the rows are that it is sure of, and which labels it takes for which."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from ensemble.analysis.reliability import Confusion, Coverage, confusions, coverage, reliability
from ensemble.analysis.report.base import ReportData, Section, html, table
from ensemble.analysis.report.pictures import GRID, INK, MUTED, SERIES, picture
from ensemble.analysis.report.results import Results
from ensemble.analysis.report.shown import heat_map, is_narrow, percent
from ensemble.merging.methods.base import Values

_BINS = 20
_MAX_MAPPED = 20
_MAX_CONFUSIONS = 10
_SURE = 0.9


class Confidence(Section):
    title: ClassVar[str] = "Confidence and mistakes"

    def html(self, data: ReportData) -> Markup:
        results = data.results
        values = results.ensemble
        if values is None:
            return html("<p>The run has merged nothing, so there is no ensemble to look at.</p>")
        if results.activation == "none":
            return html(
                "<p>These values are no probabilities, so they say nothing of how sure the members are.</p>"
            )
        found = reliability(values, results.activation, bins=_BINS)
        kept = _coverage(results, values)
        mistakes, counts = (
            confusions(values, results.truth, _MAX_CONFUSIONS)
            if results.truth is not None and results.activation == "softmax" and values.shape[1] > 1
            else ([], None)
        )
        return html(
            """
{% for line in lines %}<p class="{{ 'say' if loop.first }}">{{ line }}</p>
{% endfor %}
{{ picture }}
{% if mistakes or map %}<h3>Labels taken for others</h3>{% endif %}
{{ map }}{{ mistakes }}
""",
            lines=[*_lines(results, values, kept)],
            picture=_picture(
                found.counts / max(1, found.counts.sum()), kept, results.activation == "softmax"
            ),
            map=_map(results.labels, counts) if counts is not None and len(counts) <= _MAX_MAPPED else "",
            mistakes=_mistakes(results.labels, mistakes) if mistakes else "",
        )


def _coverage(results: Results, values: Values) -> Coverage | None:
    """None without a truth; of labels that do not exclude each other each answer counts."""
    if results.truth is None:
        return None
    if results.activation == "softmax":
        first = values.argmax(axis=1)
        sure = values[np.arange(len(values)), first]
        true = results.truth.argmax(axis=1) if results.truth.ndim == 2 else results.truth
        return coverage(sure, (true == first).astype(np.float64))
    right = (values >= 0.5) == (results.truth >= 0.5)
    return coverage(np.maximum(values, 1 - values).ravel(), right.astype(np.float64).ravel())


def _lines(results: Results, values: Values, kept: Coverage | None) -> Iterator[str]:
    is_exclusive = results.activation == "softmax"
    unit = "rows" if is_exclusive else "answers (row and label)"
    sure = values.max(axis=1) if is_exclusive else np.maximum(values, 1 - values).ravel()
    share = percent(float((sure > _SURE).mean()), 0)
    if kept is None:
        mean = percent(float(sure.mean()))
        yield f"The ensemble is surer than {percent(_SURE, 0)} in {share} of {unit}; its mean confidence is {mean}."
        return
    half, whole = int(np.searchsorted(kept.shares, 0.5 - 1e-9)), float(kept.accuracy[-1])
    yield (
        f"The surer half of the {unit} is right in {percent(float(kept.accuracy[half]))}, all in {percent(whole)}: "
        + (
            "confidence tells good rows from bad ones."
            if kept.accuracy[half] - whole > (1 - whole) / 4
            else "confidence says little about which rows are right."
        )
    )
    yield f"It is surer than {percent(_SURE, 0)} in {share} of {unit}."


def _picture(shares: Values, kept: Coverage | None, is_exclusive: bool) -> Markup:
    unit = "rows" if is_exclusive else "answers"

    def draw(figure: Figure) -> None:
        count = 1 if kept is None else 2
        grid = figure.subplots(count, 1) if is_narrow(figure) else figure.subplots(1, count)
        plots = np.atleast_1d(grid)
        edges = np.linspace(0, 100, len(shares) + 1)
        plots[0].bar(edges[:-1], 100 * shares, np.diff(edges), align="edge", color=SERIES[0], edgecolor=GRID)
        plots[0].set_xlabel("confidence (%)" if is_exclusive else "probability (%)")
        plots[0].set_ylabel(f"{unit} (%)")
        plots[0].grid(axis="x", visible=False)
        plots[0].set_xlim(0, 100)
        if kept is not None:
            plots[1].plot(100 * kept.shares, 100 * kept.accuracy, color=SERIES[0], marker="o", markersize=3.5)
            plots[1].axhline(100 * kept.accuracy[-1], color=MUTED, linewidth=0.8, linestyle="--")
            plots[1].annotate(
                "all",
                (2, 100 * kept.accuracy[-1]),
                xytext=(0, 3),
                textcoords="offset points",
                color=INK,
            )
            plots[1].set_xlabel(f"surest {unit} (% of all)")
            plots[1].set_ylabel("right (%)")
            plots[1].set_xlim(0, 102)

    what = (
        "Share of rows by the probability of their first label"
        if is_exclusive
        else "Share of answers by probability"
    )
    text = f"{what}, in bins of {100 // len(shares)} points."
    if kept is not None:
        text += f" Beside it: how often the surest {unit} are right, from the surest 5 % to all."
    return picture(
        draw, "Confidence of the ensemble", text, height=250, narrow_height=250 if kept is None else 460
    )


def _map(labels: tuple[str, ...], counts: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Markup:
    with np.errstate(invalid="ignore"):
        shares = counts / counts.sum(axis=1, keepdims=True)
    cells = [["" if not count else f"{count:,}" for count in row] for row in counts.tolist()]
    strengths = np.where(counts > 0, np.sqrt(np.clip(shares, 0.01, 1.0)), np.nan)
    return heat_map(
        labels,
        labels,
        strengths,
        cells,
        "Rows by true label (down) and the ensemble's first label (across, by number). The stronger the colour, "
        "the larger the share of the true label's rows.",
    )


def _mistakes(labels: tuple[str, ...], mistakes: list[Confusion]) -> Markup:
    return table(
        ["true label", "taken for", "rows", "of the label's rows"],
        [[labels[one.true], labels[one.first], f"{one.rows:,}", percent(one.share)] for one in mistakes],
        left=(0, 1),
    )
