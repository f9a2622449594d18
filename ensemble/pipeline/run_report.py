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
from ensemble.config.schema import FittingConfig, RuleConfig
from ensemble.config.values import AnyWeight, weight_numbers
from ensemble.merging.scoring import CascadeComparison, Gain, Score
from ensemble.planning.forecast import Speed
from ensemble.scheduling.records import Failure, FaultRecord, Gap
from ensemble.scheduling.state import Phase

# ``time_limit``: merged, but not with all rows of all members.
Status = Literal["running", "complete", "time_limit", "failed", "interrupted"]
MERGED: Final = ("complete", "time_limit")  # the statuses of runs that have written an ensemble


@dataclass(frozen=True, kw_only=True)
class WorkerReport(Counters):
    """Report a worker; ``..._after_seconds`` count from the run's start, None: the worker did not get so far.

    ``peak_gpu_memory_bytes`` is what torch reserved on the GPU, ``peak_gpu_allocated_bytes`` what tensors took of
    that.
    """

    replica: int
    devices: tuple[str, ...]
    process: str
    exit_code: int | None
    started_after_seconds: float
    leased_after_seconds: float
    start_seconds: float | None
    load_seconds: float | None
    life_seconds: float | None
    forward_share: float | None
    peak_memory_bytes: int | None
    peak_gpu_memory_bytes: int | None
    peak_gpu_allocated_bytes: int | None
    device_name: str | None
    dtype: str | None
    attn_implementation: str | None
    parameters: int | None
    max_length: int | None
    token_budget: int | None
    notes: tuple[str, ...]
    log: str

    @property
    def key(self) -> tuple[object, ...]:
        """Return a key that identifies the worker among its member's workers."""
        return self.replica, self.process, self.started_after_seconds, self.rows


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
class ProgressReport:
    """Report how far a member is, with chunks in progress; ``seconds`` and ``seconds_left`` are of computing."""

    rows_done: int = 0
    share: float = 0.0
    tokens: int = 0
    seconds: float | None = None
    seconds_left: float | None = None


@dataclass(frozen=True)
class CascadeReport:
    """Report a member or view with ``when``; compare the ensemble with and without a member if the truth is known.

    ``rows`` is how many were selected, for ``share: as_time_allows`` how many there was time for at the end.
    """

    when: dict[str, float | str]
    rows: int
    is_selected: bool
    comparison: CascadeComparison | None


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

    ``at_most`` is how many rows its model may predict, as it was trained on the others; None: all. ``fingerprint``
    is that of its job.
    """

    weight: float
    rows: int | None
    at_most: int | None = None
    fingerprint: str = ""


@dataclass(frozen=True, kw_only=True)
class Computation:
    """Report when and with what a run computed rows; devices are names by UUID, or by "cpu" with its node."""

    at: str
    seconds: float
    versions: dict[str, str]
    devices: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class MemberReport:
    """Report a member.  With views, all counts of rows except ``bad_rows`` count a row once for each view.

    Attributes:
        reused_rows: how many were done when this run began.
        taken_over: how many rows were taken over from each other work, by its path.
        chunks: how many were left to do when this run began.
        bad_rows: the reason of each table row that could not be computed.
        workers: those of an earlier run, if that completed the member.
        calibration: of the merge, as in the config; empty if there is none.
        partial_rows: how many rows lack some of their views, and are the mean of the others.
        lost_rows: at least so many were computed and not kept, because the time limit ended their chunk.
        settings: a digest of each key that the probabilities may depend on.
        view_cascades: of its views with ``when``, by their names.
        given_files: absolute paths of its predictions, if they were made elsewhere.
        computed: what this run computed rows with; None if it computed none.
        computed_before: what earlier runs computed rows with, the oldest first.
    """

    name: str
    phase: Phase
    status: Literal["failed", "left out", "complete", "unfinished"]
    weight: AnyWeight
    replicas: int
    fingerprint: str | None
    reused_rows: int
    taken_over: dict[str, int]
    work: float
    computed_as: str
    settings: dict[str, str]
    speed: Speed
    forecast: MemoryForecast | None
    progress: ProgressReport
    chunks: int
    rows: int
    tokens: int
    padded_tokens: int
    real_token_share: float | None
    bad_rows: dict[str, str]
    faults: tuple[FaultRecord, ...]
    failure: Failure | None
    workers: tuple[WorkerReport, ...]
    activation: Activation
    cascade: CascadeReport | None = None
    calibration: dict[str, Any] = field(default_factory=dict)
    views: dict[str, ViewReport] = field(default_factory=dict)
    view_cascades: dict[str, CascadeReport] = field(default_factory=dict)
    partial_rows: int = 0
    lost_rows: int = 0
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
    def workers_now(self) -> tuple[WorkerReport, ...]:
        return self.workers if self.chunks else ()

    @property
    def counters(self) -> Counters:
        """Return the sum of the counters of this run's workers."""
        return sum(self.workers_now, Counters())


