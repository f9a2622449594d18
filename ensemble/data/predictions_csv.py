"""Members' CSVs -> arrays whose rows mean the same ids, a block of rows at a time.

All that a run writes stands in the table's order and is read from top to bottom, in little memory.  A file in
another order is joined as a whole, by its ids.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from ensemble.common.errors import MergeError
from ensemble.common.text import plural
from ensemble.data.disk_rows import SpilledRows

# pyarrow reads up to 32 blocks of a file ahead; all files together have this much in a round.
_ROUND_BYTES = 1 << 22
_BLOCK_BYTES = 1 << 18
_MAX_BLOCK_BYTES = (1 << 31) - 1


class WantedRows:
    """The ids that every file must hold, each once, and what is to be known of them to read a file.

    Attributes:
        ids: text, [rows], unique.
        longest_bytes: of the longest id.
        has_lines: some id holds a line feed or a carriage return.
        joining: held while a whole file is in memory, so that they are joined one after the other.
    """

    def __init__(self, ids: pa.ChunkedArray) -> None:
        self.ids = ids
        self.joining = threading.Lock()
        self.longest_bytes = int(pc.max(pc.binary_length(ids)).as_py() or 0)
        # To search the bytes takes a twentieth of the time; they may be those of more rows than these.
        texts = (bytes(chunk.buffers()[2] or b"") for chunk in ids.chunks)
        self.has_lines = any(b"\n" in text or b"\r" in text for text in texts) and any(
            pc.any(pc.match_substring(ids, mark)).as_py() for mark in "\r\n"
        )


class PredictionsReader:
    """Reads a predictions CSV from its first row to its last.

    Args:
        labels: the columns to read, in this order, wherever they stand in the file.
        folder: where the rows of a file in another order may be kept meanwhile.
        files: how many are read at the same time.
    """

    def __init__(
        self,
        path: Path,
        id_column: str,
        labels: Sequence[str],
        wanted: WantedRows,
        folder: Path,
        files: int = 1,
    ) -> None:
        self._path = path
        self._id_column = id_column
        self._labels = list(labels)
        self._wanted = wanted
        self._folder = folder
        self._block_bytes = max(min(_BLOCK_BYTES, _ROUND_BYTES // files), 4 * wanted.longest_bytes)
        self._start = 0
        self._batches: pa_csv.CSVStreamingReader | None = None
        self._batch: pa.RecordBatch | None = None
        self._joined: SpilledRows | None = None

    def read(self, values: npt.NDArray[np.float64]) -> None:
        """Read the next rows, in the order of the wanted ids; the last of them end the look at the whole file.

        Args:
            values: takes them, whatever numbers stand there; float64 [rows, labels], each column in one piece.

        Raises:
            MergeError: missing, repeated or additional ids, other columns, cells that are not numbers.
        """
        try:
            if self._joined is None and (self._wanted.has_lines or not self._read_in_order(values)):
                self.close()
                with self._wanted.joining:
                    self._joined = SpilledRows(self._read_and_join(), self._folder, self._start)
            if self._joined is not None:
                self._joined.read(values)
        except (pa.ArrowInvalid, OSError) as error:
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

    def _read_in_order(self, values: npt.NDArray[np.float64]) -> bool:
        """False where the file is not what this tool writes; then a join says what it is."""
        rows, filled = len(values), 0
        try:
            if self._batches is None:
                # An empty cell is no number here, and nothing is looked up for each cell.
                self._batches = self._open(self._wanted.ids.type, False, self._block_bytes, null_values=[])
            while filled < rows:
                batch = self._next_batch()
                if batch is None:
                    return False
                count = min(len(batch), rows - filled)
                taken, self._batch = batch.slice(0, count), batch.slice(count)
                ids = pa.chunked_array([taken.column(self._id_column)])
                if not ids.equals(self._wanted.ids.slice(self._start + filled, count)):
                    return False
                for index, label in enumerate(self._labels):
                    values[filled : filled + count, index] = taken.column(label).to_numpy()
                filled += count
            if self._start + rows == len(self._wanted.ids) and self._next_batch() is not None:
                return False
        except pa.ArrowInvalid:
            return False
        return True

    def _next_batch(self) -> pa.RecordBatch | None:
        """The rows that are left of a batch, or a new one; None at the end of the file."""
        assert self._batches is not None
        while self._batch is None or not len(self._batch):
            try:
                self._batch = self._batches.read_next_batch()
            except StopIteration:
                return None
        return self._batch

    def _read_and_join(self) -> npt.NDArray[np.float64]:
        # One block for all, where ids need it: pyarrow refuses a cell that is longer than a block, and loses the
        # second half of a \r\n that two blocks share, within quotes too.
        block_bytes = _BLOCK_BYTES
        if self._wanted.has_lines or self._wanted.longest_bytes >= _BLOCK_BYTES // 4:
            block_bytes = min(max(self._path.stat().st_size + 1, _BLOCK_BYTES), _MAX_BLOCK_BYTES)
        with self._open(pa.large_string(), True, block_bytes) as reader:
            table = reader.read_all()
        order = _order(self._path, table.column(self._id_column), self._wanted.ids.cast(pa.large_string()))
        values = np.empty((len(order), len(self._labels)), order="F")
        for index, label in enumerate(self._labels):
            values[:, index] = table.column(label).to_numpy()[order]
        return values

    def _open(
        self, id_type: pa.DataType, newlines_in_values: bool, block_bytes: int, **convert: list[str]
    ) -> pa_csv.CSVStreamingReader:
        types = {self._id_column: id_type} | dict.fromkeys(self._labels, pa.float64())
        reader = pa_csv.open_csv(
            self._path,
            # Several files are read at once; threads of their own would not make them faster.
            read_options=pa_csv.ReadOptions(block_size=block_bytes, use_threads=False),
            parse_options=pa_csv.ParseOptions(newlines_in_values=newlines_in_values),
            convert_options=pa_csv.ConvertOptions(column_types=types, strings_can_be_null=False, **convert),
        )
        if sorted(reader.schema.names) != sorted(types):
            found, expected = ", ".join(reader.schema.names), ", ".join(types)
            raise MergeError(f"{self._path}: its columns are {found}, expected {expected}")
        return reader


def _order(path: Path, found: pa.ChunkedArray, wanted: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Where each wanted id stands among the found ones.

    Raises:
        MergeError: the ids are not the same, each once.
    """
    place = pc.index_in(wanted, value_set=found.combine_chunks())
    if not place.null_count and len(found) == len(wanted):  # each of them, so none twice and no other
        return np.asarray(place.to_numpy(), dtype=np.int64)
    problems = []
    if pc.count_distinct(found).as_py() != len(found):
        counts = pc.value_counts(found.combine_chunks())
        twice = [pair["values"].as_py() for pair in counts if pair["counts"].as_py() > 1]
        problems.append(f"{plural(len(twice), 'id')} more than once ({_first(twice)})")
    missing = wanted.filter(pc.is_null(place))
    if len(missing):
        problems.append(f"{plural(len(missing), 'id')} missing ({_first(missing[:3].to_pylist())})")
    extra = found.filter(pc.is_null(pc.index_in(found, value_set=wanted.combine_chunks())))
    if len(extra):
        problems.append(f"{plural(len(extra), 'id')} not in the table ({_first(extra[:3].to_pylist())})")
    raise MergeError(f"{path}: {'; '.join(problems)}")


def _first(ids: Sequence[str]) -> str:
    return ", ".join(repr(text) for text in ids[:3]) + (", ..." if len(ids) > 3 else "")
