"""What stands on disk of a member's work: parts, rows that could not be computed, sealed predictions.

A run asks here what is left to do.  Nothing is believed that cannot be proved: a part must hold what its name says,
predictions what their seal says, and both must carry the fingerprint of the work that is asked for now.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.digests import FileDigest, FileDigests
from ensemble.common.errors import CheckpointError, ConfigError, MergeError
from ensemble.common.files import changed_files, changed_text, read_json, write_text
from ensemble.common.shards import (
    bad_rows_in,
    bad_rows_path,
    file_sha256,
    part_table,
    parts_in,
    read_part,
    rows_path,
    rows_with_reasons,
)
from ensemble.common.text import plural
from ensemble.config import MemberConfig
from ensemble.data.digests import RowDigests
from ensemble.members.registry import member_kind
from ensemble.pipeline.fingerprint import Fingerprint, member_fingerprint
from ensemble.pipeline.reuse import matches, sources, write_row_file, write_rows
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import WorkerReport, workers_from
from ensemble.pipeline.validate import Prepared, columns_read


@dataclass
class MemberWork:
    """A member's work, as far as it is done.

    Attributes:
        is_done: bool [rows], the rows whose probabilities stand in parts or in the sealed predictions.
        bad_rows: table row to reason, of rows that an earlier run could not compute.
        is_sealed: the predictions CSV is complete and is what this run would write.
        workers: what the workers of the run that sealed the predictions did.
        worked: what they did of the member's work, in bytes of text.
        is_damaged: there are predictions of this very work, but they were changed or cut since.
        changed: what is no longer as it was when the predictions were made, in words; empty without any.
        is_older: there are predictions that an earlier version of this program made.
        files: what the files that it is made of held when the run began, by absolute path.
        row_digests: of the table's rows, [rows, 2]; None where nothing is left to do, or nobody asked.
        taken: how many rows are of other work, and whose: places within the run directory.
    """

    member: str
    fingerprint: Fingerprint
    parts_dir: Path
    is_done: npt.NDArray[np.bool_]
    bad_rows: dict[int, str] = field(default_factory=dict)
    is_sealed: bool = False
    workers: tuple[WorkerReport, ...] = ()
    worked: float = 0.0
    is_damaged: bool = False
    changed: tuple[str, ...] = ()
    is_older: bool = False
    files: dict[str, FileDigest] = field(default_factory=dict)
    row_digests: RowDigests | None = None
    taken: dict[str, int] = field(default_factory=dict)

    def parts(self) -> Iterator[pa.Table]:
        """The parts that hold what their names say, in the order of their names."""
        return parts_in(self.parts_dir, len(self.is_done))

    def make_parts_dir(self) -> None:
        """Make the folder of its parts, with what says which rows they are of.

        Raises:
            WriteError: the disk is full or the like.
        """
        self.parts_dir.mkdir(exist_ok=True)
        if self.row_digests is not None:
            write_row_file(rows_path(self.parts_dir), self.fingerprint, self.row_digests)


def refuse_trial(prepared: Prepared, rundir: RunDir) -> None:
    """A trial on the first rows must not take the place of a real run.

    Raises:
        ConfigError: the directory holds predictions of more rows.
    """
    for member in prepared.plan.members if prepared.config.limit is not None else ():
        sealed = read_json(rundir.seal(member.name)).get("rows")
        if isinstance(sealed, int) and sealed > prepared.table.rows:
            raise ConfigError(
                f"output_dir: {rundir.root} holds {member.name}'s predictions of {sealed:,} rows, which a trial on "
                f"{prepared.table.rows:,} rows would replace; give the trial its own: --set output_dir=trial"
            )


def find_works(prepared: Prepared, rundir: RunDir, say: Callable[[str], None]) -> dict[str, MemberWork]:
    """What is done of every member, by name.

    Args:
        say: takes a sentence for the user about each member of which something is, or was, there.

    Raises:
        CheckpointError: a weight file cannot be read.
    """
    works = {}
    files = FileDigests(prepared.config.hash_weights, prepared.file_states)
    keeps_bad_rows = prepared.config.on_bad_row == "uniform"
    labels = len(prepared.config.labels)
    for member in prepared.plan.members:
        own = files.for_another()
        fingerprint = member_fingerprint(prepared, member, own)
        work = find_work(rundir, member.name, fingerprint, prepared.table.rows, keeps_bad_rows)
        work.files = own.seen
        works[member.name] = work
        if not work.is_sealed and member.needs_worker:
            work.row_digests = prepared.table.row_digests(columns_read(member.model))
    computed = {member.name for member in prepared.plan.members if member.needs_worker}
    for work in works.values():  # before any of them is sealed, in the place of what another may need
        if work.row_digests is not None and not work.is_done.all():
            take_over(rundir, work, labels, keeps_bad_rows)
        for text in _found(rundir, work, "it runs again" if work.member in computed else "it is read again"):
            say(text)
    return works


def _found(rundir: RunDir, work: MemberWork, again: str) -> Iterator[str]:
    name, rows, done = work.member, len(work.is_done), int(work.is_done.sum())
    own = done - sum(work.taken.values())
    if work.is_sealed:
        yield f"{name}: done by an earlier run, reused"
    elif work.is_damaged:
        yield f"{name}: {rundir.predictions(name)} has been changed; {again}"
    elif work.changed and not own:
        then = "rows that are as they were are kept" if done else again
        yield f"{name}: {', '.join(work.changed)} changed since its predictions were made; {then}"
    elif work.is_older and not done:
        yield f"{name}: its predictions are of another version of this program; {again}"
    if own and not work.is_sealed:
        yield f"{name}: {own:,} of {plural(rows, 'row')} kept from an earlier run"
    for place, count in work.taken.items():
        yield f"{name}: {count:,} of {plural(rows, 'row')} taken over from {place}"


def find_work(
    rundir: RunDir, member: str, fingerprint: Fingerprint, rows: int, keeps_bad_rows: bool
) -> MemberWork:
    """What is done of a member under its own name; parts that are not what their names say are removed.

    Args:
        rows: of the table.
        keeps_bad_rows: rows that could not be computed count as done (``on_bad_row: uniform``); else they are
            tried again.
    """
    work = MemberWork(
        member, fingerprint, rundir.parts_dir(member, fingerprint.digest), np.zeros(rows, dtype=np.bool_)
    )
    sealed = read_json(rundir.seal(member))
    made_of = Fingerprint.from_dict(sealed.get("fingerprint"))
    work.is_older = made_of is None and isinstance(sealed.get("fingerprint"), dict)
    if made_of is not None:
        work.changed = fingerprint.changed_from(made_of)
        bad_rows = rows_with_reasons(sealed.get("bad_rows"), rows)
        is_as_sealed = not work.changed and sealed.get("sha256") == _file_digest(rundir.predictions(member))
        if is_as_sealed and (keeps_bad_rows or not bad_rows):
            work.is_done[:] = True
            work.is_sealed, work.bad_rows = True, bad_rows
            worked = sealed.get("work")
            work.workers = workers_from(sealed.get("workers"))
            work.worked = worked if isinstance(worked, float) and math.isfinite(worked) else 0.0
            return work
        work.is_damaged = not work.changed and not is_as_sealed
    for path in sorted(work.parts_dir.glob("*.csv")):
        table = part_table(read_part(path), rows)
        if table is not None:
            work.is_done[table.column("row").to_numpy()] = True
        elif path.is_file():
            path.unlink()
    if keeps_bad_rows:
        _keep_bad_rows(work, bad_rows_in(work.parts_dir, rows))
    return work


def take_over(rundir: RunDir, work: MemberWork, labels: int, keeps_bad_rows: bool) -> None:
    """Take over rows that other work has computed: of another table, or under another name.

    Args:
        labels: how many values a row has.
        keeps_bad_rows: as for ``find_work``.

    Raises:
        WriteError: the disk is full or the like.
    """
    assert work.row_digests is not None
    for source in sources(rundir):
        if work.is_done.all() or source.parts_dir == work.parts_dir:
            continue
        places = matches(source, work.fingerprint, work.row_digests)
        if places is None or not ((places >= 0) & ~work.is_done).any():
            continue
        found = source.rows(labels)
        if found is None:
            continue
        values, bad_rows = found
        is_new = (places >= 0) & ~work.is_done
        is_new &= ~np.isnan(values[places]).any(axis=1)
        rows = np.flatnonzero(is_new)
        if len(rows):
            work.make_parts_dir()
            write_rows(work.parts_dir, rows, values[places[rows]])
            work.is_done[rows] = True
            work.taken[source.place] = len(rows)
        if keeps_bad_rows and bad_rows:
            known = len(work.bad_rows)
            _keep_bad_rows(work, {int(row): bad_rows[place] for row, place in _places_of(places, bad_rows)})
            if len(work.bad_rows) > known:
                work.make_parts_dir()
                write_bad_rows(work, work.bad_rows)


def _places_of(places: npt.NDArray[np.int64], wanted: Mapping[int, str]) -> Iterator[tuple[int, int]]:
    """Which rows have one of the wanted places: pairs of row and place."""
    rows = np.flatnonzero(np.isin(places, list(wanted)))
    return zip(rows.tolist(), places[rows].tolist(), strict=True)


def _keep_bad_rows(work: MemberWork, noted: Mapping[int, str]) -> None:
    """Count rows as done that could not be computed."""
    bad_rows = {row: reason for row, reason in noted.items() if not work.is_done[row]}
    work.bad_rows |= bad_rows
    work.is_done[list(bad_rows)] = True


def demand_unchanged(prepared: Prepared, model: MemberConfig, work: MemberWork) -> None:
    """Find a member's files as they were when the run began, before its predictions are sealed.

    Its workers have looked at the files' states; here their content is looked at once more, and whether there
    are others by now.  Where the content differs and the states have not told, nothing proves any of its parts:
    they are removed.

    Raises:
        MergeError: they are not; names them.
    """
    changed = set(changed_files({path: seen.state for path, seen in work.files.items()}))
    files = FileDigests(prepared.config.hash_weights)
    if not changed:
        try:
            content = member_kind(model).content(prepared.inspected[model.name], files)
        except CheckpointError:  # one of them is being replaced now
            changed |= set(changed_files({path: seen.state for path, seen in work.files.items()}))
            content = {}
        if content == work.fingerprint.content:
            return
        if not changed:
            shutil.rmtree(work.parts_dir, ignore_errors=True)
            before = {path: seen.digest for path, seen in work.files.items()}
            now = {path: seen.digest for path, seen in files.seen.items()}
            changed = {path for path, _ in before.items() ^ now.items()}
    raise MergeError(changed_text(changed))


def write_bad_rows(work: MemberWork, bad_rows: Mapping[int, str]) -> None:
    """Keep which rows could not be computed, for the next run.

    Raises:
        WriteError: the disk is full or the like.
    """
    write_text(bad_rows_path(work.parts_dir), _json(dict(sorted(bad_rows.items()))))


def seal(
    rundir: RunDir,
    work: MemberWork,
    sha256: str,
    bad_rows: Mapping[int, str],
    workers: Sequence[WorkerReport],
    worked: float,
) -> None:
    """Say beside a member's predictions what they were made of.

    Args:
        sha256: of the predictions CSV.
        workers: what they did.
        worked: how much that was, in bytes of text.

    Raises:
        WriteError: the disk is full or the like.
    """
    document = {
        "fingerprint": work.fingerprint.to_dict(),
        "sha256": sha256,
        "rows": len(work.is_done),
        "bad_rows": dict(sorted(bad_rows.items())),
        "workers": [asdict(worker) for worker in workers],
        "work": worked,
    }
    if work.row_digests is not None:
        write_row_file(rundir.rows(work.member), work.fingerprint, work.row_digests)
    write_text(rundir.seal(work.member), _json(document))


def _file_digest(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return file_sha256(path)
    return None


def _json(document: object) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