@dataclass(frozen=True)
class NodeReport:
    """Report a node of a cluster; times count from when workers could begin; None: it did not join or leave."""

    name: str
    total_bytes: int
    joined_after_seconds: float | None = None
    lost_after_seconds: float | None = None
    why_lost: str = ""


@dataclass(frozen=True)
class AllowedLabelsReport:
    """Report where the possible labels of rows come from, in words how many they are, and their file's SHA-256."""

    source: str
    text: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Hold the content of run.json: seconds, bytes and counts; no text is a secret.

    Attributes:
        written_at: in UTC, as ISO 8601.
        seconds_left: from ``written_at`` on; None if it is not known.
        timing: seconds by phase of the whole run.
        idle_gaps: in which a device computed nothing between two members.
        nodes: of the cluster; none on one machine.
        answers: scores of the answers by the submission's column and by metric.
        gain: of the ensemble over its best member; None if there is none.
        explanation: a sentence about where the time went, if a time limit left none to compute rows.
        allowed_labels: once they have been applied; None: all labels are possible in each row.
        rules: in the config's order, once they have been applied.
        files: results by what they are: the members' in the config's order, then the others.
        config: the YAML as it was written; for several files, or with ``${CONFIG_DIR}``, all in one, with the
            overrides and that folder.
        table: the absolute path of the input table.
        fitted_on: the config's ``fitted_on``, if the run has scored the same rows; else None.
        tuned_on: the config's ``tuned_on``; None if ``tune`` wrote none of its files.
    """

    status: Status
    pid: int
    versions: dict[str, str]
    written_at: str
    seconds_left: float | None
    platform: str
    devices: tuple[Device, ...]
    driver_version: str | None
    rows: int
    null_texts: dict[str, int]
    timing: dict[str, float]
    idle_gaps: tuple[Gap, ...]
    members: tuple[MemberReport, ...]
    left_out: tuple[str, ...]
    merged_rows: dict[str, int]
    filled_rows: int
    scores: dict[str, Score]
    on_bad_row: str
    nodes: tuple[NodeReport, ...] = ()
    gain: Gain | None = None
    answers: dict[str, dict[str, float]] = field(default_factory=dict)
    explanation: str = ""
    ensemble: dict[str, Any] = field(default_factory=dict)
    allowed_labels: AllowedLabelsReport | None = None
    rules: tuple[RuleReport, ...] = ()
    warnings: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    config: str = ""
    config_files: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    table: str = ""
    fitted_on: FittingConfig | None = None
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
        write_text(path, to_json(self, indent=2, inf_nan_mode="strings").decode() + "\n")

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


@cache
def _computations_adapter() -> TypeAdapter[tuple[Computation, ...]]:
    return TypeAdapter(tuple[Computation, ...])


def computations_of(manifest: Mapping[str, object]) -> tuple[Computation, ...]:
    """Return the computations of a manifest; none if another version has written it."""
    try:
        return _computations_adapter().validate_python(manifest.get("computed", ()))
    except ValidationError:
        return ()


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
