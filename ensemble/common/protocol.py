"""The messages on the channel between the parent and a worker process.

Commands go to the worker as JSON lines on its standard input, events come back as JSON lines on a pipe of
their own.  A message is a frozen dataclass; on the wire it is an object whose ``type`` is the class's name.
Nothing here knows how a message is sent or what it causes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from operator import add, attrgetter
from typing import Any, Final, Literal, TypeAlias, get_args

Activation = Literal["softmax", "sigmoid", "none"]
# What the sum of a row's exclusive probabilities may miss 1 by; they are written in full.
SUM_TOLERANCE: Final = 1e-3


class ProtocolError(ValueError):
    """The other side said what it should not, or what this version of the package does not know."""


@dataclass(frozen=True)
class Counters:
    """What work took and what came of it, from the forward pass over the wire to run.json; ``+`` adds them up.

    This is the only list of these names: a new counter is a line here, and one where it is counted.
    """

    chunks: int = 0  # that stand as shards
    rows: int = 0  # of these chunks, with those that cannot be computed
    bad_rows: int = 0  # that cannot be computed
    tokens: int = 0  # real ones, in forward passes
    padded_tokens: int = 0  # what was computed, real tokens and padding
    batches: int = 0  # forward passes
    truncated_rows: int = 0  # cut at max_length
    cut_tokens: int = 0  # of these rows: how many tokens fewer they have
    oom_events: int = 0  # forward passes that ran out of memory and were run again smaller
    recomputed_rows: int = 0  # came out non-finite and were computed again in float32
    float32_rows: int = 0  # computed in float32 at once, since most rows before them came out non-finite
    repeated_rows: int = 0  # had the token ids of another row of the chunk and were not computed again
    shared_tokens: int = 0  # of these tokens, those at the beginning of all rows that were computed only once
    other_mass: float = 0.0  # of language models: the probability of tokens of no label, summed over rows
    predict_seconds: float = 0.0  # from a chunk's command to its shard's rename, less what timed batches took
    forward_seconds: float = 0.0  # the device's time in forward passes

    def __add__(self, other: Counters) -> Counters:
        return Counters(*map(add, _COUNTS(self), _COUNTS(other)))

    def rounded(self, digits: int) -> dict[str, Any]:
        """As plain JSON values, seconds to so many digits."""
        return {name: round(value, digits) for name, value in vars(self).items()}


# A report's workers are counters with more fields.
_COUNTS = attrgetter(*Counters.__dataclass_fields__)


@dataclass(frozen=True)
class ViewSpec:
    """A view of the table's rows.

    Attributes:
        folder: where its shards go, below ``shards_dir``.
        columns: the column whose cells stand in another one's place, by that one's name.
        label_order: for each of the config's labels the number of the one that is predicted in its place.
    """

    folder: str
    columns: dict[str, str]
    label_order: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class CommonSpec:
    """What a worker must know whatever the kind of its member."""

    labels: tuple[str, ...]  # the config's, in its order
    # Probabilities of labels that exclude each other (softmax) or do not (sigmoid), or any numbers (none).
    activation: Activation
    gpus: int  # how many devices the worker has; 0: the CPU
    memory_limit_bytes: int | None  # of each of the worker's devices, weights included; None: all
    seed: int
    table_path: str  # the published table
    order_path: str  # the numbers of the member's rows in the order of its chunks
    shards_dir: str  # where the shards go
    # Of a member that gets each row in several views: row r of n is numbered r + v * n in view v.  Empty: it gets
    # rows as they are.
    views: tuple[ViewSpec, ...] = ()
    # The states (see ``common.files``) in which the member's own files must stay, by absolute path.
    files: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class WorkerSpec:
    """Everything a worker must know about its member."""

    common: CommonSpec
    kind: str  # the module that is the child side of its kind, such as "ensemble.members.seq_cls.child"
    settings: dict[str, Any]  # that kind's own, of what JSON has


@dataclass(frozen=True)
class Start:
    """The first command: get ready to load the member described here, with everything that needs no device."""

    spec: WorkerSpec


@dataclass(frozen=True)
class Load:
    """The devices are yours: put the model on them."""


@dataclass(frozen=True)
class Predict:
    """Compute rows ``order[start:stop]`` and leave them as a shard; ``chunk`` is the parent's number for them.

    ``rows`` are these rows' numbers where the order is not known when the worker starts, as base64 of little-endian
    int32: a pipe shall take two chunks' of them, whatever the worker does.  None: the file has the order.
    """

    chunk: int
    start: int
    stop: int
    rows: str | None = None


@dataclass(frozen=True)
class Stop:
    """There is nothing left to do: close and exit 0."""


@dataclass(frozen=True)
class Started:
    """Python is up and the libraries are imported."""

    versions: dict[str, str]
    start_seconds: float


@dataclass(frozen=True)
class Ready:
    """The member is on its devices; what its kind knows of it, for the user and for run.json."""

    load_seconds: float = 0.0
    device: str = "cpu"  # or a GPU's name
    dtype: str = ""
    attn_implementation: str = ""
    parameters: int | None = None
    max_length: int | None = None  # tokens of a row
    token_budget: int | None = None  # tokens of a batch
    notes: tuple[str, ...] = ()  # sentences for the user


@dataclass(frozen=True)
class Progress:
    """How much of the chunk in hand is computed; tokens include the rows of this chunk only."""

    chunk: int
    rows: int
    tokens: int
    padded_tokens: int


@dataclass(frozen=True)
class Computed:
    """The chunk's forward passes are over and its shard is being written: the next chunk may come."""

    chunk: int


