"""The submission: a sample file says which columns and rows it has, and in which order.

Owns reading the sample, comparing it with the input table before anything runs, its own values, which may stand
in for rows that were not computed, and writing the final file.  Does not know where the probabilities come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ensemble.common.errors import DataError, MergeError
from ensemble.common.text import did_you_mean, listed, plural, quoted
from ensemble.data.csv_file import csv_cells, csv_lines, header_line, read_header, read_text_csv
from ensemble.data.input_file import missing_column

_SHOWN = 5
_SHOWN_COLUMNS = 20
_WRITE_ROWS = 65_536
# Ids in one hash table; the number of tables is limited, because each is asked for all ids.
_LOOKED_UP_ROWS = 1 << 18
_MOST_LOOK_UPS = 8
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"


@dataclass(frozen=True)
class Sample:
    """A sample submission.

    Attributes:
        id_column: which of its columns holds the ids.
        columns: every column, in file order.
        ids: shape (rows,), strings, in file order.
    """

    id_column: str
    columns: tuple[str, ...]
    ids: pa.ChunkedArray


def read_sample(path: Path, id_column: str) -> Sample:
    """Reads a sample submission (CSV or TSV); its example values are for :func:`sample_values`.

    Raises:
        DataError: the file cannot be read, or has no column ``id_column``.
    """
    columns = read_header(path)
    if id_column not in columns:
        raise DataError(missing_column(path, "id column", id_column, columns))
    return Sample(id_column, columns, read_text_csv(path, [id_column]).column(0))


def check_sample(
    sample: Sample,
    path: Path,
    ids: pa.ChunkedArray,
    id_column: str,
    labels: Sequence[str],
    columns_map: Mapping[str, str],
    limited: bool,
) -> tuple[str, ...]:
    """Compares the sample with the table before anything runs.

    Args:
        sample: the sample submission.
        path: its file, for the messages.
        ids: shape (rows,), the table's ids, unique.
        id_column: the name of the id column in the sample.
        labels: the labels that are predicted.
        columns_map: sample column to label, for columns that are not named like a label.
        limited: the table is only the first rows of the real one, so it may lack ids of the sample.

    Returns:
        the problems found; empty if a submission can be written.
    """
    problems = []
    if id_column not in sample.columns:
        problems.append(missing_column(path, "id column", id_column, sample.columns))
    others = [name for name in sample.columns if name != id_column]
    if not others:
        problems.append(
            f"{path}: has no column besides {quoted(id_column)}; a column per label to submit is needed"
        )
    strangers = [name for name in others if columns_map.get(name, name) not in labels]
    for name in strangers[:_SHOWN_COLUMNS]:
        label = columns_map.get(name, name)
        hint = did_you_mean(label, labels)
        mapped = (
            f"column {quoted(name)} is mapped to {quoted(label)}, which"
            if name in columns_map
            else f"column {quoted(name)}"
        )
        problems.append(f"{path}: {mapped} is not a label{hint}; map it to one of {listed(labels)}")
    if len(strangers) > _SHOWN_COLUMNS:
        count = plural(len(strangers) - _SHOWN_COLUMNS, "more column")
        problems.append(f"{path}: {count} that are not labels; is this the sample submission?")
    problems += [
        f"{path}: has no column {quoted(name)}{did_you_mean(name, others)}, though it is mapped to a label"
        for name in columns_map
        if name not in others
    ]
    given = [columns_map.get(name, name) for name in others]
    problems += [
        f"{path}: label {quoted(label)} would stand in {given.count(label)} columns; fix submission.columns"
        for label in dict.fromkeys(given)
        if label in labels and given.count(label) > 1
    ]
    if not is_in_order(sample, ids):  # else they are the table's, which are unique: no need to look them up
        problems += _id_problems(sample.ids, path, ids, limited)
    return tuple(problems)


def _id_problems(sample_ids: pa.ChunkedArray, path: Path, ids: pa.ChunkedArray, limited: bool) -> list[str]:
    problems: list[str] = []
    theirs, ours = _alike(sample_ids, ids)
    if _holds_each_once(theirs, ours):  # looked up once instead of three times
        return problems
    if pc.count_distinct(theirs, mode="all").as_py() < len(theirs):
        counted = pc.value_counts(theirs)
        twice = counted.field("values").filter(pc.greater(counted.field("counts"), 1))
        problems.append(f"{path}: {plural(len(twice), 'id')} more than once: {_first(twice)}")
    unknown = theirs.filter(pc.invert(pc.is_in(theirs, value_set=ours)))
    if len(unknown) and not limited:
        problems.append(f"{path}: {plural(len(unknown), 'id')} not in the input table: {_first(unknown)}")
    missing = ours.filter(pc.invert(pc.is_in(ours, value_set=theirs)))
    if len(missing):
        problems.append(_lacks(path, missing))
    return problems


def write_submission(
    sample: Sample,
    predictions_ids: pa.ChunkedArray,
    probabilities: npt.NDArray[np.float64],
    labels: Sequence[str],
    columns_map: Mapping[str, str],
    path: Path,
    limited: bool,
) -> None:
    """Writes exactly the sample's columns, in the sample's order of columns and rows.

    Args:
        sample: the sample submission, checked by :func:`check_sample`.
        predictions_ids: shape (rows,), strings, unique, in any order.
        probabilities: shape (rows, labels).
        labels: what the columns of ``probabilities`` stand for.
        columns_map: sample column to label, for columns that are not named like a label.
        path: written in place; making that atomic is the caller's business.
        limited: leave out the sample's rows that have no prediction; otherwise they are an error.

    Raises:
        MergeError: a row of the sample has no prediction, or a prediction no row.
        ValueError: the shapes do not agree.
        OSError: the file cannot be written.
    """
    if probabilities.shape != (len(predictions_ids), len(labels)):
        shape = (len(predictions_ids), len(labels))
        raise ValueError(f"probabilities of shape {probabilities.shape}, expected {shape}")
    theirs, ours = _alike(sample.ids, predictions_ids)
    places = _places(theirs, ours)
    has_place = places >= 0
    if not has_place.all() and not limited:
        lacking = theirs.filter(pa.array(~has_place))
        raise MergeError(f"no prediction for {plural(len(lacking), 'id')} of the sample: {_first(lacking)}")
    if has_place.sum() != len(ours):
        spare = ours.filter(pc.invert(pc.is_in(ours, value_set=theirs)))
        raise MergeError(f"{plural(len(spare), 'predicted id')} not in the sample: {_first(spare)}")
    submitted = theirs if has_place.all() else theirs.filter(pa.array(has_place))
    rows = places[has_place]
    indices = submitted_columns(sample, labels, columns_map)
    with path.open("wb") as stream:
        stream.write(header_line(sample.columns))
        for start in range(0, len(rows), _WRITE_ROWS):  # so that no other copy of the table is made
            taken = rows[start : start + _WRITE_ROWS]
            ids = pa.concat_arrays(submitted.slice(start, len(taken)).chunks)
            columns = (ids if index is None else pa.array(probabilities[taken, index]) for index in indices)
            stream.write(csv_lines([csv_cells(column) for column in columns]))


def is_in_order(sample: Sample, ids: pa.ChunkedArray) -> bool:
    """Whether the sample has the rows of ``ids``, shape (rows,), in the same order."""
    theirs, ours = _alike(sample.ids, ids)
    return bool(theirs.equals(ours))


def submitted_columns(
    sample: Sample, labels: Sequence[str], columns_map: Mapping[str, str]
) -> tuple[int | None, ...]:
    """What stands in each of the sample's columns: the index of a label, or None for the ids."""
    return tuple(
        None if name == sample.id_column else labels.index(columns_map.get(name, name))
        for name in sample.columns
    )


