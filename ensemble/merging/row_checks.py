"""Whether a member's values are what they should be: the last look before they go into the mean."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.errors import MergeError
from ensemble.common.protocol import Activation
from ensemble.common.text import plural

# What the worker allows a row's sum to be off: probabilities are written in full.
_SUM_TOLERANCE = 1e-3


@dataclass
class _Bad:
    """Rows of one kind: how many, and the first."""

    count: int = 0
    first: int = 0

    def note(self, start: int, is_bad: npt.NDArray[np.bool_]) -> None:
        rows = np.flatnonzero(is_bad)
        if len(rows) and not self.count:
            self.first = start + int(rows[0])
        self.count += len(rows)


class RowCheck:
    """Looks at a member's rows block by block, and tells in the end what is wrong with all of them.

    Args:
        source: what is said to hold them.
        activation: "softmax" for probabilities that sum to 1, "sigmoid" for any from 0 to 1, "none" for any number.
        ids: of the rows, [rows].
        may_lack_rows: a row of NaN is one that the member did not reach.
        advice: what to do where something is wrong.

    Attributes:
        reached: rows that hold numbers, of those seen so far.
    """

    def __init__(
        self,
        source: str,
        activation: Activation,
        ids: pa.ChunkedArray,
        may_lack_rows: bool,
        advice: str = "remove the file and run the same command again, which computes it again",
    ) -> None:
        self._advice = advice
        self._source = source
        self._activation = activation
        self._ids = ids
        self._may_lack_rows = may_lack_rows
        self._not_finite, self._outside, self._other_sums = _Bad(), _Bad(), _Bad()
        self.reached = 0

    @property
    def has_found_any(self) -> bool:
        return bool(self._not_finite.count or self._outside.count or self._other_sums.count)

    def look(self, start: int, values: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        """Look at the rows from ``start`` on, float64 [rows, labels]; returns which of them are there, [rows]."""
        if self._is_all_good(values):
            self.reached += len(values)
            return np.ones(len(values), dtype=np.bool_)
        columns = list(values.T)
        odd = np.logical_or.reduce([~np.isfinite(column) for column in columns])
        missing = np.logical_and.reduce([np.isnan(column) for column in columns])
        self.reached += len(values) - int(missing.sum())
        self._not_finite.note(start, odd & ~missing if self._may_lack_rows else odd)
        if self._activation != "none":  # comparing NaN is False
            self._outside.note(start, np.logical_or.reduce([(one < 0) | (one > 1) for one in columns]))
        if self._activation == "softmax":
            with np.errstate(invalid="ignore"):  # infinite values
                self._other_sums.note(start, np.abs(_sums(values) - 1) > _SUM_TOLERANCE)
        is_present: npt.NDArray[np.bool_] = ~missing
        return is_present

    def refuse(self) -> None:
        """Say what was found.

        Raises:
            MergeError: values that are not finite, below 0 or above 1, or that do not sum to 1; the first is named.
        """
        if self._not_finite.count:
            what = "infinite values or NaN in part" if self._may_lack_rows else "no finite number"
            self._raise(self._not_finite, what)
        if self._outside.count:
            self._raise(self._outside, "values below 0 or above 1")
        if self._other_sums.count:
            self._raise(self._other_sums, "values that do not sum to 1")

    def _is_all_good(self, values: npt.NDArray[np.float64]) -> bool:
        """By a few passes over columns that lie in one piece; False where there is a closer look to take."""
        if self._activation == "none":
            return all(bool(np.isfinite(column).all()) for column in values.T)
        if not all(column.min() >= 0 and column.max() <= 1 for column in values.T):  # False for NaN
            return False
        if self._activation == "sigmoid":
            return True
        sums = _sums(values)
        return bool(sums.min() >= 1 - _SUM_TOLERANCE and sums.max() <= 1 + _SUM_TOLERANCE)

    def _raise(self, bad: _Bad, what: str) -> None:
        raise MergeError(
            f"{self._source}: {plural(bad.count, 'row')} with {what}, the first is id {self._ids[bad.first]}; "
            f"{self._advice}"
        )


def _sums(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    sums = values[:, 0].copy()
    for column in values.T[1:]:
        sums += column
    return sums
