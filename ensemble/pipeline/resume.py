"""Find which rows of a member earlier runs have computed: shards, bad rows, complete predictions.

A file counts only if it can be verified: shards must match their names, predictions must match their manifest, and
both must have the fingerprint of this run's work.  Functions that write raise ``WriteError``, for example if the
disk is full.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from annotated_types import Gt
from pydantic import TypeAdapter, ValidationError

from ensemble.common.digests import FileDigest, FileDigests, digest_of
from ensemble.common.errors import CheckpointError, ConfigError, DataError, MergeError
from ensemble.common.files import changed_files, changed_text, read_json, without_links, write_text
from ensemble.common.shards import (
    BAD_ROWS_FILE,
    CHOICES_FILE,
    ROWS_FILE,
    bad_rows_in,
    gather_shards,
    read_shard,
    rows_with_reasons,
    shard_table,
    shards_in,
    starts_in_float32,
)
from ensemble.common.text import plural, shown_path
from ensemble.config import MemberConfig
from ensemble.data.digests import RowDigests
from ensemble.data.predictions_csv import is_as_written, read_predictions
from ensemble.jobs.job import jobs_of
from ensemble.members.registry import member_kind
from ensemble.pipeline.fingerprint import (
    Fingerprint,
    file_cells,
    job_fingerprint,
    mean_fingerprint,
    settings_digests,
)
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.reuse import EarlierWork, write_row_file, write_shards
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import Computation, MemberReport, RunReport, computations_of
from ensemble.planning.plan import CpuChoice, ModelPlan, Plan
from ensemble.scheduling.batches import BatchRecord
from ensemble.scheduling.launchers.local import worker_threads
from ensemble.scheduling.records import WorkerRecord


@dataclass
class MemberWork:
    """Hold the work of a job, or of a member that is the mean of jobs, as far as it is done.

    Attributes:
        name: of the job or the member.
        is_done: bool [rows], the rows whose probabilities are in shards or in the complete predictions.
        bad_rows: the reason of each table row that could not be computed.
        is_complete: whether the predictions and their manifest exist, and are what this run would write.
        workers: those of the previous run; ``computed_before`` is of all earlier runs, the oldest first.
        why_again: why existing predictions do not count, in words; empty without predictions.
        row_digests: of the table's rows, [rows, 2]; None if no worker computes them, and for a mean of jobs.
        rows_taken: the number of rows taken over from other work, by the path of that work.
        jobs: the works of a member's jobs, if it has views; their weighted mean gives this work's predictions.
        settings: a digest of each key on which the member's probabilities may depend.
    """

    name: str
    fingerprint: Fingerprint
    shards_dir: Path
    is_done: npt.NDArray[np.bool_]
    bad_rows: dict[int, str] = field(default_factory=dict)
    is_complete: bool = False
    workers: tuple[WorkerRecord, ...] = ()
    computed_before: tuple[Computation, ...] = ()
    why_again: str = ""
    files: dict[str, FileDigest] = field(default_factory=dict)
    row_digests: RowDigests | None = None
    rows_taken: dict[str, int] = field(default_factory=dict)
    jobs: tuple[MemberWork, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[MemberWork, ...]:
        """Return the work of each job; for a job, the work itself."""
        return self.jobs or (self,)

    @property
    def rows_kept(self) -> int:
        """Return the number of rows in shards of an earlier run."""
        return 0 if self.is_complete else int(self.is_done.sum()) - sum(self.rows_taken.values())

    @property
    def has_any_rows(self) -> bool:
        """Return whether some row need not be computed."""
        return bool(self.is_done.any()) if self.is_complete else any(job.is_done.any() for job in self.parts)

    def bad_rows_of_jobs(self) -> dict[int, str]:
        """Return the bad rows of the member's jobs by their numbers in the table; the reasons name the views."""
        reasons: dict[int, list[str]] = {}
        for job in self.parts:
            title = f"view {job.name.rpartition('@')[2]}: " if self.jobs else ""
            for row, reason in job.bad_rows.items():
                reasons.setdefault(row, []).append(title + reason)
        return {row: "; ".join(reasons[row]) for row in sorted(reasons)}

    def make_shards_dir(self) -> None:
        """Make the folder of a job's shards, with the file of row digests."""
        self.shards_dir.mkdir(parents=True, exist_ok=True)
        path = self.shards_dir / ROWS_FILE
        if self.row_digests is not None and EarlierWork.at(path) is None:
            write_row_file(path, self.fingerprint, self.row_digests)


