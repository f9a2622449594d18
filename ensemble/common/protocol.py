"""Define the messages between the parent and a worker process.

Commands go to the worker as JSON lines on its standard input, events come back as JSON lines on their own pipe. A
message is a frozen dataclass; in JSON it is an object whose ``type`` is the class's name.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

Activation = Literal["softmax", "sigmoid", "none"]
# By how much the sum of a row's exclusive probabilities may miss 1; they are written in full.
SUM_TOLERANCE: Final = 1e-3


class ProtocolError(ValueError):
    """Report that a line is not a message of this version of the package."""


@dataclass(frozen=True)
class Counters:
    """Count work, from the worker's forward passes to run.json; ``+`` adds counters up.

    This is the only list of these names: a new counter is a line here, and one where it is counted.
    """

    chunks: int = 0  # that have a shard
    rows: int = 0  # of these chunks, bad rows included
    bad_rows: int = 0  # that cannot be computed
    tokens: int = 0  # in forward passes, without padding
    padded_tokens: int = 0  # in forward passes, with padding
    batches: int = 0  # forward passes
    truncated_rows: int = 0  # cut at max_length
    cut_tokens: int = 0  # tokens that these rows lost
    clipped_images: int = 0  # of more than 8 bits a channel, cut at 255
    oom_events: int = 0  # forward passes that ran out of memory and were run again smaller
    recomputed_rows: int = 0  # came out non-finite and were computed again in float32
    float32_rows: int = 0  # computed in float32 at once, since most rows before them came out non-finite
    repeated_rows: int = 0  # had the token ids of another row of the chunk and were not computed again
    shared_tokens: int = 0  # at beginnings that rows share, which are computed only once
    other_mass: float = 0.0  # of language models: the probability of tokens of no label, summed over rows
    predict_seconds: float = 0.0  # from a chunk's command until its shard is complete
    forward_seconds: float = 0.0  # the device's time in forward passes

    def __add__(self, other: Counters) -> Counters:
        return Counters(**{name: value + getattr(other, name) for name, value in vars(self).items()})


@dataclass(frozen=True)
class JobSpec:
    """Describe a job of a worker: a way in which its model reads the table's rows.

    Attributes:
        folder: the folder of its shards, below ``shards_dir``; empty: that folder itself.
        columns: by column, the other column whose cells replace its cells.
        label_order: for each of the config's labels, the number of the label that is predicted instead; empty: the
            label itself.
    """

    folder: str = ""
    columns: dict[str, str] = dataclasses.field(default_factory=dict)
    label_order: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CommonSpec:
    """Hold what every worker must know, whatever its member's kind."""

    labels: tuple[str, ...]  # the config's, in its order
    # Softmax: probabilities of exclusive labels; sigmoid: of others; none: any numbers.
    activation: Activation
    gpus: int  # how many devices the worker has; 0: the CPU
    memory_limit_bytes: int | None = None  # of each of the worker's devices, weights included; None: all
    seed: int
    table_path: str = ""  # the published table; empty: there is none, and chunks leave no shards
    order_path: str = ""  # the numbers of the model's rows in the order of its chunks; of a table
    # Of other members' predictions, such as gemma2/positive: before chunks come, INPUTS_FILE is beside the order.
    input_columns: tuple[str, ...] = ()
    shards_dir: str = ""  # the folder of the shards; of a table
    jobs: tuple[JobSpec, ...] = (JobSpec(),)
    # The states (see ``common.files``) in which the model's files must stay, by absolute path.
    files: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class WorkerSpec:
    """Hold everything that a worker must know about its member."""

    common: CommonSpec
    kind: str  # the child side of its kind, such as "ensemble.members.python.child"; see ``predictor.load_child``
    settings: dict[str, Any]  # of that kind, as JSON values


@dataclass(frozen=True)
class Start:
    """Prepare to load this member, without using a device; the first command."""

    spec: WorkerSpec


@dataclass(frozen=True)
class Load:
    """Put the model on the devices, which are free now."""


@dataclass(frozen=True)
class BatchChoice:
    """Say how batches are made, where that is found only while a member computes.

    Attributes:
        room_bytes: what a batch may take beside the weights, in the precision of the weights; None: no limit.
        in_float32: whether chunks start in float32, since most rows of one overflowed half precision.
    """

    room_bytes: int | None = None
    in_float32: bool = False


