"""Define ``MemberKind``, the parent's side of a kind of member, and the values that it takes and returns.

docs/how-to/new-member-kind.md shows how to write a kind.  Nothing in this file imports torch; what a worker of a
kind does is in the kind's ``child.py``.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from ensemble.common.errors import DataError
from ensemble.config import DataConfig, MemberConfig
from ensemble.members.footprint import Capability, Footprint, MemoryEstimate
from ensemble.members.questions import Question

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
    """Hold what is known of a member without computing anything.

    Attributes:
        activation: "softmax" for probabilities that sum to 1, "sigmoid" for any values from 0 to 1, "none" for any
            numbers.
        label_order: ``label_order[j]`` is the member's output column for the config's label ``j``.
        summary: a few words for ``validate``.
    """

    activation: OutputActivation
    label_order: tuple[int, ...]
    summary: str
    warnings: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class Reads:
    """Name what a member reads of the table.

    Attributes:
        template: a Jinja template (``prompt_template``), whose columns are read instead.
        as_in_table: whether it reads the id's cells, too, and without ``columns`` all but the true labels.
        any_type: whether the columns may hold values of any type, not only text.
        files: the column that names files; their content counts as the content of the rows.
        row_bytes: the work of a row in bytes of text, where its cells do not tell.
        choices: the column with a list of texts for each row, whose positions are the labels.
        one_choice: whether the member reads each row once for each choice, with the choice in the list's place.
    """

    columns: tuple[str, ...] = ()
    template: str | None = None
    as_in_table: bool = False
    any_type: bool = False
    ids: bool = False
    files: FileCells | None = None
    row_bytes: int | None = None
    choices: str | None = None
    one_choice: bool = False


@dataclass(frozen=True)
class ResourceRequest:
    """State what a member asks of the machine, named as its keys in the YAML are.

    Attributes:
        num_gpus: for each replica; 0: the CPU; None: one if the machine has a GPU, or as many as it needs.
        replicas: loaded copies that share the rows.
        batch_size, max_num_batched_tokens: rows and padded tokens of one batch; None: left to the plan.
        chunk_rows: the most rows that a worker gets at a time; "all": those of a job; None: left to the plan.
        repeats_whole_chunks: whether a chunk that ended its workers is never tried in parts.
        gpu_memory: bytes that a replica takes of each of its GPUs, including CUDA's context; "all": unknown, so the
            GPUs are not shared; None: what ``memory`` estimates, or its share where GPUs are shared.
        device_map: the number of a GPU within the lease, "cpu" or "disk" for each part; None: left to the plan.
        max_memory: bytes by the number of a GPU within the lease, or "cpu"; None: left to the plan.
        may_offload: whether weights that do not fit can stay outside the GPU.
        uses_torch: whether its workers compute with the installed torch, which must have code for their GPUs.
    """

    num_gpus: int | None = 0
    replicas: int | Literal["auto"] = "auto"
    batch_size: int | None = None
    max_num_batched_tokens: int | None = None
    chunk_rows: int | Literal["all"] | None = None
    repeats_whole_chunks: bool = False
    gpu_memory: int | Literal["all"] | None = None
    device_map: Mapping[str, Any] | None = None
    max_memory: Mapping[int | str, int] | None = None
    offload_folder: Path | None = None
    may_offload: bool = False
    uses_torch: bool = False


@dataclass(frozen=True)
class Assigned:
    """Hold what the plan has decided for all replicas of a member.

    Attributes:
        gpus: of each replica; 0: the CPU.
        dtype: what ``dtype: auto`` means on these GPUs; "auto" where only a worker can tell.
        attention: for its workers; None where only they can see the architecture.
        capability: that the plan is for; None: the CPU, or not known.
        footprint: None: not known.
    """

    gpus: int
    dtype: str = "auto"
    attention: str | None = None
    capability: Capability | None = None
    footprint: Footprint | None = None


@dataclass(frozen=True)
class OutputColumns:
    """Name the columns of every member's predictions, the table's file, and its columns of true labels."""

    id_column: str
    labels: tuple[str, ...]
    table: Path = Path()
    truth: tuple[str, ...] = ()

    @classmethod
    def of(cls, data: DataConfig, labels: tuple[str, ...]) -> OutputColumns:
        """Return those of a table and the config's labels."""
        truth = data.truth_columns(labels) if data.label_column is None else (data.label_column,)
        return cls(data.id_column, labels, data.path, truth)

    def of_rows(self, columns: tuple[str, ...]) -> tuple[str, ...]:
        """Return these columns with that of the ids; none: all of the table's but those of true labels."""
        if not columns:
            # Imported late because they import pyarrow: a typo in a key is reported at once.
            from ensemble.data.formats import column_names
            from ensemble.data.input_file import without_pandas_index

            with contextlib.suppress(DataError):  # reading the table tells what is wrong with it
                names = without_pandas_index(column_names(self.table, rows=None))
                columns = tuple(name for name in names if name not in self.truth)
        return columns if self.id_column in columns else (self.id_column, *columns)


