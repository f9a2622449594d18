"""How the sections about results show numbers: shares, intervals, and tables in colour."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from matplotlib.figure import Figure

from ensemble.analysis.metrics import Interval
from ensemble.analysis.report.base import html
from ensemble.analysis.report.pictures import INK, MUTED, NARROW, SERIES, picture

NOTHING = "\N{EN DASH}"
# Between a number and its unit, and within large numbers' words, no line ends.
_SPACE = "\N{NO-BREAK SPACE}"
# Columns with names instead of numbers; of more the table would be wider than a phone.
_MAX_NAMED = 3
# Characters of a row's name in a heat map, and of a member's in a table.
_MAX_HEAD = 15
MAX_NAME = 26
# Members in a diagram with a line for each, and in what takes the time of members times members.
MAX_MEMBERS = 50


def percent(share: float, digits: int = 1) -> str:
    """A share, such as 0.884, in percent; one that is not there is a dash."""
    return f"{100 * share:.{digits}f}{_SPACE}%" if math.isfinite(share) else NOTHING


def points(share: float, digits: int = 1) -> str:
    """A difference of shares, such as 0.012, in percentage points with its sign."""
    return signed(100 * share, digits) + f"{_SPACE}points" if math.isfinite(share) else NOTHING


def number(value: float, digits: int = 4) -> str:
    return f"{value:.{digits}f}".replace("-", "\N{MINUS SIGN}") if math.isfinite(value) else NOTHING


def signed(value: float, digits: int = 4) -> str:
    """With its sign, unless it is 0 as shown."""
    shown = f"{value:+.{digits}f}"
    if not math.isfinite(value):
        return NOTHING
    return shown[1:] if float(shown) == 0 else shown.replace("-", "\N{MINUS SIGN}")


# How metrics are written, with their units; those that are shares are shown in percent.
METRIC_NAMES: Final = {"log_loss": "log loss", "accuracy": "accuracy", "auc": "AUC", "rmse": "RMSE"}
_UNITS = {"log_loss": "nats"}
_SHARES = ("accuracy",)


def metric_heading(metric: str) -> str:
    """The name of a metric with its unit."""
    unit = f" ({_UNITS[metric]})" if metric in _UNITS else ""
    return METRIC_NAMES[metric] + unit


def metric_text(metric: str, value: float) -> str:
    """A metric with its unit, for a sentence."""
    unit = f"{_SPACE}{_UNITS[metric]}" if metric in _UNITS else ""
    return metric_value(metric, value) + unit


def metric_value(metric: str, value: float) -> str:
    return percent(value) if metric in _SHARES else number(value)


def with_interval(metric: str, found: Interval, is_difference: bool = False) -> Markup:
    """A metric, or a difference of two, with its interval, which stands back."""
    factor, digits = (100, 1) if metric in _SHARES else (1, 4)
    value, low, high = (factor * one for one in (found.value, found.low, found.high))
    unit = "" if metric not in _SHARES else f"{_SPACE}points" if is_difference else f"{_SPACE}%"
    return html(
        "{{ value }}{{ unit }} <span class=muted>({{ low }} to {{ high }})</span>",
        value=signed(value, digits) if is_difference else number(value, digits),
        low=number(low, digits),
        high=number(high, digits),
        unit=unit,
    )


def shortened(name: str, most: int) -> str:
    """A name where there is little room: its middle goes, as names often differ in their ends."""
    if len(name) <= most:
        return name
    end = (most - 1) // 2
    return f"{name[: most - 1 - end]}\N{HORIZONTAL ELLIPSIS}{name[-end:]}"


def is_narrow(figure: Figure) -> bool:
    """Whether this is the drawing for phones."""
    return bool(figure.get_figwidth() * 96 < NARROW + 1)


def differences_picture(rows: Sequence[tuple[str, Interval]], title: str, text: str, axis: str) -> Markup:
    """Differences with their intervals, one below the other, and a line at 0.

    What is no more than noise is grey, what is above 0 a blue dot, what is below it an orange diamond.

    Args:
        rows: names and differences, from top to bottom.
        axis: what is shown, with its unit.
    """

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        places = np.arange(len(rows))[::-1]
        for place, (_, one) in zip(places, rows, strict=True):
            is_above = one.value >= 0
            colour = (SERIES[0] if is_above else SERIES[1]) if one.excludes_zero else MUTED
            if np.isfinite([one.low, one.high]).all():
                axes.plot([one.low, one.high], [place, place], color=colour, linewidth=2.2, alpha=0.6)
            axes.plot([one.value], [place], marker="o" if is_above else "D", markersize=5, color=colour)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_yticks(places, [shortened(name, 13 if is_narrow(figure) else 26) for name, _ in rows])
        axes.set_ylim(-0.7, len(rows) - 0.3)
        axes.tick_params(length=0)
        axes.locator_params(axis="x", nbins=4 if is_narrow(figure) else 8)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(axis)

    return picture(draw, title, text, height=64 + 22 * len(rows))


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    values: npt.NDArray[np.float64],
    cells: Sequence[Sequence[str]],
    caption: str,
) -> Markup:
    """A table with the values as colours: a shade of blue, of orange below 0; NaN has none.

    As a table it can be read out and copied, and scrolls in its own frame where the window is narrower.

    Args:
        rows: names, [rows]; numbered, and ``columns`` have the numbers, where these are the same and more than 3.
        values: from -1 to 1, [rows, columns]: the strength of the colour.
        cells: what stands there, a few characters each, [rows][columns].
    """
    is_numbered = list(rows) == list(columns) and len(rows) > _MAX_NAMED
    return html(
        _HEAT_MAP,
        rows=rows,
        heads=[shortened(name, _MAX_HEAD) for name in rows],
        columns=columns,
        is_numbered=is_numbered,
        cells=[
            [
                (text, None if math.isnan(value) else f"{abs(value):.2f}", value < 0)
                for text, value in zip(*row, strict=True)
            ]
            for row in zip(cells, values.tolist(), strict=True)
        ],
        caption=caption,
    )


# Of these sections, on top of the page's own.  Colours of cells are half transparent, so that they fit both modes.
RESULTS_STYLE = """
.pair { display: flex; flex-wrap: wrap; gap: 0 2rem; }
.pair > figure { flex: 1 1 18rem; min-width: 0; max-width: 100%; margin: 0.5rem 0; }
.heat table { font-size: 0.75rem; border-collapse: separate; border-spacing: 1px; }
.heat th, .heat td { padding: 0; border: 0; text-align: center; line-height: 1.5rem; font-weight: 400; }
.heat td { min-width: 1.55rem; background: rgb(47 111 209 / calc(var(--v, 0) * 0.55)); border-radius: 2px; }
.heat td.below { background: rgb(217 115 14 / calc(var(--v, 0) * 0.55)); }
.heat tbody th { text-align: left; max-width: 7.5rem; overflow: hidden; text-overflow: ellipsis;
  padding-right: 0.4rem; position: sticky; left: 0; background: var(--cfefefe); color: inherit; }