def refuse_trial(prepared: Prepared, rundir: RunDir) -> None:
    """Raise a ConfigError if a trial on the first rows would replace predictions of more rows."""
    if prepared.config.limit is None:
        return
    for member in prepared.config.models:
        rows = read_json(rundir.manifest(member.name)).get("rows")
        if isinstance(rows, int) and rows > prepared.table.rows:
            raise ConfigError(
                f"output_dir: {rundir.root} holds {member.name}'s predictions of {rows:,} rows, which a trial on "
                f"{prepared.table.rows:,} rows would replace; use another directory: --set output_dir=trial"
            )


def find_works(prepared: Prepared, rundir: RunDir, say: Callable[[str], None]) -> dict[str, MemberWork]:
    """Return the work of every member, by name, and tell the user what is kept."""
    config = prepared.config
    files = FileDigests(config.hash_weights, prepared.file_states)
    works = {member.name: _work_of_member(prepared, rundir, member, files) for member in config.models}
    reuse = [] if prepared.reuse is None else [prepared.reuse]
    if prepared.job_rows:
        # The out-of-fold run has rows that only some jobs may compute.
        reuse += dict.fromkeys(trained.oof_run for trained in prepared.loaded.trained.values())
    # Take rows over before any member is completed: its predictions may replace rows that others take over.
    for member_work in works.values():
        for work in (member_work,) if member_work.is_complete else member_work.parts:
            if not work.is_complete:
                keeps_bad_rows = config.on_bad_row == "uniform"
                take_over(work, prepared.table.ids, rundir, len(config.labels), keeps_bad_rows, reuse)
            _say_what_is_kept(work, say)
    if prepared.reuse is not None:
        with_workers = [works[model.member] for model in prepared.plan.models if model.needs_worker]
        if with_workers and not any(work.has_any_rows for work in with_workers):
            raise DataError(
                f"--reuse: {shown_path(prepared.reuse)} has no row of this table by members with these settings; "
                "name another run, or leave the option out to compute all rows"
            )
    _add_from_report(rundir, works.values())
    return works


def _work_of_member(
    prepared: Prepared, rundir: RunDir, member: MemberConfig, files: FileDigests
) -> MemberWork:
    """Return the work of a member and of its jobs, from files with their names."""
    table, name = prepared.table, member.name
    in_order = jobs_of(prepared.models, name)
    if name in prepared.loaded.untrained:  # nothing can be its work
        nothing = Fingerprint(settings=digest_of("untrained"), content={}, rows=digest_of(table.rows))
        names = [name, *(job.name for job in in_order if job.view)]
        work, *of_jobs = (
            MemberWork(of, nothing, rundir.shards_dir(of, nothing.digest), np.zeros(table.rows, np.bool_))
            for of in names
        )
        work.jobs = tuple(of_jobs)
        return work
    keeps_bad_rows = prepared.config.on_bad_row == "uniform"
    with_ids = member_kind(member).reads().ids
    works: dict[str, MemberWork] = {}
    for plan in prepared.plan.models:
        if plan.member != name:
            continue
        of_model = files.for_another()
        for job in plan.jobs:
            work = find_work(
                rundir, job.name, job_fingerprint(prepared, plan, job, of_model), table.rows, keeps_bad_rows
            )
            work.files = of_model.seen
            if plan.needs_worker:
                cells = file_cells(prepared, name, job)
                work.row_digests = table.row_digests(prepared.job_columns[job.name], cells, with_ids)
            works[job.name] = work
    if not member.counted_views:
        work = works[name]
    else:
        fingerprints = [works[job.name].fingerprint for job in in_order]
        fingerprint = mean_fingerprint(in_order, fingerprints, prepared.job_rows)
        # The rows of such jobs follow from others' predictions or the time: the mean is always made again.
        is_final = not any(job.may_lack_rows for job in in_order)
        work = find_work(rundir, name, fingerprint, table.rows, keeps_bad_rows, is_final=is_final)
        work.jobs = tuple(works[job.name] for job in in_order)
    work.settings = settings_digests(prepared.config, member)
    return work


