"""Read any rows of the published table, in any order, straight from the memory-mapped file.

Workers use this; it imports nothing of the parent's ``table.py``, with which it shares the file's layout alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.files import atomic_path
from ensemble.data.json_cells import python_rows


class PublishedTable:
    """Read the rows of a published table, as the jobs of a worker read them.

    Args:
        swaps: for each job, by column, the other column whose cells replace its cells.
        inputs_path: the file of ``write_inputs``, which is opened when rows are read.

    Attributes:
        inputs: the columns of that file, which every job reads behind those of the table.
        rows: number of rows of the table.
        has_nulls: whether some row has no value for some job, by column.
    """

    def __init__(
        self,
        path: Path,
        swaps: Sequence[Mapping[str, str]] = ({},),
        inputs_path: Path = Path(),
        inputs: Sequence[str] = (),
    ) -> None:
        self._swaps = swaps
        self._swap = swaps[0]
        self._inputs_path, self.inputs = inputs_path, tuple(inputs)
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        # A mapped batch is a set of pointers: its pages are read when their rows are.
        self._batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
        self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)
        self._ids: list[pa.Array] = []
        fields = list(reader.schema)
        if fields and (fields[-1].metadata or {}).get(b"ensemble") == b"ids":
            fields.pop()
            self._ids = [batch.column(len(fields)) for batch in self._batches]
            self._batches = [batch.select(list(range(len(fields)))) for batch in self._batches]
        names = [field.name for field in fields]
        self.schema = pa.schema([*fields, *(pa.field(name, pa.float64()) for name in self.inputs)])
        self.columns: tuple[str, ...] = tuple(self.schema.names)
        with_nulls = {name for name in names if any(batch[name].null_count for batch in self._batches)}
        self.has_nulls = {
            name: any(swap.get(name, name) in with_nulls for swap in ({}, *swaps)) for name in names
        }
        self.has_nulls |= dict.fromkeys(self.inputs, True)
        self.rows = int(reader.schema.metadata[b"ensemble.rows"])

    def use_job(self, job: int) -> None:
        """Return rows as this job reads them from now on."""
        self._swap = self._swaps[job]

    def take(self, indices: npt.NDArray[np.integer]) -> list[dict[str, object]]:
        """Return rows in the order of ``indices``: dicts of column to Python value, with JSON cells parsed.

        Indices are from 0 to ``rows`` - 1, repeats allowed, [n].
        """
        rows = self._checked(indices)
        if not self.columns:
            return [{} for _ in rows]
        taken: list[dict[str, object]] = [{}] * len(rows)
        for batch_number, positions, batch_rows in self._by_batch(rows):
            cells_of_rows = python_rows(self._batches[batch_number].take(pa.array(batch_rows)))
            for position, cells in zip(positions.tolist(), cells_of_rows, strict=True):
                if self._swap:
                    cells = {name: cells[self._swap.get(name, name)] for name in cells}
                taken[position] = cells
        if self.inputs:
            of_inputs = self._input_batch.take(pa.array(rows)).to_pylist()
            taken = [cells | of_row for cells, of_row in zip(taken, of_inputs, strict=True)]
        return taken

    def ids(self, indices: npt.NDArray[np.integer]) -> list[str]:
        """Return the ids of rows, if the table was published with ids; the argument is as for ``take``."""
        rows = self._checked(indices)
        taken = [""] * len(rows)
        for batch_number, positions, batch_rows in self._by_batch(rows):
            ids = self._ids[batch_number].take(pa.array(batch_rows)).to_pylist()
            for position, row_id in zip(positions.tolist(), ids, strict=True):
                taken[position] = row_id
        return taken

    def batches(self, indices: npt.NDArray[np.integer], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield columns of rows, whose numbers rise, as Arrow holds them, some rows at a time."""
        fields, all_rows = [self.schema.field(name) for name in columns], self._checked(indices)
        for batch, positions, rows in self._by_batch(all_rows):
            cells = [
                self._input_batch[name].take(pa.array(all_rows[positions]))
                if name in self.inputs
                else self._batches[batch][self._swap.get(name, name)].take(pa.array(rows))
                for name in columns
            ]
            yield pa.RecordBatch.from_arrays(cells, schema=pa.schema(fields))

    @cached_property
    def _input_batch(self) -> pa.RecordBatch:
        """Return the rows of the inputs' predictions."""
        return pa.ipc.open_file(pa.memory_map(str(self._inputs_path))).get_batch(0)

    def _checked(self, indices: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        rows = np.asarray(indices, dtype=np.int64)
        if len(rows) and (rows.min() < 0 or rows.max() >= self.rows):
            raise IndexError(f"rows {rows.min()} to {rows.max()} of a table of {self.rows} rows")
        return rows

    def _by_batch(
        self, rows: npt.NDArray[np.int64]
    ) -> Iterator[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Yield for each batch with some of the rows: its number, their positions in ``rows`` and in the batch."""
        batch_of_row = np.searchsorted(self._ends, rows, side="right")
        for batch in np.unique(batch_of_row).tolist():
            positions = np.flatnonzero(batch_of_row == batch)
            yield batch, positions, rows[positions] - (self._ends[batch] - self._batches[batch].num_rows)


def write_inputs(path: Path, columns: Sequence[str], values: npt.NDArray[np.float64]) -> None:
    """Write predictions, [rows, columns], for ``PublishedTable``; NaN becomes null."""
    batch = pa.record_batch([pa.array(column, from_pandas=True) for column in values.T], names=[*columns])
    with atomic_path(path) as temporary, pa.ipc.new_file(str(temporary), batch.schema) as writer:
        writer.write_batch(batch)
