"""Find what earlier runs have computed of a job, and keep what this run computes: shards, bad rows, predictions.

A file counts only if it can be verified: shards must match their names, predictions must match their manifest, and
both must be of the same causes.  Rows of other work are taken over if settings and files are the same: those of a
trial, of an older version of the table, of a member with another name. They are compared by digests of what the job
reads; ids count only for members that read them. They become a shard like any other.  Functions that write raise
``WriteError``, for example if the disk is full.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv
from pydantic import TypeAdapter, ValidationError

from ensemble.common.digests import FileDigest
from ensemble.common.files import atomic_path, read_json, without_links, write_text
from ensemble.common.shards import (
    BAD_ROWS_FILE,
    ROWS_FILE,
    bad_rows_in,
    gather_shards,
    read_shard,
    rows_with_reasons,
    shard_name,
    shard_table,
    shards_in,
)
from ensemble.data.digests import DIGEST_BYTES, RowDigests, find_rows
from ensemble.data.ids import places_among
from ensemble.data.predictions_csv import is_as_written, read_predictions
from ensemble.jobs.causes import Causes
from ensemble.jobs.job import JobFiles

# A shard is text in memory while it is written and read.
_ROWS_PER_SHARD = 1 << 17


@dataclass(frozen=True, kw_only=True)
class Computation:
    """Report when and with what a run computed rows; devices are names by UUID, or by "cpu" with its node."""

    at: str
    seconds: float
    versions: dict[str, str]
    devices: dict[str, str]


@dataclass
class Work:
    """Hold what stands on disk of a job, or of the mean of a member's jobs, as far as it is done.

    Attributes:
        name: of the predictions.
        is_done: bool [rows], the rows whose probabilities are in shards or in the complete predictions.
        bad_rows: the reason of each table row that could not be computed.
        is_complete: whether the predictions and their manifest exist, and are what this run would write.
        computed_before: what earlier runs computed rows with, the oldest first.
        why_again: why existing predictions do not count, in words; empty without predictions.
        files: the files that the job's model reads, by absolute path.
        row_digests: of the table's rows, [rows, 2]; None if no worker computes them.
        rows_taken: the number of rows taken over from other work, by the path of that work.
    """

    name: str
    causes: Causes
    shards_dir: Path
    is_done: npt.NDArray[np.bool_]
    bad_rows: dict[int, str] = field(default_factory=dict)
    is_complete: bool = False
    computed_before: tuple[Computation, ...] = ()
    why_again: str = ""
    files: dict[str, FileDigest] = field(default_factory=dict)
    row_digests: RowDigests | None = None
    rows_taken: dict[str, int] = field(default_factory=dict)

    @property
    def rows_kept(self) -> int:
        """Return the number of rows in shards of an earlier run."""
        return 0 if self.is_complete else int(self.is_done.sum()) - sum(self.rows_taken.values())

    def make_shards_dir(self) -> None:
        """Make the folder of a job's shards, with the file of row digests."""
        self.shards_dir.mkdir(parents=True, exist_ok=True)
        path = self.shards_dir / ROWS_FILE
        if self.row_digests is not None and EarlierWork.at(path) is None:
            write_row_file(path, self.causes, self.row_digests)


