"""What a member's work has left on disk: shards, rows that could not be computed, complete predictions.

A run learns here what is left to do.  Only what can be proved counts: a shard must hold what its name says,
predictions what their manifest says, and both must carry the fingerprint of the work that this run is to do.
Functions that write raise ``WriteError`` if the disk is full or the like.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.digests import FileDigest, FileDigests
from ensemble.common.errors import CheckpointError, ConfigError, DataError, MergeError
from ensemble.common.files import changed_files, changed_text, read_json, write_text
from ensemble.common.shards import (
    bad_rows_in,
    bad_rows_path,
    cpu_choice_path,
    gather_shards,
    read_shard,
    rows_path,
    rows_with_reasons,
    shard_table,
    shards_in,
)
from ensemble.common.text import plural, shown_path
from ensemble.config import MemberConfig
from ensemble.data.digests import RowDigests
from ensemble.data.ids import match_ids
from ensemble.data.predictions_csv import is_as_written, read_predictions
from ensemble.data.row_files import FileCells
from ensemble.members.registry import member_kind
from ensemble.pipeline.fingerprint import (
    Fingerprint,
    file_cells,
    mean_fingerprint,
    member_fingerprint,
    settings_digests,
    view_fingerprints,
)
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.reuse import EarlierWork, write_row_file, write_shards
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import Computation, RunReport, WorkerReport, makers_of
from ensemble.planning.plan import CpuChoice, MemberPlan, Plan
from ensemble.scheduling.launchers.local import worker_threads


@dataclass
class MemberWork:
    """The work of a member, or of one of its views, as far as it is done.

    Attributes:
        is_done: bool [rows], the rows whose probabilities are in shards or in the complete predictions.
        bad_rows: the reason of each table row that could not be computed.
        is_complete: the predictions and their manifest exist, and are what this run would write.
        is_new: this run made them, without any worker.
        workers: the workers of the run that made the predictions.
        computed, computed_before: what this run and earlier ones computed rows with, the oldest first.
        work_bytes: the share of the member's work that the workers did, in bytes of text.
        why_again: why existing predictions do not count, in words; empty if there are none.
        files: the member's files as they were when the run began, by absolute path.
        row_digests: of the table's rows, [rows, 2]; None if nothing is left to do.
        rows_taken: how many rows are taken over from each other work, by its path.
        views: the work of each view, if the member has several; their weighted mean is this work's predictions.
    """

    member: str
    fingerprint: Fingerprint
    shards_dir: Path
    is_done: npt.NDArray[np.bool_]
    bad_rows: dict[int, str] = field(default_factory=dict)
    is_complete: bool = False
    is_new: bool = False
    workers: tuple[WorkerReport, ...] = ()
    computed: Computation | None = None
    computed_before: tuple[Computation, ...] = ()
    work_bytes: float = 0.0
    why_again: str = ""
    files: dict[str, FileDigest] = field(default_factory=dict)
    row_digests: RowDigests | None = None
    rows_taken: dict[str, int] = field(default_factory=dict)
    views: tuple[MemberWork, ...] = ()
    weights: tuple[float, ...] = ()
    columns: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    file_cells: FileCells | None = None

    @property
    def parts(self) -> tuple[MemberWork, ...]:
        """The work in each view; the work itself if there are no views."""
        return self.views or (self,)

    @property
    def has_rows(self) -> npt.NDArray[np.bool_]:
        """Rows that need not be computed, numbered through the views, bool [views * rows]."""
        if self.is_complete:
            return np.tile(self.is_done, len(self.parts))
        return np.concatenate([part.is_done for part in self.parts])

    @property
    def noted_bad_rows(self) -> dict[int, str]:
        """Rows that could not be computed, numbered through the views."""
        rows = len(self.is_done)
        return {
            row + view * rows: reason
            for view, part in enumerate(self.parts)
            for row, reason in part.bad_rows.items()
        }

    def rows_of_view(self, numbered: Mapping[int, str], view: int) -> dict[int, str]:
        """Return the rows of one view, from rows that are numbered through the views."""
        rows = len(self.is_done)
        return {row - view * rows: reason for row, reason in numbered.items() if row // rows == view}

    def bad_rows_of_views(self, numbered: Mapping[int, str]) -> dict[int, str]:
        """Return bad rows that are numbered through the views by their table row, with the views in the reasons."""
        if not self.views:
            return dict(numbered)
        reasons: dict[int, list[str]] = {}
        for view, part in enumerate(self.views):
            name = part.member.rpartition("@")[2]
            for row, reason in self.rows_of_view(numbered, view).items():
                reasons.setdefault(row, []).append(f"view {name}: {reason}")
        return {row: "; ".join(reasons[row]) for row in sorted(reasons)}

    def values(self, labels: int) -> npt.NDArray[np.float64]:
        """Return the values in the shards, [rows, labels]; NaN in rows that no shard has."""
        return gather_shards(shards_in(self.shards_dir, len(self.is_done)), len(self.is_done), labels)

    def make_shards_dir(self) -> None:
        """Make the folders of the shards and of the views' shards, with the file of row digests."""
        self.shards_dir.mkdir(parents=True, exist_ok=True)
        for view in self.views:
            view.make_shards_dir()
        if self.row_digests is not None:
            write_row_file(rows_path(self.shards_dir), self.fingerprint, self.row_digests)

    def count_as_done(self, bad_rows: Mapping[int, str]) -> None:
        """Count rows that could not be computed as done."""
        new_rows = {row: reason for row, reason in bad_rows.items() if not self.is_done[row]}
        self.bad_rows |= new_rows
        self.is_done[list(new_rows)] = True

    def read_row_digests(self, prepared: Prepared) -> None:
        self.row_digests = prepared.table.row_digests(self.columns, self.file_cells)


