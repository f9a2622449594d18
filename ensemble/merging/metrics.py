"""How good probabilities are where the truth is known, and how much better than others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ensemble.common.protocol import Activation
from ensemble.merging.calibration import EPSILON

# Standard errors that count as chance, and the share of the prior's log loss that counts as no gain at all.
_ERRORS = 2.0
_NO_GAIN = 0.01
# Nats; the frequencies of rows that are all alike may seem to be so far from the truth.
_ROUNDING = 1e-9
# Standard errors to either side that hold 95 % of a normal distribution.
_NORMAL_95 = 1.959963984540054
# Blocks whose losses are kept: a member may have read one more than the merge has taken.
_KEPT_BLOCKS = 2


@dataclass(frozen=True)
class Score:
    """How good a member, or the ensemble, is in ``rows``; None for what says nothing of such values.

    ``log_loss`` is in nats per row, of labels that do not exclude each other the mean over labels.  ``accuracy`` is
    a share of the rows, of exclusive labels alone; ``rmse`` is of regression, of several labels the mean of theirs.
    ``prior_log_loss`` is that of always predicting the labels' frequencies in these rows, ``margin`` two standard
    errors of the difference, both in nats per row.  ``no_better_than_prior``: even with the margin in favour the
    log loss is not below the prior's by 1 % of what the truth itself is below it (all of it, where the truth holds
    no probabilities but 0 and 1).  Chance alone brings a good member there on hardly any table.
    """

    log_loss: float | None
    accuracy: float | None
    rows: int
    prior_log_loss: float | None
    margin: float | None
    no_better_than_prior: bool
    rmse: float | None = None


@dataclass(frozen=True)
class Gain:
    """How much better the ensemble is than its best member on the same rows.

    In nats of log loss per row, or where ``of`` is "squared error" in the mean of that over rows and labels.
    ``best_member`` is the one of least loss of those that have all ``rows``; ``gain`` is below 0 where it is
    better than the ensemble.  ``low`` to ``high`` is the normal 95 % interval of the mean of the rows' differences:
    what other rows of the same kind would give for these two.  It does not know that the best member was chosen on
    the same rows, where luck makes the best of several look better than it is: a gain is rather more than it seems,
    a loss rather less.  Nor does it know of weights that were fitted on these rows and look better than they are.
    Both ends are None where there is one row.
    """

    best_member: str
    gain: float
    low: float | None
    high: float | None
    rows: int
    of: Literal["log loss", "squared error"] = "log loss"


class PairedLosses:
    """The differences between others' losses and one's, row by row, added up block by block.

    Args:
        others: how many; what is kept of each is two numbers.
    """

    def __init__(self, others: int) -> None:
        self.rows = 0
        self._sums = np.zeros(others)
        self._squares = np.zeros(others)

    def add(self, losses: npt.NDArray[np.float64], others: Sequence[npt.NDArray[np.float64] | None]) -> None:
        """A block's losses, float64 [rows]; None of one that lacks rows, of which nothing can be said any more."""
        self.rows += len(losses)
        for number, theirs in enumerate(others):
            if theirs is None:
                self._sums[number] = np.nan
                continue
            differences = theirs - losses
            self._sums[number] += differences.sum()
            self._squares[number] += np.square(
                differences, out=differences
            ).sum()  # @ would start BLAS's threads

    def best(self, numbers: Iterable[int]) -> int:
        """Which of these others has the least loss; the first of equal ones."""
        return min(numbers, key=lambda number: self._sums[number])

    def gain(self, number: int, name: str, activation: Activation = "softmax") -> Gain:
        """Over one of the others; ``activation`` is that of the losses."""
        rows, mean = self.rows, float(self._sums[number]) / self.rows
        of: Literal["log loss", "squared error"] = "squared error" if activation == "none" else "log loss"
        if rows < 2:
            return Gain(name, mean, None, None, rows, of)
        variance = max(0.0, float(self._squares[number]) - rows * mean**2) / (rows - 1)
        margin = _NORMAL_95 * math.sqrt(variance / rows)
        return Gain(name, mean, mean - margin, mean + margin, rows, of)


