"""Select rows by ``when``. PURE.

A row is selected where the mean of the members and jobs before is unsure.  That depends on their values alone:
neither chunks nor time nor an earlier run change it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ensemble.jobs.job import When

Doubts = npt.NDArray[np.float64]
# A share of rows, such as 0.07 of 100, is a little more or less than a whole number.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class ExpectedShare:
    """Hold the share of the rows that ``when`` is expected to select, and why, in words."""

    share: float
    why: str
    is_timed: bool = False  # it is as many as there is time for


def when_text(when: When, before: str = "members") -> str:
    """Return the rule in words: only where the members before it have ..."""
    ((rule, number),) = when.items()
    if isinstance(number, str):
        return f"on as many rows as there is time for, first where the {before} before it are least certain"
    if rule == "share":
        return f"only on the {100 * number:g} % of the rows of which the {before} before it are least certain"
    limit = f"a margin below {number:g}" if rule == "margin_below" else f"an entropy above {number:g} nats"
    return f"only on rows where the mean of the {before} before it has {limit}"


def margins(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return how far the likeliest of two labels or more is ahead of the second, [rows]."""
    second, first = np.partition(values, -2, axis=1)[:, -2:].T
    return np.asarray(first - second)


def entropy_terms(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return -p ln p of each cell, in nats; 0 for p = 0."""
    return np.asarray(-(values * np.log(np.where(values > 0, values, 1.0))))


def doubts(rule: str, mean: npt.NDArray[np.float64], is_exclusive: bool) -> Doubts:
    """Return how unsure each row is, [rows]: a larger number is less certain, infinity means that there is no mean.

    For ``entropy_above`` this is the entropy in nats, otherwise the negative margin.  With labels that exclude each
    other, the margin is from the likeliest label to the next, and the entropy is that of the row scaled to a sum
    of 1.  Independent labels are each a choice between p and 1 - p: the margin is that of the closest label, and
    the entropies add up.

    ``mean`` holds probabilities, float64 [rows, labels]; NaN in rows that no member has.
    """
    if rule == "entropy_above":
        if is_exclusive:
            with np.errstate(invalid="ignore"):
                choices = [mean / mean.sum(axis=1)[:, None]]
        else:
            choices = [mean, 1.0 - mean]
        doubt = np.zeros(len(mean))
        for probabilities in choices:
            doubt += entropy_terms(probabilities).sum(axis=1)
    elif is_exclusive and mean.shape[1] > 1:
        doubt = -margins(mean)
    else:
        doubt = -np.abs(2.0 * mean - 1.0).min(axis=1)
    return np.where(np.isnan(doubt), np.inf, doubt)


def select_rows(when: When, doubt: Doubts) -> npt.NDArray[np.bool_]:
    """Return which rows are computed, bool [rows].

    Rows that no member has are always selected. If rows are equally certain, ``share`` takes those that come first
    in the table. ``share: as_time_allows`` takes all rows: the time limit decides how many of them are computed.
    """
    ((rule, number),) = when.items()
    if isinstance(number, str):
        return np.ones(len(doubt), dtype=np.bool_)
    if rule == "share":
        selected = np.isinf(doubt)
        row_count = math.ceil(number * len(doubt) - _ROUNDING)
        selected[np.argsort(-doubt, kind="stable")[:row_count]] = True
        return selected
    threshold = -number if rule == "margin_below" else number
    return np.asarray(doubt > threshold)
