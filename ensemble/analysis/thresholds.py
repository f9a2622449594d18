"""Fit the thresholds that turn expected numbers into answers, for the best quadratic kappa."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import minimize

from ensemble.analysis.calibration import one_hot, sampled_rows
from ensemble.data.answers import Answer, halfway
from ensemble.data.table import Truth
from ensemble.merging.methods.base import Values
from ensemble.merging.scoring import Interval

_MAX_ROWS = 20_000


@dataclass(frozen=True)
class FittedThresholds:
    """Hold the thresholds (``values``) between the labels' numbers, fitted to held-out predictions of all rows.

    ``score`` is the kappa of rows whose thresholds were fitted without them, ``halfway`` that of rounding.
    """

    numbers: tuple[float, ...]
    values: tuple[float, ...]
    score: float
    halfway: float
    over_halfway: Interval


def rounding(numbers: tuple[float, ...]) -> Answer:
    """Return the answer that is the number nearest to the expected one."""
    return Answer(texts=(), numbers=numbers, thresholds=halfway(numbers))


def fit_thresholds(values: Values, truth: Truth, numbers: tuple[float, ...], seed: int) -> Answer:
    """Return the answer whose thresholds have the best kappa on these rows that Nelder and Mead's search finds.

    The kappa is flat between rows' expected numbers, so that a search by slopes stands still. The first steps are a
    quarter of the least distance of two numbers. Of more than 20,000 rows it takes as many at random.
    """
    rows, answer = sampled_rows(len(values), _MAX_ROWS, seed), rounding(numbers)
    values, truth = values[rows], truth[rows]

    def loss(thresholds: Values) -> float:
        tried = replace(answer, thresholds=tuple(np.sort(thresholds).tolist()))
        return -tried.scores(truth, values, "softmax").get("quadratic_kappa", 0.0)

    start, step = np.array(answer.thresholds), np.diff(sorted(numbers)).min() / 4
    simplex = np.vstack([start, start + step * np.eye(len(start))])
    best = minimize(loss, start, method="Nelder-Mead", options={"initial_simplex": simplex})
    thresholds = tuple(np.sort(best.x).round(6).tolist())
    return replace(answer, thresholds=thresholds) if len(set(thresholds)) == len(start) else answer


def answered(answer: Answer, values: Values) -> Values:
    """Return each row's answer as probabilities, 1 for it and 0 for the others, float64 [rows, labels]."""
    return one_hot(answer.choices(values)[:, 0], values.shape[1])
