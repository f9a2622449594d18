"""Define the keys of trainings: their table, their folds, and how a member is trained."""

# No "from __future__ import annotations": pydantic would evaluate every annotation from its text again.

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from annotated_types import Ge, Le, Len
from pydantic import AfterValidator, Field

from ensemble.config.document import Problem
from ensemble.config.strict import StrictConfig
from ensemble.config.table import DataConfig, broken_label_columns
from ensemble.config.values import (
    Column,
    Count,
    Devices,
    File,
    LabelMap,
    Labels,
    MustBe,
    Part,
    Seed,
    Settings,
    Share,
    Source,
    Text,
)

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
    "train.per_device_train_batch_size at auto, which finds the size before the training",
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
Command = Annotated[
    tuple[Text, ...],
    Len(1),
    MustBe('a list of a program and its arguments, such as [python, train.py, --train, "{train}"]', list),
]


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
    # that is held out (-1: none), {out} the folder that gets the checkpoint or adapter.
    command: Command | None = Field(
        default=None, examples=['[python, train.py, --train, "{train}", --fold, "{fold}", --out, "{out}"]']
    )
    num_gpus: Devices | None = None  # for each training; 0: the CPU; None: one if there is any GPU
    # What is trained: a folder, or a name on the hub.
    base_model: Source | None = Field(default=None, examples=["models/deberta-v3-base"])
    # full: all weights; lora: a LoRA adapter; qlora: the same on 4-bit weights; head: a logistic regression on
    # pooled features
    method: Literal["full", "lora", "qlora", "head"] = "full"
    # folds: the mean of the folds' models; average: one adapter, the mean of theirs; refit: a model of all rows
    predict_with: Literal["folds", "average", "refit"] = "folds"
    # The Trainer's own keys, such as {learning_rate: 2.0e-5, num_train_epochs: 3}
    training_arguments: Settings = Field(default_factory=dict)
    # peft's own keys of LoraConfig, such as {r: 16, lora_alpha: 32}
    lora_config: LoraSettings = Field(default_factory=dict)
    effective_batch_size: Count = 16  # rows in each step of the optimizer
    # Rows at a time on the device; auto: as many as fit, found by a trial on GPUs, 8 on a CPU. A training that runs
    # out of memory goes on with fewer.
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
        if self.predict_with == "average" and self.method not in ("lora", "qlora"):
            yield ("predict_with",), "average is of adapters; choose method: lora or qlora, or folds or refit"

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
