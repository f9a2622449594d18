"""Rehearse a run: measure the members on a sample of rows, and forecast the whole run.

The sample has rows of all lengths, so that its batches are like those of the whole table. It is a real run in a
temporary folder; nothing of the config's own run directory is touched.
"""

from __future__ import annotations

import math
import resource
import shutil
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.clock import boot_seconds
from ensemble.common.errors import ConfigError, Interrupted, MembersFailed
from ensemble.common.files import free_bytes
from ensemble.common.text import duration, gib, plural, shown_path
from ensemble.config import EnsembleConfig, LoadedConfig
from ensemble.data.table import InputTable, read_table
from ensemble.members.registry import member_kind
from ensemble.pipeline.load import derived_run
from ensemble.pipeline.prepare import for_rows, prepare
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.run import Display, run_prepared
from ensemble.pipeline.run_report import MemberReport, RunReport, measured_speeds
from ensemble.pipeline.selection import expected_shares, share_of_job
from ensemble.planning.forecast import Speed
from ensemble.planning.plan import STANDBY_HOST_BYTES, ModelPlan, Plan
from ensemble.scheduling.deadline import reserve_seconds
from ensemble.scheduling.launchers.base import make_launcher

# Rows of a sample, in strips of rows of like length.
_SAMPLE_ROWS, _STRIP_ROWS = 384, 16
# A sample that computes for less than this is too short for a steady speed; a larger one is then measured.
_MIN_SECONDS = 8.0


@dataclass(frozen=True)
class MemberRehearsal:
    """Hold the forecast of a member.

    Attributes:
        compute_seconds: for all rows, on all replicas.
        peak_memory_bytes, peak_gpu_memory_bytes: the most that a worker took in the sample's run; None if unknown.
        rows: expected rows; with ``when`` not all rows of the table.
        rows_at_limit: rows computed at ``time_limit``; None without a limit.
    """

    name: str
    replicas: int
    startup_seconds: float
    compute_seconds: float
    peak_memory_bytes: int | None
    peak_gpu_memory_bytes: int | None
    rows: int
    rows_at_limit: int | None


@dataclass(frozen=True)
class Rehearsal:
    """Hold the forecast of a run.

    Attributes:
        seconds: from the command to the submission.
        other_seconds: the part of them that is neither start-up nor computing; below 0 if workers overlap.
        kept_seconds: the part of the limit that is kept for the last submission.
        host_bytes: memory of all processes that run at the same time.
        disk_bytes: by purpose.
        disk_free_bytes: at ``output_dir``.
        assumed: a sentence for each member with ``when``.
    """

    rows: int
    sample_rows: int
    seconds: float
    other_seconds: float
    time_limit_seconds: float | None
    kept_seconds: float
    members: tuple[MemberRehearsal, ...]
    host_bytes: int | None
    host_free_bytes: int | None
    disk_bytes: Mapping[str, int]
    disk_free_bytes: int
    output_dir: Path
    assumed: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[str, ...]:
        """Return why a run would not end as it should, a sentence for each reason."""
        problems = []
        limit = self.time_limit_seconds
        if limit is not None and self.seconds + self.kept_seconds > limit:
            counts = {member.name: member.rows - (member.rows_at_limit or 0) for member in self.members}
            rows = plural(self.rows, "row")
            missing = [f"{name} {count:,} of {rows}" for name, count in counts.items() if count]
            problems.append(
                f"it would not end within time_limit ({duration(limit)}): it takes about "
                f"{duration(self.seconds)}, and {duration(self.kept_seconds)} must be left for the last "
                f"submission; missing at the limit: {', '.join(missing) or 'perhaps the last rows'}"
            )
        needed = sum(self.disk_bytes.values())
        if needed > self.disk_free_bytes:
            problems.append(
                f"the disk of {self.output_dir} would be full: {gib(needed)} are needed, and "
                f"{gib(self.disk_free_bytes)} are free"
            )
        return tuple(problems)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what may go wrong: part of the processes' memory are pages of files, which the kernel can drop."""
        free, needed = self.host_free_bytes, self.host_bytes
        if free is None or needed is None or needed <= free:
            return ()
        return (
            f"it may run out of memory: its processes take up to {gib(needed)}, pages of files among them, and "
            f"{gib(free)} are free; standby: false or fewer replicas need less",
        )


