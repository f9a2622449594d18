"""Check a member's values before they are merged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.errors import MergeError
from ensemble.common.protocol import SUM_TOLERANCE, Activation
from ensemble.common.text import plural, quoted

# What may be wrong with rows, the worst first.
_NOT_FINITE = "no finite number"
_OUTSIDE = "values below 0 or above 1"
_OTHER_SUMS = "values that do not sum to 1"
_SHOWN = 4


class RowCheck:
    """Check a member's rows block by block; ``refuse`` raises an error if some are wrong.

    Args:
        source: what the message says has the rows.
        may_lack_rows: whether a row may be NaN, because the member did not reach it.
        advice: what to do about wrong rows.
        columns: names of the values of a row, for messages; none: they are not shown.

    Attributes:
        reached: how many of the rows so far hold numbers.
    """

    def __init__(
        self,
        source: str,
        activation: Activation,
        ids: pa.ChunkedArray,
        may_lack_rows: bool,
        advice: str = "remove the file and run the same command again, which computes it again",
        columns: Sequence[str] = (),
    ) -> None:
        self._advice = advice
        self._source = source
        self.activation = activation
        self._ids = ids
        self._may_lack_rows = may_lack_rows
        self._columns = columns
        # Count, first row and its cells as text, by what is wrong.
        self._bad: dict[str, tuple[int, int, str]] = {}
        self.reached = 0

    @property
    def has_found_any(self) -> bool:
        return bool(self._bad)

    def look(self, start: int, values: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        """Check the rows from ``start`` on, float64 [rows, labels]; return which are present, [rows]."""
        columns = values.T
        with np.errstate(invalid="ignore"):  # infinite values
            sums = np.add.reduce(columns)
        is_odd = ~np.isfinite(sums)
        is_present: npt.NDArray[np.bool_] = np.ones(len(values), dtype=np.bool_)
        if is_odd.any():
            is_present = np.asarray(~np.isnan(values).all(axis=1))
        self.reached += int(is_present.sum())
        wrong = {_NOT_FINITE: is_odd & is_present if self._may_lack_rows else is_odd}
        if self.activation != "none":  # comparing NaN is False
            wrong[_OUTSIDE] = (np.minimum.reduce(columns) < 0) | (np.maximum.reduce(columns) > 1)
        if self.activation == "softmax":
            wrong[_OTHER_SUMS] = np.abs(sums - 1) > SUM_TOLERANCE
        for problem, is_wrong in wrong.items():
            rows = np.flatnonzero(is_wrong)
            if len(rows):
                row = int(rows[0])
                nothing = (0, start + row, self._cells(problem, values[row]))
                count, first, cells = self._bad.get(problem, nothing)
                self._bad[problem] = count + len(rows), first, cells
        return is_present

    def _cells(self, problem: str, row: npt.NDArray[np.float64]) -> str:
        """Return the cells of a row [labels] that are to blame, with their columns' names."""
        is_wrong = {
            _NOT_FINITE: ~np.isfinite(row),
            _OUTSIDE: (row < 0) | (row > 1),
            _OTHER_SUMS: np.ones(len(row), np.bool_),
        }[problem]
        pairs = zip(self._columns, row, is_wrong, strict=bool(self._columns))
        cells = [f"{quoted(column)} is {value:g}" for column, value, wrong in pairs if wrong]
        return f" ({', '.join(cells[:_SHOWN])}{', ...' if len(cells) > _SHOWN else ''})" if cells else ""

    def refuse(self) -> None:
        """Raise MergeError if values are not finite, below 0 or above 1, or do not sum to 1; name the first row."""
        for problem in (_NOT_FINITE, _OUTSIDE, _OTHER_SUMS):
            if problem in self._bad:
                count, first, cells = self._bad[problem]
                where = f"{plural(count, 'row')} with {problem}, the first is id {self._ids[first]}{cells}"
                raise MergeError(f"{self._source}: {where}; {self._advice}")
