"""Define the keys of the YAML with their types and defaults.

Kinds of members and merge methods add more keys. ``defaults:`` is merged under the models by ``load``.
"""

# No "from __future__ import annotations": pydantic would evaluate every annotation from its text again.

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from annotated_types import Ge, Le
from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    SerializeAsAny,
    Tag,
    ValidationInfo,
    field_validator,
)

from ensemble.common.text import did_you_mean, listed, metric_words, plural
from ensemble.config.document import KeyProblems, Problem, place
from ensemble.config.values import (
    Address,
    AnyWeight,
    Column,
    Columns,
    CommandWords,
    Count,
    DeviceList,
    Devices,
    DistinctNumbers,
    Duration,
    Ends,
    Factors,
    File,
    Finite,
    Folder,
    HangTimeout,
    Label,
    LabelMap,
    LabelPair,
    Labels,
    LabelTexts,
    Launcher,
    LauncherSettings,
    LengthBins,
    Marker,
    Method,
    MustBe,
    Name,
    Names,
    Number,
    Part,
    Probabilities,
    Retries,
    RisingNumbers,
    Seed,
    Settings,
    Sha256,
    Share,
    Source,
    StrictConfig,
    TaskType,
    Temperature,
    Text,
    Thresholds,
    TimeLimit,
    Trackers,
    Values,
    Versions,
    Weight,
    When,
    foreign_label,
    foreign_labels,
    mapping_or_text,
    same_label_problems,
    takes_time_left,
    weight_numbers,
)

# Keys of a member that matter only at the merge; its predictions do not depend on them.
MERGE_KEYS: Final = ("weight", "calibration", "when")
# Names of the views that a training makes: the model of a fold, alone or behind the name of the member's own view.
_FOLD_VIEW: Final = r"(?i)(.*-)?fold-\d+"


class AllowedLabelsTable(StrictConfig):
    """Another table, which lists the labels that are possible in all rows with the same key."""

    path: File = Field(examples=["questions.csv"])  # in any format of data.path
    key: Column = Field(examples=["question_id"])  # column of both tables; in this one each key stands once
    column: Column = Field(examples=["labels"])  # its column with JSON lists of labels

    def __str__(self) -> str:
        return f"{self.column} of {self.path}"


ColumnOrTable = Annotated[
    Annotated[Column, Tag("text")] | Annotated[AllowedLabelsTable, Tag("mapping")],
    Discriminator(mapping_or_text),
]


class DataConfig(StrictConfig):
    """The table to predict. A relative path starts at the working directory."""

    # A CSV, TSV, Parquet or JSON lines file, gzipped or not, or the address of one, such as s3://bucket/test.csv.
    path: File = Field(examples=["test.csv"])
    id_column: Column = "id"  # column of the ids, which are kept byte for byte
    label_column: Column | None = None  # the true labels, for metrics
    # Or one column per label with its true probability, such as 0 or 1; a mapping if their names differ.
    label_columns: Labels | LabelMap | None = None
    skip_unlabelled: bool = False  # leave out rows whose label is empty, in place of refusing them
    # Column with a JSON list of the labels that are possible in a row, others get 0; or that of another table.
    allowed_labels: ColumnOrTable | None = None

    older_keys: ClassVar[Mapping[str, str]] = {
        "path": "file csv input input_path test",
        "id_column": "id id_col",
        "label_column": "label label_col target target_column",
        "label_columns": "label_cols targets target_columns",
    }
    alternatives: ClassVar[tuple[tuple[str, str], ...]] = (("label_column", "label_columns"),)

    def truth_columns(self, labels: Sequence[str]) -> tuple[str, ...]:
        """Return the column of ``label_columns`` for each of the config's labels; empty if there are none."""
        if not self.label_columns:
            return ()
        if not isinstance(self.label_columns, dict):
            return tuple(labels)
        column_by_label = {label: column for column, label in self.label_columns.items()}
        return tuple(column_by_label.get(label, label) for label in labels)

    @property
    def has_truth(self) -> bool:
        """Return whether columns are named that have the true labels."""
        return self.label_column is not None or self.label_columns is not None

    def labelled_by(self, column: str | None) -> Self:
        """Return the same with another column of true labels; None: it stays as it is."""
        if column is None:
            return self
        return self.model_copy(update={"label_column": column, "label_columns": None})

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        if self.label_column is not None and len(labels) == 1:
            yield (
                ("label_column",),
                "holds one of several labels, but there is a single label here; name the column of its numbers "
                "with label_columns: {column: label}",
            )
        if self.label_columns is None:
            return
        if self.label_column is not None:
            yield ("label_columns",), "data.label_column is given as well; keep one of the two"
        yield from broken_label_columns(self.label_columns, labels)


def broken_label_columns(
    label_columns: Sequence[str] | Mapping[str, str], labels: Sequence[str]
) -> Iterator[Problem]:
    """Yield labels that ``label_columns`` lacks or has twice, and those that are none."""
    columns: dict[Any, str] = dict(enumerate(label_columns))
    advice = " (of a column with another name: {column: label})"
    if isinstance(label_columns, Mapping):
        columns, advice = {**label_columns}, ""
    problems = [*same_label_problems("label_columns", columns, labels, advice)]
    yield from problems
    if not problems and len(columns) < len(labels):
        yield ("label_columns",), "has no column for some of the labels; name one for each"