def find_work(
    rundir: JobFiles,
    name: str,
    causes: Causes,
    rows: int,
    keeps_bad_rows: bool,
    is_final: bool = True,
) -> Work:
    """Return the work of a job or member from files with its name: complete predictions, or else shards.

    Shards whose content does not match their names are removed. With ``keeps_bad_rows``, rows that could not be
    computed count as done; otherwise they run again. Predictions that are not ``is_final`` do not count.
    """
    folder = rundir.shards_dir(name, causes.digest)
    work = Work(name, causes, folder, is_done=np.zeros(rows, dtype=np.bool_))
    manifest = read_json(rundir.manifest(name))
    made_of = Causes.from_dict(manifest.get("fingerprint"))
    bad_rows = rows_with_reasons(manifest.get("bad_rows"), rows)
    if made_of is None:
        if isinstance(manifest.get("fingerprint"), dict):
            work.why_again = "its predictions are of another version of this program"
    elif made_of != causes:
        changed = ", ".join(causes.changed_from(made_of))
        other = "its predictions are of a table with other rows"
        work.why_again = other if changed == "rows" else f"{changed} changed since its predictions were made"
    elif not is_as_written(rundir.predictions(name)):
        work.why_again = f"{rundir.predictions(name)} has been changed"
    elif is_final and manifest.get("present") is None and (keeps_bad_rows or not bad_rows):
        work.is_complete, work.bad_rows, work.is_done[:] = True, bad_rows, True
        work.computed_before = computations_of(manifest)
        return work
    for path in sorted(folder.glob("*.csv")):
        table = shard_table(read_shard(path), rows)
        if table is not None:
            work.is_done[table.column("row").to_numpy()] = True
        elif path.is_file():
            path.unlink()
    if keeps_bad_rows:
        bad_rows = bad_rows_in(folder, rows)
        work.bad_rows = {row: reason for row, reason in bad_rows.items() if not work.is_done[row]}
        work.is_done[list(work.bad_rows)] = True
    return work


def values_of(rundir: JobFiles, work: Work, labels: int) -> npt.NDArray[np.float64]:
    """Return values from complete predictions, or else from shards, [rows, labels]; NaN in missing rows."""
    rows = len(work.is_done)
    if not work.is_complete:
        return gather_shards(shards_in(work.shards_dir, rows), rows, labels)
    values = read_predictions(rundir.predictions(work.name)).values
    if work.is_done.all():
        return values
    values_of_table = np.full((rows, labels), np.nan, order="F")
    values_of_table[work.is_done] = values
    return values_of_table


