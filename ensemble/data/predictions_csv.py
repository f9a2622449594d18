"""Predictions in files -> arrays whose rows mean the table's ids.

All that a run writes are CSVs in the table's order, and read from top to bottom, in little memory.  A file in
another order or format, or of ids that take whole blocks or lines, is joined as a whole, by its ids.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from ensemble.common.errors import DataError, MergeError, WriteError
from ensemble.common.files import read_json, unreadable
from ensemble.common.shards import file_sha256
from ensemble.common.text import plural, quoted
from ensemble.data.csv_file import text_as_numbers
from ensemble.data.formats import FORMATS, is_plain_csv, prediction_batches
from ensemble.data.input_file import first_ids, is_text, shown_type

ID_COLUMN: Final = "id"
# pyarrow reads up to 32 blocks of a file ahead; all files together have this much in a round.
_ROUND_BYTES = 1 << 22
_BLOCK_BYTES = 1 << 18
_ITEM_BYTES = 8
# Held while a whole file is in memory, so that files are joined one after the other.
_JOINING = threading.Lock()
_Values = npt.NDArray[np.float64]


def file_stem(path: Path) -> str:
    """A file's name without the ending of an input format, with or without .gz, in any case."""
    endings = "|".join(re.escape(ending) for known in FORMATS for ending in known.extensions)
    return re.sub(rf"(?i)({endings})?(\.gz)?$", "", path.name) or path.name


def is_as_written(predictions: Path) -> bool | None:
    """Whether a member's predictions have the SHA-256 of the manifest beside them; None: there is no manifest."""
    manifest = read_json(predictions.with_suffix(".json"))
    if not isinstance(manifest.get("fingerprint"), dict):
        return None
    try:
        return file_sha256(predictions) == manifest.get("sha256")
    except OSError:
        return False


def demand_as_written(predictions: Path) -> None:
    """Raises DataError where predictions were changed after their run wrote them; other files may be anything.

    Those that cannot be read raise it, too.
    """
    if is_as_written(predictions) is False:
        try:
            predictions.open("rb").close()
        except OSError as error:
            raise DataError(unreadable(predictions, error)) from error
        raise DataError(
            f"{predictions}: is not the file that its run wrote, as {predictions.stem}.json beside it has another "
            "SHA-256; run the config again, which computes it anew, or copy the file to another folder to use it "
            "as it is"
        )


def guessed_id_column(names: Sequence[str], others: Collection[str] = (), usual: str = ID_COLUMN) -> str:
    """The column of the ids where nobody names it: the usual one, else the first that is none of the others."""
    return usual if usual in names else next((name for name in names if name not in others), names[0])


def repeated_ids(ids: pa.ChunkedArray) -> pa.Array:
    """The ids that are there more than once, each once."""
    if pc.count_distinct(ids, mode="all").as_py() == len(ids):
        return pa.array([], ids.type)
    counted = pc.value_counts(ids)
    return counted.field("values").filter(pc.greater(counted.field("counts"), 1))


def repeated_text(path: Path, repeated: pa.Array | pa.ChunkedArray, column: str = ID_COLUMN) -> str:
    """The sentence about ids that are there more than once, in a column that may have been guessed."""
    another = "" if column == ID_COLUMN else f" (in column {quoted(column)}; --id-column names another)"
    count = plural(len(repeated), "id")
    return f"{path}: {count} more than once ({first_ids(repeated)}); keep one row for each id{another}"


