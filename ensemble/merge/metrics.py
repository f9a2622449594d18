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


def score(values: npt.NDArray[np.float64], truth: npt.NDArray[np.int64]) -> Score:
    """Log loss and accuracy of class probabilities.

    The log loss is the mean of -ln p(true label), with p clipped to the smallest step of float64 as
    scikit-learn's ``log_loss`` does, after rows are scaled to sum to 1.

    Args:
        values: float64 [rows, labels].
        truth: label numbers, [rows].
    """
    rows = np.arange(len(truth))
    epsilon = np.finfo(np.float64).eps
    true = np.clip(values[rows, truth] / values.sum(axis=1), epsilon, 1 - epsilon)
    return Score(
        log_loss=float(-np.log(true).mean()),
        accuracy=float((values.argmax(axis=1) == truth).mean()),
    )
