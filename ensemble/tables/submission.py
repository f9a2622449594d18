"""The submission: a sample file says which columns and rows it has, and in which order.

Owns reading the sample, comparing it with the input table before anything runs, and writing the final file.
Does not know where the probabilities come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ensemble.errors import DataError, MergeError
from ensemble.tables.csvfile import read_header, read_text_csv, write_csv
from ensemble.tables.inputfile import did_you_mean, listed, missing_column, plural

_SHOWN = 5


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
    """Reads a sample submission (CSV or TSV); its example values are not looked at.

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
            f"{path}: has no column besides {id_column!r}; a column per label to submit is needed"
        )
    for name in others:
        label = columns_map.get(name, name)
        if label in labels:
            continue
        hint = did_you_mean(label, labels)
        mapped = (
            f"column {name!r} is mapped to {label!r}, which" if name in columns_map else f"column {name!r}"
        )
        problems.append(f"{path}: {mapped} is not a label{hint}; map it to one of {listed(labels)}")
    problems += [
        f"{path}: has no column {name!r}{did_you_mean(name, others)}, though it is mapped to a label"
        for name in columns_map
        if name not in others
    ]
    given = [columns_map.get(name, name) for name in others]
    problems += [
        f"{path}: label {label!r} would stand in {given.count(label)} columns; mend submission.columns"
        for label in dict.fromkeys(given)
        if label in labels and given.count(label) > 1
    ]
    return (*problems, *_id_problems(sample.ids, path, ids, limited))


def _id_problems(sample_ids: pa.ChunkedArray, path: Path, ids: pa.ChunkedArray, limited: bool) -> list[str]:
    problems = []
    theirs, ours = _alike(sample_ids, ids)
    if pc.count_distinct(theirs, mode="all").as_py() < len(theirs):
        counted = pc.value_counts(theirs)
        twice = counted.field("values").filter(pc.greater(counted.field("counts"), 1))
        problems.append(f"{path}: {plural(len(twice), 'id')} more than once: {_first(twice)}")
    unknown = theirs.filter(pc.invert(pc.is_in(theirs, value_set=ours)))
    if len(unknown) and not limited:
        problems.append(f"{path}: {plural(len(unknown), 'id')} not in the input table: {_first(unknown)}")
    missing = ours.filter(pc.invert(pc.is_in(ours, value_set=theirs)))
    if len(missing):
        problems.append(f"{path}: lacks {plural(len(missing), 'id')} of the input table: {_first(missing)}")
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
    places = pc.index_in(theirs, value_set=ours)
    if places.null_count and not limited:
        lacking = theirs.filter(pc.is_null(places))
        raise MergeError(f"no prediction for {plural(len(lacking), 'id')} of the sample: {_first(lacking)}")
    if len(places) - places.null_count != len(ours):
        spare = ours.filter(pc.invert(pc.is_in(ours, value_set=theirs)))
        raise MergeError(f"{plural(len(spare), 'predicted id')} not in the sample: {_first(spare)}")
    rows = places.drop_null().to_numpy()
    columns = []
    for name in sample.columns:
        if name == sample.id_column:
            columns.append(theirs.filter(pc.is_valid(places)))
        else:
            columns.append(pa.array(probabilities[rows, labels.index(columns_map.get(name, name))]))
    write_csv(path, sample.columns, columns)


def _alike(left: pa.ChunkedArray, right: pa.ChunkedArray) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """Both columns as large strings, unless both are plain ones already."""
    if left.type == right.type == pa.string():
        return left, right
    return pc.cast(left, pa.large_string()), pc.cast(right, pa.large_string())


def _first(ids: pa.Array | pa.ChunkedArray) -> str:
    return ", ".join(map(repr, ids[:_SHOWN].to_pylist())) + (", ..." if len(ids) > _SHOWN else "")
