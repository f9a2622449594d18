"""How the sections about results write numbers, metrics and names."""

from __future__ import annotations

import math
from typing import Final

from markupsafe import Markup

from ensemble.analysis.metrics import Interval
from ensemble.analysis.report.base import html

ENSEMBLE: Final = "ensemble"
NOTHING: Final = "\N{EN DASH}"
METRIC_NAMES: Final = {"log_loss": "log loss", "accuracy": "accuracy", "auc": "AUC", "rmse": "RMSE"}


def percent(share: float, digits: int = 1) -> str:
    """Return a share, such as 0.884, in percent."""
    return f"{number(100 * share, digits)}\N{NO-BREAK SPACE}%"


def number(value: float, digits: int = 4, sign: str = "") -> str:
    """Return a number with a minus sign; with ``sign="+"`` one above 0 has a sign, too."""
    if not math.isfinite(value):
        return NOTHING
    return f"{value:{sign}z.{digits}f}".replace("-", "\N{MINUS SIGN}")


def metric_text(metric: str, value: float) -> str:
    return percent(value) if metric == "accuracy" else number(value)


def with_interval(metric: str, interval: Interval, is_difference: bool = False) -> Markup:
    """Return a metric, or a difference of two, with its interval, which is muted."""
    factor, digits, unit = 1, 4, ""
    if metric == "accuracy":  # in percent
        factor, digits = 100, 1
        unit = "\N{NO-BREAK SPACE}points" if is_difference else "\N{NO-BREAK SPACE}%"
    return html(
        "{{ value }}{{ unit }} <span class=muted>({{ low }} to {{ high }})</span>",
        value=number(factor * interval.value, digits, "+" if is_difference else ""),
        low=number(factor * interval.low, digits),
        high=number(factor * interval.high, digits),
        unit=unit,
    )


def shortened(name: str, most: int) -> str:
    """Return a name without its middle if it is too long, as names often differ in their ends."""
    if len(name) <= most:
        return name
    end = (most - 1) // 2
    return f"{name[: most - 1 - end]}\N{HORIZONTAL ELLIPSIS}{name[-end:]}"
