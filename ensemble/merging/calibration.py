"""Calibration at the merge: a member's probabilities, less sure or surer of themselves, before they are merged.

    softmax   p(k)  ->  softmax over k of  ln p(k) * scale(k) / temperature + bias(k)
    sigmoid   p(k)  ->  sigmoid of  logit p(k) * scale(k) / temperature + bias(k),    logit p = ln(p / (1 - p))

Probabilities below float64's epsilon (2.2e-16) count as that, and of sigmoid members those above 1 - epsilon.  The
members' predictions stay as they are on disk: only what is merged, and scored, is calibrated.

C. Guo, G. Pleiss, Y. Sun and K. Q. Weinberger, "On Calibration of Modern Neural Networks", ICML 2017 (temperature
and vector scaling).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
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
    given: CalibrationConfig | None, activation: Activation, labels: Sequence[str]
) -> Calibrator | None:
    """What a member's values go through; None where that changes nothing."""
    if given is None or given == CalibrationConfig():
        return None
    scale = np.array([given.scale.get(label, 1.0) for label in labels]) / given.temperature
    bias = np.array([given.bias.get(label, 0.0) for label in labels])

    return lambda values: rescale(values, scale, bias, activation)


def rescale(values: Values, scale: Values | float, bias: Values | float, activation: Activation) -> None:
    """Calibrate probabilities in place: a scale (over the temperature) and a bias, of all labels or each."""
    scores = features(values, activation)
    scores *= scale
    scores += bias
    values[:] = probabilities_of(scores, [activation])


def features(values: Values, activation: Activation) -> Values:
    """Logarithms of softmax probabilities, log odds of sigmoid ones, raw values as they are; a new array."""
    if activation == "none":
        return values.copy(order="K")
    clipped: Values = np.clip(values, EPSILON, 1.0 if activation == "softmax" else 1.0 - EPSILON)
    rest = np.log1p(-clipped) if activation == "sigmoid" else None
    logs: Values = np.log(clipped, out=clipped)
    return logs if rest is None else np.subtract(logs, rest, out=logs)


def probabilities_of(scores: Values, activations: Collection[Activation]) -> Values:
    """Scores [rows, labels] as values of such members: softmax where all are, raw where all are, else sigmoid."""
    if set(activations) == {"none"}:
        return scores
    return softmax(scores) if set(activations) == {"softmax"} else sigmoid(scores)