class Scoring:
    """Log loss and accuracy of probabilities, or errors of regression, added up block by block.

    The log loss is the mean of -ln p(true label), with p clipped to the smallest step of float64 as
    scikit-learn's ``log_loss`` does, after rows are scaled to sum to 1.  Where the truth is probabilities itself,
    it is the cross-entropy, the mean of -sum(truth * ln p), and a row's true label is the likeliest; of equal
    ones, the first, as in predictions.  Of labels that do not exclude each other it is the mean over rows and
    labels of -truth * ln p - (1 - truth) * ln(1 - p).

    Args:
        truth: label numbers, int64 [rows], of exclusive labels; or float64 [rows, labels]: of these probabilities
            that sum to 1, of others probabilities, of regression any numbers.
        activation: what the values are; "none" is regression.
        has_loss: False for values that are no probabilities, whatever they are made of; then there is an accuracy
            at most.
    """

    def __init__(
        self,
        truth: npt.NDArray[np.int64] | npt.NDArray[np.float64],
        activation: Activation = "softmax",
        has_loss: bool = True,
    ) -> None:
        self._truth = truth
        self._activation = activation
        self._has_loss = has_loss
        self._hits = 0
        self._loss, self._squares = 0.0, 0.0
        self._of_labels = np.zeros(truth.shape[-1])  # squared errors
        self._least, self._prior = 0.0, np.zeros(0)  # the truth's own log loss; shares of the labels
        if activation != "none":
            counts = np.bincount(truth) if truth.ndim == 1 else truth.sum(axis=0)
            self._prior = counts / max(1, len(truth))
            self._least = (
                0.0
                if truth.ndim == 1
                else float(row_losses(truth, truth.astype(np.float64), activation).mean())
            )
        self._losses: dict[int, npt.NDArray[np.float64]] = {}  # by the block's first row, the latest blocks

    def add(self, start: int, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The rows from ``start`` on: float64 [rows, labels]; returns their losses, [rows], see ``row_losses``."""
        truth = self._truth[start : start + len(values)]
        losses = np.zeros(len(values))
        if self._has_loss:
            losses = row_losses(truth, values, self._activation)
            self._loss += float(losses.sum())
            if self._activation == "none":
                self._of_labels += np.square(values - truth).sum(axis=0)
            else:
                self._squares += float(np.square(losses - self._prior_losses(truth)).sum())
        if self._activation == "softmax":
            labels = truth if truth.ndim == 1 else truth.argmax(axis=1)
            self._hits += int((values.argmax(axis=1) == labels).sum())
        self._losses[start] = losses
        if len(self._losses) > _KEPT_BLOCKS:
            del self._losses[next(iter(self._losses))]
        return losses

    def losses(self, start: int) -> npt.NDArray[np.float64] | None:
        """Those of the block from ``start`` on, if it was added and is one of the latest two."""
        return self._losses.get(start)

    def score(self) -> Score | None:
        """Of all rows, once each was added; None where nothing can be said of such values."""
        rows = len(self._truth)
        accuracy = self._hits / rows if self._activation == "softmax" else None
        if not self._has_loss:
            return None if accuracy is None else Score(None, accuracy, rows, None, None, False)
        if self._activation == "none":
            rmse = float(np.sqrt(self._of_labels / rows).mean())
            return Score(None, None, rows, None, None, False, rmse)
        loss, prior = self._loss / rows, float(self._prior_losses(self._truth).mean())
        # Of the mean of the rows' differences, which share what is hard about a row.
        variance = max(0.0, self._squares / rows - (loss - prior) ** 2)
        margin = _ERRORS * math.sqrt(variance / max(1, rows - 1))
        gain = prior - self._least
        is_no_better = gain > _ROUNDING and rows > 1 and loss - margin > prior - gain * _NO_GAIN
        return Score(loss, accuracy, rows, prior, margin, is_no_better)

    def _prior_losses(
        self, truth: npt.NDArray[np.int64] | npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Those of always predicting the labels' frequencies, [rows]."""
        if self._activation == "sigmoid":
            return row_losses(truth, np.broadcast_to(self._prior, truth.shape), "sigmoid")
        prior = -np.log(np.where(self._prior > 0, self._prior, 1 / max(1, len(self._truth))))
        return np.asarray(prior[truth.astype(np.int64)] if truth.ndim == 1 else truth @ prior)


def row_losses(
    truth: npt.NDArray[np.int64] | npt.NDArray[np.float64],
    values: npt.NDArray[np.float64],
    activation: Activation = "softmax",
) -> npt.NDArray[np.float64]:
    """The log loss of each row in nats, [rows], as ``Scoring`` has it; in regression the mean of squared errors.

    Args:
        truth: of these rows, label numbers (exclusive labels), or how likely each label is, float64 [rows, labels];
            in regression the numbers themselves.
        values: float64 [rows, labels].
        activation: with "sigmoid" the mean over labels of -truth * ln p - (1 - truth) * ln(1 - p), p clipped to the
            smallest step of float64; with "none" the mean over labels of squared differences.
    """
    if activation == "none":
        return np.asarray(np.square(values - truth).mean(axis=1))
    if activation == "sigmoid":
        yes = np.clip(values, EPSILON, 1 - EPSILON)
        return np.asarray(-(truth * np.log(yes) + (1 - truth) * np.log1p(-yes)).mean(axis=1))
    sums = values.sum(axis=1)
    if truth.ndim == 1:
        chosen = values[np.arange(len(truth)), truth.astype(np.int64)]
        return np.asarray(-np.log(np.clip(chosen / sums, EPSILON, 1 - EPSILON)))
    shares = np.clip(values / sums[:, None], EPSILON, 1 - EPSILON)
    return np.asarray(-(truth * np.log(shares)).sum(axis=1))


@dataclass(frozen=True)
class Comparison:
    """The ensemble with a member and without it, on the rows that the member has.

    Log losses are in nats per row, of labels that do not exclude each other the mean over labels; there is no
    accuracy of those.  A ``difference`` is with the member less without it, so that less than 0 is a
    gain, and ``error`` its standard error.  Those ``over_all`` are over all rows of the table.
    """

    rows: int
    log_loss: float
    log_loss_without: float
    accuracy: float | None
    accuracy_without: float | None
    difference: float
    error: float
    difference_over_all: float
    error_over_all: float


class Comparing:
    """Adds up a ``Comparison`` of probabilities block by block; ``truth`` is as for ``Scoring``."""

    def __init__(
        self, truth: npt.NDArray[np.int64] | npt.NDArray[np.float64], activation: Activation = "softmax"
    ) -> None:
        self._truth = truth
        self._activation = activation
        self._sums = np.zeros(
            6
        )  # rows, losses with and without, squares of the differences, hits with and without

    def add(
        self,
        rows: npt.NDArray[np.int64],
        values: npt.NDArray[np.float64],
        without: npt.NDArray[np.float64],
    ) -> None:
        """These rows of the table, with what the ensemble gives to them, float64 [n, labels] each."""
        truth = self._truth[rows]
        labels = truth if truth.ndim == 1 else truth.argmax(axis=1)
        both = [row_losses(truth, one, self._activation) for one in (values, without)]
        hits = [(one.argmax(axis=1) == labels).sum() for one in (values, without)]
        squares = np.square(both[0] - both[1]).sum()
        self._sums += [len(rows), both[0].sum(), both[1].sum(), squares, *hits]

    def result(self) -> Comparison | None:
        """None where there were no rows."""
        rows, loss, without, squares, hits, hits_without = self._sums.tolist()
        if not rows:
            return None
        is_exclusive = self._activation == "softmax"
        errors, total = [], loss - without
        for count in (rows, len(self._truth)):
            variance = max(0.0, squares / count - (total / count) ** 2)
            errors.append(math.sqrt(variance / max(1, count - 1)))
        return Comparison(
            int(rows),
            loss / rows,
            without / rows,
            hits / rows if is_exclusive else None,
            hits_without / rows if is_exclusive else None,
            total / rows,
            errors[0],
            total / len(self._truth),
            errors[1],
        )