def refuse_trial(prepared: Prepared, rundir: RunDir) -> None:
    """Raise a ConfigError if a trial on the first rows would replace predictions of more rows."""
    if prepared.config.limit is None:
        return
    for member in prepared.plan.members:
        rows = read_json(rundir.manifest(member.name)).get("rows")
        if isinstance(rows, int) and rows > prepared.table.rows:
            raise ConfigError(
                f"output_dir: {rundir.root} holds {member.name}'s predictions of {rows:,} rows, which a trial on "
                f"{prepared.table.rows:,} rows would replace; give the trial its own: --set output_dir=trial"
            )


def find_works(prepared: Prepared, rundir: RunDir, say: Callable[[str], None]) -> dict[str, MemberWork]:
    """Return what is done of every member, by name, and tell the user."""
    files = FileDigests(prepared.config.hash_weights, prepared.file_states)
    members = prepared.plan.members
    keeps_bad_rows = prepared.config.on_bad_row == "uniform"
    works = {member.name: _work_of_member(prepared, rundir, member, files) for member in members}
    # Before any member is completed: its predictions may replace rows that another member takes over.
    for member in members:
        member_work = works[member.name]
        for work in (member_work,) if member_work.is_complete else member_work.parts:
            if work.row_digests is not None and not work.is_done.all():
                take_over(rundir, work, len(prepared.config.labels), keeps_bad_rows, prepared.reuse)
            _say_what_is_kept(work, member.needs_worker, say)
    if prepared.reuse is not None:
        with_workers = [works[member.name] for member in members if member.needs_worker]
        if with_workers and not any(work.has_rows.any() for work in with_workers):
            raise DataError(
                f"--reuse: {shown_path(prepared.reuse)} has no row of this table by members with these settings; "
                "name another run, or leave the option out to compute all rows"
            )
        for member in members:
            work = works[member.name]
            left = int((~work.is_done).sum())
            if work.row_digests is not None and left:
                at_most = "" if member.model.when is None else "at most "
                say(f"{member.name}: {at_most}{plural(left, 'row')} left to compute")
    _add_from_report(rundir, works.values())
    return works