def _say_what_is_kept(work: MemberWork, say: Callable[[str], None]) -> None:
    """Tell the user which rows are kept, and from where, or why the work begins again."""
    name, rows = work.name, plural(len(work.is_done), "row")
    if work.is_complete:
        say(f"{name}: done by an earlier run, reused")
        return
    if work.why_again and not work.rows_kept:
        consequence = "rows that are as they were are kept" if work.rows_taken else "it runs again"
        say(f"{name}: {work.why_again}; {consequence}")
    if work.rows_kept:
        say(f"{name}: {work.rows_kept:,} of {rows} kept from an earlier run")
    for path, count in work.rows_taken.items():
        shown = shown_path(Path(path)) if path.startswith("/") else path
        say(f"{name}: {count:,} of {rows} taken over from {shown}")


def _add_from_report(rundir: RunDir, works: Iterable[MemberWork]) -> None:
    """Add the workers of the previous run, and what computed the rows in shards."""
    members: dict[str | None, MemberReport] = {}
    with suppress(DataError):  # no report, or a report of another version
        members = {member.fingerprint: member for member in RunReport.read(rundir.run_json).members}
    for work in works:
        if work.jobs and not work.is_complete:
            work.computed_before = tuple(run for job in work.jobs for run in job.computed_before)
        before = members.get(work.fingerprint.digest)
        if before is None:
            continue
        work.workers = before.workers
        if any(part.rows_kept for part in work.parts):
            # The report has what computed the jobs, too.
            taken = () if work.jobs else work.computed_before
            work.computed_before = (*before.computations, *taken)


def find_work(
    rundir: RunDir,
    name: str,
    fingerprint: Fingerprint,
    rows: int,
    keeps_bad_rows: bool,
    is_final: bool = True,
) -> MemberWork:
    """Return the work of a job or member from files with its name: complete predictions, or else shards.

    Shards whose content does not match their names are removed. With ``keeps_bad_rows``, rows that could not be
    computed count as done; otherwise they run again. Predictions that are not ``is_final`` do not count.
    """
    folder = rundir.shards_dir(name, fingerprint.digest)
    work = MemberWork(name, fingerprint, folder, is_done=np.zeros(rows, dtype=np.bool_))
    manifest = read_json(rundir.manifest(name))
    made_of = Fingerprint.from_dict(manifest.get("fingerprint"))
    bad_rows = rows_with_reasons(manifest.get("bad_rows"), rows)
    if made_of is None:
        if isinstance(manifest.get("fingerprint"), dict):
            work.why_again = "its predictions are of another version of this program"
    elif made_of != fingerprint:
        changed = ", ".join(fingerprint.changed_from(made_of))
        work.why_again = f"{changed} changed since its predictions were made"
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


def values_of(rundir: RunDir, work: MemberWork, labels: int) -> npt.NDArray[np.float64]:
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


def mean_of_jobs(
    values: Sequence[npt.NDArray[np.float64]], weights: Sequence[float]
) -> npt.NDArray[np.float64]:
    """Return each row's weighted mean over the jobs that have the row, [rows, labels]; NaN if no job has it."""
    if len(values) == 1:
        return values[0]
    sums, shares = np.zeros(values[0].shape, order="F"), np.zeros(len(values[0]))
    for job_values, weight in zip(values, weights, strict=True):
        is_present = ~np.isnan(job_values[:, 0])
        sums[is_present] += weight * job_values[is_present]
        shares[is_present] += weight
    with np.errstate(invalid="ignore"):
        return np.asarray(sums / shares[:, None])