@dataclass(frozen=True)
class ChunkDone:
    """The chunk's shard stands under its final name."""

    chunk: int
    shard: str  # the file's path within ``shards_dir``: its name, of a view's in a folder there
    counters: Counters
    bad_rows: tuple[int, ...] = ()  # rows of the table that cannot be computed; the shard does not hold them
    bad_row_reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChunkFailed:
    """The chunk could not be computed, and which row is to blame is not known; the process waits for another."""

    chunk: int
    error_type: str
    message: str
    traceback: str


@dataclass(frozen=True)
class Heartbeat:
    """The process lives.  The first one comes before ``Started``."""

    idle_seconds: (
        float  # since its main thread finished its last step, such as a batch; 0 waiting for a command
    )


@dataclass(frozen=True)
class Failed:
    """The worker cannot go on; it exits after this."""

    error_type: str
    message: str
    traceback: str
    chunk: int | None = None
    can_retry: bool = False  # whether a fresh process may fare better, as after an error that poisons CUDA


@dataclass(frozen=True)
class Closed:
    """The last word of a worker that was told to stop."""

    peak_memory_bytes: int
    peak_gpu_memory_bytes: int | None = None  # of the GPU that held most; None on a CPU


Command: TypeAlias = Start | Load | Predict | Stop
Event: TypeAlias = (
    Started | Ready | Heartbeat | Progress | Computed | ChunkDone | ChunkFailed | Failed | Closed
)

_TYPES: dict[str, type[Any]] = {kind.__name__: kind for kind in (*get_args(Command), *get_args(Event))}


def encode(message: Command | Event) -> str:
    """One message as one line of JSON, newline included."""
    return json.dumps({"type": type(message).__name__, **dataclasses.asdict(message)}) + "\n"


def decode(line: str) -> Any:
    """The message in a line of JSON.

    Raises:
        ProtocolError: the line is not a message of this version of the package.
    """
    try:
        fields = json.loads(line)
        kind = _TYPES[fields.pop("type")]
        if "counters" in fields:
            fields["counters"] = Counters(**fields["counters"])
        if kind is Start:
            spec = fields["spec"]
            common = with_tuples(spec["common"])
            common["views"] = tuple(ViewSpec(**with_tuples(view)) for view in common.get("views", ()))
            fields["spec"] = WorkerSpec(**{**spec, "common": CommonSpec(**common)})
        return kind(**with_tuples(fields))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"not a message: {line[:200]!r}") from error


def with_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A dataclass's fields as JSON gave them, without tuples: every list is one; deeper ones are the user's."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
