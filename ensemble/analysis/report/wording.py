"""How the sections about results write numbers, metrics and names."""

from __future__ import annotations

import math
from typing import Final

from markupsafe import Markup

from ensemble.analysis.metrics import Interval
from ensemble.analysis.report.base import html

ENSEMBLE: Final = "ensemble"
NOTHING: Final = "\N{EN DASH}"
# Characters of a member's name in a table.
MAX_NAME: Final = 26
METRIC_NAMES: Final = {"log_loss": "log loss", "accuracy": "accuracy", "auc": "AUC", "rmse": "RMSE"}
_UNITS = {"log_loss": "nats"}
_SHARES = ("accuracy",)  # are shown in percent
_SPACE = "\N{NO-BREAK SPACE}"


def percent(share: float, digits: int = 1) -> str:
    """Return a share, such as 0.884, in percent."""
    return f"{100 * share:.{digits}f}{_SPACE}%" if math.isfinite(share) else NOTHING


def number(value: float, digits: int = 4) -> str:
    return f"{value:z.{digits}f}".replace("-", "\N{MINUS SIGN}") if math.isfinite(value) else NOTHING


def signed(value: float, digits: int = 4) -> str:
    """Return a number with its sign, unless it is 0 as shown."""
    if not math.isfinite(value):
        return NOTHING
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "\N{MINUS SIGN}")


def metric_heading(metric: str) -> str:
    unit = f" ({_UNITS[metric]})" if metric in _UNITS else ""
    return METRIC_NAMES[metric] + unit


def metric_text(metric: str, value: float) -> str:
    """Return a metric with its unit, for a sentence."""
    if metric in _SHARES:
        return percent(value)
    unit = f"{_SPACE}{_UNITS[metric]}" if metric in _UNITS else ""
    return number(value) + unit


def with_interval(metric: str, interval: Interval, is_difference: bool = False) -> Markup:
    """Return a metric, or a difference of two, with its interval, which is muted."""
    factor, digits, unit = 1, 4, ""
    if metric in _SHARES:
        factor, digits = 100, 1
        unit = f"{_SPACE}points" if is_difference else f"{_SPACE}%"
    write = signed if is_difference else number
    return html(
        "{{ value }}{{ unit }} <span class=muted>({{ low }} to {{ high }})</span>",
        value=write(factor * interval.value, digits),
        low=number(factor * interval.low, digits),
        high=number(factor * interval.high, digits),
        unit=unit,
    )


def shortened(name: str, most: int = MAX_NAME) -> str:
    """Return a name without its middle if it is too long, as names often differ in their ends."""
    if len(name) <= most:
        return name
    end = (most - 1) // 2
    return f"{name[: most - 1 - end]}\N{HORIZONTAL ELLIPSIS}{name[-end:]}"


def row_name(name: str) -> str | Markup:
    """Return a member's name for the first column of a table; the ensemble's is bold."""
    return html("<strong>{{ name }}</strong>", name=name) if name == ENSEMBLE else shortened(name)