@dataclass(frozen=True)
class ExternalPredictions:
    """Hold predictions that were made elsewhere and need no worker.

    Attributes:
        values: float64 [rows, labels], in the order of the table and of the config's labels; a row that is missing
            (``may_lack_rows``) is NaN.
        ignored_ids: how many ids the table does not have.
    """

    values: npt.NDArray[np.float64]
    ignored_ids: int


@dataclass(frozen=True)
class Draft:
    """Propose a member for a first config.

    Attributes:
        settings: its keys other than ``name``, ``weight`` and what it reads.
        labels: the member's labels, in its order; None: not known.
        are_named: False for numbered labels such as LABEL_0 and LABEL_1.
        max_length: the tokens of a row that it can read; None: it reads no tokens, or any number.
        reads_text: whether it needs ``prompt_template`` or ``text_column``.
        labels_are_columns: whether the labels are columns of a file; ``columns`` maps those of other names.
        reads_all_columns: whether it reads all of the table's columns.
        of_labels: a key that maps each label of the config, and a function that guesses the value for a label.
        guessed_key: a key of ``settings`` that is a guess.
        guess: what the user should check about ``of_labels`` or ``guessed_key``.
        file_keys: for a member that reads files: the keys for the column of file names, their folder and their
            suffix.
    """

    settings: Mapping[str, Any]
    labels: tuple[str, ...] | None = None
    are_named: bool = False
    max_length: int | None = None
    reads_text: bool = True
    labels_are_columns: bool = False
    reads_all_columns: bool = False
    of_labels: tuple[str, Callable[[str], str]] | None = None
    guessed_key: str = ""
    guess: str = ""
    file_keys: tuple[str, str, str] | None = None

    @property
    def is_model(self) -> bool:
        """Return whether the member computes its predictions."""
        return self.reads_text or self.reads_all_columns or self.file_keys is not None


@dataclass(frozen=True)
class Candidate:
    """Hold settings that ``tune`` can try; shorter tables than ``pays_from_seconds`` are not worth a trial."""

    name: str
    keys: Mapping[str, Any]
    pays_from_seconds: float = 0.0


@dataclass(frozen=True)
class RanWith:
    """Hold the settings that a worker ran with; ``tokens`` counts those of the rows that it computed."""

    dtype: str | None = None
    attention: str | None = None
    token_budget: int | None = None
    tokens: int | None = None


S = TypeVar("S", bound=MemberConfig)
I = TypeVar("I", bound=Inspection)  # noqa: E741


