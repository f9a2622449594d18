"""The worker's view of the published table: any rows, in any order, straight from the memory-mapped file.

Imports nothing of the parent's ``table.py``; the file's layout is all that they share.  Does not know what
the rows are for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa


class PublishedTable:
    """The rows of one published table, in one or more views.

    Row r is numbered r + v * ``rows`` in view v.

    Args:
        views: for each view the column whose cells stand in another one's place, by that one's name.

    Attributes:
        rows: number of rows, whatever the views.
        columns: the names of the columns.
        schema: of the columns.
        has_nulls: whether some row has no value there, by column.

    Raises:
        OSError: the file cannot be opened.
        pyarrow.ArrowInvalid: it is not an Arrow IPC file.
    """

    def __init__(self, path: Path, views: Sequence[Mapping[str, str]] = ()) -> None:
        self._views = views or ({},)
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        # A mapped batch is a set of pointers: its pages are read when a row in them is.
        self._batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
        self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)
        self._ids: list[pa.Array] = []
        fields = list(reader.schema)
        if fields and (fields[-1].metadata or {}).get(b"ensemble") == b"ids":
            places = list(range(len(fields) - 1))
            self._ids = [batch.column(len(places)) for batch in self._batches]
            self._batches = [batch.select(places) for batch in self._batches]
            fields.pop()
        self.schema = pa.schema(fields)
        self.columns: tuple[str, ...] = tuple(self.schema.names)
        self._json_columns = json_columns(self.schema)
        self.has_nulls = {
            name: any(batch.column(place).null_count for batch in self._batches)
            for place, name in enumerate(self.columns)
        }
        nulls = dict(self.has_nulls)
        for view in self._views:
            for name, shown in view.items():
                self.has_nulls[name] = self.has_nulls[name] or nulls[shown]
        self.rows = int(reader.schema.metadata[b"ensemble.rows"])

    def view_of(self, indices: npt.NDArray[np.integer]) -> int:
        """The number of the view that these rows are of; all are of one, as those of a chunk are."""
        return int(indices[0]) // self.rows if len(indices) else 0

    def take(self, indices: npt.NDArray[np.integer]) -> list[dict[str, object]]:
        """Rows ``indices`` (shape (n,), integers from 0 to views * ``rows`` - 1, repeats allowed), in that order.

        Returns:
            shape (n,): dicts of column to Python value.  JSON cells are parsed; nulls are None.

        Raises:
            IndexError: an index outside of the table.
        """
        views, wanted = self._checked(indices)
        if not self.columns:
            return [{} for _ in wanted]
        taken: list[dict[str, object]] = [{}] * len(wanted)
        for home, places, local in self._homes(wanted):
            batch = self._batches[home]
            for place, row in zip(places.tolist(), batch.take(pa.array(local)).to_pylist(), strict=True):
                for name in self._json_columns:
                    cell = row[name]
                    if isinstance(cell, str):
                        row[name] = json.loads(cell)
                if shown := self._views[views[place]]:
                    row = {name: row[shown.get(name, name)] for name in row}
                taken[place] = row
        return taken

    def ids(self, indices: npt.NDArray[np.integer]) -> list[str]:
        """The ids of these rows, of a table that was published with them; arguments and errors as for ``take``."""
        _, wanted = self._checked(indices)
        taken = [""] * len(wanted)
        for home, places, local in self._homes(wanted):
            found = self._ids[home].take(pa.array(local)).to_pylist()
            for place, one in zip(places.tolist(), found, strict=True):
                taken[place] = one
        return taken

    def _checked(
        self, indices: npt.NDArray[np.integer]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The view that each row is of, and its number in the table."""
        wanted = np.asarray(indices, dtype=np.int64)
        count = self.rows * len(self._views)
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= count):
            raise IndexError(f"rows {wanted.min()} to {wanted.max()} of a table of {count} rows")
        return np.divmod(wanted, max(1, self.rows))

    def _homes(
        self, wanted: npt.NDArray[np.int64]
    ) -> Iterator[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """For each batch that has some of the rows: its number, their places among them, their places in it."""
        homes = np.searchsorted(self._ends, wanted, side="right")
        for home in np.unique(homes).tolist():
            places = np.flatnonzero(homes == home)
            yield home, places, wanted[places] - (self._ends[home] - self._batches[home].num_rows)


def json_columns(schema: pa.Schema) -> tuple[str, ...]:
    """The columns whose text the parent marked as JSON for a value that is not text."""
    return tuple(field.name for field in schema if (field.metadata or {}).get(b"ensemble") == b"json")