def read_by_id(
    path: Path,
    id_column: str,
    labels: Sequence[str],
    ids: pa.ChunkedArray,
    may_have_others: bool,
    may_lack: bool = False,
    table: str = "the table",
    advice: str | None = None,
) -> tuple[_Values, int]:
    """Reads predictions whose rows stand in any order, in blocks: what stays of them are ids and numbers.

    Args:
        labels: the columns to read, in this order, wherever they stand in the file.
        ids: text, [rows], unique; each of them must be there once.
        may_have_others: rows of other ids are left out and counted.
        may_lack: ids that are not there, and rows without a number, become rows of NaN.
        table: what ``ids`` are those of, for a message; ``advice``: what to do of ids that only one of them has.

    Returns:
        float64 [rows, labels], each column in one piece, and the number of rows left out.

    Raises:
        DataError: missing, repeated or additional ids; also what ``read_numbers`` raises.
    """
    found, read = read_numbers(path, id_column, labels, may_lack)
    found = found.cast(ids.type)
    place = pc.index_in(found, value_set=ids)  # of each row of the file in the table
    is_known, rows_of_ids = place.is_valid(), place.drop_null().to_numpy()
    counts = np.bincount(rows_of_ids, minlength=len(ids))
    repeated, missing = ids.filter(pa.array(counts > 1)), ids.filter(pa.array(counts == 0))
    problems = []
    if len(missing) and not may_lack:
        count = plural(len(missing), "id")
        needed = advice or "a row is needed for each of them"
        own = ""
        if len(missing) == len(ids) and len(found):  # 1.0 for 1, say
            needed = "write them in the same way, or name the column of the ids"
            own = f", as its ids are others ({first_ids(found)})"
        problems.append(f"{count} of {table} missing ({first_ids(missing)}){own}; {needed}")
    if place.null_count and not may_have_others:
        others = found.filter(pc.invert(is_known))
        remedy = f"; {advice}" if advice else ""
        problems.append(f"{plural(len(others), 'id')} not in {table} ({first_ids(others)}){remedy}")
    problems = [f"{path}: {problem}" for problem in problems]
    if len(repeated):
        problems.insert(0, repeated_text(path, repeated))
    if problems:
        raise DataError(problems)
    values = np.full((len(ids), len(labels)), np.nan, order="F")
    values[rows_of_ids] = read[is_known.to_numpy()]
    return values, place.null_count


def read_numbers(
    path: Path, id_column: str, labels: Sequence[str], may_lack: bool = False
) -> tuple[pa.ChunkedArray, _Values]:
    """Read predictions as they stand, in any format, in blocks.

    Args:
        may_lack: a row whose cells are all empty becomes a row of NaN.

    Returns:
        the ids as text, [rows], and the columns ``labels`` in this order, float64 [rows, labels].

    Raises:
        DataError: a cell that is no number; also what ``prediction_batches`` raises.
    """
    chunks, blocks, rows = [], [], 0
    for batch in prediction_batches(path, id_column, labels):
        chunks.append(batch.column(0))
        blocks.append(np.empty((len(batch), len(labels))))
        may_be_empty = _without_cells(batch) if may_lack else np.zeros(len(batch), np.bool_)
        for index, label in enumerate(labels):
            cells = batch.column(1 + index)
            if (numbers := _numbers(cells)) is None:
                what = f"column {quoted(label)} holds {shown_type(cells.type)} values"
                raise DataError(f"{path}: {what}; write it as numbers")
            blocks[-1][:, index], is_no_number = numbers
            is_wrong = is_no_number & ~may_be_empty
            if is_wrong.any():
                bad = int(is_wrong.argmax())
                cell = cells[bad].as_py()
                what = f"{'nothing' if cell is None else quoted(str(cell))} in column {quoted(label)} is no number"
                raise DataError(f"{path}: row {rows + bad + 1:,}: {what}; write a number in every row")
        rows += len(batch)
    return pa.chunked_array(chunks), np.concatenate(blocks)