_ORDER: Final = "the order of rows comes from the seed and their lengths, so that a killed training can go on"
_SAVES: Final = "a training saves as often as that takes little time, and goes on from the newest save"
_FOLDS: Final = (
    "the held-out fold has no say in a training; train.early_stopping looks at a slice of the rest"
)
_DEVICE: Final = "a training runs in one process, on the devices that train.num_gpus gives it"
_QUIET: Final = "a training reports to its run alone"
_ROWS: Final = "rows are encoded before the training, as they are for predictions"
# By key; a name that ends with "_" stands for all keys that begin with it.
OWNED: Final[Mapping[str, str]] = {
    "auto_find_batch_size": "it would begin again at step 0 with weights that are trained already; leave "
    "train.per_device_train_batch_size at auto, which goes on with fewer rows when memory runs out",
    "gradient_accumulation_steps": "it follows from train.effective_batch_size and the rows that fit",
    "per_device_train_batch_size": "train has a key of this name",
    "average_tokens_across_devices": "the loss is divided by the rows of the effective batch",
    "label_smoothing_factor": "training.labels may hold probabilities; smooth them there",
    **dict.fromkeys(
        ["group_by_length", "length_column_name", "train_sampling_strategy", "data_seed"], _ORDER
    ),
    "seed": "the run has a key of this name",
    "full_determinism": "a training on a CPU is the same bit for bit without it",
    "output_dir": "trainings are written below the run's output_dir",
    **dict.fromkeys(["resume_from_checkpoint", "ignore_data_skip", "enable_jit_checkpoint", "save_"], _SAVES),
    "restore_callback_states_from_checkpoint": _SAVES,
    **dict.fromkeys(["eval_", "do_", "load_best_model_at_end", "metric_for_best_model"], _FOLDS),
    **dict.fromkeys(["greater_is_better", "per_device_eval_batch_size"], _FOLDS),
    **dict.fromkeys(["report_to", "run_name", "project", "trackio_", "logging_", "disable_tqdm"], _QUIET),
    **dict.fromkeys(["push_to_hub", "hub_", "include_num_input_tokens_seen"], _QUIET),
    **dict.fromkeys(["deepspeed", "fsdp", "fsdp_", "ddp_", "local_rank", "use_cpu"], _DEVICE),
    **dict.fromkeys(["parallelism_config", "accelerator_config"], _DEVICE),
    **dict.fromkeys(["dataloader_", "remove_unused_columns", "label_names"], _ROWS),
}


