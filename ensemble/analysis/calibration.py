"""Calibration of one member by log loss: a temperature, or a scale and a bias for each label (vector scaling).

Softmax members become softmax(scale * log p / temperature + bias), sigmoid ones the same of the logit, label by
label.  Log loss is convex in 1 / temperature, and in scale and bias, so Newton's method finds the optimum.

Probabilities below ``EPSILON`` count as that, and of sigmoid members those above 1 - ``EPSILON``: a row in which a
member was wrongly sure costs 36 nats, not any number, as in scikit-learn's ``log_loss``.

C. Guo, G. Pleiss, Y. Sun and K. Q. Weinberger, "On Calibration of Modern Neural Networks", ICML 2017.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ensemble.merging.blocks import block_spans
from ensemble.merging.calibration import EPSILON, features, probabilities_of, rescale

Values: TypeAlias = npt.NDArray[np.float64]
Truth: TypeAlias = npt.NDArray[np.int64] | npt.NDArray[np.float64]
Kind: TypeAlias = Literal["softmax", "sigmoid"]

# Of a temperature; a member at the upper end knows nothing of these labels, one at the lower is right in every row.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
_MAX_STEPS = 100
_STEP_TOLERANCE = 1e-9  # relative; the step after it would be of the square of that
_GAIN_TOLERANCE = 1e-13  # nats per row that a step could gain


@dataclass(frozen=True)
class VectorScaling:
    """``scale`` and ``bias``, float64 [labels] each."""

    scale: Values
    bias: Values


def fit_temperature(values: Values, truth: Truth, kind: Kind) -> float:
    """The temperature with the least log loss; 1 where no temperature changes anything.

    Args:
        values: probabilities, float64 [rows, labels].
        truth: label numbers, int64 [rows], or probabilities, float64 [rows, labels].

    Returns:
        from ``MIN_TEMPERATURE`` to ``MAX_TEMPERATURE``.
    """
    if kind == "sigmoid":
        values, truth = binary(values), binary(one_hot(truth, values.shape[1]))
    logs = log_scores(values, "softmax")
    target = float(of_truth(logs, truth).sum())
    ends = low, high = 1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE  # of the inverse
    inverse = 1.0
    for _ in range(_MAX_STEPS):
        slope, curvature = -target, 0.0
        for _, block in _blocks(logs):
            shares = probabilities_of((inverse * block).T, ["softmax"]).T
            means = (shares * block).sum(axis=0)
            slope += float(means.sum())
            curvature += float((shares * np.square(block - means)).sum())
        if slope * slope <= 2 * _GAIN_TOLERANCE * logs.shape[1] * curvature:
            break  # also where all labels of each row are alike
        low, high = (low, inverse) if slope > 0 else (inverse, high)
        following = inverse - slope / curvature
        if not low < following < high:
            end = low if slope > 0 else high
            following = end if end in ends else (low * high) ** 0.5
        if abs(following - inverse) <= _STEP_TOLERANCE * inverse:
            break
        inverse = following
    found: float = 1 / inverse
    return found


def fit_vector_scaling(values: Values, truth: Truth, kind: Kind) -> VectorScaling:
    """The scale and the bias of each label with the least log loss.

    All scales are taken to be 1 and all biases 0 give or take 1, as a normal prior, which counts as one row.  It
    decides what the rows do not: what is added to all biases alike, the bias of a label that no row has, scales
    of a member that is the same in every row.

    Args:
        values: probabilities, float64 [rows, labels]; and the truth as ``fit_temperature`` takes it.
    """
    rows, labels = values.shape
    logs = log_scores(values, kind)
    targets = np.ascontiguousarray(one_hot(truth, labels).T)
    start = np.concatenate([np.ones(labels), np.zeros(labels)])
    found = start.copy()

    def loss(parameters: Values) -> float:
        scale, bias = parameters[:labels, None], parameters[labels:, None]
        total = float(np.square(parameters - start).sum()) / 2
        for part, block in _blocks(logs):
            scores = scale * block + bias
            total -= float((targets[:, part] * scores).sum())
            if kind == "sigmoid":
                total += float(np.logaddexp(0, scores).sum())
            else:
                top = scores.max(axis=0)
                total += float((top + np.log(np.exp(scores - top).sum(axis=0))).sum())
        return float(total / rows)

    best = loss(found)
    for _ in range(_MAX_STEPS):
        slope, curvature = found - start, np.eye(2 * labels)
        for part, block in _blocks(logs):
            scores = found[:labels, None] * block + found[labels:, None]
            shares = probabilities_of(scores.T, [kind]).T
            error = shares - targets[:, part]
            slope += np.concatenate([(error * block).sum(axis=1), error.sum(axis=1)])
            if kind == "sigmoid":
                spread = shares * (1 - shares)
            else:
                spread, both = shares, np.concatenate([shares * block, shares])
                curvature -= both @ both.T
            scaled = spread * block
            across = np.diag(scaled.sum(axis=1))
            upper = np.diag((scaled * block).sum(axis=1))
            curvature += np.block([[upper, across], [across, np.diag(spread.sum(axis=1))]])
        step = np.linalg.solve(curvature, slope)
        gain = float(slope @ step) / rows  # twice what a whole step gains, where the loss is a parabola
        if gain <= _GAIN_TOLERANCE:
            found = found - step
            break
        share = 1.0
        while (reached := loss(found - share * step)) > best - 1e-4 * share * gain and share > EPSILON:
            share /= 2
        found, best = found - share * step, reached
    return VectorScaling(found[:labels], found[labels:])


def calibrated(values: Values, calibration: float | VectorScaling | None, kind: Kind) -> Values:
    """A member's probabilities with a calibration, float64 [rows, labels], each column in one piece.

    Args:
        calibration: a temperature; None changes nothing.
    """
    if calibration is None:
        return values
    scale, bias = (
        (calibration.scale, calibration.bias)
        if isinstance(calibration, VectorScaling)
        else (1 / calibration, 0.0)
    )
    result = np.array(values, order="F")
    for start, stop in block_spans(*result.shape):
        rescale(result[start:stop], scale, bias, kind)
    return result


def log_scores(values: Values, kind: Kind) -> Values:
    """ln p, or of sigmoid members ln p - ln(1 - p), float64 [labels, rows], of probabilities [rows, labels]."""
    return np.ascontiguousarray(features(values.T, kind))


def binary(values: Values) -> Values:
    """Each label of each row as a row of its own: no and yes, float64 [rows x labels, 2], label by label."""
    yes = values.T.ravel()
    return np.stack([1 - yes, yes]).T


def one_hot(truth: Truth, labels: int) -> Values:
    """The truth as probabilities, float64 [rows, labels]."""
    if truth.ndim == 2:
        return truth.astype(np.float64, copy=False)
    shares = np.zeros((labels, len(truth)))
    shares[truth, np.arange(len(truth))] = 1
    return shares.T


def of_truth(logs: Values, truth: Truth) -> Values:
    """ln p of the true label, [rows], of float64 [labels, rows]; its mean by the truth where that is soft."""
    if truth.ndim == 1:
        return np.asarray(logs[truth, np.arange(len(truth))])
    return np.asarray(np.einsum("kn,nk->n", logs, truth))


def _blocks(columns: Values) -> Iterator[tuple[slice, Values]]:
    for start, stop in block_spans(columns.shape[1], len(columns)):
        yield slice(start, stop), columns[:, start:stop]