def _work_of_member(prepared: Prepared, rundir: RunDir, member: MemberPlan, files: FileDigests) -> MemberWork:
    """Return what is done of a member under its own name, and of its views."""
    files = files.for_another()
    fingerprint = member_fingerprint(prepared, member, files)
    keeps_bad_rows = prepared.config.on_bad_row == "uniform"
    rows = prepared.table.rows
    may_lack_rows = member.model.when is not None or member_kind(member.model).may_lack_rows
    ids = prepared.table.ids if may_lack_rows else None
    views = member.model.counted_views
    of_views: list[Fingerprint] = []
    if views:
        of_views = view_fingerprints(prepared, member, fingerprint.content)
        fingerprint = mean_fingerprint(member, of_views, fingerprint)
    work = find_work(rundir, member.name, fingerprint, rows, keeps_bad_rows, ids)
    work.columns = prepared.columns[member.name]
    work.file_cells = prepared.files.get(member.name)
    work.settings = settings_digests(prepared.config, member.model)
    work.weights = tuple(view.weight for view in views)
    for number, view in enumerate(views):
        fingerprint = of_views[number]
        folder = work.shards_dir / f"{view.name}.{fingerprint.digest[:16]}"
        # No member can have a name with "@".
        name = f"{member.name}@{view.name}"
        view_work = find_work(rundir, name, fingerprint, rows, keeps_bad_rows, ids, folder)
        view_work.columns = prepared.view_columns[member.name][number]
        view_work.file_cells = file_cells(prepared, member.name, view)
        work.views += (view_work,)
    for part in (work, *work.views):
        part.files = files.seen
    if member.needs_worker and not work.is_complete:
        for part in work.parts:
            if not part.is_complete:
                part.read_row_digests(prepared)
    return work


def _say_what_is_kept(work: MemberWork, needs_worker: bool, say: Callable[[str], None]) -> None:
    """Tell the user which rows of a work are kept, and from where, or why it begins again."""
    name, rows = work.member, len(work.is_done)
    done = int(work.is_done.sum())
    kept = 0 if work.is_complete else done - sum(work.rows_taken.values())
    if work.is_complete:
        say(f"{name}: done by an earlier run, reused")
    elif work.why_again and not kept:
        again = "it runs again" if needs_worker else "it is read again"
        say(f"{name}: {work.why_again}; {'rows that are as they were are kept' if done else again}")
    if kept:
        say(f"{name}: {kept:,} of {plural(rows, 'row')} kept from an earlier run")
    for path, count in work.rows_taken.items():
        shown = shown_path(Path(path)) if path.startswith("/") else path
        say(f"{name}: {count:,} of {plural(rows, 'row')} taken over from {shown}")


def _add_from_report(rundir: RunDir, works: Iterable[MemberWork]) -> None:
    """Add what workers reported after their member's last row, and what computed the rows in shards."""
    try:
        report = RunReport.read(rundir.run_json)
    except DataError:  # there is none, or one of another version
        return
    reported = {(member.name, worker.key): worker for member in report.members for worker in member.workers}
    members = {member.fingerprint: member for member in report.members}
    for work in works:
        work.workers = tuple(reported.get((work.member, worker.key), worker) for worker in work.workers)
        if work.is_complete or not work.has_rows.any():
            continue
        before = members.get(work.fingerprint.digest)
        if before is not None:
            work.computed_before = (*before.computations, *work.computed_before)
        else:  # some of its views may be complete
            work.computed_before += tuple(run for view in work.views for run in view.computed_before)


