"""A run that is not made: how long it would take for a table of any size, by a real run of a sample.

The sample's rows are a slice of each length of the whole, so that its batches are like those of the whole; what it
measures are seconds per work, seconds to start, and all that a forecast by these two leaves out.  Its run directory
is a temporary folder: nothing of a real run is touched.
"""

from __future__ import annotations

import math
import resource
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.clock import boot_seconds
from ensemble.common.errors import ConfigError, Interrupted, MembersFailed
from ensemble.common.files import atomic_path
from ensemble.common.gpus import driver_session
from ensemble.common.text import duration, gib, plural, shown_path
from ensemble.config import EnsembleConfig, LoadedConfig
from ensemble.data.csv_file import write_csv
from ensemble.data.table import InputTable, read_table
from ensemble.members.registry import member_kind
from ensemble.pipeline.cascade import expected_shares
from ensemble.pipeline.prepare import for_rows, prepare
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.run import Display, run_prepared
from ensemble.pipeline.run_report import MemberReport, RunReport, measured_speeds
from ensemble.planning.chunks import Chunk
from ensemble.planning.forecast import Speed
from ensemble.planning.plan import WORKER_HOST_BYTES, MemberPlan, Plan, without_done
from ensemble.scheduling.deadline import Share, goals, reserve_seconds
from ensemble.scheduling.launchers.base import make_launcher

# Rows of a sample at first, in strips of rows next to each other in length: a batch then holds rows of like length,
# as the whole table's batches do.
SAMPLE_ROWS = 384
STRIP_ROWS = 16
# A sample that computes for less than this says little of a steady speed; then a larger one is measured.
_MIN_SECONDS = 8.0
_WANTED_SECONDS = 12.0
# To how much of the work it is told how far members get.
_FRACTION = 1e-4


@dataclass(frozen=True)
class MemberRehearsal:
    """What a member would take.

    Attributes:
        startup_seconds: until one of its workers computes.
        compute_seconds: for all rows, on all of its replicas.
        peak_memory_bytes: of a worker's process in the sample's run; None where it did not tell.
        peak_gpu_memory_bytes: the most that one took of a GPU in the sample's run; None without GPUs.
        forecast_bytes: what the plan says of a device with the longest row of the whole; None: not known.
        usable_bytes: of the GPU that has the least to use; None without GPUs.
        rows: that it would compute: all, or with ``when`` what the sample tells.
        rows_at_limit: of these at ``time_limit``; None without one.
    """

    name: str
    replicas: int
    startup_seconds: float
    compute_seconds: float
    peak_memory_bytes: int | None
    peak_gpu_memory_bytes: int | None
    forecast_bytes: int | None
    usable_bytes: int | None
    rows: int
    rows_at_limit: int | None


@dataclass(frozen=True)
class Rehearsal:
    """What a run would take.

    Attributes:
        rows: of the whole.
        sample_rows: that were computed to know.
        seconds: from command to submission.
        other_seconds: those of them before the first worker, between workers, and after the last; less than 0 where
            more is saved, as by workers that start while others compute.
        time_limit_seconds: None where the config has none.
        kept_seconds: of the limit, for the last submission.
        host_bytes: memory that the run's processes take at a time; None where a worker did not tell.
        host_free_bytes: None where the system does not tell.
        disk_bytes: by what it is for.
        disk_free_bytes: where ``output_dir`` is.
        assumed: of members with ``when``, a sentence each.
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
        """Why a run would not end as it should, a sentence each; empty where it would."""
        found = []
        limit = self.time_limit_seconds
        if limit is not None and self.seconds + self.kept_seconds > limit:
            counts = {one.name: one.rows - (one.rows_at_limit or 0) for one in self.members}
            rows = plural(self.rows, "row")
            missing = [f"{name} {count:,} of {rows}" for name, count in counts.items() if count]
            found.append(
                f"it would not end within time_limit ({duration(limit)}): it takes about "
                f"{duration(self.seconds)}, and {duration(self.kept_seconds)} must be left for the last "
                f"submission; missing at the limit: {', '.join(missing) or 'perhaps the last rows'}"
            )
        if (needed := sum(self.disk_bytes.values())) > self.disk_free_bytes:
            found.append(
                f"the disk of {self.output_dir} would be full: {gib(needed)} are needed, and "
                f"{gib(self.disk_free_bytes)} are free"
            )
        return tuple(found)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What may go wrong: a process's memory counts pages of weight files, which the kernel can give up."""
        free, needed = self.host_free_bytes, self.host_bytes
        if free is None or needed is None or needed <= free:
            return ()
        return (
            f"it may run out of memory: its processes take up to {gib(needed)}, pages of files among them, and "
            f"{gib(free)} are free; standby: false or fewer replicas need less",
        )