def write_manifest(rundir: JobFiles, work: Work, sha256: str, computed: Computation | None = None) -> None:
    """Write what a member's predictions were made of, with bad rows by their positions in the predictions."""
    is_present = work.is_done
    positions = np.cumsum(is_present) - 1
    document: dict[str, object] = {
        "fingerprint": work.causes.to_dict(),
        "sha256": sha256,
        "rows": len(is_present),
        "bad_rows": {
            int(positions[row]): work.bad_rows[row] for row in sorted(work.bad_rows) if is_present[row]
        },
        "computed": [asdict(run) for run in (*work.computed_before, computed) if run is not None],
    }
    if not is_present.all():
        document["present"] = int(is_present.sum())
    if work.row_digests is not None:
        write_row_file(rundir.rows(work.name), work.causes, work.row_digests[is_present])
    else:  # a row file of earlier predictions does not describe these
        rundir.rows(work.name).unlink(missing_ok=True)
    write_text(rundir.manifest(work.name), json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def write_bad_rows(work: Work, bad_rows: Mapping[int, str]) -> None:
    document = dict(sorted(bad_rows.items()))
    write_text(work.shards_dir / BAD_ROWS_FILE, json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def take_over(
    work: Work,
    ids: pa.ChunkedArray,
    rundir: JobFiles,
    labels: int,
    keeps_bad_rows: bool,
    reuse: Sequence[Path] = (),
) -> None:
    """Take over rows that other work has computed: for another table, with another name, or in another run.

    The member's earlier predictions are other work, too, if they lack rows or have bad rows. ``ids`` are the
    table's, ``reuse`` has the directories of other runs.
    """
    if work.row_digests is None:
        return
    sources = list(EarlierWork.all_in(rundir))
    for folder in reuse:
        if without_links(folder) != without_links(rundir.root):
            sources += EarlierWork.all_in(JobFiles(without_links(folder)), is_other_run=True)
    for source in sources:
        if work.is_done.all():
            return
        if source.values_path == work.shards_dir:
            continue
        positions = source.positions_of(work.causes, work.row_digests, ids)
        is_new = (positions >= 0) & ~work.is_done
        if not is_new.any():
            continue
        values, bad_rows = source.values(labels)
        rows = np.flatnonzero(is_new & ~np.isnan(values[positions]).any(axis=1))
        bad = np.flatnonzero(is_new & np.isin(positions, list(bad_rows))) if keeps_bad_rows else rows[:0]
        if not len(rows) + len(bad):
            continue
        work.make_shards_dir()
        write_shards(work.shards_dir, rows, values[positions[rows]])
        if len(bad):
            work.bad_rows |= {int(row): bad_rows[int(positions[row])] for row in bad}
            write_bad_rows(work, work.bad_rows)
        work.is_done[rows] = work.is_done[bad] = True
        work.rows_taken[source.location] = len(rows) + len(bad)
        work.computed_before += computations_of(read_json(source.path.with_suffix(".json")))


@dataclass(frozen=True)
class EarlierWork:
    """Hold the work of a member on some rows of a table, as its file of row digests describes it.

    ``path`` is that file: ``<member>.rows`` beside predictions, or ``rows.bin`` in a folder of shards. ``location``
    is the path of the values: within the run directory, or absolute if that is another run's.
    """

    path: Path
    causes: Causes
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
            causes = Causes.from_dict(document["fingerprint"])
            rows, sha256 = int(document["rows"]), str(document["sha256"])
            is_whole = path.stat().st_size == len(line) + rows * DIGEST_BYTES
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        if causes is None or not is_whole:
            return None
        return cls(path=path, causes=causes, rows=rows, sha256=sha256)

    @classmethod
    def all_in(cls, rundir: JobFiles, is_other_run: bool = False) -> Iterator[EarlierWork]:
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
        if Causes.from_dict(manifest.get("fingerprint")) == self.causes and is_as_written(path):
            values = read_predictions(path).values
            if values.shape == (self.rows, labels):
                bad_rows = rows_with_reasons(manifest.get("bad_rows"), self.rows)
                values[list(bad_rows)] = np.nan
                return values, bad_rows
        return np.full((self.rows, labels), np.nan), {}

    def positions_of(
        self, causes: Causes, digests: RowDigests, ids: pa.ChunkedArray
    ) -> npt.NDArray[np.int64]:
        """Return the position of each row in this work, -1 if it lacks the row or is other work, [rows].

        Rows of the same table are found by their ids: a row that ``when`` left out may have the text of another.
        """
        if self.causes == causes:
            if self.rows == len(digests):
                return np.arange(len(digests))
            path = self.values_path
            if path == self.path.parent or not is_as_written(path):
                return np.full(len(ids), -1)
            return places_among(ids, read_predictions(path).ids)
        content = b""
        if replace(self.causes, rows=causes.rows) == causes:
            content = self.path.read_bytes().partition(b"\n")[2]
        if hashlib.sha256(content).hexdigest() != self.sha256:
            content = b""
        return find_rows(digests, np.frombuffer(content, "<u8").reshape(-1, 2))


def write_row_file(path: Path, causes: Causes, digests: RowDigests) -> None:
    """Write the file that says which rows a member's work is of."""
    content = np.ascontiguousarray(digests, "<u8").tobytes()
    sha256 = hashlib.sha256(content).hexdigest()
    line = json.dumps({"fingerprint": causes.to_dict(), "rows": len(digests), "sha256": sha256})
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


@cache
def _computations_adapter() -> TypeAdapter[tuple[Computation, ...]]:
    return TypeAdapter(tuple[Computation, ...])


def computations_of(manifest: Mapping[str, object]) -> tuple[Computation, ...]:
    """Return the computations of a manifest; none if another version has written it."""
    try:
        return _computations_adapter().validate_python(manifest.get("computed", ()))
    except ValidationError:
        return ()
