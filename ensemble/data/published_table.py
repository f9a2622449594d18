"""The worker's view of the published table: any rows, in any order, straight from the memory-mapped file.

Imports nothing of the parent's ``table.py``; the file's layout is all that they share.  Does not know what
the rows are for.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa


class PublishedTable:
    """The rows of one published table.

    Attributes:
        rows: number of rows.
        columns: the names of the columns.

    Raises:
        OSError: the file cannot be opened.
        pyarrow.ArrowInvalid: it is not an Arrow IPC file.
    """

    def __init__(self, path: Path) -> None:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        # A mapped batch is a set of pointers: its pages are read when a row in them is.
        self._batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
        self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)
        self.columns: tuple[str, ...] = tuple(reader.schema.names)
        self._json_columns = json_columns(reader.schema)
        self.rows = int(reader.schema.metadata[b"ensemble.rows"])

    def take(self, indices: npt.NDArray[np.integer]) -> list[dict[str, object]]:
        """Rows ``indices`` (shape (n,), integers from 0 to ``rows`` - 1, repeats allowed), in that order.

        Returns:
            shape (n,): dicts of column to Python value.  JSON cells are parsed; nulls are None.

        Raises:
            IndexError: an index outside of the table.
        """
        wanted = np.asarray(indices, dtype=np.int64)
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= self.rows):
            raise IndexError(f"rows {wanted.min()} to {wanted.max()} of a table of {self.rows} rows")
        if not self.columns:
            return [{} for _ in wanted]
        taken: list[dict[str, object]] = [{}] * len(wanted)
        homes = np.searchsorted(self._ends, wanted, side="right")
        for home in np.unique(homes):
            places = np.flatnonzero(homes == home)
            batch = self._batches[home]
            local = wanted[places] - (self._ends[home] - batch.num_rows)
            for place, row in zip(places.tolist(), batch.take(pa.array(local)).to_pylist(), strict=True):
                for name in self._json_columns:
                    cell = row[name]
                    if isinstance(cell, str):
                        row[name] = json.loads(cell)
                taken[place] = row
        return taken


def json_columns(schema: pa.Schema) -> tuple[str, ...]:
    """The columns whose text the parent marked as JSON for a value that is not text."""
    return tuple(field.name for field in schema if (field.metadata or {}).get(b"ensemble") == b"json")
