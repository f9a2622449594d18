"""Read which labels are possible in each row: from a column of the table, or from another table by a key."""

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

# Whether each label is possible in each row, bool [rows, labels].
Flags: TypeAlias = npt.NDArray[np.bool_]
_SHOWN = 3


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
    needs = TableNeeds(
        id_column=key,
        label_column=None,
        labels=(),
        columns=(column,),
        json_columns=(column,),
        text_columns=(),
        limit=None,
    )
    others = read_table(path, needs)
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