@dataclass(frozen=True)
class Predict:
    """Compute rows ``order[start:stop]`` of a job and write their shard.

    ``chunk`` is the parent's number for them, ``job`` the number of the job in ``CommonSpec.jobs``.
    ``rows`` are these rows' numbers if the order is unknown when the worker starts, as base64 of little-endian
    int32, so short that a pipe takes those of two chunks. None: the file has the order. ``choice`` is what the
    member's workers have chosen so far, in earlier runs, too.
    """

    chunk: int
    start: int
    stop: int
    rows: str | None = None
    choice: BatchChoice = BatchChoice()
    job: int = 0


@dataclass(frozen=True)
class Stop:
    """Close and exit 0; there is no more work."""


@dataclass(frozen=True)
class Finish:
    """Finish the batch, write a shard of the chunk's rows that are done, close and exit 0; the run is stopped."""


@dataclass(frozen=True)
class Started:
    """Report that Python is up and the libraries are imported."""

    versions: dict[str, str]
    start_seconds: float


@dataclass(frozen=True)
class Ready:
    """Report that the member is on its devices, with facts for the user and for run.json."""

    load_seconds: float = 0.0
    device: str = "cpu"  # or a GPU's name
    dtype: str = ""
    attn_implementation: str = ""
    parameters: int | None = None
    max_length: int | None = None  # tokens of a row
    token_budget: int | None = None  # tokens of a batch
    notes: tuple[str, ...] = ()  # sentences for the user
    room_bytes: int | None = None  # as in ``BatchChoice``, where none is on record
    max_room_bytes: int | None = None  # the largest room on record that it can take over


@dataclass(frozen=True)
class Progress:
    """Tell how much of the current chunk is computed; the counts are of this chunk only."""

    chunk: int
    rows: int
    tokens: int
    padded_tokens: int


@dataclass(frozen=True)
class ChunkDone:
    """Report that the chunk's shard is complete; after ``Finish`` it may lack rows, which count nowhere."""

    chunk: int
    shard: str  # the file's path within ``shards_dir``; a view's shards are in a folder
    counters: Counters
    bad_rows: tuple[int, ...] = ()  # rows of the table that cannot be computed and are not in the shard
    bad_row_reasons: tuple[str, ...] = ()
    choice: BatchChoice = BatchChoice()  # for the next chunk


@dataclass(frozen=True)
class ChunkFailed:
    """Report that an unknown row spoilt the chunk; the process waits for another chunk."""

    chunk: int
    error_type: str
    message: str
    traceback: str


@dataclass(frozen=True)
class Heartbeat:
    """Report that the process lives; the first heartbeat comes before ``Started``."""

    # Since the main thread finished its last step, such as a batch; 0 while it waits for a command.
    idle_seconds: float


@dataclass(frozen=True)
class Failed:
    """Report that the worker cannot go on and exits."""

    error_type: str
    message: str
    traceback: str
    chunk: int | None = None
    can_retry: bool = False  # whether a fresh process may fare better, as after an error that poisons CUDA


@dataclass(frozen=True)
class Closed:
    """Report the end of a worker that was asked to stop.

    Attributes:
        peak_memory_bytes: of the process on the host.
        peak_gpu_memory_bytes: what torch's allocator reserved on the GPU with the highest peak; None on a CPU.
        peak_gpu_allocated_bytes: what tensors took of it, which is what a plan forecasts.
    """

    peak_memory_bytes: int
    peak_gpu_memory_bytes: int | None = None
    peak_gpu_allocated_bytes: int | None = None


Command: TypeAlias = Start | Load | Predict | Stop | Finish
Event: TypeAlias = Started | Ready | Heartbeat | Progress | ChunkDone | ChunkFailed | Failed | Closed

_TYPES: dict[str, type[Any]] = {kind.__name__: kind for kind in (*get_args(Command), *get_args(Event))}


def encode(message: Command | Event) -> str:
    """Return a message as a line of JSON, newline included."""
    return json.dumps({"type": type(message).__name__, **dataclasses.asdict(message)}) + "\n"


def decode(line: str) -> Any:
    """Return the message in a line of JSON.

    Raises:
        ProtocolError: the line is not a message of this version of the package.
    """
    try:
        fields = json.loads(line)
        kind = _TYPES[fields.pop("type")]
        if "counters" in fields:
            fields["counters"] = Counters(**fields["counters"])
        if "choice" in fields:
            fields["choice"] = BatchChoice(**fields["choice"])
        if kind is Start:
            spec = fields["spec"]
            common = with_tuples(spec["common"])
            common["jobs"] = tuple(JobSpec(**with_tuples(job)) for job in common["jobs"])
            fields["spec"] = WorkerSpec(**{**spec, "common": CommonSpec(**common)})
        return kind(**with_tuples(fields))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"not a message: {line[:200]!r}") from error


def with_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dataclass's fields from JSON with tuples for lists; nested lists stay, as they are the user's."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
