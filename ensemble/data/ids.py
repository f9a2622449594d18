"""Find duplicate ids, and the positions of ids in a table."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ensemble.common.errors import DataError
from ensemble.common.text import plural, quoted
from ensemble.data.input_file import first_ids

ID_COLUMN: Final = "id"


def repeated_ids(ids: pa.ChunkedArray) -> pa.Array:
    """Return the ids, or null, that come more than once, each once."""
    if pc.count_distinct(ids, mode="all").as_py() == len(ids):
        return pa.array([], ids.type)
    counted = pc.value_counts(ids)
    return counted.field("values").filter(pc.greater(counted.field("counts"), 1))


def refuse_repeated_ids(path: Path, ids: pa.ChunkedArray, id_column: str = ID_COLUMN) -> None:
    """Raise DataError if ids of a file come more than once."""
    repeated = repeated_ids(ids)
    if len(repeated):
        raise DataError(_repeated_text(path, repeated, id_column))


def places_among(ids: pa.ChunkedArray, table_ids: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Return where each id stands among those of a table, which are unique, -1 where it does not; [ids]."""
    if ids.type != table_ids.type:
        ids, table_ids = pc.cast(ids, pa.large_string()), pc.cast(table_ids, pa.large_string())
    if ids.equals(table_ids):
        return np.arange(len(ids))
    places = pc.fill_null(pc.index_in(ids, value_set=table_ids), -1)
    return np.asarray(places.to_numpy(), dtype=np.int64)


def match_ids(
    path: Path,
    ids: pa.ChunkedArray,
    table_ids: pa.ChunkedArray,
    *,
    may_lack: bool = False,
    may_have_others: bool = False,
    id_column: str = ID_COLUMN,
    table: str = "the table",
    advice: str = "",
) -> npt.NDArray[np.int64]:
    """Return where each row of a file stands in a table, -1 where it does not; [rows of the file].

    Args:
        table_ids: of the table that messages call ``table``, unique.
        may_lack: the file may lack rows of the table; with ``may_have_others`` it may have further rows.
        advice: what to do about ids that only one of them has.

    Raises:
        DataError: ids that are repeated, missing, or not in the table.
    """
    places = places_among(ids, table_ids)
    counts = np.bincount(places[places >= 0], minlength=len(table_ids))
    missing = table_ids.filter(pa.array(counts == 0))
    others = ids.filter(pa.array(places < 0))
    remedy = f"; {advice}" if advice else ""
    problems = []
    if (counts > 1).any():
        problems.append(_repeated_text(path, table_ids.filter(pa.array(counts > 1)), id_column))
    if len(missing) and not may_lack:
        problem = f"{path}: {plural(len(missing), 'id')} of {table} missing ({first_ids(missing)})"
        if len(missing) == len(table_ids) and len(others):  # 1.0 for 1, say
            problem += f", as its ids are others ({first_ids(others)})"
            advice = "write them in the same way, or name the column of the ids"
            raise DataError([*problems, f"{problem}; {advice}"])
        problems.append(problem + remedy)
    if len(others) and not may_have_others:
        problems.append(f"{path}: {plural(len(others), 'id')} not in {table} ({first_ids(others)}){remedy}")
    if problems:
        raise DataError(problems)
    return places


def all_ids(files: list[pa.ChunkedArray]) -> pa.ChunkedArray:
    """Return each id of some files once, in the order in which they come."""
    ids = files[0]
    for other in files[1:]:
        new = other.filter(pa.array(places_among(other, ids) < 0))
        if len(new):
            ids = pa.chunked_array([*ids.chunks, *pc.cast(new, ids.type).chunks], ids.type)
    return ids


def _repeated_text(path: Path, repeated: pa.Array | pa.ChunkedArray, id_column: str) -> str:
    """Return the sentence about ids that come more than once, in a column that may have been guessed."""
    another = "" if id_column == ID_COLUMN else f" (in column {quoted(id_column)}; --id-column names another)"
    count = plural(len(repeated), "id")
    return f"{path}: {count} more than once ({first_ids(repeated)}); keep one row for each id{another}"