class MemberKind(ABC, Generic[S, I]):
    """Describe a member of a run; each subclass is a kind, and an instance holds only its settings.

    A member either needs workers or has its predictions already.  Problems are sentences that begin with their key,
    such as "num_gpus: ..."; errors are an ``EnsembleError`` of exit code 2 with all problems.

    Attributes:
        Settings: the type of ``settings``; its ``task_type`` names the kind.
        needs_worker: whether workers compute its predictions.
        child: the child side that its workers run (see ``predictor.load_child``).
        activation_key: the key that says what its values are, for advice; empty: there is no such key.
        rows_advice: what to do about wrong values in predictions that it has already.
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
        """Propose a member of this kind from ``source``, a path or a name; None if ``source`` is of another kind.

        Raises:
            EnsembleError: ``source`` is of this kind but cannot be used.
        """
        return None

    @property
    def may_lack_rows(self) -> bool:
        """Return whether the member is complete with predictions for only some of the table's rows."""
        return False

    def request(self) -> ResourceRequest:
        """Return what the member's workers ask of the machine."""
        return ResourceRequest()

    def reads(self) -> Reads:
        """Return what the member reads of the table."""
        return Reads()

    def sources(self) -> tuple[str, ...]:
        """Return the member's files and folders, which a run watches and never writes to.

        Names on the hub may be among them.
        """
        return ()

    def hub_files(self, inspected: I) -> tuple[HubFile, ...]:
        """Return one file from each of its folders that came from the hub."""
        return ()

    def question(self) -> Question | None:
        """Return what ``inspect`` asks a process, which is asked about all members at once; None: nothing."""
        return None

    @abstractmethod
    def inspect(self, columns: OutputColumns) -> I:
        """Read the member's files, without computing anything.

        Raises:
            EnsembleError: the member cannot run.
        """

    def problems(self, inspected: I | None) -> Iterator[str]:
        """Yield problems of the settings that ``inspect`` does not raise; None: ``inspect`` failed."""
        return iter(())

    def warnings(self, inspected: I) -> Iterator[str]:
        """Yield warnings about the settings, each beginning with its key."""
        return iter(())

    def prompt_warnings(self, prompt: str) -> Iterator[str]:
        """Yield warnings about the first row's prompt, each beginning with its key."""
        return iter(())

    def packages(self, inspected: I | None) -> Iterator[tuple[str, str]]:
        """Yield each optional package that the member needs, with the ".key" that needs it."""
        return iter(())

    def memory(self, inspected: I, lengths: npt.NDArray[np.int64], labels: int) -> MemoryEstimate | None:
        """Estimate the memory of a replica; None: not known, and it may run anywhere.

        Args:
            lengths: bytes that it reads of each row, int64 [rows].
            labels: the number of values that it returns for a row.

        Raises:
            EnsembleError: a file is broken.
        """
        return None

    @abstractmethod
    def fingerprint(self, inspected: I, assigned: Assigned) -> Mapping[str, object]:
        """Return all that the member's numbers depend on other than files and rows, as JSON or YAML can hold it.

        The names are shown where a value has changed. Shards of an earlier run are reused where this value,
        ``content`` and the rows are the same.
        """

    def fingerprint_anywhere(self, inspected: I) -> Mapping[str, object]:
        """Return what ``fingerprint`` returns, without what the devices of a run decide."""
        return self.fingerprint(inspected, Assigned(gpus=0))

    @abstractmethod
    def content(self, inspected: I, files: FileDigests) -> Mapping[str, str]:
        """Return hexadecimal digests of its files, by a word that says what they hold: "weights", "tokenizer".

        Raises:
            EnsembleError: a file cannot be read, or changes while it is read.
        """

    def worker_settings(
        self, inspected: I, assigned: Assigned, offload_folder: Path | None
    ) -> Mapping[str, Any]:
        """Return the settings for a worker, other than the common ones, as JSON can hold them.

        Args:
            offload_folder: for this worker alone, where the request names one.
        """
        raise NotImplementedError

    def environment(self) -> Mapping[str, str]:
        """Return environment variables for its workers on GPUs, which are set before they start."""
        return {}

    def candidates(
        self, inspected: I, assigned: Assigned, ran_with: RanWith | None = None
    ) -> Sequence[Sequence[Candidate]]:
        """Return groups of settings for ``tune`` that may be faster and change numbers a little.

        The first group holds precisions, the widest first: others are compared with it.  Each further group is
        tried with the best of the groups before it, the last group with the best number of workers, too.

        Args:
            ran_with: the settings of the best candidate so far; None: nothing has run yet, and the usual values
                are assumed.
        """
        return ()

    def problems_before_training(self) -> Iterator[str]:
        """Yield problems of files that a member trained by a command has already, each beginning with its key."""
        return iter(())

    def learned_activation(self, labels: int) -> OutputActivation:
        """Return what the values of a member with ``train`` are for that many labels."""
        raise NotImplementedError

    def arrange_training(self, folder: Path) -> str:
        """Arrange what a training has left, and return a note for the user; raise CheckpointError to refuse it."""
        raise NotImplementedError

    def trained_settings(self, folder: Path) -> Mapping[str, str]:
        """Return the keys with which the member loads what a training has left in ``folder``."""
        raise NotImplementedError

    def predictions(self, ids: pa.ChunkedArray, columns: OutputColumns) -> ExternalPredictions:
        """Return all of its predictions, for kinds without workers; the caller checks that they are probabilities.

        Args:
            ids: of the table's rows, text, unique.

        Raises:
            DataError: the predictions cannot be read.
        """
        raise NotImplementedError
