"""Calibrate a member by log loss: fit a temperature, or a scale and a bias for each label (vector scaling).

Softmax members become softmax(scale * log p / temperature + bias), sigmoid ones the same of the logit, label by
label. Log loss is convex in 1 / temperature, and in scale and bias. Probabilities below ``EPSILON`` count as that:
a row in which a member was wrongly sure costs 36 nats, as in scikit-learn's ``log_loss``.

C. Guo, G. Pleiss, Y. Sun and K. Q. Weinberger, "On Calibration of Modern Neural Networks", ICML 2017.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize
from scipy.special import expit, logsumexp

from ensemble.data.table import Truth
from ensemble.merging.calibration import features
from ensemble.merging.methods.base import Values

Kind: TypeAlias = Literal["softmax", "sigmoid"]
Flags: TypeAlias = npt.NDArray[np.bool_] | None

# A member at the upper end knows nothing of these labels, one at the lower end is right in every row.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
# More rows are sampled at random: k fitted numbers then cost new rows k / 200,000 nats.
MAX_ROWS: Final = 100_000


def fit_temperature(values: Values, truth: Truth, kind: Kind, possible: Flags = None) -> float:
    """Return the temperature with the least log loss; 1 if none changes anything.

    The truth is label numbers, int64 [rows], or like the values probabilities, float64 [rows, labels]. Labels that
    are not ``possible``, bool [rows, labels], are 0 after the calibration; None: all are possible.
    """
    logs, targets, offsets = _logs_and_targets(values, truth, kind, possible)
    rows = logs.shape[1]

    def loss(inverse: Values) -> tuple[float, Values]:
        value, slopes = loss_of_scores(inverse * logs + offsets, targets, kind)
        return value / rows, np.array([(slopes * logs).sum() / rows])

    bounds = [(1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE)]
    options = {"ftol": 1e-13, "gtol": 1e-8}
    best = minimize(loss, [1.0], jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return float(1 / best.x[0])


def fit_vector_scaling(
    values: Values, truth: Truth, kind: Kind, possible: Flags = None
) -> tuple[Values, Values]:
    """Return the scale and the bias of each label with the least log loss, float64 [labels] each.

    A normal prior, which counts as one row, takes all scales to be 1 and all biases 0 give or take 1. It decides
    what the rows do not, such as the bias of a label that no row has. Arguments are as for ``fit_temperature``.
    """
    logs, targets, offsets = _logs_and_targets(values, truth, kind, possible)
    labels, rows = logs.shape
    start = np.repeat([1.0, 0.0], labels)

    def loss(parameters: Values) -> tuple[float, Values]:
        scores = parameters[:labels, None] * logs + parameters[labels:, None] + offsets
        value, slopes = loss_of_scores(scores, targets, kind)
        distance = parameters - start
        gradient = np.concatenate([(slopes * logs).sum(axis=1), slopes.sum(axis=1)]) + distance
        return (value + distance @ distance / 2) / rows, gradient / rows

    options = {"ftol": 1e-13, "gtol": 1e-7, "maxiter": 500}
    best = minimize(loss, start, jac=True, method="L-BFGS-B", options=options)
    return best.x[:labels], best.x[labels:]


def loss_of_scores(scores: Values, targets: Values, kind: Kind) -> tuple[float, Values]:
    """Return the summed log loss of scores, and its derivative by the scores; all are float64 [labels, rows]."""
    if kind == "sigmoid":
        norms, shares = np.logaddexp(0, scores), expit(scores)
    else:
        norms = logsumexp(scores, axis=0)
        shares = np.exp(scores - norms)
    return float(norms.sum() - (targets * scores).sum()), shares - targets


def one_hot(truth: Truth, labels: int) -> Values:
    """Return the truth as probabilities, float64 [rows, labels]."""
    if truth.ndim == 2:
        return truth.astype(np.float64, copy=False)
    return np.asarray((truth == np.arange(labels)[:, None]).T, np.float64)


def sampled_rows(rows: int, most: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """Return the numbers of all rows, or of so many drawn at random."""
    if rows <= most:
        return np.arange(rows)
    return np.random.default_rng(seed).permutation(rows)[:most]


def _logs_and_targets(
    values: Values, truth: Truth, kind: Kind, possible: Flags
) -> tuple[Values, Values, Values | float]:
    """Return a sample's features, its truth, and what to add to scores, float64 [labels, rows] each.

    A label that is impossible in a row has no feature there, and a score that makes its probability 0. Where a true
    label is impossible, the calibration cannot help, and all labels of the row count as possible.
    """
    rows = sampled_rows(len(values), MAX_ROWS)
    logs = features(values[rows], kind).T
    targets = one_hot(truth[rows], values.shape[1]).T
    offsets: Values | float = 0.0
    if possible is not None:
        is_impossible = ~possible[rows].T
        is_impossible[:, (is_impossible & (targets > 0)).any(axis=0)] = False
        offsets = np.where(is_impossible, -1e5, 0.0)  # far below all scores that a temperature gives
        logs = np.where(is_impossible, 0.0, logs)
    return np.ascontiguousarray(logs), np.ascontiguousarray(targets), offsets