.heat thead th { padding: 0 0.2rem; }
@media (max-width: 30rem) { .heat table { font-size: 0.6875rem; } .heat td { min-width: 1.3rem; }
  .heat tbody th { max-width: 5.2rem; } .heat th, .heat td { line-height: 1.35rem; } }
.say { font-size: 1.0625rem; }
article { border: 1px solid var(--cd8dee4); border-radius: 8px; padding: 0.6rem 0.8rem; margin: 0.6rem 0; }
article p { margin: 0.25rem 0; white-space: pre-wrap; }
article .top { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 1rem; font-size: 0.8125rem; }
.says { font-size: 0.8125rem; display: grid; grid-template-columns: fit-content(45%) minmax(0, 1fr);
  gap: 0.1rem 0.75rem; margin-top: 0.4rem; }
.says > div { min-width: 0; }
.says > div:nth-child(odd) { min-width: 5.5rem; }
.tag { display: inline-block; border-radius: 4px; padding: 0 0.35rem; background: rgb(101 109 118 / 0.15); }
.tag.right { background: rgb(43 138 92 / 0.25); }
summary { cursor: pointer; font-size: 0.875rem; color: var(--c2f6fd1); margin: 0.5rem 0; }
"""
_HEAT_MAP = """
<figure class="heat"><div class="table"><table>
<thead><tr><td></td>
{% for name in columns %}
<th scope="col" title="{{ name }}">{{ loop.index if is_numbered else name }}</th>
{% endfor %}
</tr></thead>
<tbody>
{% for row in cells %}
<tr><th scope="row" title="{{ rows[loop.index0] }}">
{%- if is_numbered %}<span class="muted">{{ loop.index }}</span> {% endif %}{{ heads[loop.index0] }}</th>
{%- for text, strength, is_below in row -%}
<td{% if strength %} style="--v:{{ strength }}"{% if is_below %} class="below"{% endif %}{% endif %}>{{ text }}</td>
{%- endfor %}</tr>

{% endfor %}
</tbody></table></div><figcaption>{{ caption }}</figcaption></figure>
"""


def spread(values: npt.NDArray[np.float64], least: float = 0.1) -> npt.NDArray[np.float64]:
    """Values as strengths of colour from 0.1 to 1: the lowest and the highest of them, at least ``least`` apart."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return np.full(values.shape, np.nan)
    low, high = float(finite.min()), float(finite.max())
    low = min(low, high - least)
    return np.asarray(0.1 + 0.9 * (values - low) / (high - low))
