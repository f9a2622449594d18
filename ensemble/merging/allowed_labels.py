"""Rule out the labels that are impossible in a row, as ``data.allowed_labels`` says.

Members' predictions stay as they are on disk. Each member's values are changed after its calibration and before the
merge, and the merged values once more, because some methods give more than 0 where every member gives 0; they are
changed again after ``rules``, so that no rule makes a label possible. The possible labels keep their proportions;
where all of them have 0, they get equal parts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ensemble.common.errors import DataError
from ensemble.common.text import did_you_mean, listed, plural, quoted
from ensemble.data.ids import places_among
from ensemble.data.json_cells import parse_json_cell
from ensemble.data.table import InputTable, TableNeeds, read_table, row_text
from ensemble.merging.methods.base import Values
from ensemble.merging.scoring import Truth

# Whether each label is possible in each row, bool [rows, labels].
Flags: TypeAlias = npt.NDArray[np.bool_]
_SHOWN = 3


class AllowedLabels:
    """Hold which labels are possible in each row, at least one: ``flags``, bool [rows, labels], from ``source``."""

    def __init__(self, flags: Flags, source: str) -> None:
        self.flags = flags
        self.source = source

    @property
    def text(self) -> str:
        """Return in words how many labels are possible in a row, and where they stand."""
        counts = self.flags.sum(axis=1)
        span = " to ".join(f"{count:,}" for count in sorted({counts.min(), counts.max()}))
        return f"{span} of {plural(self.flags.shape[1], 'label')} possible in a row, by {self.source}"

    def taken(self, rows: npt.NDArray[np.int64]) -> AllowedLabels:
        """Return the same for these rows of the table, in this order."""
        return AllowedLabels(self.flags[rows], self.source)

    def impossible_truths(self, truth: Truth) -> npt.NDArray[np.int64]:
        """Return the rows for which a true label is none of the possible ones; for ``truth`` see ``Scoring``."""
        if truth.ndim == 1:
            return np.flatnonzero(~self.flags[np.arange(len(truth)), truth.astype(np.int64)])
        return np.flatnonzero(((truth > 0) & ~self.flags).any(axis=1))

    def apply(self, start: int, values: Values, exclusive: bool, only: Flags | None = None) -> None:
        """Set impossible labels of a block that begins at ``start``, float64 [rows, labels], to 0, in place.

        Rows of ``exclusive`` labels are scaled to a sum of 1. A row stays as it is, bit for bit, if all of its
        labels are possible, if it is NaN, or if ``only``, bool [rows], is given and lacks it.
        """
        flags = self.flags[start : start + len(values)]
        is_changed = ~flags.all(axis=1) & ~np.isnan(values).any(axis=1)
        if only is not None:
            is_changed &= only
        rows = np.flatnonzero(is_changed)
        possible = flags[rows]
        kept = np.where(possible, values[rows], 0.0)
        if exclusive:
            sums = kept.sum(axis=1, keepdims=True)
            with np.errstate(invalid="ignore"):  # 0 / 0
                kept = np.where(sums > 0, kept / sums, possible / possible.sum(axis=1, keepdims=True))
        values[rows] = kept


def allowed_in_column(path: Path, table: InputTable, column: str, labels: Sequence[str]) -> Flags:
    """Return the labels that the JSON lists in a column of the table name; ``path`` is the table's.

    Raises:
        DataError: a cell is no list, is empty, or names something that is no label.
    """
    number_of = {label: number for number, label in enumerate(labels)}
    flags = np.zeros((table.rows, len(labels)), dtype=np.bool_)
    wrong: list[str] = []
    for row, cells in enumerate(table.python_rows([column])):
        names = parse_json_cell(cells[column])
        problem = "" if names else "names no label; every row needs one"
        if not isinstance(names, list):
            problem, names = "is no JSON list of labels", []
        for name in names:
            # A whole number is a label as well, as in the config.
            label = name if isinstance(name, str) else json.dumps(name, ensure_ascii=False)
            if label in number_of:
                flags[row, number_of[label]] = True
            else:
                problem = f"{quoted(label)} is no label{did_you_mean(label, labels)}"
        if problem:
            wrong.append(f"{row_text(row, table.ids)}: {problem}")
    _refuse(f"{path}: column {quoted(column)}", wrong, f"the labels are {listed(labels)}")
    return flags


def allowed_by_key(
    table: InputTable, key: str, path: Path, column: str, labels: Sequence[str], table_path: Path
) -> Flags:
    """Return the labels that another table, the one at ``path``, names for each row's cell in the column ``key``.

    Raises:
        DataError: the other table cannot be read, has a key twice or lacks one, or see ``allowed_in_column``.
    """
    others = read_table(path, TableNeeds(id_column=key, columns=(column,), json_columns=(column,)))
    flags, keys = allowed_in_column(path, others, column, labels), table.texts(key)
    places = places_among(keys, others.ids)
    missing = [
        f"{row_text(row, table.ids)}: {quoted(keys[row].as_py() or '')}"
        for row in np.flatnonzero(places < 0).tolist()
    ]
    _refuse(f"{table_path}: column {quoted(key)}", missing, f"{path} has no such keys; add them there")
    return np.asarray(flags[places])


def _refuse(where: str, rows: Sequence[str], advice: str) -> None:
    """Raise DataError about the rows, a text each, if there are any; show the first of them."""
    if rows:
        more = f" (and {len(rows) - _SHOWN:,} more)" if len(rows) > _SHOWN else ""
        raise DataError(f"{where}: {plural(len(rows), 'row')}: {'; '.join(rows[:_SHOWN])}{more}; {advice}")