def _without_cells(batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    """Which rows are empty in all columns but the first, that of the ids."""
    empty = np.ones(len(batch), np.bool_)
    for cells in batch.columns[1:]:
        is_empty = pc.equal(pc.fill_null(cells, ""), "") if is_text(cells.type) else cells.is_null()
        empty &= is_empty.to_numpy(zero_copy_only=False)
    return empty


def _numbers(cells: pa.Array) -> tuple[_Values, npt.NDArray[np.bool_]] | None:
    """As ``text_as_numbers``, of a column of any type; None where it can hold no numbers."""
    if is_text(cells.type):
        return text_as_numbers(pc.fill_null(cells, "") if cells.null_count else cells)
    kinds = pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_null
    if not any(is_kind(cells.type) for is_kind in kinds):
        return None
    is_null = cells.is_null().to_numpy(zero_copy_only=False)
    return np.asarray(pc.cast(cells, pa.float64(), safe=False).to_numpy(zero_copy_only=False)), is_null


class PredictionsReader:
    """Reads a file of predictions from its first row to its last, in the order of the table's ids.

    Args:
        labels: the columns to read, in this order, wherever they stand in the file.
        ids: text, [rows], unique; the file must hold each of them once and no other.
        folder: where the rows of a file in another order may be kept meanwhile.
        files: how many are read at the same time.
        may_lack: ids may be missing, and rows without a number, which become NaN; then the others stand in the
            table's order.
        table, advice: see ``read_by_id``.
    """

    def __init__(
        self,
        path: Path,
        id_column: str,
        labels: Sequence[str],
        ids: pa.ChunkedArray,
        folder: Path,
        files: int = 1,
        may_lack: bool = False,
        table: str = "the table",
        advice: str | None = None,
    ) -> None:
        self._path = path
        self._id_column = id_column
        self._labels = list(labels)
        self._ids = ids
        self._folder = folder
        self._may_lack = may_lack
        self._words = table, advice
        self._block_bytes = min(_BLOCK_BYTES, _ROUND_BYTES // files)
        self._start = 0
        self._batches: pa_csv.CSVStreamingReader | None = None
        self._batch: pa.RecordBatch | None = None
        self._joined: SpilledRows | None = None

    def read(self, values: _Values) -> None:
        """Read the next rows; the last of them end the look at the whole file.

        Args:
            values: takes them, whatever numbers stand there; float64 [rows, labels], each column in one piece.

        Raises:
            MergeError: missing, repeated or additional ids, missing columns, cells that are not numbers.
        """
        try:
            if self._may_lack:
                if not self._read_what_is_there(values):
                    self._refuse()
            elif self._joined is None and not self._read_in_order(values):
                self.close()
                with _JOINING:
                    whole, _ = read_by_id(
                        self._path, self._id_column, self._labels, self._ids, False, False, *self._words
                    )
                    self._joined = SpilledRows(whole, self._folder, self._start)
            if self._joined is not None:
                self._joined.read(values)
        except DataError as error:
            raise MergeError(error.problems) from error
        except OSError as error:
            raise MergeError(f"{self._path}: cannot be read ({error})") from error
        self._start += len(values)

    def rewind(self) -> None:
        """Begin again with the first row."""
        self._start = 0
        if self._joined is not None:
            self._joined.rewind()
        else:
            self.close()
            self._batches = None

    def close(self) -> None:
        """Let go of the file, and of what was kept of it."""
        self._batch = None
        for opened in filter(None, (self._batches, self._joined)):
            opened.close()

    def _read_in_order(self, values: _Values) -> bool:
        """False where the file is not what this tool writes; then a join says what it is."""
        rows, filled = len(values), 0
        if not is_plain_csv(self._path):
            return False
        try:
            while filled < rows:
                batch = self._next_batch()
                if batch is None:
                    return False
                count = min(len(batch), rows - filled)
                taken, self._batch = batch.slice(0, count), batch.slice(count)
                if not pa.chunked_array([taken.column(0)]).equals(
                    self._ids.slice(self._start + filled, count)
                ):
                    return False
                for index in range(len(self._labels)):
                    values[filled : filled + count, index] = taken.column(1 + index).to_numpy()
                filled += count
            return self._start + rows < len(self._ids) or self._next_batch() is None
        except (pa.ArrowInvalid, pa.ArrowKeyError, UnicodeDecodeError):
            return False

    def _read_what_is_there(self, values: _Values) -> bool:
        """False where it is no CSV that holds some of the table's rows, in its order, and nothing else."""
        values[:] = np.nan
        rows, reached = self._ids.slice(self._start, len(values)), -1
        try:
            while (batch := self._next_batch()) is not None:
                found = pc.index_in(batch.column(0), value_set=rows)
                # What comes behind the first id that is not of these rows is left for the next ones.
                is_other = pc.is_null(found).to_numpy(zero_copy_only=False)
                count = int(is_other.argmax()) if is_other.any() else len(batch)
                places = found.slice(0, count).to_numpy()
                if not (np.diff(places, prepend=reached) > 0).all():
                    return False
                taken = [column.slice(0, count) for column in batch.columns[1:]]
                empty = [cells.is_null() for cells in taken]
                if not all(is_null.equals(empty[0]) for is_null in empty):
                    return False
                for index, cells in enumerate(taken):
                    values[places, index] = cells.to_numpy(zero_copy_only=False)
                self._batch = batch.slice(count)
                if count < len(batch):
                    break
                reached = int(places[-1])
            return self._start + len(values) < len(self._ids) or self._next_batch() is None
        except (pa.ArrowInvalid, pa.ArrowKeyError, UnicodeDecodeError):
            return False

    def _refuse(self) -> NoReturn:
        """Say why a file cannot be read as some of the table's rows."""
        read_by_id(self._path, self._id_column, self._labels, self._ids, False, True, *self._words)
        raise MergeError(
            f"{self._path}: its rows do not stand in the table's order; remove the file and run the same command "
            "again, which writes it again"
        )

    def _next_batch(self) -> pa.RecordBatch | None:
        """The rows that are left of a batch, or a new one; None at the end of the file."""
        if self._batches is None:
            types = {self._id_column: self._ids.type} | dict.fromkeys(self._labels, pa.float64())
            self._batches = pa_csv.open_csv(
                self._path,
                # Several files are read at once; threads of their own would not make them faster.
                pa_csv.ReadOptions(block_size=self._block_bytes, use_threads=False),
                # An empty cell is no number, but in a file that may lack rows.  Nothing is looked up for each cell.
                convert_options=pa_csv.ConvertOptions(
                    column_types=types,
                    include_columns=list(types),
                    strings_can_be_null=False,
                    null_values=[""] if self._may_lack else [],
                ),
            )
        while self._batch is None or not len(self._batch):
            try:
                self._batch = self._batches.read_next_batch()
            except StopIteration:
                return None
        return self._batch


class SpilledRows:
    """Values in a file without a name, which is gone when nobody has it open, however the process ends.

    Args:
        values: float64 [rows, labels]; not needed any more afterwards.
        folder: where there is room for them.
        start: the row that is read first.

    Raises:
        WriteError: the disk is full or the like.
    """

    def __init__(self, values: _Values, folder: Path, start: int = 0) -> None:
        self._rows = len(values)
        self._start = start
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
            for column in values.T:
                self._file.write(np.ascontiguousarray(column).data)
            self._file.flush()
        except OSError as error:
            raise WriteError(
                f"cannot write to {folder} ({error.strerror or error}); make room there, or change output_dir"
            ) from error

    def close(self) -> None:
        self._file.close()

    def read(self, values: _Values) -> None:
        """Read the next rows into float64 [rows, labels], each column in one piece.

        Raises:
            OSError: the file was cut short.
        """
        for label, column in enumerate(values.T):
            place = (label * self._rows + self._start) * _ITEM_BYTES
            if os.preadv(self._file.fileno(), [column.data], place) != column.nbytes:
                raise OSError("a temporary file has been cut short")
        self._start += len(values)

    def rewind(self) -> None:
        """Begin again with the first row."""
        self._start = 0
