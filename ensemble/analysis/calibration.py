"""Calibration of one member by log loss: a temperature, or a scale and a bias for each label (vector scaling).

Softmax members become softmax(scale * log p / temperature + bias), sigmoid ones the same of the logit, label by
label. Log loss is convex in 1 / temperature, and in scale and bias. Probabilities below ``EPSILON`` count as that:
a row in which a member was wrongly sure costs 36 nats, as in scikit-learn's ``log_loss``.

C. Guo, G. Pleiss, Y. Sun and K. Q. Weinberger, "On Calibration of Modern Neural Networks", ICML 2017.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize
from scipy.special import expit

from ensemble.merging.blocks import block_spans
from ensemble.merging.calibration import features, rescale

Values: TypeAlias = npt.NDArray[np.float64]
Truth: TypeAlias = npt.NDArray[np.int64] | npt.NDArray[np.float64]
Kind: TypeAlias = Literal["softmax", "sigmoid"]

# A member at the upper end knows nothing of these labels, one at the lower end is right in every row.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
# More rows are sampled at random: k fitted numbers then cost new rows k / 200,000 nats.
MAX_ROWS: Final = 100_000


@dataclass(frozen=True)
class VectorScaling:
    """``scale`` and ``bias``, float64 [labels] each."""

    scale: Values
    bias: Values


def fit_temperature(values: Values, truth: Truth, kind: Kind) -> float:
    """Return the temperature with the least log loss; 1 if none changes anything.

    Args:
        values: probabilities, float64 [rows, labels].
        truth: label numbers, int64 [rows], or probabilities, float64 [rows, labels].
    """
    logs, targets = _logs_and_targets(values, truth, kind)

    def loss(inverse: Values) -> tuple[float, Values]:
        total, slope = 0.0, 0.0
        for part in blocks(logs.shape[1], len(logs)):
            value, error = loss_of_scores(inverse * logs[:, part], targets[:, part], kind)
            total += value
            slope += float((error * logs[:, part]).sum())
        return total / logs.shape[1], np.array([slope / logs.shape[1]])

    bounds = [(1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE)]
    options = {"ftol": 1e-13, "gtol": 1e-8}
    best = minimize(loss, [1.0], jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return float(1 / best.x[0])


def fit_vector_scaling(values: Values, truth: Truth, kind: Kind) -> VectorScaling:
    """Return the scale and the bias of each label with the least log loss.

    A normal prior, which counts as one row, takes all scales to be 1 and all biases 0 give or take 1. It decides
    what the rows do not: what is added to all biases alike, the bias of a label that no row has, scales of a member
    that is the same in every row. Arguments are as for ``fit_temperature``.
    """
    logs, targets = _logs_and_targets(values, truth, kind)
    labels, rows = logs.shape
    start = np.repeat([1.0, 0.0], labels)

    def loss(parameters: Values) -> tuple[float, Values]:
        scale, bias = parameters[:labels, None], parameters[labels:, None]
        total = float(np.square(parameters - start).sum()) / 2
        slope = parameters - start
        for part in blocks(rows, labels):
            value, error = loss_of_scores(scale * logs[:, part] + bias, targets[:, part], kind)
            total += value
            slope += np.concatenate([(error * logs[:, part]).sum(axis=1), error.sum(axis=1)])
        return total / rows, slope / rows

    options = {"ftol": 1e-13, "gtol": 1e-7, "maxiter": 500}
    best = minimize(loss, start, jac=True, method="L-BFGS-B", options=options)
    return VectorScaling(best.x[:labels], best.x[labels:])


def calibrated(values: Values, calibration: float | VectorScaling | None, kind: Kind) -> Values:
    """Return a member's probabilities with a calibration, float64 [rows, labels], each column in one piece.

    Args:
        calibration: a temperature; None changes nothing.
    """
    if calibration is None:
        return values
    if isinstance(calibration, VectorScaling):
        scale, bias = calibration.scale, calibration.bias
    else:
        scale, bias = np.array([1 / calibration]), np.array([0.0])
    result = np.array(values, order="F")
    for part in blocks(*result.shape):
        rescale(result[part], scale, bias, kind)
    return result


def loss_of_scores(scores: Values, targets: Values, kind: Kind) -> tuple[float, Values]:
    """Return the log loss of scores, summed over rows (sigmoid: and labels), and its derivative by the scores.

    Args:
        scores, targets: float64 [labels, rows].
    """
    if kind == "sigmoid":
        whole, shares = np.logaddexp(0, scores), expit(scores)
    else:
        top = scores.max(axis=0)
        shares = np.exp(scores - top)
        sums = shares.sum(axis=0)
        whole = top + np.log(sums)
        shares /= sums
    return float(whole.sum() - (targets * scores).sum()), shares - targets


def one_hot(truth: Truth, labels: int) -> Values:
    """Return the truth as probabilities, float64 [rows, labels]."""
    if truth.ndim == 2:
        return truth.astype(np.float64, copy=False)
    shares = np.zeros((labels, len(truth)))
    shares[truth, np.arange(len(truth))] = 1
    return shares.T


def blocks(rows: int, labels: int) -> list[slice]:
    """Return slices of rows that fit a core's cache."""
    return [slice(*span) for span in block_spans(rows, labels)]


def sampled_rows(rows: int, most: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """Return the numbers of all rows, or of so many drawn at random."""
    if rows <= most:
        return np.arange(rows)
    return np.random.default_rng(seed).permutation(rows)[:most]


def _logs_and_targets(values: Values, truth: Truth, kind: Kind) -> tuple[Values, Values]:
    """Return ln p or logits, and the truth, float64 [labels, rows] each."""
    rows = sampled_rows(len(values), MAX_ROWS)
    logs = features(values[rows], kind).T
    targets = one_hot(truth[rows], values.shape[1]).T
    return np.ascontiguousarray(logs), np.ascontiguousarray(targets)
