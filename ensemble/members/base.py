"""What a kind of member is, on the parent's side: ``MemberKind``, and the values that cross its border.

docs/extending.md shows how to write one.  Nothing here imports torch; what a worker of a kind does is in the kind's
``child.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from ensemble.config import MemberConfig
from ensemble.config.schema import MERGE_KEYS
from ensemble.members.footprint import Capability, Footprint, MemoryEstimate

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    from ensemble.common.digests import FileDigests
    from ensemble.common.files import HubFile
    from ensemble.common.protocol import Activation as OutputActivation
    from ensemble.data.row_files import FileCells


@dataclass(frozen=True)
class Inspection:
    """What is known of a member without computing anything.

    ``activation`` says what its values are: "softmax" for probabilities that sum to 1, "sigmoid" for any from 0 to
    1, "none" for any number.  ``label_order[j]`` is the member's own output column of the config's label ``j``.
    ``summary`` is what ``validate`` shows of it, in a few words.
    """

    activation: OutputActivation
    label_order: tuple[int, ...]
    summary: str
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Reads:
    """What a member reads: columns as they stand, or those in a Jinja template (``prompt_template``).

    ``any_type``: its columns may hold values of any type, not text alone.  ``ids``: its workers get the ids, too.
    ``files``: one of its columns names files, which count as what its rows hold.  ``row_bytes``: what a row counts
    as, in bytes of text, where its cells do not tell how much work it is.
    """

    columns: tuple[str, ...] = ()
    template: str | None = None
    any_type: bool = False
    ids: bool = False
    files: FileCells | None = None
    row_bytes: int | None = None


@dataclass(frozen=True)
class ResourceRequest:
    """What a member asks of the machine, named as its keys in the YAML are.

    Attributes:
        num_gpus: for each replica; 0: the CPU; None: one if there is any, or as many as it needs.
        replicas: loaded copies that share the rows.
        batch_size: rows of one batch; None: left to the plan.
        max_num_batched_tokens: padded tokens of one batch; None: left to the plan.
        gpu_memory: bytes that a replica takes of each of its GPUs, CUDA's own included; "all": it is not known, and
            nobody else shall be there; None: what ``memory`` tells, or its share where GPUs are shared.
        device_map: the number of a GPU within the lease, "cpu" or "disk" for each part; None: left to the plan.
        max_memory: bytes by the number of a GPU within the lease, or "cpu"; None: left to the plan.
        offload_folder: where weights go that fit nowhere else.
        may_offload: whether weights that do not fit can wait outside of the GPU.
    """

    num_gpus: int | None = 0
    replicas: int | Literal["auto"] = "auto"
    batch_size: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory: int | Literal["all"] | None = None
    device_map: Mapping[str, Any] | None = None
    max_memory: Mapping[int | str, int] | None = None
    offload_folder: Path | None = None
    may_offload: bool = False


@dataclass(frozen=True)
class Assigned:
    """What the plan has decided for all replicas of a member.

    Attributes:
        gpus: of each replica; 0: the CPU.
        dtype: what dtype: auto means on these GPUs; "auto" where only a worker can tell.
        attention: what its workers are told to take; None where only they can see the architecture.
        capability: the compute capability that this was decided for; None: the CPU, or not known.
        footprint: a replica's memory, where it is known.
    """

    gpus: int
    dtype: str = "auto"
    attention: str | None = None
    capability: Capability | None = None
    footprint: Footprint | None = None


@dataclass(frozen=True)
class OutputColumns:
    """The columns of every member's predictions, by the config; and the table's folder, where paths in it start."""

    id_column: str
    labels: tuple[str, ...]
    table_folder: Path = Path()


@dataclass(frozen=True)
class Given:
    """Predictions that need no worker.

    Attributes:
        values: float64 [rows, labels], in the order of the table and of the config's labels; NaN in the rows that a
            kind lacks that may lack rows.
        ignored_ids: how many ids there were that the table does not have.
    """

    values: npt.NDArray[np.float64]
    ignored_ids: int


@dataclass(frozen=True)
class Draft:
    """What a first config would say of a member.

    Attributes:
        settings: its keys beside ``name``, ``weight`` and what it reads.
        labels: its own, in its order; None where nobody knows them.
        are_named: False where they only count, as LABEL_0 and LABEL_1 do.
        max_length: tokens that it can read of a row; None: it reads none, or as many as there are.
        reads_text: whether it needs ``prompt_template`` or ``text_column``.
        labels_are_columns: of a file; where they are named otherwise, ``columns`` says which are which.
        of_labels: a key, and what stands there for each label of the config, as a first guess.
        guess: what to look at of that guess.
        file_keys: of one that reads files: the keys of the column that names them, of their folder and of what
            stands behind each cell.
    """

    settings: Mapping[str, Any]
    labels: tuple[str, ...] | None
    are_named: bool
    max_length: int | None = None
    reads_text: bool = True
    labels_are_columns: bool = False
    of_labels: tuple[str, Callable[[str], str]] | None = None
    guess: str = ""
    file_keys: tuple[str, str, str] | None = None

    @property
    def is_model(self) -> bool:
        """Whether it computes its predictions, of labels in an order of its own."""
        return self.reads_text or self.file_keys is not None


@dataclass(frozen=True)
class Candidate:
    """Settings that ``tune`` can try: ``name`` says them in a word or two, ``keys`` as the YAML has them.

    ``pays_from_seconds`` is what computing the whole table must take without them for a trial to be worth it.
    """

    name: str
    keys: Mapping[str, Any]
    pays_from_seconds: float = 0.0


@dataclass(frozen=True)
class RanWith:
    """What a worker of a member took, by itself or as it was told; None where it has none.

    Attributes:
        tokens: of the rows that it computed.
    """

    dtype: str | None = None
    attention: str | None = None
    token_budget: int | None = None
    tokens: int | None = None


S = TypeVar("S", bound=MemberConfig)
I = TypeVar("I", bound=Inspection)  # noqa: E741


class MemberKind(ABC, Generic[S, I]):
    """A member of a run; each subclass is a kind of member, and its instances hold nothing but their settings.

    ``settings`` is one of ``Settings``, whose ``task_type`` names the kind. Either it needs workers, and
    ``child`` is the module that they run (see ``predictor.Child``), or it has its predictions already.
    ``activation_key`` is the key that says what its values are, for advice; empty where there is none.
    ``rows_advice`` is what to do where predictions that it has already are not what they should be. Problems are
    sentences that begin with the key that they are about, such as "num_gpus: ..."; errors are ``EnsembleError``
    of exit code 2 with every problem found.
    """

    Settings: ClassVar[type[MemberConfig]]
    needs_worker: ClassVar[bool] = True
    child: ClassVar[str] = ""
    activation_key: ClassVar[str] = ""
    rows_advice: ClassVar[str] = "correct the file"

    def __init__(self, settings: S) -> None:
        self.settings = settings

    @classmethod
    def draft(cls, source: str, id_column: str) -> Draft | None:
        """A member of this kind made of ``source``, a path or another name; None where it is nothing of this kind.

        Raises:
            EnsembleError: it seems to be, and cannot be used.
        """
        return None

    @property
    def may_lack_rows(self) -> bool:
        """Whether it may be complete with some of the table's rows only; its predictions hold no others."""
        return False

    def request(self) -> ResourceRequest:
        """What its workers ask of the machine."""
        return ResourceRequest()

    def reads(self) -> Reads:
        """What it reads of the table."""
        return Reads()

    def sources(self) -> tuple[str, ...]:
        """The files and folders that it is made of; a name on the hub among them does no harm.

        A run watches them, and writes nothing there.
        """
        return ()

    def hub_files(self, inspected: I) -> tuple[HubFile, ...]:
        """Of what it has from the hub, a file of each folder."""
        return ()

    @abstractmethod
    def inspect(self, columns: OutputColumns) -> I:
        """Look at what it is made of, without computing anything.

        Raises:
            EnsembleError: what makes a run impossible.
        """

    def problems(self, inspected: I | None, any_gpu: bool) -> Iterator[str]:
        """What is wrong with its settings beside what ``inspect`` found.

        Args:
            inspected: None where ``inspect`` failed.
            any_gpu: whether the run has a GPU.
        """
        return iter(())

    def warnings(self, inspected: I) -> Iterator[str]:
        """What is to be said of its settings before a run, key first."""
        return iter(())

    def packages(self, inspected: I | None) -> Iterator[tuple[str, str]]:
        """Packages that it needs and that are not installed with this one; each with ".key" that needs it."""
        return iter(())

    def memory(self, inspected: I, lengths: npt.NDArray[np.int64], labels: int) -> MemoryEstimate | None:
        """What a replica takes; None: not known, and it may run anywhere.

        Args:
            lengths: bytes of all that it reads of each row, [rows].
            labels: how many values it gives for a row.

        Raises:
            EnsembleError: a file is broken.
        """
        return None

    @abstractmethod
    def fingerprint(self, inspected: I, assigned: Assigned) -> Mapping[str, object]:
        """All that its numbers depend on beside files and rows, as JSON or YAML can hold it.

        Its shards of an earlier run are reused where this, ``content`` and the rows are the same.
        """

    def predicted_by(self) -> dict[str, object]:
        """The keys of the config that its predictions may depend on, with their values: those of no device."""
        of_devices = {field.name for field in fields(ResourceRequest)}
        return self.settings.model_dump(exclude={"name", *MERGE_KEYS, *of_devices})

    @abstractmethod
    def content(self, inspected: I, files: FileDigests) -> Mapping[str, str]:
        """What its files hold, as digests in hexadecimal by what they are, in a word: "weights", "tokenizer".

        Raises:
            EnsembleError: a file cannot be read, or is being written to.
        """

    def worker_settings(
        self, inspected: I, assigned: Assigned, offload_folder: Path | None
    ) -> Mapping[str, Any]:
        """What a worker of it is told beside what all are told, as JSON can hold it; for kinds with workers.

        Args:
            offload_folder: for this worker alone, where the request names one.
        """
        raise NotImplementedError

    def environment(self) -> Mapping[str, str]:
        """What is set in the environment of its workers that have GPUs, before they start."""
        return {}

    def candidates(
        self, inspected: I, assigned: Assigned, ran_with: RanWith | None = None
    ) -> Sequence[Sequence[Candidate]]:
        """Settings that may be faster and change numbers a little, for ``tune``; none: there is nothing to choose.

        The first group are precisions, the widest first: what the others are held against.  Each further group is
        tried with the best of the groups before it, the last one with as many workers side by side as are best.

        Args:
            ran_with: what the best so far ran with; None: nothing has run yet, and as many are given as there
                usually are.
        """
        return ()

    def predictions(self, ids: pa.ChunkedArray, columns: OutputColumns) -> Given:
        """All of its predictions, for kinds without workers; the caller looks whether they are probabilities.

        Args:
            ids: of the table's rows, text, unique.

        Raises:
            DataError: they cannot be had.
        """
        raise NotImplementedError
