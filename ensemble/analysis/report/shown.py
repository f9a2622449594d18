"""How the sections about results show numbers: shares, intervals, and tables in colour."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from ensemble.analysis.report.base import html

NOTHING = "\N{EN DASH}"
# Between a number and its unit, and within large numbers' words, no line ends.
_SPACE = "\N{NO-BREAK SPACE}"
# Columns with names instead of numbers; of more the table would be wider than a phone.
_MAX_NAMED = 3


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


def interval(value: str, low: str, high: str) -> Markup:
    """A number with its interval, which stands back."""
    return html(
        "{{ value }} <span class=muted>({{ low }} to {{ high }})</span>", value=value, low=low, high=high
    )


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
{%- if is_numbered %}<span class="muted">{{ loop.index }}</span> {% endif %}{{ rows[loop.index0] }}</th>
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
