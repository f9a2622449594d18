"""Turn scores into probabilities in the parent: softmax and sigmoid, float64 [rows, labels]."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def softmax(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return exp(x - m) / sum of exp(x - m) with m the row's largest x, written over the scores.

    -inf beside a finite x becomes 0; rows with NaN, with inf or with no finite x become NaN.
    """
    with np.errstate(invalid="ignore"):
        scores -= scores.max(axis=1)[:, None]
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=1)[:, None]
    return scores


def sigmoid(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return 1 / (1 + exp(-x)) in a new array; NaN stays NaN."""
    with np.errstate(over="ignore"):  # exp of a large number is inf, as it should be
        odds = np.exp(-scores)
    return np.asarray(1.0 / (1.0 + odds))