@driver_session()
def rehearse(
    loaded: LoadedConfig,
    make_display: Callable[[], Display],
    rows: int | None = None,
    lengths_from: Path | None = None,
    sample_rows: int | None = None,
    elapsed_seconds: float = 0.0,
    clock: Callable[[], float] = boot_seconds,
    owns_process: bool = True,
) -> Rehearsal:
    """Run a sample, and say what the whole would take.

    Args:
        make_display: shows a sample's run.
        rows: of the whole; None: as many as the config's table has.
        lengths_from: a table with the columns that members read, whose rows are taken instead.
        sample_rows: how many are computed; None: what takes long enough to know.
        elapsed_seconds: what the run itself would have taken by now as well, such as Python's start.
        owns_process: as :func:`heed_signals` takes it.

    Raises:
        EnsembleError: of exit code 2 as a run would end before it writes anything; 1 where the sample's run failed.
    """
    began = clock()
    prepared = prepare(loaded)
    before = elapsed_seconds + clock() - began
    config = loaded.config
    if not any(member.needs_worker for member in prepared.plan.members):
        raise ConfigError("models: no member needs a worker, so there is nothing to rehearse; run it")
    base = prepared.table
    if lengths_from is not None:
        base = read_table(
            lengths_from, replace(prepared.needs, label_column=None, label_columns=(), limit=None)
        )
    rows = prepared.table.rows if rows is None else rows
    table = _table_of(base, rows, config.seed)
    source, least = table, min(rows, sample_rows or SAMPLE_ROWS)
    if rows > base.rows:  # equal rows are computed once, so copies say nothing of a larger table's time
        source = _different(base, prepared.needs.columns)
        if source.rows < least:
            raise ConfigError(
                f"rehearse: {source.rows:,} different rows are too few for a sample of {least:,} of {rows:,} rows; "
                "name a table with rows of such lengths, for example --lengths-from train.csv"
            )
    began = clock()
    whole = for_rows(prepared, loaded, table)
    before += clock() - began

    say = make_display().say
    size = least
    folder = Path(tempfile.mkdtemp(prefix="ensemble-rehearsal-"))
    keep = False
    try:
        while True:
            origin = "" if lengths_from is None else f" like those of {shown_path(lengths_from)}"
            say(f"a run of {size:,} of {plural(rows, 'row')}{origin}, to measure the speed")
            sample = _sample(prepared, loaded, source, size, folder / str(size))
            began = clock()
            try:
                report = run_prepared(sample, make_display(), True, began, clock, owns_process)
            except Interrupted as stopped:
                raise Interrupted(stopped.exit_code - 128, "nothing of a rehearsal is kept") from None
            wall_seconds = clock() - began
            if report.status != "complete":
                keep = True
                texts = [f"member {one.member} failed: {one.message}" for one in report.failures]
                raise MembersFailed([*texts, f"the sample's run and its logs are in {folder / str(size)}"])
            computed = sum(worker.predict_seconds for member in report.members for worker in member.workers)
            if sample_rows is not None or size == source.rows or computed >= _MIN_SECONDS:
                break
            size = min(source.rows, math.ceil(size * _WANTED_SECONDS / max(computed, 0.1)))
        return _result(whole, sample, report, wall_seconds, before, folder)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _table_of(base: InputTable, rows: int, seed: int) -> InputTable:
    """Return a table of ``rows`` rows: all of the base's as often as they go in, and some of them once more."""
    whole, rest = divmod(rows, base.rows)
    chosen = np.sort(np.random.default_rng(seed).choice(base.rows, rest, replace=False))
    numbers = np.concatenate([np.tile(np.arange(base.rows), whole), chosen]).astype(np.int64)
    # Ids of about the length that the base's have; 4 bytes of an id are its offset.
    width = max(len(str(rows)), round(base.ids.nbytes / base.rows) - 4)
    ids = pa.chunked_array([pa.array([f"{number:0{width}}" for number in range(rows)], pa.string())])
    return base.derived(numbers, ids)