def rehearse(
    loaded: LoadedConfig,
    make_display: Callable[[], Display],
    rows: int | None = None,
    lengths_from: Path | None = None,
    sample_rows: int | None = None,
    elapsed_seconds: float = 0.0,
    owns_process: bool = True,
) -> Rehearsal:
    """Run a sample and forecast the whole run.

    Args:
        rows: of the whole table; None: as many as the config's table has.
        lengths_from: a table with the columns that members read; its rows are used instead of the config's.
        sample_rows: None: as many as are needed for a steady speed.
        elapsed_seconds: what the run itself would have taken by now, such as Python's start.

    Raises:
        EnsembleError: with exit code 2 as for a run that stops before it writes anything; with 1 if the sample's
            run failed.
    """
    began = boot_seconds()
    prepared = prepare(loaded)
    config = loaded.config
    if not any(model.needs_worker for model in prepared.plan.models):
        raise ConfigError("models: no member needs a worker, so there is nothing to rehearse; run it")
    base = prepared.table
    if lengths_from is not None:
        needs = replace(prepared.needs, label_column=None, label_columns=(), limit=None)
        base = read_table(lengths_from, needs)
    rows = prepared.table.rows if rows is None else rows
    copies, more = divmod(rows, base.rows)
    chosen = np.sort(np.random.default_rng(config.seed).choice(base.rows, more, replace=False))
    source = whole_table = _rows_of(base, np.concatenate([np.tile(np.arange(base.rows), copies), chosen]))
    size = min(rows, sample_rows or _SAMPLE_ROWS)
    if rows > base.rows:  # equal rows are computed once, so that copies would make the sample too fast
        _, first = np.unique(base.row_digests(prepared.needs.columns), axis=0, return_index=True)
        source = _rows_of(base, np.sort(first))
        if source.rows < size:
            raise ConfigError(
                f"rehearse: {source.rows:,} different rows are too few for a sample of {size:,} of {rows:,} rows; "
                "name a table with rows of such lengths, for example --lengths-from train.csv"
            )
    whole = for_rows(prepared, loaded, whole_table)
    before_seconds = elapsed_seconds + boot_seconds() - began

    say = make_display().say
    folder = Path(tempfile.mkdtemp(prefix="ensemble-rehearsal-"))
    keep = False
    try:
        while True:
            origin = "" if lengths_from is None else f" like those of {shown_path(lengths_from)}"
            say(f"a run of {size:,} of {plural(rows, 'row')}{origin}, to measure the speed")
            sample = _sample(prepared, loaded, source, size, folder / str(size))
            began = boot_seconds()
            try:
                report = run_prepared(sample, make_display(), True, began, owns_process)
            except Interrupted as stopped:
                raise Interrupted(stopped.exit_code - 128, "nothing of a rehearsal is kept") from None
            wall_seconds = boot_seconds() - began
            if report.status != "complete":
                keep = True
                texts = [f"member {failure.member} failed: {failure.message}" for failure in report.failures]
                raise MembersFailed([*texts, f"the sample's run and its logs are in {folder / str(size)}"])
            computed = sum(member.counters.predict_seconds for member in report.members)
            if sample_rows is not None or size == source.rows or computed >= _MIN_SECONDS:
                return _forecast(whole, sample, report, wall_seconds, before_seconds)
            size = min(source.rows, math.ceil(size * 1.5 * _MIN_SECONDS / max(computed, 0.1)))
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _rows_of(table: InputTable, numbers: npt.NDArray[np.int64]) -> InputTable:
    return table.derived(numbers, table.ids.take(pa.array(numbers)))