def find_work(
    rundir: RunDir,
    member: str,
    fingerprint: Fingerprint,
    rows: int,
    keeps_bad_rows: bool,
    ids: pa.ChunkedArray | None = None,
    folder: Path | None = None,
) -> MemberWork:
    """Return what is done of a member under its own name; shards that do not hold what their names say are removed.

    Args:
        keeps_bad_rows: rows that could not be computed count as done (``on_bad_row: uniform``); otherwise they are
            tried again.
        ids: of the rows, for a member whose predictions may lack rows; None if they must have all.
        folder: of its shards; None: the member's own.
    """
    folder = folder or rundir.shards_dir(member, fingerprint.digest)
    work = MemberWork(
        member=member, fingerprint=fingerprint, shards_dir=folder, is_done=np.zeros(rows, dtype=np.bool_)
    )
    manifest = read_json(rundir.manifest(member))
    made_of = Fingerprint.from_dict(manifest.get("fingerprint"))
    if made_of is None:
        if isinstance(manifest.get("fingerprint"), dict):
            work.why_again = "its predictions are of another version of this program"
    elif made_of != fingerprint:
        changed = fingerprint.changed_from(made_of)
        work.why_again = f"{', '.join(changed)} changed since its predictions were made"
        rows_before = manifest.get("rows")
        # They are of a trial, or the table grew or shrank.
        if changed == ("rows",) and isinstance(rows_before, int) and rows_before != rows:
            work.why_again = (
                f"its predictions are of a table of {plural(rows_before, 'row')}, this one has {rows:,}"
            )
    elif not is_as_written(rundir.predictions(member)):
        work.why_again = f"{rundir.predictions(member)} has been changed"
    elif _take_predictions(work, rundir.predictions(member), manifest, keeps_bad_rows, ids):
        return work
    for path in sorted(folder.glob("*.csv")):
        table = shard_table(read_shard(path), rows)
        if table is not None:
            work.is_done[table.column("row").to_numpy()] = True
        elif path.is_file():
            path.unlink()
    if keeps_bad_rows:
        work.count_as_done(bad_rows_in(folder, rows))
    return work


def _take_predictions(
    work: MemberWork,
    predictions: Path,
    manifest: Mapping[str, object],
    keeps_bad_rows: bool,
    ids: pa.ChunkedArray | None,
) -> bool:
    """Complete a work by its predictions, and return whether they have the rows that they must have."""
    bad_rows = rows_with_reasons(manifest.get("bad_rows"), len(work.is_done))
    has_all_rows = manifest.get("present") is None
    if bad_rows and not keeps_bad_rows:
        return False
    if has_all_rows:
        work.is_done[:] = True
    elif ids is None:
        return False
    else:
        file = read_predictions(predictions)
        row_numbers = match_ids(predictions, file.ids, ids, may_lack=True)
        work.is_done[row_numbers] = True
        bad_rows = {int(row_numbers[position]): reason for position, reason in bad_rows.items()}
    work.is_complete, work.bad_rows = True, bad_rows
    work.workers, work.computed_before = makers_of(manifest)
    work_bytes = manifest.get("work")
    if isinstance(work_bytes, float) and math.isfinite(work_bytes):
        work.work_bytes = work_bytes
    return True


def values_of(rundir: RunDir, work: MemberWork, labels: int) -> npt.NDArray[np.float64]:
    """Return the values of a work without views, [rows, labels]; NaN in rows that it does not have."""
    if not work.is_complete:
        return work.values(labels)
    values = np.full((len(work.is_done), labels), np.nan, order="F")
    values[work.is_done] = read_predictions(rundir.predictions(work.member)).values
    return values


def mean_of_views(
    values: Sequence[npt.NDArray[np.float64]], weights: Sequence[float]
) -> npt.NDArray[np.float64]:
    """Return the weighted mean of the views that have a row, [rows, labels]; NaN in rows that no view has."""
    if len(values) == 1:
        return values[0]
    sums, shares = np.zeros(values[0].shape, order="F"), np.zeros(len(values[0]))
    for view_values, weight in zip(values, weights, strict=True):
        is_present = ~np.isnan(view_values[:, 0])
        sums[is_present] += weight * view_values[is_present]
        shares[is_present] += weight
    with np.errstate(invalid="ignore"):
        return np.asarray(sums / shares[:, None])


