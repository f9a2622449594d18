"""Members' CSVs -> arrays whose rows mean the same ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from ensemble.errors import MergeError

_BLOCK_BYTES = 1 << 22
_LARGEST_BLOCK_BYTES = (1 << 31) - 1


def read_predictions(
    path: Path, id_column: str, labels: Sequence[str], ids: pa.ChunkedArray
) -> npt.NDArray[np.float64]:
    """Read a predictions CSV and put its rows into the order of ``ids``.

    Args:
        labels: the columns to read, in this order, wherever they stand in the file.
        ids: text, [rows]; the rows that must be there, each once.

    Returns:
        float64 [rows, labels].

    Raises:
        MergeError: missing, repeated or additional ids, other columns, values that are not finite.
    """
    types = {id_column: pa.large_string()} | {label: pa.float64() for label in labels}
    wanted = ids.cast(pa.large_string())
    try:
        block_bytes = _block_bytes(path, wanted)
        values = _read_in_order(path, types, labels, wanted, block_bytes)
        if values is None:
            values = _read_and_join(path, types, labels, wanted, block_bytes)
    except (pa.ArrowInvalid, OSError) as error:
        raise MergeError(f"{path}: cannot be read ({error})") from error
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(bad):
        raise MergeError(f"{path}: {len(bad)} rows hold no finite number, the first is id {ids[int(bad[0])]}")
    return values


def _block_bytes(path: Path, wanted: pa.ChunkedArray) -> int:
    """One block for the whole file where ids need it, which is rare.

    pyarrow refuses a cell that is longer than a block, and loses the second half of a ``\\r\\n`` that two blocks
    share, within quotes too.
    """
    longest = pc.max(pc.binary_length(wanted)).as_py() or 0
    if longest < _BLOCK_BYTES // 4 and not pc.any(pc.match_substring(wanted, "\r")).as_py():
        return _BLOCK_BYTES
    return min(max(path.stat().st_size + 1, _BLOCK_BYTES), _LARGEST_BLOCK_BYTES)


def _read_in_order(
    path: Path,
    types: Mapping[str, pa.DataType],
    labels: Sequence[str],
    wanted: pa.ChunkedArray,
    block_bytes: int,
) -> npt.NDArray[np.float64] | None:
    """The values of a file whose rows stand in the wanted order, block by block; None for any other file."""
    values = np.empty((len(wanted), len(labels)), order="F")
    start = 0
    with _open(path, types, block_bytes) as reader:
        if sorted(reader.schema.names) != sorted(types):
            found, expected = ", ".join(reader.schema.names), ", ".join(types)
            raise MergeError(f"{path}: its columns are {found}, expected {expected}")
        for batch in reader:
            stop = start + len(batch)
            (id_column, *_) = types
            if not pa.chunked_array([batch.column(id_column)]).equals(wanted.slice(start, len(batch))):
                return None
            for index, label in enumerate(labels):
                values[start:stop, index] = batch.column(label).to_numpy(zero_copy_only=False)
            start = stop
    return values if start == len(wanted) else None


def _read_and_join(
    path: Path,
    types: Mapping[str, pa.DataType],
    labels: Sequence[str],
    wanted: pa.ChunkedArray,
    block_bytes: int,
) -> npt.NDArray[np.float64]:
    (id_column, *_) = types
    with _open(path, types, block_bytes) as reader:
        table = reader.read_all()
    order = _order(path, table.column(id_column), wanted)
    return np.asfortranarray(np.column_stack([table.column(label).to_numpy()[order] for label in labels]))


def _open(path: Path, types: Mapping[str, pa.DataType], block_bytes: int) -> pa_csv.CSVStreamingReader:
    return pa_csv.open_csv(
        path,
        read_options=pa_csv.ReadOptions(block_size=block_bytes),
        parse_options=pa_csv.ParseOptions(newlines_in_values=True),
        convert_options=pa_csv.ConvertOptions(column_types=dict(types), strings_can_be_null=False),
    )


def _order(path: Path, found: pa.ChunkedArray, wanted: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Where each wanted id stands among the found ones."""
    problems = []
    if pc.count_distinct(found).as_py() != len(found):
        counts = pc.value_counts(found.combine_chunks())
        twice = [pair["values"].as_py() for pair in counts if pair["counts"].as_py() > 1]
        problems.append(f"{len(twice)} ids stand there more than once ({_first(twice)})")
    place = pc.index_in(wanted, value_set=found.combine_chunks())
    missing = wanted.filter(pc.is_null(place))
    if len(missing):
        problems.append(f"{len(missing)} ids are missing ({_first(missing[:3].to_pylist())})")
    extra = found.filter(pc.is_null(pc.index_in(found, value_set=wanted.combine_chunks())))
    if len(extra):
        problems.append(f"{len(extra)} ids are not in the table ({_first(extra[:3].to_pylist())})")
    if problems:
        raise MergeError(f"{path}: {'; '.join(problems)}")
    return np.asarray(place.to_numpy(), dtype=np.int64)


def _first(ids: Sequence[str]) -> str:
    return ", ".join(repr(text) for text in ids[:3]) + (", ..." if len(ids) > 3 else "")