def sample_rows_of(lengths: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    """Return the row numbers of a sample, in the table's order: a strip of rows of like length from each quantile.

    The first strip has the longest row, so that the sample takes as much memory as the whole; the others are from
    the middle of their part of the rows, by length.
    """
    rows = len(lengths)
    if size >= rows:
        return np.arange(rows)
    order = np.argsort(-lengths, kind="stable")
    strips = math.ceil(size / _STRIP_ROWS)
    parts = np.linspace(0, rows, strips + 1).astype(np.int64)
    counts = np.diff(np.linspace(0, size, strips + 1).astype(np.int64))
    chosen = []
    for number, (start, stop, count) in enumerate(zip(parts, parts[1:], counts, strict=False)):
        first = start if number == 0 else start + (stop - start - count) // 2
        chosen.append(order[first : first + count])
    return np.sort(np.concatenate(chosen))


def with_speeds(plan: Plan, speeds: Mapping[str, Speed]) -> Plan:
    """Return the plan with other speeds, by member."""
    models = tuple(replace(model, speed=speeds.get(model.member, model.speed)) for model in plan.models)
    return replace(plan, models=models)


def with_shares(plan: Plan, shares: Mapping[str, float]) -> Plan:
    """Return the plan with other expected shares of members and jobs with ``when``, by their names."""
    models = []
    for model in plan.models:
        undecided = {number: share_of_job(model.jobs[number].selection, shares) for number in model.undecided}
        models.append(replace(model, undecided=undecided))
    return replace(plan, models=tuple(models))


def forecast_seconds(plan: Plan, fraction: float = 1.0) -> float:
    """Return the seconds from the first worker's start until each member has done this fraction of its rows."""
    demands = [replace(of, compute_seconds=of.compute_seconds * fraction) for of in plan.demands]
    return plan.seconds_of(demands)


def reached_fraction(plan: Plan, seconds_left: float) -> float:
    """Return the fraction of the rows that each member computes within this time: members take turns."""
    return _largest_share(lambda share: forecast_seconds(plan, share), seconds_left)


def share_in_time(
    plan: Plan, shares: Mapping[str, float], timed: Collection[str], seconds_left: float
) -> float:
    """Return the share of the rows that works with ``share: as_time_allows`` compute within this time."""

    def seconds_of(share: float) -> float:
        return forecast_seconds(with_shares(plan, {**shares, **dict.fromkeys(timed, share)}))

    return _largest_share(seconds_of, seconds_left)


def _largest_share(seconds_of: Callable[[float], float], seconds_left: float) -> float:
    """Return the largest share, in steps of a thousandth, that takes no more than this time; 0 if none does."""
    steps = bisect_right(range(1001), seconds_left, key=lambda step: seconds_of(step / 1000))
    return max(0, steps - 1) / 1000


def _sample(
    prepared: Prepared, loaded: LoadedConfig, table: InputTable, size: int, output_dir: Path
) -> Prepared:
    """Return a run of some rows into another directory, of members that need a worker and those that they read."""
    config = loaded.config
    working = [model for model in config.models if member_kind(model).needs_worker]
    read = {name for model in working for name in model.input_names}
    models = [model for model in config.models if model in working or model.name in read]
    # A method may have keys for members by name.
    ensemble = config.ensemble if len(models) == len(config.models) else EnsembleConfig()
    changed = derived_run(loaded, models, output_dir, ensemble=ensemble, time_limit=None, report=False)
    sample = for_rows(prepared, changed, _rows_of(table, sample_rows_of(table.text_bytes, size)))
    # A launcher ends with its run.
    return replace(sample, launcher=make_launcher(config.launcher, config.hang_timeout))


def _forecast(
    whole: Prepared, sample: Prepared, report: RunReport, wall_seconds: float, before_seconds: float
) -> Rehearsal:
    """Scale the sample's run, which took ``wall_seconds`` after its checks, to the whole table."""
    config, rows, limit = whole.config, whole.table.rows, whole.config.time_limit
    computed_as = {model.name: model.computed_as for model in config.models}
    speeds = measured_speeds(report, [gpu.name for gpu in whole.plan.gpus], computed_as)
    sample_dir = sample.config.output_dir
    shares = expected_shares(config, whole.models, whole.inspected, {}, sample_dir, "of the sample")
    expected = {work: share.share for work, share in shares.items()}
    plan = with_shares(with_speeds(whole.plan, speeds), expected)
    csv_bytes = round((sample_dir / "ensemble.csv").stat().st_size * rows / sample.table.rows)
    # What the forecast leaves out: gaps between workers, folders, the merge; less what standby saves.
    besides = wall_seconds - forecast_seconds(with_speeds(sample.plan, speeds))
    other = before_seconds + besides
    kept, reached = 0.0, None
    if limit is not None:
        kept = reserve_seconds(0.0, len(config.models), limit)
        seconds_left = limit - kept - before_seconds - besides
        reached = reached_fraction(plan, seconds_left)
        timed = [work for work, share in shares.items() if share.is_timed]
        expected |= dict.fromkeys(timed, share_in_time(plan, expected, timed, seconds_left))

    reports = {member.name: member for member in report.members}
    working: dict[str, list[ModelPlan]] = {}
    for model in plan.models:
        if model.needs_worker:
            working.setdefault(model.member, []).append(model)
    members = tuple(_member(models, reports[name], rows, reached) for name, models in working.items())
    # Shards stay until the run is complete; each view has both shards and a file.
    copies = sum(1 + max(1, 2 * len(model.counted_views)) for model in config.models)
    submissions = 0 if config.submission is None else 1 + (config.submission.path is not None)
    return Rehearsal(
        rows=rows,
        sample_rows=sample.table.rows,
        seconds=other + forecast_seconds(plan),
        other_seconds=other,
        time_limit_seconds=limit,
        kept_seconds=kept,
        members=members,
        host_bytes=_host_bytes(plan, members),
        host_free_bytes=None if plan.host is None else max(0, plan.host.total_bytes - plan.host.used_bytes),
        disk_bytes={
            "table": whole.table.column_bytes,
            "predictions": csv_bytes * copies,
            "ensemble": csv_bytes,
            "submission": csv_bytes * submissions,
        },
        disk_free_bytes=free_bytes(config.output_dir) or 0,
        output_dir=config.output_dir.absolute(),
        assumed=tuple(
            f"{work}: `when` is expected to select {100 * expected[work]:.0f} % of the rows ({share.why})"
            for work, share in shares.items()
        ),
    )


def _member(
    models: Sequence[ModelPlan], report: MemberReport, rows: int, reached: float | None
) -> MemberRehearsal:
    shares = [model.undecided.get(number, 1.0) for model in models for number in range(len(model.jobs))]
    expected_rows = round(rows * max(shares))
    return MemberRehearsal(
        name=report.name,
        replicas=max(model.replicas for model in models),
        startup_seconds=sum(model.speed.startup_seconds for model in models),
        compute_seconds=sum(model.demand.compute_seconds / model.replicas for model in models),
        peak_memory_bytes=report.peak("peak_memory_bytes") or None,
        peak_gpu_memory_bytes=report.peak("peak_gpu_memory_bytes") or None,
        rows=expected_rows,
        rows_at_limit=None if reached is None else round(expected_rows * reached),
    )


def _host_bytes(plan: Plan, members: Sequence[MemberRehearsal]) -> int | None:
    """Return the memory of the largest workers that can run at the same time, of a standby, and of this process."""
    if any(member.peak_memory_bytes is None for member in members):
        return None
    peaks = sorted(member.peak_memory_bytes or 0 for member in members for _ in range(member.replicas))
    working = [model for model in plan.models if model.needs_worker]
    on_cpu = max((round(1 / model.cpu_share) for model in working if not model.gpus), default=0)
    at_a_time = len(plan.gpus) * plan.config.workers_per_gpu + on_cpu
    standby = STANDBY_HOST_BYTES if plan.gpus and plan.config.standby and len(working) > 1 else 0
    parent = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # in kB on Linux, see getrusage(2)
    return sum(peaks[-at_a_time:]) + standby + parent