def owned_keys(keys: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the keys of ``train.training_arguments`` that are not the user's, with a sentence that says why."""
    for key in keys:
        for name, reason in OWNED.items():
            if key == name or (name.endswith("_") and key.startswith(name)):
                yield key, f"is not set here: {reason}; drop it"
                break


def steps_problem(arguments: Mapping[str, Any]) -> str | None:
    """Return why ``num_train_epochs`` gives no training; None if it does, or is no number, or max_steps decides."""
    epochs, max_steps = arguments.get("num_train_epochs"), arguments.get("max_steps")
    if not isinstance(epochs, int | float) or (isinstance(max_steps, int) and max_steps > 0):
        return None
    if epochs > 0 and math.isfinite(epochs):
        return None
    return f"{epochs} epochs are no training; give a number above 0, or max_steps"


DEFAULT_FOLDS: Final = 5
MAX_FOLDS: Final = 1000
# What a command of the user may hold in braces: files and numbers of the training that it is for.
PLACEHOLDERS: Final = ("train", "fold", "out")

Folds = Annotated[int, Ge(2), Le(MAX_FOLDS), MustBe(f"a whole number from 2 to {MAX_FOLDS}")]


def _to_be_trained(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without ``inference_mode: true``, as peft saves every adapter: it would train nothing."""
    return {key: value for key, value in settings.items() if key != "inference_mode" or value is not True}


LoraSettings = Annotated[Settings, AfterValidator(_to_be_trained)]


class FoldsConfig(StrictConfig):
    """Divide the training table's rows into folds: give ``n_splits``, or the ``column`` that holds them."""

    n_splits: Folds | None = None  # stratified by the true label; None: 5, unless column is given
    column: Column | None = None  # its values are the folds, numbered from 0 in sorted order
    group_column: Column | None = None  # rows with the same cell are in the same fold
    seed: Seed = 0  # of the division

    older_keys: ClassVar[Mapping[str, str]] = {
        "n_splits": "n_folds folds num_folds k splits",
        "group_column": "groups group group_col",
        "column": "fold fold_column fold_col",
    }
    alternatives: ClassVar[tuple[tuple[str, str], ...]] = (("n_splits", "column"),)

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        if self.column is not None and self.n_splits is not None:
            yield ("column",), "n_splits is given as well; keep one of the two"

    @property
    def splits(self) -> int | None:
        """Return the number of folds; None where a column tells."""
        return None if self.column is not None else self.n_splits or DEFAULT_FOLDS

    @property
    def columns(self) -> dict[str, str]:
        """Return the table's columns that decide folds, by their key."""
        return self.model_dump(include={"column", "group_column"}, exclude_none=True)


class ExtraTable(StrictConfig):
    """Another table, whose rows join the training part of every fold but their group's and are never predicted."""

    path: File = Field(examples=["synthetic.csv"])  # in any format of data.path, with the same columns
    weight: Share = 1.0  # of each of its rows in the loss; rows of training.data have 1
    label_column: Column | None = None  # the true labels; None: as in training.data
    label_columns: Labels | LabelMap | None = None  # or the column of each label's probability
    labels: File | None = None  # or a CSV of probabilities by id, such as ensemble.csv of another run

    older_keys: ClassVar[Mapping[str, str]] = {"path": "file csv", "weight": "sample_weight"}

    def as_data(self, data: DataConfig) -> DataConfig:
        """Return the keys of this table; its labels are named as in ``data``, unless it names them itself."""
        changes: dict[str, object] = {"path": self.path}
        if self.label_column is not None or self.label_columns is not None or self.labels is not None:
            changes |= {"label_column": self.label_column, "label_columns": self.label_columns}
        return data.model_copy(update=changes)

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        names = [key for key in ("label_column", "label_columns", "labels") if getattr(self, key) is not None]
        if len(names) > 1:
            yield (names[1],), f"{names[0]} is given as well; keep one of them"
        if self.label_columns is not None:
            yield from broken_label_columns(self.label_columns, labels)


Extra = Annotated[tuple[ExtraTable, ...], MustBe("a list of tables", list)]


class TrainingConfig(StrictConfig):
    """Set what members with ``train`` are trained on; each fold is predicted by a model that has not seen it."""

    data: DataConfig | None = None  # the labelled table; None: the run's own
    folds: FoldsConfig = FoldsConfig()  # which rows are held out together
    extra: Extra | None = None  # further tables for training only
    # A CSV of probabilities by id, such as ensemble.csv of another run, to learn in place of the true labels.
    labels: File | None = Field(default=None, examples=["runs/teacher/ensemble.csv"])


class EarlyStopping(StrictConfig):
    """End a training when the loss on a slice of its own part no longer falls; the held-out fold has no say."""

    share: Part = 0.1  # of the training part's rows (or groups), which are then not trained on
    patience: Count = 1  # epochs without a lower loss

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        if self.share > 0.5:
            yield ("share",), "must be at most 0.5; the other rows are left to train on"


class TrainConfig(StrictConfig):
    """Set how a member is trained: by a ``command``, or from a ``base_model`` by transformers' Trainer and peft."""

    # A program, run once for each fold; {train} is the file of the rows to train on, {fold} the number of the fold
    # that is held out (-1: none), {out} the folder that gets the result.
    command: CommandWords | None = Field(
        default=None, examples=['[python, train.py, --train, "{train}", --fold, "{fold}", --out, "{out}"]']
    )
    num_gpus: Devices | None = None  # for each training; 0: the CPU; None: one if there is any GPU
    # What is trained: a folder, or a name on the hub.
    base_model: Source | None = Field(default=None, examples=["models/deberta-v3-base"])
    # full: all weights; lora: a LoRA adapter; qlora: the same on 4-bit weights; head: a logistic regression on
    # pooled features
    method: Literal["full", "lora", "qlora", "head"] = "full"
    # folds: the mean of the folds' models; average: one model of their mean weights; refit: a model of all rows
    predict_with: Literal["folds", "average", "refit"] = "folds"
    # The Trainer's own keys, such as {learning_rate: 2.0e-5, num_train_epochs: 3}
    training_arguments: Settings = Field(default_factory=dict)
    # peft's own keys of LoraConfig, such as {r: 16, lora_alpha: 32}
    lora_config: LoraSettings = Field(default_factory=dict)
    effective_batch_size: Count = 16  # rows in each step of the optimizer
    # Rows at a time on the device; auto: a whole step's on GPUs, 8 on a CPU. A training that runs out of memory
    # goes on with fewer.
    per_device_train_batch_size: Count | Literal["auto"] = "auto"
    early_stopping: EarlyStopping | None = None  # None: all epochs
    C: Share = 1.0  # of method head: the inverse strength of the regularization of LogisticRegression
    pooling_mode: Literal["mean", "cls", "lasttoken"] = "mean"  # of method head, as in pooled_cls

    older_keys: ClassVar[Mapping[str, str]] = {
        "command": "cmd script run",
        "base_model": "model_name_or_path model base pretrained",
        "num_gpus": "gpus n_gpus",
        "training_arguments: {learning_rate: 2.0e-5}": "learning_rate lr",
        "training_arguments: {num_train_epochs: 3}": "num_train_epochs epochs num_epochs",
        "training_arguments": "trainer args training_args",
        "lora_config: {r: 16}": "r lora_r lora_alpha target_modules",
        "lora_config": "lora peft peft_config",
        "effective_batch_size": "batch_size train_batch_size total_batch_size gradient_accumulation_steps",
    }

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        if (self.command is None) == (self.base_model is None):
            yield (), "give one of command and base_model"
            return
        if self.command is not None:
            yield from self._broken_command()
            return
        size = self.per_device_train_batch_size
        if isinstance(size, int) and size > self.effective_batch_size:
            yield (
                ("per_device_train_batch_size",),
                f"more than effective_batch_size, {self.effective_batch_size:,}; set that, too",
            )
        for name, sentence in owned_keys(self.training_arguments):
            yield ("training_arguments", name), sentence
        no_steps = steps_problem(self.training_arguments)
        if no_steps is not None:
            yield ("training_arguments", "num_train_epochs"), no_steps
        yield from self._broken_head()
        if self.lora_config and self.method not in ("lora", "qlora"):
            yield ("lora_config",), "needs method: lora or qlora"
        if self.predict_with == "average" and self.method == "head":
            yield ("predict_with",), "average is of adapters or checkpoints; choose folds or refit"

    def _broken_head(self) -> Iterator[Problem]:
        """Find keys of training by steps beside ``method: head``, and keys of a head beside the other methods."""
        of_head, is_head = ("C", "pooling_mode"), self.method == "head"
        of_steps = (
            "training_arguments",
            "effective_batch_size",
            "per_device_train_batch_size",
            "early_stopping",
        )
        for key in of_steps if is_head else of_head:
            if key in self.model_fields_set:
                yield (key,), f"is not for method: {self.method}; drop it, or choose another method"

    def _broken_command(self) -> Iterator[Problem]:
        """Find a command without the folder to write to, and keys that are of the built-in way only."""
        text = " ".join(self.command or ())
        for name in ("train", "out"):
            if f"{{{name}}}" not in text:
                yield ("command",), f"does not say {{{name}}}, which stands for a path; pass it on"
        built_in = set(type(self).model_fields) - {"command", "num_gpus", "predict_with"}
        for key in sorted(built_in & self.model_fields_set):
            yield (key,), "is for training from a base_model; the command decides it here"


class IsotonicConfig(StrictConfig):
    """The points of a line, which is level beyond them."""

    x: RisingNumbers = Field(examples=["[0.02, 0.4, 0.97]"])  # the member's probabilities
    y: Probabilities = Field(examples=["[0.05, 0.5, 0.9]"])  # what they become

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        if len(self.x) != len(self.y):
            yield ("y",), f"{len(self.y):,} for {len(self.x):,} of x; give one for each"


class CalibrationConfig(StrictConfig):
    """A calibration of a member's probabilities before the merge, as ``fit`` finds it."""

    temperature: Temperature = 1.0  # above 1 the member is less sure, below 1 more sure
    scale: Factors = Field(default_factory=dict)  # by label: factor of its log probability; 1 if left out
    bias: Factors = Field(default_factory=dict)  # by label: added to the log probability; 0 if left out
    # By label: {x: [...], y: [...]}, the line from its probabilities to others, before rows are scaled to 1.
    isotonic: Annotated[dict[str, IsotonicConfig], MustBe("a mapping of labels to lines", dict)] = Field(
        default_factory=dict, examples=["{positive: {x: [0.02, 0.4, 0.97], y: [0.05, 0.5, 0.9]}}"]
    )

    older_keys: ClassVar[Mapping[str, str]] = {"temperature": "t temp", "scale": "w", "bias": "b"}

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        if self.isotonic and self.model_copy(update={"isotonic": {}}) != CalibrationConfig():
            yield ("isotonic",), "temperature, scale or bias is given as well; keep one way"
        yield from foreign_labels("isotonic", self.isotonic, labels)
        yield from foreign_labels("scale", self.scale, labels)
        yield from foreign_labels("bias", self.bias, labels)


class MemberConfig(StrictConfig):
    """Describe a member of the ensemble: the keys that all kinds have. A kind's own keys are in a subclass."""

    name: Name = Field(examples=["gemma2"])  # also a file name, so unique in upper and lower case
    task_type: TaskType = "seq_cls"  # kind of member: built in, or from an installed package
    # Weight in the merge, relative to the other members; or a weight for each label or length bin.
    weight: Weight = 1.0
    calibration: CalibrationConfig | None = None  # correction of its probabilities at the merge
    # Only rows for which the weighted mean of the members listed before it is unsure; left out: all rows.
    when: When | None = Field(default=None, examples=[{"margin_below": 0.3}])

    @property
    def training(self) -> TrainConfig | None:
        """Return how the member is trained; None: its files are there already."""
        return None

    @property
    def has_weight(self) -> bool:
        """Return whether the member counts in the merge, at least for some label and row."""
        return any(weight_numbers(self.weight))

    @property
    def all_views(self) -> tuple["ViewConfig", ...]:
        """Return the views of each row; empty for a member without views."""
        return ()

    @property
    def input_names(self) -> tuple[str, ...]:
        """Return the names of the members whose predictions it reads; empty for a member without ``inputs``."""
        return ()

    def input_columns(self, labels: Sequence[str]) -> tuple[str, ...]:
        """Return the columns that hold these predictions, such as ``gemma2/positive``, by member and label."""
        return tuple(f"{name}/{label}" for name in self.input_names for label in labels)

    @property
    def label_behind_prompt(self) -> str:
        """Return the text of the first label if it follows the prompt; empty if nothing does."""
        return ""

    @property
    def counted_views(self) -> tuple["ViewConfig", ...]:
        """Return the views of each row without those of weight 0; empty for a member without views."""
        return tuple(view for view in self.all_views if view.weight > 0)

    @property
    def views_with_when(self) -> dict[int, Mapping[str, float | str]]:
        """Return the ``when`` of each counted view that has one, by the view's number."""
        views = enumerate(self.counted_views)
        return {number: view.when for number, view in views if view.when is not None}

    @property
    def has_all_rows(self) -> bool:
        """Return whether it predicts every row in all views: no ``when`` selects some."""
        return self.when is None and not self.views_with_when

    def without_when(self) -> Self:
        """Return the settings of the same member for all rows, in all views."""
        changes: dict[str, Any] = {"when": None}
        if self.counted_views:
            changes["views"] = tuple(view.model_copy(update={"when": None}) for view in self.counted_views)
        return self.model_copy(update=changes)

    def as_view(self, view: "ViewConfig") -> Self:
        """Return the settings for one of the views, without any views."""
        return self.model_copy(update={**view.changes, "views": None})

    @property
    def models(self) -> "dict[str, Self]":
        """Return the settings of each model that workers load, by the key that names it; "": there is only one.

        Each counts only the views that this model computes; views keep their numbers.
        """
        return {"": self}

    @property
    def computed_as(self) -> str:
        """Return a digest of the settings that decide how long a row takes; settings may be secrets."""
        values = [value for key, value in self if key not in ("name", "views", "inputs", *MERGE_KEYS)]
        return sha256(repr(values).encode()).hexdigest()[:16]


class SwapConfig(StrictConfig):
    """Two columns that swap their cells in a view of a row, and the labels that swap with them."""

    columns: Columns = Field(examples=[["response_a", "response_b"]])  # each gets the cells of the other
    # Their predictions are swapped back; None: the labels mean the same both ways.
    labels: LabelPair | None = None

    older_keys: ClassVar[Mapping[str, str]] = {"columns": "column fields", "labels": "label"}

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        for key, pair in (("columns", self.columns), ("labels", self.labels)):
            if pair is not None and pair[0] == pair[1]:
                yield (key,), "the same twice; name two to swap"
        for number, label in enumerate(self.labels or ()):
            if labels and label not in labels:
                yield ("labels", number), "must be one of the labels"


class ViewConfig(StrictConfig):
    """Describe a view of each row; a member's prediction is the weighted mean over its views."""

    name: Name = Field(examples=["swapped"])  # part of a file name, so unique in upper and lower case
    weight: Number = 1.0  # in the mean, relative to the member's other views; 0: not computed
    swap: SwapConfig | None = None  # None: the columns stay in their places
    # Only rows for which the mean of the views before it, and of the members listed before, is unsure; None: all.
    when: When | None = Field(default=None, examples=[{"share": "as_time_allows"}])

    older_keys: ClassVar[Mapping[str, str]] = {"swap": "swap_columns"}

    @property
    def changes(self) -> dict[str, Any]:
        """Return the member's keys that this view changes."""
        return {}

    @property
    def columns(self) -> dict[str, str]:
        """Return, by column, the other column whose cells replace its cells."""
        if self.swap is None:
            return {}
        first, second = self.swap.columns
        return {first: second, second: first}

    def label_order(self, labels: Sequence[str]) -> tuple[int, ...]:
        """Return, for each of the config's labels, the number of the label that the member predicts instead."""
        order = list(range(len(labels)))
        if self.swap is not None and self.swap.labels is not None:
            first, second = map(labels.index, self.swap.labels)
            order[first], order[second] = second, first
        return tuple(order)


Views = Annotated[tuple[ViewConfig, ...], MustBe("a list of views", list)]


class ReaderConfig(MemberConfig):
    """A member that reads rows of the table, so that it can read each row in several views."""

    # Ways in which it reads each row, each with its own name; left out: every row once, as it is.
    views: Views | None = Field(
        default=None,
        examples=["[{name: as_is}, {name: swapped, swap: {columns: [a, b], labels: [a_wins, b_wins]}}]"],
    )

    # Keys of a member, and of its views, that say what a worker loads; none: the same in all views.
    loaded_keys: ClassVar[tuple[str, ...]] = ()

    @property
    def all_views(self) -> tuple[ViewConfig, ...]:
        return self.views or ()

    @property
    def _loads(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in self.loaded_keys}

    def _loaded_by(self, view: ViewConfig) -> str | None:
        """Return the key by which a view names another model than the member's; None: it has that one."""
        return next((key for key in self.loaded_keys if view.changes.get(key)), None)

    @property
    def models(self) -> dict[str, Self]:
        views: dict[tuple[Any, ...], list[ViewConfig]] = {}
        for view in self.counted_views:
            views.setdefault(tuple(self.as_view(view)._loads.values()), []).append(view)
        if set(views) <= {tuple(self._loads.values())}:
            return {"": self}
        own_key = next((key for key, value in self._loads.items() if value), "")
        models: dict[str, Self] = {}
        for first, *others in views.values():
            key = self._loaded_by(first)
            name = own_key if key is None else f"views[{self.all_views.index(first)}].{key}"
            # Other models' views are never computed there, and nothing must be loaded for them.
            loaded = {name: getattr(first, name) for name in self.loaded_keys}
            stand_in = type(first).model_construct(name=first.name, weight=0.0, **loaded)
            computed = tuple(view if view is first or view in others else stand_in for view in self.all_views)
            models[name] = self.model_copy(update={**self.as_view(first)._loads, "views": computed})
        return models

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        yield from super().broken_rules(labels)
        yield from same_name_problems("views", [view.name for view in self.all_views])
        for number, view in enumerate(self.all_views):
            if self.training is not None and re.fullmatch(_FOLD_VIEW, view.name):
                sentence = "with train, names that end in fold-<number> are the folds' models; choose another"
                yield ("views", number, "name"), sentence
            key = self._loaded_by(view)
            if self.training is not None and key is not None:
                yield ("views", number, key), "with train the training makes the member's models; drop this"
        if self.views and not self.counted_views:
            yield ("views",), "all weights are 0; one view must have a weight above 0"
        is_time_taken = False
        for number, view in enumerate(self.all_views):
            if is_time_taken and view.weight > 0 and not takes_time_left(view.when):
                yield ("views", number), "comes after a view with share: as_time_allows; list that view last"
            is_time_taken |= takes_time_left(view.when) and view.weight > 0


class InputsConfig(ReaderConfig):
    """A member that reads cells of any type, so that its rows can have other members' predictions, too."""

    # Members listed before this one: it reads their predictions as columns, such as gemma2/positive.
    inputs: Names | None = Field(default=None, examples=[["gemma2", "llama3"]])

    @property
    def input_names(self) -> tuple[str, ...]:
        return self.inputs or ()


class EnsembleConfig(StrictConfig):
    """Set how the members' probabilities are merged; a merge method with its own keys has a subclass."""

    # mean, geometric_mean, logit_mean, median, power_mean, rank_mean, vote, stacking, or a package's method.
    method: Method = "mean"

    # For weights by length: bytes of text at which the next bin begins; [500, 2000] makes three bins.
    length_bins: LengthBins | None = None

    older_keys: ClassVar[Mapping[str, str]] = {
        "weight (in each model)": "weight weights",
        "method": "type strategy",
    }


class RuleConfig(StrictConfig):
    """Values for rows that meet a condition, in place of the merged ones; give one of ``set`` and ``mask``."""

    # A Jinja expression over the row's columns, as in prompt_template, that gives true or false.
    when: Text = Field(examples=['"{{ response_a == response_b }}"'])
    set: Values | None = None  # values by label; if labels are exclusive, the others share the rest of 1
    mask: Labels | None = None  # impossible labels: 0; exclusive labels are then scaled to a sum of 1

    older_keys: ClassVar[Mapping[str, str]] = {
        "when": "if condition",
        "set": "override then",
        "mask": "zero impossible",
    }

    @property
    def action(self) -> str:
        """Return in a few words what the rule does to rows."""
        if self.mask:
            return f"mask {', '.join(self.mask)}"
        return f"set {', '.join(f'{label} {value:g}' for label, value in (self.set or {}).items())}"

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        if self.set is None and self.mask is None:
            yield (), "neither set nor mask is given; give one"
        if self.set is not None and self.mask is not None:
            yield (), "set and mask; make two rules"
        yield from foreign_labels("set", self.set or (), labels)
        for number, label in enumerate(self.mask or ()):
            if labels and label not in labels:
                yield ("mask", number), "must be one of the labels"


class AnswerConfig(StrictConfig):
    """Several labels or a number as the answer; give one of ``top``, ``above`` and ``expected``."""

    top: Count | None = None  # how many labels, the likeliest first; those of probability 0 are left out
    # Labels with at least this probability, or thresholds by label, joined in the config's order. A column of one
    # label, by its own name or here, holds 1 or 0.
    above: Thresholds | None = Field(default=None, examples=["{toxic: 0.31}"])
    at_least: Count | None = None  # where fewer labels are above, the likeliest others are added
    none: Marker | None = None  # text where no label is above; left out: nothing, or 0
    separator: Marker = " "  # text between the labels of top and above
    # A number for each label; the expected number decides which is the answer. With one label: its value decides.
    expected: DistinctNumbers | None = None
    # Expected numbers at which the next answer begins; left out: halfway between the numbers.
    thresholds: RisingNumbers | None = None

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        if sum(key is not None for key in (self.top, self.above, self.expected)) != 1:
            yield (), "give one of top, above and expected"
        if isinstance(self.above, dict):
            yield from foreign_labels("above", self.above, labels)
        for key in ("at_least", "none"):
            if self.above is None and getattr(self, key) is not None:
                yield (key,), "is for above, which is not given"
        if self.top is not None and labels and self.top > len(labels):
            yield ("top",), f"more than there are: {plural(len(labels), 'label')}"
        if self.expected is None and self.thresholds is not None:
            yield ("thresholds",), "are between the numbers of expected, which is not given"
        if self.expected is None:
            return
        count = len(self.expected)
        if len(labels) > 1 and count != len(labels):
            yield ("expected",), f"{count:,} for {len(labels):,} labels; give one for each, in their order"
        elif count < 2:
            yield ("expected",), "a single number would be the answer in every row; give two or more"
        elif self.thresholds is not None and len(self.thresholds) != count - 1:
            yield ("thresholds",), f"{len(self.thresholds):,} between {count:,} numbers; give {count - 1:,}"

    def label_thresholds(self, column: str, labels: Sequence[str]) -> dict[str, float]:
        """Return the threshold of each label that may stand in this column of the submission, by label."""
        above = {} if self.above is None else self.above
        chosen = [column] if column in labels else labels
        return above if isinstance(above, dict) else dict.fromkeys(chosen, above)


class AnswerColumnConfig(StrictConfig):
    """A column of the submission that holds answers, not probabilities."""

    # label: the likeliest label, of equal ones the first.
    answer: Annotated[
        Annotated[Literal["label"], MustBe("label, {top: 3} or {above: 0.5}"), Tag("text")]
        | Annotated[AnswerConfig, Tag("mapping")],
        Discriminator(mapping_or_text),
    ] = Field(examples=["label"])
    # By label, what the submission calls it; the label itself if left out.
    names: LabelTexts = Field(default_factory=dict)
    # A Jinja template for each label or number, {{ answer }}, with the row's columns around it.
    format: Text | None = Field(default=None, examples=['"{{ prefix }}_{{ answer }}"'])

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        if self.answer == "label" and len(labels) == 1:
            yield ("answer",), "there is a single label, so that all answers would be the same"
        if self.names and isinstance(self.answer, AnswerConfig) and self.answer.expected is not None:
            yield ("names",), "are for labels; write text around the numbers of expected by format"
        yield from foreign_labels("names", self.names, labels)


_SubmittedColumn = Annotated[
    Annotated[Label, Tag("text")] | Annotated[AnswerColumnConfig, Tag("mapping")],
    Discriminator(mapping_or_text),
]
SubmittedColumns = Annotated[
    dict[str, _SubmittedColumn], MustBe("a mapping of names to labels or answers", dict)
]


class SubmissionConfig(StrictConfig):
    """The file to submit, with the columns and rows of a sample."""

    sample: File = Field(examples=["sample_submission.csv"])  # gives the columns and the order of the rows
    # Where to write: CSV, or Parquet if its name ends in .parquet; None: in the output directory.
    path: File | None = None
    # By the sample's columns: the label whose probability a column holds, if their names differ; or {answer: ...}.
    columns: SubmittedColumns = Field(default={}, examples=["{winner: {answer: label}}"])

    older_keys: ClassVar[Mapping[str, str]] = {
        "sample": "sample_path template",
        "path": "file output output_path",
    }

    @property
    def label_by_column(self) -> dict[str, str]:
        """Return the label of each column that holds probabilities."""
        return {name: label for name, label in self.columns.items() if isinstance(label, str)}

    @property
    def answers(self) -> dict[str, AnswerColumnConfig]:
        """Return the columns that hold answers."""
        return {name: column for name, column in self.columns.items() if not isinstance(column, str)}

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        for column, label in self.label_by_column.items():
            if labels and label not in labels:
                yield ("columns", column), "must be one of the labels"
        for column, settings in self.answers.items():
            answer = settings.answer
            count = 0 if answer == "label" else len(answer.label_thresholds(column, labels))
            if answer != "label" and 0 < count <= (answer.at_least or 0):
                yield ("columns", column, "answer", "at_least"), "every row would have all its labels"


class TuningConfig(StrictConfig):
    """The machine, the sample and the tolerance of the settings that ``tune`` wrote."""

    devices: Names = Field(examples=["[Tesla T4]"])  # names of the GPUs, or of the CPU
    # Versions of packages, by name.
    versions: Versions = Field(examples=["{torch: 2.6.0, transformers: 5.0.0}"])
    rows: Count = Field(examples=[256])  # rows of the sample
    tolerance: Number = Field(examples=[0.02])  # how far probabilities may be from the reference's
    date: Text = Field(examples=["'2026-01-31'"])  # day of the measurement


class FittingConfig(StrictConfig):
    """The rows that the weights were fitted on, and the score on held-out rows.

    ``sha256`` is of a UTF-8 line for each labelled row, sorted by id: the id, a tab, the label and a line feed.
    With label columns, a line has every label that is not 0, sorted by name, with tabs between them and, if the
    value is not 1, with ``=`` and the value to nine digits.
    """

    rows: Count = Field(examples=[2_000])  # rows with a label
    sha256: Sha256 = Field(examples=["'" + "0123456789abcdef" * 4 + "'"])  # SHA-256 of their ids and labels
    metric: Text = Field(examples=["log_loss"])  # metric that was optimized
    value: Finite = Field(examples=[0.3982])  # cross-validated value of the metric
    # 95 % interval of the value; null: unknown.
    interval: Ends | None = Field(default=None, examples=["[0.3710, 0.4254]"])

    @property
    def text(self) -> str:
        """Return the score of the weights on rows that they were not fitted on, in words."""
        text = f"fitted on these {plural(self.rows, 'row')}; held-out {metric_words(self.metric)}: {self.value:.4f}"
        if self.interval is None:
            return text
        low, high = self.interval
        return f"{text} (95 % interval {low:.4f} to {high:.4f})"


class MetricConfig(StrictConfig):
    """A metric to show."""

    name: Text = Field(examples=["auc"])  # or a function of yours: my_metric.py:score
    group: Column | None = None  # column of groups of rows, over which it is averaged


Metrics = Annotated[tuple[MetricConfig, ...], MustBe("a list of metrics such as {name: auc}", list)]
Ensemble = SerializeAsAny[EnsembleConfig]
Members = tuple[SerializeAsAny[MemberConfig], ...]
RuleList = Annotated[tuple[RuleConfig, ...], MustBe("a list of rules", list)]
Models = Annotated[Members, MustBe("a list of models", list)]


class RunConfig(StrictConfig):
    """The settings of a run."""

    data: DataConfig = Field(examples=["{path: test.csv}"])  # the table to predict
    labels: Labels = Field(examples=["[negative, positive]"])  # the columns of the predictions, in this order
    # The members; common keys can stand under defaults.
    models: Models = Field(examples=["[{name: a, model_name_or_path: models/a, text_column: text}]"])
    ensemble: Ensemble = Field(default_factory=EnsembleConfig)  # how probabilities are merged
    training: TrainingConfig | None = None  # table and folds for members with train; None: the run's table
    rules: RuleList | None = None  # values for rows that meet a condition, instead of the merged ones
    submission: SubmissionConfig | None = None  # left out: no submission is written
    output_dir: Folder = Field(examples=["runs/first"])  # folder for all files of the run
    # Address of a folder to which results are copied at the end, such as s3://bucket/runs/first; None: nowhere.
    copy_to: Address | None = None
    # Experiment trackers that get scores, settings, seconds, memory and the report of a run; None: no tracker.
    report_to: Trackers | None = None
    limit: Count | None = None  # only the first rows of the table
    seed: Seed = 0  # random seed
    devices: DeviceList | None = None  # the GPUs to use; None: all visible ones
    # Where workers run: local, ray (docs/how-to/ray.md), or {name: {settings}}.
    launcher: Launcher | LauncherSettings = "local"
    max_workers_per_gpu: Count | Literal["auto"] = 1  # workers that share a GPU; auto: by members and memory
    cpu_workers: Count | Literal["auto"] = "auto"  # workers at a time on a CPU, which share its cores
    wait_for_gpu: Duration = 0.0  # seconds to wait for memory that other programs use
    retries: Retries = 2  # how often a chunk is tried again, each time in a new worker
    # For rows that their member cannot compute.
    on_bad_row: Literal["fail", "uniform", "drop_member"] = "fail"
    on_member_failure: Literal["fail", "continue"] = "fail"  # continue: merge the other members
    time_limit: TimeLimit | None = None  # limit for a run, or for train; a submission is complete before it
    # Values of rows that no member has computed by then.
    fill: Literal["uniform", "prior", "sample"] = "uniform"
    hang_timeout: HangTimeout = 600.0  # seconds without a finished batch after which a worker counts as hung
    hash_weights: bool = False  # read all bytes to see whether weights changed; False: samples
    standby: bool = True  # start the next member's process while this one computes
    release_timeout: Duration = 60.0  # seconds until a GPU must be free after its worker has ended
    report: bool = True  # write report.html at the end
    # Shown in addition: [{name: auc, group: rule}, {name: my_metric.py:score}]
    metrics: Metrics | None = Field(default=None, examples=["[{name: auc, group: rule}, {name: macro_f1}]"])
    fitted_on: FittingConfig | None = None  # written by fit; shown beside the scores of these rows
    tuned_on: TuningConfig | None = None  # written by tune: where the settings were measured; no effect

    older_keys: ClassVar[Mapping[str, str]] = {
        "models": "members",
        "labels": "classes label_names",
        "data": "dataset input table",
        "output_dir": "output out_dir output_path save_dir",
        "devices": "gpus gpu_ids device_ids visible_devices",
        "limit": "max_rows n_rows nrows num_rows",
    }

    @property
    def workers_per_gpu(self) -> int:
        """Return how many workers share a GPU; of ``auto`` the plan makes a number."""
        return 1 if self.max_workers_per_gpu == "auto" else self.max_workers_per_gpu

    @property
    def group_columns(self) -> tuple[str, ...]:
        """Return the columns of the metrics' groups, if the rows have a truth."""
        metrics = (self.data.has_truth and self.metrics) or ()
        return tuple(dict.fromkeys(metric.group for metric in metrics if metric.group is not None))

    @property
    def possible_labels(self) -> str | AllowedLabelsTable | None:
        """Return where the labels that are possible in a row stand; a member's ``choices`` say it, too."""
        columns = [getattr(member, "choices", None) for member in self.models]
        return self.data.allowed_labels or next(filter(None, columns), None)

    @field_validator("labels")
    @classmethod
    def _labels_differ(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        problems: list[Problem] = []
        first_index: dict[str, int] = {}
        for index, label in enumerate(labels):
            first = first_index.setdefault(label, index)
            if first != index:
                problems.append(((index,), f"the same as labels[{first}]; name each label once"))
        if problems:
            raise KeyProblems(problems)
        return labels

    @field_validator("models")
    @classmethod
    def _models_go_together(cls, models: tuple[MemberConfig, ...]) -> tuple[MemberConfig, ...]:
        problems = [
            (loc[1:], sentence)
            for loc, sentence in same_name_problems("models", [member.name for member in models])
        ]
        sentence = "needs a member with a weight above 0 listed before this one, whose mean selects the rows"
        of_view = (
            "needs a view before this one, or a member with a weight above 0, whose mean selects the rows"
        )
        for index, member in enumerate(models):
            if deciding_members(models[:index]):
                continue
            if member.when:
                problems.append(((index, "when"), sentence))
            elif 0 in member.views_with_when:
                number = member.all_views.index(member.counted_views[0])
                problems.append(((index, "views", number, "when"), of_view))
        problems += broken_inputs(models)
        if problems:
            raise KeyProblems(problems)
        return models

    @field_validator("fill")
    @classmethod
    def _fill_has_its_source(cls, fill: str, info: ValidationInfo) -> str:
        submission: SubmissionConfig | Literal["wrong"] | None = info.data.get("submission", "wrong")
        if fill == "sample" and submission is None:
            raise ValueError("sample needs submission.sample, the file whose values it takes")
        if fill == "sample" and isinstance(submission, SubmissionConfig) and submission.answers:
            raise ValueError("sample has answers, not probabilities; choose uniform or prior")
        return fill

    @property
    def trained_members(self) -> tuple[MemberConfig, ...]:
        return tuple(member for member in self.models if member.training is not None)

    @property
    def training_data(self) -> DataConfig:
        """Return the table that members are trained on."""
        given = None if self.training is None else self.training.data
        return given or self.data

    @property
    def training_files(self) -> list[Path]:
        """Return the paths of the tables that members are trained on, and of soft labels."""
        training = self.training or TrainingConfig()
        paths = [self.training_data.path, training.labels]
        for extra in training.extra or ():
            paths += [extra.path, extra.labels]
        return [path for path in paths if path is not None]

    def _broken_training(self) -> Iterator[Problem]:
        """Yield that there is nobody to train, or nothing to learn."""
        # A member whose keys are wrong has a stand-in here, and may well have train.
        has_stand_in = any(type(member) is MemberConfig for member in self.models)
        if self.training is not None and not self.trained_members and not has_stand_in:
            yield ("training",), "no member has train; give it to one, or drop this"
        if not self.trained_members:
            return
        if not self.training_data.has_truth and (self.training is None or self.training.labels is None):
            where = "data" if self.training is None or self.training.data is None else "training.data"
            yield (*where.split("."),), "has no label_column, which the members with train learn"

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        yield from self._broken_training()
        if self.data.id_column in self.labels:
            index = self.labels.index(self.data.id_column)
            yield ("labels", index), "the same as data.id_column; predictions hold both columns"
        if self.launcher != "local":
            with_inputs = [index for index, member in enumerate(self.models) if member.input_names]
            sentence = "works on one machine alone, as predictions stay there; set launcher: local"
            yield from ((("models", index, "inputs"), sentence) for index in with_inputs)
        if self.time_limit is None:
            yield from self._unlimited()
        problems = [*self._broken_weights()]
        yield from problems or self._broken_sums()

    def _unlimited(self) -> Iterator[Problem]:
        """Yield each ``as_time_allows`` of a run without a time limit."""
        sentence = "share: as_time_allows needs time_limit; set it, or a share such as 0.3"
        for index, member in enumerate(self.models):
            if takes_time_left(member.when):
                yield ("models", index, "when"), sentence
            for number, view in enumerate(member.all_views):
                if takes_time_left(view.when) and view.weight > 0:
                    yield ("models", index, "views", number, "when"), sentence

    def _broken_weights(self) -> Iterator[Problem]:
        """Yield weights that lack a number for a label or length bin."""
        edges = self.ensemble.length_bins or ()
        for index, member in enumerate(self.models):
            loc = ("models", index, "weight")
            if isinstance(member.weight, dict):
                for label in member.weight:
                    if label not in self.labels:
                        yield (*loc, label), foreign_label(self.labels)
                missing = [label for label in self.labels if label not in member.weight]
                if missing:
                    yield loc, f"has no number for {listed(missing)}; give one for each label"
            elif isinstance(member.weight, tuple) and len(member.weight) != len(edges) + 1:
                bins = f"{len(edges)} of ensemble.length_bins make {len(edges) + 1} bins"
                reason = bins if edges else "a list of weights needs ensemble.length_bins"
                yield loc, f"{reason}; give one number for each bin"

    def _broken_sums(self) -> Iterator[Problem]:
        """Yield the first label and length bin for which all weights are 0."""
        weights = [member.weight for member in self.models]
        bins = len(self.ensemble.length_bins or ()) + 1
        for number, label in itertools.product(range(bins), self.labels):
            if any(_number_of(weight, number, label) for weight in weights):
                continue
            where = ""
            if any(isinstance(weight, dict) for weight in weights):
                where += f" for {label}"
            if any(isinstance(weight, tuple) for weight in weights):
                where += f" in length bin {number + 1} of {bins}"
            yield ("models",), f"the weights{where} are all 0; at least one must be more"
            return


def deciding_members(members: Sequence[MemberConfig]) -> list[MemberConfig]:
    """Return the members that select rows of later ones: those whose own rows do not depend on the time."""
    return [member for member in members if member.has_weight and not takes_time_left(member.when)]


def broken_inputs(members: Sequence[MemberConfig]) -> Iterator[Problem]:
    """Yield each of the members' ``inputs`` that is no member before it, is named twice, or lacks rows."""
    names = [member.name for member in members]
    for index, member in enumerate(members):
        before = {other.name: other for other in members[:index]}
        for number, name in enumerate(member.input_names):
            loc = (index, "inputs", number)
            if name == member.name:
                yield loc, "is the member itself; name members that are listed before it"
            elif name in names and name not in before:
                yield loc, "is listed after this member; list it before"
            elif name not in before:
                yield (
                    loc,
                    f"is no member{did_you_mean(name, names)}; name members that are listed before this one",
                )
            elif name in member.input_names[:number]:
                yield loc, "the same twice; name each member once"
            elif not before[name].has_all_rows:
                yield loc, "has when, so that it lacks rows; name members that predict every row in all views"


def same_name_problems(key: str, names: Sequence[str]) -> Iterator[Problem]:
    """Yield names in the list at ``key`` that differ only in upper and lower case."""
    first_index: dict[str, int] = {}
    for index, name in enumerate(names):
        first = first_index.setdefault(name.lower(), index)
        if first != index:
            sentence = f"the same as {place((key, first, 'name'))}; names must differ in more than their case"
            yield (key, index, "name"), sentence


def _number_of(weight: AnyWeight, length_bin: int, label: str) -> float:
    if isinstance(weight, dict):
        return weight[label]
    if isinstance(weight, tuple):
        return weight[length_bin]
    return weight
