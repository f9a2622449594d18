"""Look up what earlier runs have done of a run's members, and go on as they began.

``jobs.work`` says what stands on disk of each job.  Functions that write raise ``WriteError``, for example if the
disk is full.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Annotated

from annotated_types import Gt
from pydantic import TypeAdapter, ValidationError

from ensemble.common.digests import FileDigests
from ensemble.common.errors import CheckpointError, ConfigError, DataError, MergeError, OutputInUse
from ensemble.common.files import changed_files, changed_text, read_json, without_links, write_text
from ensemble.common.shards import CHOICES_FILE, starts_in_float32
from ensemble.common.text import plural, shown_path
from ensemble.config import MemberConfig
from ensemble.data.predictions_csv import demand_as_written
from ensemble.jobs.causes import Causes
from ensemble.jobs.job import Model, jobs_of, view_of
from ensemble.jobs.work import Work, find_work, take_over
from ensemble.members.registry import member_kind
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.run_dir import RunDir, holder
from ensemble.pipeline.run_report import MemberReport, RunReport
from ensemble.planning.plan import CpuChoice, ModelPlan, Plan
from ensemble.scheduling.batches import BatchRecord
from ensemble.scheduling.launchers.local import worker_threads
from ensemble.scheduling.records import WorkerRecord


@dataclass
class MemberWork:
    """Hold the work of a member's jobs, in their order, and of their mean; the only job of a member needs no mean.

    ``workers`` are those of the previous run.
    """

    jobs: tuple[Work, ...]
    mean: Work | None = None
    workers: tuple[WorkerRecord, ...] = ()

    @property
    def predictions(self) -> Work:
        """Return the work that ends in the member's predictions."""
        return self.mean or self.jobs[0]

    @property
    def name(self) -> str:
        return self.predictions.name

    @property
    def is_complete(self) -> bool:
        return self.predictions.is_complete

    def job(self, name: str) -> Work:
        return next(work for work in self.jobs if work.name == name)

    @property
    def sources(self) -> tuple[Work, ...]:
        """Return what need not be computed again: complete predictions, or else what there is of the jobs."""
        return (self.predictions,) if self.is_complete else self.jobs

    @property
    def has_any_rows(self) -> bool:
        """Return whether some row need not be computed."""
        return any(work.is_done.any() for work in self.sources)

    @property
    def bad_rows(self) -> dict[int, str]:
        """Return the bad rows by their numbers in the table; the reasons name the views."""
        if self.mean is None or self.is_complete:
            return self.predictions.bad_rows
        reasons: dict[int, list[str]] = {}
        for job in self.jobs:
            for row, reason in job.bad_rows.items():
                reasons.setdefault(row, []).append(f"view {view_of(job.name)}: {reason}")
        return {row: "; ".join(reasons[row]) for row in sorted(reasons)}


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
    works: dict[str, MemberWork] = {}
    for member in config.models:
        read = {name: works[name].predictions.causes for name in member.input_names}
        works[member.name] = _work_of_member(prepared, rundir, member, files, read)
    reuse = [] if prepared.reuse is None else [prepared.reuse]
    if prepared.job_rows:
        # The out-of-fold run has rows that only some jobs may compute.
        runs = chain.from_iterable(trained.oof_runs for trained in prepared.loaded.trained.values())
        reuse += dict.fromkeys(runs)
    # Take rows over before any member is completed: its predictions may replace rows that others take over.
    for work in (work for member_work in works.values() for work in member_work.sources):
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
    prepared: Prepared, rundir: RunDir, member: MemberConfig, files: FileDigests, read: Mapping[str, Causes]
) -> MemberWork:
    """Return the work of a member, from files with the names of its jobs; ``read`` are the causes of its inputs."""
    name, rows = member.name, prepared.table.rows
    in_order = jobs_of(prepared.models, name)
    keeps_bad_rows = prepared.config.on_bad_row == "uniform"
    with_ids = member_kind(member).reads().ids
    by_job: dict[str, Work] = {}
    for plan in prepared.plan.models:
        if plan.member != name:
            continue
        of_model = files.for_another()
        for job in plan.jobs:
            causes = prepared.causes(plan, job, of_model).with_inputs(read)
            work = find_work(rundir, job.name, causes, rows, keeps_bad_rows)
            work.files = of_model.seen
            if plan.needs_worker:
                columns, cells = prepared.job_columns[job.name], prepared.file_cells(job)
                work.row_digests = prepared.table.row_digests(columns, cells, with_ids)
            by_job[job.name] = work
    jobs = tuple(by_job[job.name] for job in in_order)
    if not member.counted_views:
        return MemberWork(jobs)
    causes = Causes.of_mean(in_order, [work.causes for work in jobs], prepared.job_rows)
    # Which rows are selected follows from others' predictions or the time: then the mean is always made again.
    is_final = all(job.has_all_rows for job in in_order)
    return MemberWork(jobs, find_work(rundir, name, causes, rows, keeps_bad_rows, is_final=is_final))


def _say_what_is_kept(work: Work, say: Callable[[str], None]) -> None:
    """Tell the user which rows are kept, and from where, or why the work begins again."""
    name, rows = work.name, plural(len(work.is_done), "row")
    if work.is_complete:
        say(f"{name}: done by an earlier run, reused")
        return
    if work.why_again and not work.rows_kept:
        consequence = "equal rows are kept" if work.rows_taken else "it runs again"
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
        predictions = work.predictions
        if work.mean is not None and not work.is_complete:
            work.mean.computed_before = tuple(run for job in work.jobs for run in job.computed_before)
        before = members.get(predictions.causes.digest)
        if before is None:
            continue
        work.workers = before.workers
        if any(job.rows_kept for job in work.jobs):
            # The report has what computed the jobs, too.
            taken = () if work.mean is not None else predictions.computed_before
            predictions.computed_before = (*before.computations, *taken)


def demand_unchanged(prepared: Prepared, model: Model, works: Sequence[Work]) -> None:
    """Raise a MergeError if a model's files have changed since the run began; ``works`` are those of its jobs.

    Workers have compared the files' states; this function compares their content, and looks for new files.  If the
    content changed but the states did not, any shard may come from the new content: all shards are removed.
    """
    files = FileDigests(prepared.config.hash_weights)
    is_same = False
    with suppress(CheckpointError):  # a file is being replaced right now
        contents = [
            member_kind(job.settings).content(prepared.of_models[model.name], files) for job in model.jobs
        ]
        is_same = contents == [work.causes.content for work in works]
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