def take_over(
    work: MemberWork,
    ids: pa.ChunkedArray,
    rundir: RunDir,
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
            sources += EarlierWork.all_in(RunDir(without_links(folder)), is_other_run=True)
    for source in sources:
        if work.is_done.all():
            return
        if source.values_path == work.shards_dir:
            continue
        positions = source.positions_of(work.fingerprint, work.row_digests, ids)
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


def demand_unchanged(prepared: Prepared, plan: ModelPlan, works: Sequence[MemberWork]) -> None:
    """Raise a MergeError if a model's files have changed since the run began; ``works`` are those of its jobs.

    Workers have compared the files' states; this function compares their content, and looks for new files.  If the
    content changed but the states did not, any shard may come from the new content: all shards are removed.
    """
    files = FileDigests(prepared.config.hash_weights)
    is_same = False
    with suppress(CheckpointError):  # a file is being replaced right now
        contents = [
            member_kind(job.settings).content(prepared.of_models[plan.name], files) for job in plan.jobs
        ]
        is_same = contents == [work.fingerprint.content for work in works]
    seen = works[0].files
    changed = set(changed_files({path: file.state for path, file in seen.items()}))
    if is_same and not changed:
        return
    if not changed:
        for work in works:
            shutil.rmtree(work.shards_dir, ignore_errors=True)
        before = {path: file.digest for path, file in seen.items()}
        now = {path: file.digest for path, file in files.seen.items()}
        changed = {path for path, _ in before.items() ^ now.items()}
    raise MergeError(changed_text(changed))


def write_bad_rows(work: MemberWork, bad_rows: Mapping[int, str]) -> None:
    document = dict(sorted(bad_rows.items()))
    write_text(work.shards_dir / BAD_ROWS_FILE, json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def write_manifest(
    rundir: RunDir, work: MemberWork, sha256: str, computed: Computation | None = None
) -> None:
    """Write what a member's predictions were made of, with bad rows by their positions in the predictions."""
    is_present = work.is_done
    positions = np.cumsum(is_present) - 1
    document: dict[str, object] = {
        "fingerprint": work.fingerprint.to_dict(),
        "settings": dict(work.settings),
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
        write_row_file(rundir.rows(work.name), work.fingerprint, work.row_digests[is_present])
    elif work.jobs:  # the row file of a run without views does not describe these predictions
        rundir.rows(work.name).unlink(missing_ok=True)
    write_text(rundir.manifest(work.name), json.dumps(document, indent=2, ensure_ascii=False) + "\n")


@dataclass(frozen=True)
class Choices:
    """Hold what a run chose for a model, which a resumed run goes on with; it stands in each of its jobs' folders.

    Attributes:
        cpu: other threads can change last digits; None: its workers are on GPUs, or on a cluster.
        rooms: see ``BatchRecord``; the names of shards say whether chunks start in float32.
    """

    cpu: CpuChoice | None = None
    rooms: Mapping[str, Annotated[int, Gt(0)]] = field(default_factory=dict)

    @classmethod
    def read(cls, folders: Iterable[Path]) -> Choices:
        """Return the choices in the first folder that has some; a damaged file has none."""
        for folder in folders:
            with suppress(OSError, ValidationError):
                return _choices_adapter().validate_json((folder / CHOICES_FILE).read_bytes(), strict=True)
        return cls()

    def write(self, folders: Iterable[Path]) -> None:
        for folder in folders:
            write_text(folder / CHOICES_FILE, json.dumps(asdict(self), indent=2) + "\n")


@cache
def _choices_adapter() -> TypeAdapter[Choices]:
    return TypeAdapter(Choices)


def kept_batches(folders: Sequence[Path]) -> BatchRecord:
    """Return how earlier runs made a model's batches, as far as they have chosen it, from its jobs' folders."""
    return BatchRecord(Choices.read(folders).rooms, any(map(starts_in_float32, folders)))


def cpu_choice_of(model: ModelPlan) -> CpuChoice:
    return CpuChoice(threads=model.cpu_threads or worker_threads(model.cpu_share), workers=model.replicas)


def changed_cpu_choices(plan: Plan, kept: Mapping[str, CpuChoice]) -> Iterator[str]:
    """Yield a sentence for each model on the CPU whose workers now have another number of threads."""
    for model in plan.models:
        threads, choice = cpu_choice_of(model).threads, kept.get(model.name)
        if choice is not None and not model.gpus and choice.threads != threads:
            yield (
                f"{model.name}: its workers began with {plural(choice.threads, 'thread')} each and go on with "
                f"{threads}: last digits of its rows may differ"
            )