def reopen(prepared: Prepared, rundir: RunDir, work: MemberWork) -> None:
    """Turn complete predictions that lack rows into shards to go on with."""
    if work.views:
        work.is_complete = False
        for view in work.views:
            reopen(prepared, rundir, view)
    if not work.is_complete:
        return
    work.read_row_digests(prepared)
    rows = np.flatnonzero(work.is_done)
    values = read_predictions(rundir.predictions(work.member)).values
    is_good = ~np.isin(rows, list(work.bad_rows))
    work.is_complete = False
    work.make_shards_dir()
    write_shards(work.shards_dir, rows[is_good], values[is_good])
    if work.bad_rows:
        write_bad_rows(work, work.bad_rows)
    # A run that was interrupted after it had reopened them has left further shards.
    for shard in shards_in(work.shards_dir, len(work.is_done)):
        work.is_done[shard.column("row").to_numpy()] = True


def take_over(
    rundir: RunDir, work: MemberWork, labels: int, keeps_bad_rows: bool, reuse: Path | None = None
) -> None:
    """Take over rows that other work has computed: of another table, under another name, or in another run."""
    assert work.row_digests is not None
    sources = EarlierWork.all_in(rundir)
    if reuse is not None:
        of_other_run = EarlierWork.all_in(RunDir(reuse.resolve()))
        sources = chain(
            sources, (replace(source, location=str(source.values_path)) for source in of_other_run)
        )
    for source in sources:
        if work.is_done.all() or source.values_path == work.shards_dir:
            continue
        positions = source.positions_of(work.fingerprint, work.row_digests)
        if positions is None or not ((positions >= 0) & ~work.is_done).any():
            continue
        values_and_bad_rows = source.values(labels)
        if values_and_bad_rows is None:
            continue
        values, bad_rows = values_and_bad_rows
        has_values = (positions >= 0) & ~np.isnan(values[positions]).any(axis=1)
        rows = np.flatnonzero(has_values & ~work.is_done)
        if len(rows):
            work.make_shards_dir()
            write_shards(work.shards_dir, rows, values[positions[rows]])
            work.is_done[rows] = True
            work.rows_taken[source.location] = len(rows)
            _, computed = makers_of(read_json(source.path.with_suffix(".json")))
            work.computed_before += computed
        if keeps_bad_rows and bad_rows:
            count_before = len(work.bad_rows)
            rows_with_reason = np.flatnonzero(np.isin(positions, list(bad_rows))).tolist()
            work.count_as_done({row: bad_rows[int(positions[row])] for row in rows_with_reason})
            if len(work.bad_rows) > count_before:
                work.make_shards_dir()
                write_bad_rows(work, work.bad_rows)


def demand_unchanged(prepared: Prepared, model: MemberConfig, work: MemberWork) -> None:
    """Raise a MergeError if a member's files are not as they were when the run began.

    Workers have compared the files' states; this compares their content, and looks for new files.  If the content
    changed and the states did not show it, no shard is proved to be of the old content: all are removed.
    """
    files = FileDigests(prepared.config.hash_weights)
    is_same = False
    with suppress(CheckpointError):  # a file is being replaced at this moment
        content = member_kind(model).content(prepared.inspected[model.name], files)
        is_same = content == work.fingerprint.content
    changed = set(changed_files({path: seen.state for path, seen in work.files.items()}))
    if is_same and not changed:
        return
    if not changed:
        shutil.rmtree(work.shards_dir, ignore_errors=True)
        before = {path: seen.digest for path, seen in work.files.items()}
        now = {path: seen.digest for path, seen in files.seen.items()}
        changed = {path for path, _ in before.items() ^ now.items()}
    raise MergeError(changed_text(changed))