def check_sample_values(
    sample: Sample, path: Path, labels: Sequence[str], columns_map: Mapping[str, str]
) -> tuple[str, ...]:
    """Whether the sample's own values can stand in for predictions; reads them.

    Args: as for :func:`sample_values`.

    Returns:
        the problems found: a column with cells that are no finite number; empty if there are none.

    Raises:
        DataError: the file cannot be read.
    """
    return _read_values(sample, path, labels, columns_map)[2]


def sample_values(
    sample: Sample,
    path: Path,
    ids: pa.ChunkedArray,
    labels: Sequence[str],
    columns_map: Mapping[str, str],
) -> npt.NDArray[np.float64]:
    """The values that stand in the sample, read from its file.

    A label without a column gets what the others leave of 1, in equal parts with the other labels that have none,
    and never less than 0: with a single column for one of two classes, the other class has the rest.  None of
    it is in the submission, which has no such column either.

    Args:
        sample: the sample submission, checked by :func:`check_sample`.
        path: its file.
        ids: shape (rows,), strings, unique; the rows wanted, which may be some of the sample's only.
        labels: what the columns of the result stand for.
        columns_map: sample column to label, for columns that are not named like a label.

    Returns:
        float64 [rows, labels], in the order of ``ids``.

    Raises:
        DataError: the file cannot be read, a cell is no finite number, or an id is not there (any more).
    """
    found_ids, by_label, problems = _read_values(sample, path, labels, columns_map)
    if problems:
        raise DataError(problems)
    theirs, ours = _alike(found_ids, ids)
    places = pc.index_in(ours, value_set=theirs)
    if places.null_count:
        raise DataError(_lacks(path, ours.filter(pc.is_null(places))))
    rows = places.to_numpy()
    values = np.zeros((len(rows), len(labels)), order="F")
    for index, label in enumerate(labels):
        if label in by_label:
            values[:, index] = by_label[label][rows]
    rest = [index for index, label in enumerate(labels) if label not in by_label]
    if rest:
        values[:, rest] = (np.maximum(1.0 - values.sum(axis=1), 0.0) / len(rest))[:, None]
    return values


