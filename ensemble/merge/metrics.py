"""How good probabilities are where the truth is known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Score:
    """``log_loss`` in nats per row, ``accuracy`` as a share of the rows."""

    log_loss: float
    accuracy: float


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

    def add(self, start: int, values: npt.NDArray[np.float64]) -> None:
        """The rows from ``start`` on: float64 [rows, labels]."""
        truth = self._truth[start : start + len(values)]
        epsilon = np.finfo(np.float64).eps
        true = np.clip(values[np.arange(len(truth)), truth] / values.sum(axis=1), epsilon, 1 - epsilon)
        self._loss -= float(np.log(true).sum())
        self._hits += int((values.argmax(axis=1) == truth).sum())

    def score(self) -> Score:
        """Of all rows, once each was added."""
        rows = len(self._truth)
        return Score(log_loss=self._loss / rows, accuracy=self._hits / rows)