def write_bad_rows(work: MemberWork, bad_rows: Mapping[int, str]) -> None:
    document = dict(sorted(bad_rows.items()))
    write_text(bad_rows_path(work.shards_dir), json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def write_manifest(
    rundir: RunDir, work: MemberWork, sha256: str, is_present: npt.NDArray[np.bool_] | None = None
) -> None:
    """Write what a member's predictions were made of, with bad rows by their positions in the predictions.

    Args:
        is_present: the rows that they hold, bool [rows]; None: all.
    """
    if is_present is None:
        is_present = np.ones(len(work.is_done), dtype=np.bool_)
    has_all_rows = bool(is_present.all())
    positions = np.cumsum(is_present) - 1
    document: dict[str, object] = {
        "fingerprint": work.fingerprint.to_dict(),
        "settings": dict(work.settings),
        "sha256": sha256,
        "rows": len(work.is_done),
        "bad_rows": {
            int(positions[row]): work.bad_rows[row] for row in sorted(work.bad_rows) if is_present[row]
        },
        "workers": [asdict(worker) for worker in work.workers],
        "computed": [asdict(run) for run in (*work.computed_before, work.computed) if run is not None],
        "work": work.work_bytes,
    }
    if not has_all_rows:
        document["present"] = int(is_present.sum())
    if work.row_digests is not None:
        digests = work.row_digests if has_all_rows else work.row_digests[is_present]
        write_row_file(rundir.rows(work.member), work.fingerprint, digests)
    elif work.views:  # the row file of a run without views does not describe these predictions
        rundir.rows(work.member).unlink(missing_ok=True)
    write_text(rundir.manifest(work.member), json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def kept_cpu_choices(works: Mapping[str, MemberWork]) -> dict[str, CpuChoice]:
    """Return what earlier runs chose for members that are not complete, as other threads can change last digits."""
    choices = {}
    for name, work in works.items():
        choice = None if work.is_complete else _read_cpu_choice(work.shards_dir)
        if choice is not None:
            choices[name] = choice
    return choices


def keep_cpu_choice(shards_dir: Path, member: MemberPlan) -> None:
    """Write what this run chose for a member, unless an earlier run chose the same threads."""
    threads = member.cpu_threads or worker_threads(member.cpu_share)
    choice = CpuChoice(threads=threads, workers=member.replicas)
    kept = _read_cpu_choice(shards_dir)
    if kept is None or kept.threads != threads:
        write_text(cpu_choice_path(shards_dir), json.dumps(asdict(choice)) + "\n")


def changed_cpu_choices(plan: Plan, kept: Mapping[str, CpuChoice]) -> Iterator[str]:
    """Yield a sentence for each member that does not run on the CPU as it began."""
    for member in plan.members:
        choice = kept.get(member.name)
        if choice is None or member.gpus:
            continue
        threads = member.cpu_threads or worker_threads(member.cpu_share)
        if threads != choice.threads:
            why = f"the run may use {plural(plan.cpus, 'core')}"
            if plan.config.cpu_workers != "auto":
                why = f"cpu_workers is {plan.config.cpu_workers}"
            elif member.request.replicas != "auto":
                why = f"replicas is {member.request.replicas}"
            yield (
                f"{member.name}: its workers began with {plural(choice.threads, 'thread')} each and go on with "
                f"{threads}, as {why}: last digits of its rows may differ"
            )
        elif member.replicas < min(choice.workers, len(member.chunks)):
            yield (
                f"{member.name}: {plural(member.replicas, 'worker')} at a time instead of {choice.workers}, as "
                "cores and free memory hold no more; its numbers stay the same"
            )


def _read_cpu_choice(shards_dir: Path) -> CpuChoice | None:
    """Return the choice in a member's work folder; None if there is none, or the file is damaged."""
    document = read_json(cpu_choice_path(shards_dir))
    threads, workers = document.get("threads"), document.get("workers")
    if not isinstance(threads, int) or not isinstance(workers, int) or min(threads, workers) < 1:
        return None
    return CpuChoice(threads=threads, workers=workers)