def _read_values(
    sample: Sample, path: Path, labels: Sequence[str], columns_map: Mapping[str, str]
) -> tuple[pa.ChunkedArray, dict[str, npt.NDArray[np.float64]], tuple[str, ...]]:
    """Ids, numbers by label, and the problems of cells that are none; all in file order."""
    names = {name: columns_map.get(name, name) for name in sample.columns if name != sample.id_column}
    wanted = {name: label for name, label in names.items() if label in labels}
    # The ids once more: their order is the file's as it is now.
    table = read_text_csv(path, [sample.id_column, *wanted])
    by_label, problems = {}, []
    for name, label in wanted.items():
        numbers = _numbers(table.column(name))
        by_label[label] = numbers
        bad = np.flatnonzero(~np.isfinite(numbers))
        if len(bad):
            cell = table.column(name)[int(bad[0])].as_py()
            problems.append(
                f"{path}: column {quoted(name)}: {plural(len(bad), 'cell')} without a finite number, the first in "
                f"row {bad[0] + 1:,}: {quoted(cell)}; fix the file, or choose fill: uniform or prior"
            )
    return table.column(0), by_label, tuple(problems)


def _numbers(cells: pa.ChunkedArray) -> npt.NDArray[np.float64]:
    """Text as numbers, NaN where it is none; shape (rows,)."""
    trimmed = pc.utf8_trim_whitespace(cells)
    try:
        numbers = pc.cast(trimmed, pa.float64())
    except pa.ArrowInvalid:  # one cell is enough for that
        is_number = pc.match_substring_regex(trimmed, _NUMBER)
        numbers = pc.cast(pc.if_else(is_number, trimmed, "nan"), pa.float64())
    return np.asarray(numbers.to_numpy(), dtype=np.float64)


def _alike(left: pa.ChunkedArray, right: pa.ChunkedArray) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """Both columns as large strings, unless both are plain ones already."""
    if left.type == right.type == pa.string():
        return left, right
    return pc.cast(left, pa.large_string()), pc.cast(right, pa.large_string())


def _holds_each_once(theirs: pa.ChunkedArray, ours: pa.ChunkedArray) -> bool:
    """Whether both hold the same ids, each once; ``ours`` are unique."""
    places = _places(theirs, ours)
    if len(theirs) != len(ours) or (places < 0).any():
        return False
    is_there = np.zeros(len(ours), dtype=np.bool_)
    is_there[places] = True
    return bool(is_there.all())


def _places(theirs: pa.ChunkedArray, ours: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Where each of their ids stands among ours, -1 where it does not; shape (rows of theirs,).

    Looked up in parts of ours, because the hash table of two million ids alone takes 130 MB.
    """
    places = np.full(len(theirs), -1, dtype=np.int64)
    step = max(_LOOKED_UP_ROWS, -(-len(ours) // _MOST_LOOK_UPS))
    for start in range(0, len(ours), step):
        found = pc.fill_null(pc.index_in(theirs, value_set=ours.slice(start, step)), -1).to_numpy()
        is_there = found >= 0
        places[is_there] = found[is_there] + start
    return places


def _lacks(path: Path, ids: pa.ChunkedArray) -> str:
    return f"{path}: lacks {plural(len(ids), 'id')} of the input table: {_first(ids)}"


def _first(ids: pa.Array | pa.ChunkedArray) -> str:
    return ", ".join(map(quoted, ids[:_SHOWN].to_pylist())) + (", ..." if len(ids) > _SHOWN else "")
