"""How good probabilities are where the truth is known."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Standard errors that count as chance, and the share of the prior's log loss that counts as no gain at all.
_ERRORS = 2.0
_NO_GAIN = 0.01


@dataclass(frozen=True)
class Score:
    """``log_loss`` in nats per row, ``accuracy`` as a share of the ``rows``.

    ``prior_log_loss`` is that of always predicting the labels' frequencies in these rows, ``margin`` two standard
    errors of the difference, both in nats per row.  ``no_better_than_prior``: even with the margin in favour the
    log loss is not below the prior's by 1 % of it.  Chance alone brings a good member there on hardly any table.
    """

    log_loss: float
    accuracy: float
    rows: int
    prior_log_loss: float
    margin: float
    no_better_than_prior: bool


class Scoring:
    """Log loss and accuracy of class probabilities, added up block by block.

    The log loss is the mean of -ln p(true label), with p clipped to the smallest step of float64 as
    scikit-learn's ``log_loss`` does, after rows are scaled to sum to 1.

    Args:
        truth: label numbers, [rows].
    """

    def __init__(self, truth: npt.NDArray[np.int64]) -> None:
        self._truth = truth
        self._loss = 0.0
        self._hits = 0
        counts = np.bincount(truth)
        self._prior = -np.log(np.maximum(counts, 1) / max(1, len(truth)))
        self._squares = 0.0

    def add(self, start: int, values: npt.NDArray[np.float64]) -> None:
        """The rows from ``start`` on: float64 [rows, labels]."""
        truth = self._truth[start : start + len(values)]
        epsilon = np.finfo(np.float64).eps
        true = np.clip(values[np.arange(len(truth)), truth] / values.sum(axis=1), epsilon, 1 - epsilon)
        losses = -np.log(true)
        self._loss += float(losses.sum())
        self._squares += float(np.square(losses - self._prior[truth]).sum())
        self._hits += int((values.argmax(axis=1) == truth).sum())

    def score(self) -> Score:
        """Of all rows, once each was added."""
        rows = len(self._truth)
        loss, prior = self._loss / rows, float(self._prior[self._truth].mean())
        # Of the mean of the rows' differences, which share what is hard about a row.
        variance = max(0.0, self._squares / rows - (loss - prior) ** 2)
        margin = _ERRORS * math.sqrt(variance / max(1, rows - 1))
        is_no_better = prior > 0 and rows > 1 and loss - margin > prior * (1 - _NO_GAIN)
        return Score(loss, self._hits / rows, rows, prior, margin, is_no_better)
