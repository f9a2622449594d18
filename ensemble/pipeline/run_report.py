"""Define the content of run.json as typed values: what ran, where, for how long, and with which results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from ensemble.common.errors import DataError
from ensemble.common.files import unreadable, write_text
from ensemble.common.gpus import Device
from ensemble.common.protocol import Activation, Counters
from ensemble.common.redact import MASK
from ensemble.common.text import duration, plural
from ensemble.config.schema import FittingConfig, MetricConfig, RuleConfig
from ensemble.config.values import AnyWeight, weight_numbers
from ensemble.jobs.work import Computation
from ensemble.merging.scoring import CascadeComparison, Gain, Score
from ensemble.planning.forecast import Speed
from ensemble.scheduling.records import Failure, FaultRecord, Gap, NodeChange, WorkerRecord
from ensemble.scheduling.state import Phase

SCHEMA: Final = "ensemble run 1"  # another number: run.json of other versions is refused
# ``time_limit``: merged, but not with all rows of all members.
Status = Literal["running", "complete", "time_limit", "failed", "interrupted"]
PeakName = Literal["peak_memory_bytes", "peak_gpu_memory_bytes", "peak_gpu_allocated_bytes"]
MERGED: Final = ("complete", "time_limit")  # the statuses of runs that have written an ensemble


@dataclass(frozen=True)
class MemoryForecast:
    """Report the planned memory of a replica on each device, with the token budget of the workers."""

    parameters: int
    weight_bytes: int
    context_bytes: int
    peak_bytes: int
    token_budget: int
    width: int


@dataclass(frozen=True)
class CascadeReport:
    """Report what ``when`` of a member or view selected.

    ``rows`` is how many were selected, for ``share: as_time_allows`` how many there was time for at the end.
    """

    when: dict[str, float | str]
    rows: int
    is_selected: bool


@dataclass(frozen=True)
class RuleReport:
    """Report a rule of the config, and how many rows it applied to."""

    when: str
    set: dict[str, float] | None
    mask: tuple[str, ...] | None
    rows: int

    @property
    def config(self) -> RuleConfig:
        return RuleConfig.model_construct(when=self.when, set=self.set, mask=self.mask)


@dataclass(frozen=True)
class ViewReport:
    """Report a view of a member, and how many rows it has; None before the first merge.

    ``fingerprint`` is that of its job.
    """

    weight: float
    rows: int | None
    fingerprint: str = ""
    cascade: CascadeReport | None = None


@dataclass(frozen=True, kw_only=True)
class MemberProgress:
    """Hold how far a member is, for displays while it runs, and for its report; rows count once for each job.

    Attributes:
        replicas: 0: its predictions were made elsewhere.
        jobs: how many it has.
        chunks: how many were left to do when this run began.
        rows: how many it is to have, as far as that is known.
        reused_rows: how many were done when this run began.
        rows_done: with chunks in progress; so are ``tokens_done``, and the share of the work that this run has
            done, ``computed_share``.
        fraction: the share of all of its work that is done.
        seconds: of computing, one model behind the other; None before the first chunk.
        seconds_left: at the speed so far; None before this run has done anything.
        lost_rows: at least so many were computed and not kept, because the time limit ended their chunk.
        batch_size: as in the config.
        in_hand: the titles of jobs without rows that workers do, and how far these are.
    """

    name: str
    phase: Phase
    replicas: int = 1
    has_rows: bool = True
    has_when: bool = False
    jobs: int = 1
    chunks: int = 0
    rows: int = 0
    reused_rows: int = 0
    rows_done: int = 0
    tokens_done: int = 0
    fraction: float = 0.0
    computed_share: float = 0.0
    seconds: float | None = None
    seconds_left: float | None = None
    lost_rows: int = 0
    batch_size: int | None = None
    in_hand: tuple[str, ...] = ()
    faults: tuple[FaultRecord, ...] = ()
    failure: Failure | None = None
    workers: tuple[WorkerRecord, ...] = ()

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens_done / self.seconds if self.seconds and self.tokens_done else None

    @property
    def rows_per_second(self) -> float | None:
        """Return the speed of members without tokens."""
        computed = max(0, self.rows_done - self.reused_rows)
        return computed / self.seconds if self.seconds and computed and not self.tokens_done else None


@dataclass(frozen=True, kw_only=True)
class MemberReport(MemberProgress):
    """Report a member.  With views, all counts of rows except ``bad_rows`` count a row once for each view.

    Attributes:
        inputs: the members whose predictions it reads.
        workers: those of an earlier run, if that completed the member.
        counters: of this run's chunks.
        taken_over: how many rows were taken over from each other work, by its path.
        work: what this run has done, in the units of ``speed``.
        bad_rows: the reason of each table row that could not be computed.
        calibration: of the merge, as in the config; empty if there is none.
        given_files: absolute paths of its predictions, if they were made elsewhere.
        computed: what this run computed rows with; None if it computed none.
        computed_before: what earlier runs computed rows with, the oldest first.
    """

    status: Literal["failed", "left out", "complete", "unfinished"]
    weight: AnyWeight
    activation: Activation
    fingerprint: str | None
    computed_as: str
    speed: Speed
    work: float
    forecast: MemoryForecast | None = None
    counters: Counters = field(default_factory=Counters)
    taken_over: dict[str, int] = field(default_factory=dict)
    bad_rows: dict[str, str] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    cascade: CascadeReport | None = None
    calibration: dict[str, Any] = field(default_factory=dict)
    views: dict[str, ViewReport] = field(default_factory=dict)
    given_files: tuple[str, ...] = ()
    computed: Computation | None = None
    computed_before: tuple[Computation, ...] = ()

    @property
    def computations(self) -> tuple[Computation, ...]:
        """Return what each run computed rows with, this run last."""
        return self.computed_before if self.computed is None else (*self.computed_before, self.computed)

    @property
    def has_weight(self) -> bool:
        return any(weight_numbers(self.weight))

    @property
    def workers_now(self) -> tuple[WorkerRecord, ...]:
        return self.workers if self.chunks else ()

    @property
    def worker_counters(self) -> Counters:
        """Return the sum of the workers' counters, of an earlier run's if that completed the member."""
        return sum((worker.counters for worker in self.workers), Counters())

    def peak(self, name: PeakName) -> int:
        """Return the most memory that a worker took; 0 if it is not known."""
        closed = [worker.closed for worker in self.workers if worker.closed is not None]
        return max((getattr(ending, name) or 0 for ending in closed), default=0)


@dataclass(frozen=True)
class AllowedLabelsReport:
    """Report where the possible labels of rows come from, in words how many they are, and their file's SHA-256."""

    source: str
    text: str
    sha256: str


