"""Take over rows from other work: a trial, an older version of the table, a member with another name.

Settings, weights and tokenizer must be the same.  Rows of another table are compared by digests of what the member
reads; ids count only for members that read them.  The rows become a shard like any other.  Functions that write
raise ``WriteError`` if the disk is full.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv

from ensemble.common.errors import ConfigError, OutputInUse
from ensemble.common.files import atomic_path, read_json, without_links
from ensemble.common.shards import bad_rows_in, gather_shards, rows_with_reasons, shard_name, shards_in
from ensemble.data.digests import DIGEST_BYTES, RowDigests, find_rows
from ensemble.data.ids import places_among
from ensemble.data.predictions_csv import demand_as_written, is_as_written, read_predictions
from ensemble.pipeline.fingerprint import Fingerprint
from ensemble.pipeline.run_dir import RunDir, holder

# A shard is text in memory while it is written and read.
_ROWS_PER_SHARD = 1 << 17


@dataclass(frozen=True)
class EarlierWork:
    """Hold the work of a member on some rows of a table, as its file of row digests describes it.

    ``path`` is that file: ``<member>.rows`` beside predictions, or ``rows.bin`` in a folder of shards. ``location``
    is the path of the values: within the run directory, or absolute if that is another run's.
    """

    path: Path
    fingerprint: Fingerprint
    rows: int
    sha256: str
    location: str = ""

    @classmethod
    def at(cls, path: Path) -> EarlierWork | None:
        """Read a file of row digests; None if there is none, it is of another scheme, or it is cut short."""
        try:
            with path.open("rb") as file:
                line = file.readline()
            document = json.loads(line)
            fingerprint = Fingerprint.from_dict(document["fingerprint"])
            rows, sha256 = int(document["rows"]), str(document["sha256"])
            is_whole = path.stat().st_size == len(line) + rows * DIGEST_BYTES
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        if fingerprint is None or not is_whole:
            return None
        return cls(path=path, fingerprint=fingerprint, rows=rows, sha256=sha256)

    @classmethod
    def all_in(cls, rundir: RunDir, is_other_run: bool = False) -> Iterator[EarlierWork]:
        """Yield all work in a run directory, complete predictions first, then shards."""
        for pattern in ("predictions/*.rows", "work/*/rows.bin"):
            for path in sorted(rundir.root.glob(pattern)):
                work = cls.at(path)
                if work is not None:
                    values_path = work.values_path
                    location = values_path if is_other_run else values_path.relative_to(rundir.root)
                    yield replace(work, location=str(location))

    @property
    def values_path(self) -> Path:
        """Return the path of the predictions, or of the folder of shards."""
        return self.path.with_suffix(".csv") if self.path.suffix == ".rows" else self.path.parent

    def values(self, labels: int) -> tuple[npt.NDArray[np.float64], dict[int, str]]:
        """Return the rows' values, [rows, labels], NaN where there are none, and bad rows; none if they changed."""
        path = self.values_path
        if path == self.path.parent:
            return gather_shards(shards_in(path, self.rows), self.rows, labels), bad_rows_in(path, self.rows)
        manifest = read_json(self.path.with_suffix(".json"))
        if Fingerprint.from_dict(manifest.get("fingerprint")) == self.fingerprint and is_as_written(path):
            values = read_predictions(path).values
            if values.shape == (self.rows, labels):
                bad_rows = rows_with_reasons(manifest.get("bad_rows"), self.rows)
                values[list(bad_rows)] = np.nan
                return values, bad_rows
        return np.full((self.rows, labels), np.nan), {}

    def positions_of(
        self, fingerprint: Fingerprint, digests: RowDigests, ids: pa.ChunkedArray
    ) -> npt.NDArray[np.int64]:
        """Return the position of each row in this work, -1 if it lacks the row or is other work, [rows].

        Rows of the same table are found by their ids: a row that ``when`` left out may have the text of another.
        """
        if self.fingerprint == fingerprint:
            if self.rows == len(digests):
                return np.arange(len(digests))
            return self._positions_of_ids(ids)
        content = b""
        if replace(self.fingerprint, rows=fingerprint.rows) == fingerprint:
            content = self.path.read_bytes().partition(b"\n")[2]
        if hashlib.sha256(content).hexdigest() != self.sha256:
            content = b""
        return find_rows(digests, np.frombuffer(content, "<u8").reshape(-1, 2))

    def _positions_of_ids(self, ids: pa.ChunkedArray) -> npt.NDArray[np.int64]:
        path = self.values_path
        if path == self.path.parent or not is_as_written(path):
            return np.full(len(ids), -1)
        return places_among(ids, read_predictions(path).ids)


def demand_reusable(folder: Path, output_dir: Path) -> None:
    """Raise an error if ``folder`` is the run's own, no run's or in use, or if its predictions were changed."""
    rundir = RunDir(folder)
    if without_links(folder) == without_links(output_dir):
        raise ConfigError(
            f"--reuse: {folder} is the output_dir of this run, whose rows it keeps anyway; leave the option out, "
            "or set another output_dir"
        )
    if not rundir.run_json.is_file():
        raise ConfigError(f"--reuse: {folder} has no run.json; name the output_dir of another run")
    process = holder(rundir)
    if process is not None:
        raise OutputInUse(f"--reuse: {folder} is in use by {process}; wait for its run to end")
    for path in sorted(rundir.predictions_dir.glob("*.csv")):
        demand_as_written(path)


def write_row_file(path: Path, fingerprint: Fingerprint, digests: RowDigests) -> None:
    """Write the file that says which rows a member's work is of."""
    content = np.ascontiguousarray(digests, "<u8").tobytes()
    sha256 = hashlib.sha256(content).hexdigest()
    line = json.dumps({"fingerprint": fingerprint.to_dict(), "rows": len(digests), "sha256": sha256})
    with atomic_path(path) as temporary:
        temporary.write_bytes(f"{line}\n".encode() + content)


def write_shards(folder: Path, rows: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> None:
    """Write rows, numbers of table rows, with their values, [rows, labels], as shards."""
    names = ["row", *(f"p{label}" for label in range(values.shape[1]))]
    for start in range(0, len(rows), _ROWS_PER_SHARD):
        stop = min(start + _ROWS_PER_SHARD, len(rows))
        columns = [pa.array(rows[start:stop]), *(pa.array(column) for column in values[start:stop].T)]
        sink = io.BytesIO()
        pa_csv.write_csv(pa.table(columns, names=names), sink)
        with atomic_path(folder / shard_name(start, stop, sink.getvalue())) as temporary:
            temporary.write_bytes(sink.getvalue())


def write_bits(path: Path, flags: npt.NDArray[np.bool_] | None) -> None:
    """Write a bit for each flag, each row of flags from a new byte on; None: remove the file."""
    if flags is None:
        path.unlink(missing_ok=True)
        return
    with atomic_path(path) as temporary:
        temporary.write_bytes(np.packbits(flags, axis=-1).tobytes())


def read_bits(path: Path, count: int, rows: int) -> npt.NDArray[np.bool_] | None:
    """Return flags, bool [count, rows]; None if there are none, or others."""
    bits = np.frombuffer(path.read_bytes() if path.exists() else b"", np.uint8)
    if not len(bits) or len(bits) != count * -(-rows // 8):
        return None
    return np.unpackbits(bits.reshape(count, -1), axis=1, count=rows).astype(np.bool_)