def _different(table: InputTable, columns: Sequence[str]) -> InputTable:
    """Return the table without the rows that equal an earlier one in these columns."""
    _, first = np.unique(table.row_digests(columns), axis=0, return_index=True)
    numbers = np.sort(first).astype(np.int64)
    return table.derived(numbers, table.ids.take(pa.array(numbers)))


def sample_rows_of(lengths: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    """Row numbers of a sample, in the table's order: strips of rows of like length, as many from each quantile.

    The first strip has the longest row, so that the sample takes the memory that the whole does; each other one is
    from the middle of its part of the rows, by length.

    Args:
        lengths: bytes of text per row, [rows].
        size: rows wanted, at most all.
    """
    rows = len(lengths)
    if size >= rows:
        return np.arange(rows)
    order = np.argsort(-lengths, kind="stable")
    strips = math.ceil(size / STRIP_ROWS)
    parts = np.linspace(0, rows, strips + 1).astype(np.int64)
    counts = np.diff(np.linspace(0, size, strips + 1).astype(np.int64))
    chosen = []
    for number, (start, stop, count) in enumerate(zip(parts, parts[1:], counts, strict=False)):
        first = start if not number else start + (stop - start - count) // 2
        chosen.append(order[first : first + count])
    return np.sort(np.concatenate(chosen))


def rows_reached(chunks: Sequence[Chunk], fraction: float) -> int:
    """How many rows are done when this fraction of the work is, chunk by chunk; within one, rows cost the same.

    Args:
        chunks: in the order of dispatch; their costs add up to 1.
    """
    rows, left = 0, fraction
    for chunk in chunks:
        if chunk.cost > left:
            return rows + (int(chunk.rows * left / chunk.cost) if left > 0 else 0)
        rows += chunk.rows
        left -= chunk.cost
    return rows


def with_speeds(plan: Plan, speeds: Mapping[str, Speed]) -> Plan:
    """The plan's way of sharing the devices, by other speeds."""
    members = tuple(replace(one, speed=speeds.get(one.name, one.speed)) for one in plan.members)
    return replace(plan, members=members)


def forecast_seconds(plan: Plan, fraction: float = 1.0) -> float:
    """From the first worker's start until each member has done this fraction, by the speeds of the plan."""
    jobs = [replace(job, compute_seconds=job.compute_seconds * fraction) for job in plan.jobs]
    return plan.seconds_of(jobs)


def missing_rows(plan: Plan, seconds_left: float) -> dict[str, int]:
    """Rows that each member would not reach in any view, by name: members take turns, so that all get equally far.

    Args:
        plan: with measured speeds.
        seconds_left: from the first worker's start until all computing must stop.
    """
    # First views come before all others, and a row that a member has in its first view counts as reached.
    first_views = {
        one.name: replace(one.speed, seconds_per_work=one.speed.seconds_per_work / one.views)
        for one in plan.members
    }
    plan = with_speeds(plan, first_views)
    working = [member for member in plan.members if member.needs_worker]
    shares = [
        Share(
            name=one.name,
            fraction_done=0.0,
            seconds_per_member=one.job.compute_seconds * max(one.gpus, 1) / (1 if one.gpus else one.replicas),
            startup_seconds=one.speed.startup_seconds,
            gpus=one.gpus,
        )
        for one in working
    ]
    # On the CPU its replicas share one device, and so do their seconds above.
    devices = len(plan.gpus) * plan.config.max_workers_per_gpu + any(not one.gpus for one in working)
    reached = goals(shares, devices, seconds_left)
    # Goals count all devices as busy to the end, the forecast knows who can share what is left.
    within, beyond = 0.0, 1.0
    if forecast_seconds(plan) <= seconds_left:
        within = 1.0
    elif forecast_seconds(plan, 0.0) < seconds_left:
        while beyond - within > _FRACTION:
            middle = (within + beyond) / 2
            if forecast_seconds(plan, middle) <= seconds_left:
                within = middle
            else:
                beyond = middle
    fractions = {name: min(one, within) if within else one for name, one in reached.items()}
    return {one.name: one.table_rows - _reached(one, fractions[one.name]) for one in working}


def _reached(member: MemberPlan, fraction: float) -> int:
    if fraction >= 1:  # the costs of chunks add up to 1 as far as rounding goes
        return member.table_rows
    nothing = np.zeros(len(member.order), dtype=np.bool_)
    chunks = without_done(member, nothing, is_timed=True).chunks
    return min(member.table_rows, rows_reached(chunks, fraction / member.views))


def _sample(
    prepared: Prepared, loaded: LoadedConfig, table: InputTable, size: int, output_dir: Path
) -> Prepared:
    """A run of some of the rows into a directory of its own, which merges, but has no submission and no limit."""
    config = loaded.config
    models = tuple(
        # Of weight 0 it would not be merged; and how fast a member with ``when`` is more rows tell better than few.
        model.model_copy(update={"weight": 1.0, "when": None})
        for model in config.models
        if member_kind(model).needs_worker
    )
    keys: dict[str, object] = {
        "models": models,
        "submission": None,
        "time_limit": None,
        "limit": None,
        "output_dir": output_dir,
        "report": False,
    }
    if len(models) < len(config.models):  # a method may have keys for members by name
        keys["ensemble"] = EnsembleConfig()
    chosen = sample_rows_of(table.text_bytes, size)
    ids = table.ids.take(pa.array(chosen))
    rows = table.derived(chosen, ids)
    changed = replace(loaded, config=config.model_copy(update=keys))
    made = for_rows(prepared, changed, rows)
    # Launchers end with their run.
    launcher = make_launcher(config.launcher, config.hang_timeout)
    return replace(made, launcher=launcher)


def _result(
    whole: Prepared, sample: Prepared, report: RunReport, wall_seconds: float, before: float, folder: Path
) -> Rehearsal:
    """What the sample's run says of the whole.

    Args:
        wall_seconds: what the sample's run took, its checks left out.
        before: seconds until a run of the whole would have passed its checks.
        folder: for a file of the size of what would be written.
    """
    config, rows = whole.config, whole.table.rows
    computed_as = {model.name: model.computed_as for model in config.models}
    speeds = measured_speeds(report, [gpu.name for gpu in whole.plan.gpus], computed_as)
    plan = with_speeds(whole.plan, speeds)
    shares = expected_shares(config, whole.inspected, {}, None, sample.config.output_dir, "of the sample")
    plan = replace(
        plan,
        members=tuple(
            replace(one, expected_share=shares[one.name].share) if one.name in shares else one
            for one in plan.members
        ),
    )
    # What is written after the last row, and before the first one under a limit: a CSV of numbers that are as long.
    names = [config.data.id_column, *config.labels]
    generator, columns = np.random.default_rng(0), len(config.labels)
    values = generator.dirichlet(np.ones(columns), rows) if columns > 1 else generator.random((rows, 1))
    began = boot_seconds()
    with atomic_path(folder / "size.csv") as temporary:
        write_csv(temporary, names, [whole.table.ids, *map(pa.array, values.T)])
    writing = boot_seconds() - began
    csv_bytes = (folder / "size.csv").stat().st_size
    # An ensemble and a submission; under a limit there is a first one before any worker starts.
    merged_files = 1 + (config.submission is not None)
    writes = len(config.models) + merged_files * (1 if config.time_limit is None else 2)
    # Gaps between workers, their ends, folders, the merge, and what standing by saves: all that the forecast
    # leaves out of the sample's run.
    besides = wall_seconds - forecast_seconds(with_speeds(sample.plan, speeds))
    other = before + besides + writes * writing
    kept = 0.0
    missing: Mapping[str, int] = {}
    if (limit := config.time_limit) is not None:
        kept = reserve_seconds(merged_files * writing, len(config.models), limit)
        missing = missing_rows(plan, max(0.0, limit - kept - before - besides))

    by_name = {member.name: member for member in report.members}
    members = tuple(
        _member(one, by_name[one.name], rows, missing[one.name] if missing else None)
        for one in plan.members
        if one.needs_worker
    )
    is_copied = config.submission is not None and config.submission.path is not None
    output_dir = config.output_dir.absolute()
    place = next(path for path in (output_dir, *output_dir.parents) if path.is_dir())
    host = plan.host
    return Rehearsal(
        rows=rows,
        sample_rows=sample.table.rows,
        seconds=other + forecast_seconds(plan),
        other_seconds=other,
        time_limit_seconds=limit,
        kept_seconds=kept,
        members=members,
        host_bytes=_host_bytes(plan, members),
        host_free_bytes=None if host is None else max(0, host.total_bytes - host.used_bytes),
        disk_bytes={
            "table": whole.table.column_bytes,
            # Shards stay until the run is complete; views have both of their own.
            "predictions": csv_bytes
            * (
                len(config.models)
                + len(members)
                + sum(2 * len(views) - 1 for model in config.models if (views := model.counted_views))
            ),
            "ensemble": csv_bytes,
            "submission": csv_bytes * (1 + is_copied) if config.submission is not None else 0,
        },
        disk_free_bytes=shutil.disk_usage(place).free,
        output_dir=output_dir,
        assumed=tuple(
            f"{name}: `when` is expected to select {100 * one.share:.0f} % of the rows ({one.why})"
            for name, one in shares.items()
        ),
    )


def _member(plan: MemberPlan, report: MemberReport, rows: int, missing: int | None) -> MemberRehearsal:
    workers = report.workers
    peaks = [one.peak_memory_bytes for one in workers if one.peak_memory_bytes is not None]
    gpu_peaks = [one.peak_gpu_memory_bytes for one in workers if one.peak_gpu_memory_bytes is not None]
    placement = plan.placement
    rooms = [placement.fits[uuid].room_bytes for uuid in placement.devices if uuid in placement.fits]
    forecast = None
    if (needed := placement.footprint) is not None and plan.gpus:
        budgets = [one.token_budget for one in workers if one.token_budget is not None]
        forecast = needed.peak_bytes(plan.gpus, max([needed.width, *budgets]))
    return MemberRehearsal(
        name=plan.name,
        replicas=plan.replicas,
        startup_seconds=plan.speed.startup_seconds,
        compute_seconds=plan.job.compute_seconds / plan.replicas,
        peak_memory_bytes=max(peaks, default=None),
        peak_gpu_memory_bytes=max(gpu_peaks, default=None),
        forecast_bytes=forecast,
        usable_bytes=min(rooms, default=None) if plan.gpus else None,
        rows=round(rows * plan.expected_share),
        rows_at_limit=None if missing is None else round((rows - missing) * plan.expected_share),
    )


def _host_bytes(plan: Plan, members: Sequence[MemberRehearsal]) -> int | None:
    """Of the largest workers that can run at a time, of one that stands by, and of this process."""
    peaks: list[int] = []
    for one in members:
        if one.peak_memory_bytes is None:
            return None
        peaks += [one.peak_memory_bytes] * one.replicas
    working = [member for member in plan.members if member.needs_worker]
    on_cpu = max((one.replicas for one in working if not one.gpus), default=0)
    at_a_time = len(plan.gpus) * plan.config.max_workers_per_gpu + on_cpu
    stands_by = WORKER_HOST_BYTES if plan.gpus and plan.config.standby and len(working) > 1 else 0
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # in kB on Linux, see getrusage(2)
    return sum(sorted(peaks, reverse=True)[:at_a_time]) + stands_by + own
