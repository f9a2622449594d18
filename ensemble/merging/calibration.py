"""Calibrate members' probabilities before they are merged.

    softmax   p(k)  ->  softmax over k of  ln p(k) * scale(k) / temperature + bias(k)
    sigmoid   p(k)  ->  sigmoid of  logit p(k) * scale(k) / temperature + bias(k),    logit p = ln(p / (1 - p))
    isotonic  p(k)  ->  a line through points for each label; softmax labels are then scaled to a sum of 1

Probabilities are clipped to float64's epsilon (2.2e-16), those of sigmoid members to 1 - epsilon, too. The members'
predictions stay as they are on disk: only what is merged, and scored, is calibrated.

C. Guo, G. Pleiss, Y. Sun and K. Q. Weinberger, "On Calibration of Modern Neural Networks", ICML 2017 (temperature
and vector scaling).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ensemble.common.activations import sigmoid, softmax
from ensemble.common.protocol import Activation
from ensemble.config import CalibrationConfig

EPSILON: Final = float(np.finfo(np.float64).eps)
Values: TypeAlias = npt.NDArray[np.float64]
# Changes float64 [rows, labels] in place; rows of NaN stay.
Calibrator: TypeAlias = Callable[[Values], None]


def calibrator(
    settings: CalibrationConfig | None, activation: Activation, labels: Sequence[str]
) -> Calibrator | None:
    """Return the function that calibrates a member's values; None if it would change nothing."""
    if settings is None or settings == CalibrationConfig():
        return None
    if settings.isotonic:
        lines = {labels.index(label): (line.x, line.y) for label, line in settings.isotonic.items()}
        return lambda values: _follow(values, lines, activation)
    scale = np.array([settings.scale.get(label, 1.0) for label in labels]) / settings.temperature
    bias = np.array([settings.bias.get(label, 0.0) for label in labels])

    return lambda values: rescale(values, scale, bias, activation)


def _follow(values: Values, lines: Mapping[int, tuple[Sequence[float], ...]], activation: Activation) -> None:
    """Calibrate probabilities in place by the points of each label's line; rows of zeros get equal parts."""
    for label, (x, y) in lines.items():
        values[:, label] = np.interp(values[:, label], x, y)
    if activation == "softmax":
        sums = values.sum(axis=1, keepdims=True)
        with np.errstate(invalid="ignore"):
            values[:] = np.where(sums == 0, 1 / values.shape[1], values / sums)


def rescale(values: Values, scale: Values | float, bias: Values | float, activation: Activation) -> None:
    """Calibrate probabilities in place; ``scale`` (over the temperature) and ``bias`` are of all labels or each."""
    scores = features(values, activation)
    scores *= scale
    scores += bias
    values[:] = probabilities_of(scores, [activation])


def features(values: Values, activation: Activation) -> Values:
    """Return logarithms of softmax probabilities, log odds of sigmoid ones, or a copy of raw values."""
    if activation == "none":
        return values.copy(order="K")
    if activation == "softmax":
        clipped: Values = np.clip(values, EPSILON, 1.0)
        return np.log(clipped, out=clipped)
    clipped = np.clip(values, EPSILON, 1.0 - EPSILON)
    logs_of_rest = np.log1p(-clipped)
    logs: Values = np.log(clipped, out=clipped)
    return np.subtract(logs, logs_of_rest, out=logs)


def probabilities_of(scores: Values, activations: Collection[Activation]) -> Values:
    """Turn scores [rows, labels] into values: softmax if all members are softmax, raw if all are, else sigmoid."""
    if set(activations) == {"none"}:
        return scores
    return softmax(scores) if set(activations) == {"softmax"} else sigmoid(scores)