@dataclass(kw_only=True)
class Results:
    """Hold what the merge of a run has made.

    Attributes:
        scores: by member name, and of the ensemble.
        gain: of the ensemble over its best member; None if no member has all rows, or there is only one.
        metric_remarks: what metrics of the config are the mean of, and why some have no value.
        answers: scores of the answers by the submission's column and by metric.
        files: absolute paths by what they are, in the order in which they were made.
        merged_rows: how many rows each merged member gave.
        filled_rows: how many rows no member gave.
        kept_submission: a sentence about one of an earlier run that stays; empty: this run's own is written.
        comparisons: of the ensemble with and without each member or job with ``when``, if the truth is known.
        job_rows: how many rows each job has, of members whose mean of jobs this run has made.
        partial_rows: how many rows of these members are the mean of some of their views only.
        fitted_on: the config's ``fitted_on``, if the run has scored the same rows; else None.
        allowed_labels: once they have been applied; None: all labels are possible in each row.
    """

    scores: dict[str, Score] = field(default_factory=dict)
    gain: Gain | None = None
    metric_remarks: tuple[str, ...] = ()
    answers: dict[str, dict[str, float]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    merged_rows: dict[str, int] = field(default_factory=dict)
    filled_rows: int = 0
    kept_submission: str = ""
    comparisons: dict[str, CascadeComparison] = field(default_factory=dict)
    job_rows: dict[str, int] = field(default_factory=dict)
    partial_rows: dict[str, int] = field(default_factory=dict)
    fitted_on: FittingConfig | None = None
    allowed_labels: AllowedLabelsReport | None = None


@dataclass(kw_only=True)
class RunReport(Results):
    """Hold the content of run.json: seconds, bytes and counts; no text is a secret.

    Attributes:
        files: the members' in the config's order, then the others.
        written_at: in UTC, as ISO 8601.
        seconds_left: from ``written_at`` on; None if it is not known.
        timing: seconds by phase of the whole run.
        idle_gaps: in which a device computed nothing between two members.
        nodes: of a cluster, which joined or were lost while the run went on, in this order.
        explanation: a sentence about where the time went, if a time limit left none to compute rows.
        rules: in the config's order, once they have been applied.
        config: the YAML as it was written; for several files, or with ``${CONFIG_DIR}``, all in one, with the
            overrides and that folder.
        table: the absolute path of the input table.
        metrics: the config's.
        tuned_on: the config's ``tuned_on``; None if ``tune`` wrote none of its files.
    """

    schema: Literal["ensemble run 1"]
    status: Status
    pid: int
    versions: dict[str, str]
    written_at: str
    platform: str
    devices: tuple[Device, ...]
    rows: int
    timing: dict[str, float]
    members: tuple[MemberReport, ...]
    on_bad_row: str
    seconds_left: float | None = None
    driver_version: str | None = None
    null_texts: dict[str, int] = field(default_factory=dict)
    idle_gaps: tuple[Gap, ...] = ()
    left_out: tuple[str, ...] = ()
    nodes: tuple[NodeChange, ...] = ()
    explanation: str = ""
    ensemble: dict[str, Any] = field(default_factory=dict)
    rules: tuple[RuleReport, ...] = ()
    warnings: tuple[str, ...] = ()
    config: str = ""
    config_files: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    table: str = ""
    metrics: tuple[MetricConfig, ...] = ()
    tuned_on: dict[str, Any] | None = None

    def table_path(self) -> Path:
        """Return the path of the run's table, or raise a DataError if it is not known or not there any more."""
        path = Path(self.table)
        if not self.table or MASK in self.table:
            raise DataError(
                "run.json does not keep the path of the run's table, which holds a secret; so its texts and "
                "true labels cannot be read"
            )
        if not path.exists():
            raise DataError(f"the table of the run, {path}, is not there any more")
        return path

    @property
    def failures(self) -> tuple[Failure, ...]:
        return tuple(member.failure for member in self.members if member.failure is not None)

    def __repr__(self) -> str:
        seconds, members = duration(self.timing["total_seconds"]), plural(len(self.members), "member")
        lines = [f"{self.status}, after {seconds}: {plural(self.rows, 'row')}, {members}"]
        for name, score in self.scores.items():
            values = {"log loss": score.log_loss, "accuracy": score.accuracy, "RMSE": score.rmse}
            shown = (f"{title} {value:.4g}" for title, value in values.items() if value is not None)
            lines.append(f"{name}: {', '.join(shown)}")
        if self.fitted_on is not None:
            lines.append(f"ensemble: {self.fitted_on.text}")
        lines += [f"{failure.member} {failure.outcome}: {failure.message}" for failure in self.failures]
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        """Write run.json; numbers that JSON does not have become texts, such as "NaN"."""
        # Much faster than the standard library; with hundreds of workers it is a megabyte each time.
        document = {"schema": self.schema} | vars(self)
        write_text(path, to_json(document, indent=2, inf_nan_mode="strings").decode() + "\n")

    @classmethod
    def read(cls, path: Path) -> RunReport:
        """Read run.json, or raise a DataError if there is none that this version can read."""
        try:
            content = path.read_bytes()
            return _report_adapter().validate_json(content)
        except (FileNotFoundError, NotADirectoryError):
            text = f"{path.parent}: there is no run.json that can be read; name the output_dir of a run"
            raise DataError(text) from None
        except OSError as error:
            raise DataError(unreadable(path, error)) from error
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise DataError(
                f"{path} is damaged or of another version of ensemble ({where}: {first['msg']}), so there is no "
                "run.json that can be read; run the config again"
            ) from None


@cache  # it takes 15 ms to make
def _report_adapter() -> TypeAdapter[RunReport]:
    return TypeAdapter(RunReport)


def measured_speeds(
    report: RunReport, gpu_names: Sequence[str], computed_as: Mapping[str, str]
) -> dict[str, Speed]:
    """Return speeds by member name from the report of an earlier run on GPUs of these names.

    Members whose ``computed_as`` (see ``MemberConfig``) is another one are left out.
    """
    if {gpu.name for gpu in report.devices if gpu.is_gpu} != set(gpu_names):
        return {}
    return {
        member.name: member.speed
        for member in report.members
        if member.computed_as == computed_as.get(member.name)
        and (member.speed.is_measured or member.speed.is_startup_measured)
    }
