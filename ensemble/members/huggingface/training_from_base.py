"""Describe, without torch, the training of a member from a base model: problems, disk, and what it depends on.

The question about the base model asks for the training, too (``training/arguments.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from ensemble.common.digests import FileDigests, digest_of, digests_of
from ensemble.common.errors import CheckpointError
from ensemble.common.packages import installed_versions, unsupported
from ensemble.config import MemberConfig
from ensemble.config.schema import TrainConfig
from ensemble.members.huggingface.checkpoint.adapter_files import unshared_settings
from ensemble.members.huggingface.checkpoint.digests import hub_commit, tokenizer_digest, weights_digest
from ensemble.members.huggingface.checkpoint.facts import Facts
from ensemble.members.huggingface.checkpoint.hub import find_file, how_to_install
from ensemble.members.huggingface.checkpoint.inspect import checkpoint_question, read_checkpoint
from ensemble.members.huggingface.parent import TextCheckpoint
from ensemble.members.huggingface.spec import BACKBONE
from ensemble.members.questions import Question
from ensemble.members.registry import member_kind

# The packages of each method; those of "full" come with every installation.
_PACKAGES: Final = {"lora": ("peft",), "qlora": ("peft", "bitsandbytes"), "head": ("scikit-learn",)}
_TRAINER: Final = "ensemble.members.huggingface.training.trainer"
_HEAD_TRAINER: Final = "ensemble.members.pooled_cls.training"
_MICRO_BATCH: Final = 8  # where a training begins on a CPU
# Of each trained parameter: its float32 weight, and with it AdamW's two averages in a save.
_WEIGHT_BYTES, _SAVE_BYTES = 4, 12
# Keys of train that change no model, or nothing beyond rounding.
_NO_OTHER_MODEL = {"command", "base_model", "num_gpus", "predict_with", "per_device_train_batch_size"}
# The same of the settings of a member's workers.
_OF_PREDICTION = frozenset(
    "model_name_or_path revision job_adapters job_templates merge_adapter asked batch_size token_budget "
    "device_map max_memory offload_folder expandable_segments max_split_size_mb torch_compile bytes_per_token "
    "bytes_per_token_pair bytes_per_row fixed_bytes bytes_per_kept_token width".split()
)


def training_from_base(model: MemberConfig) -> TrainingFromBase | None:
    """Return the training of a member with ``train.base_model``; None for other members."""
    train, kind = model.training, member_kind(model)
    if train is None or train.base_model is None:
        return None
    assert isinstance(kind, TextCheckpoint)
    return TrainingFromBase(kind, train)


class TrainingFromBase:
    """Describe the training of a member from ``train.base_model``, before it begins."""

    def __init__(self, kind: TextCheckpoint[Any], train: TrainConfig) -> None:
        self.model = kind.settings
        self.base_model = str(train.base_model)
        self._kind = kind
        self._train = train
        self._base = self.model.model_copy(update={"model_name_or_path": self.base_model})
        self._auto_class = BACKBONE if train.method == "head" else kind.auto_class
        self._packages = _PACKAGES.get(train.method, ())
        self._lacking = [package for package in self._packages if not installed_versions([package])]

    @cached_property
    def folder(self) -> Path | None:
        """Return the folder with the base model's ``config.json``; None: there is none."""
        with contextlib.suppress(CheckpointError):
            return find_file(self.base_model, "config.json", self.model.revision).parent
        return None

    def questions(self) -> Iterator[Question]:
        """Yield what is asked about the training and its base model if that is found."""
        if self.folder is not None:
            yield checkpoint_question(self._base, self.folder, self._auto_class, self._asked)

    @property
    def _asked(self) -> Mapping[str, Any]:
        has_adapter = "peft" in self._packages and not self._lacking
        lora_config = self._train.lora_config if has_adapter else None
        return {"training_arguments": self._train.training_arguments, "lora_config": lora_config}

    @cached_property
    def _facts(self) -> Facts:
        """Return what the libraries say of the base model and of the training."""
        try:
            return read_checkpoint(self._base, self._auto_class, self._asked).facts
        except CheckpointError as error:
            return Facts(problems=error.problems)

    def problems(self, key: str) -> Iterator[str]:
        """Yield what is wrong with it, each sentence with its key below ``key``."""
        for package in self._lacking:
            how = how_to_install(package)
            yield (
                f"{key}.method: {self._train.method} needs the package {package}, which is not installed: {how}"
            )
        for text in unsupported((), dict.fromkeys(self._packages, f"{key}.method")):
            yield f"{key}.method: {text}"
        if "peft" in self._packages:
            averages = self._train.predict_with == "average"
            for name in unshared_settings(self._train.lora_config, averages):
                yield (
                    f"{key}.lora_config.{name}: the folds' adapters share one base"
                    f"{' and have a mean' if averages else ''}, which this excludes; drop it"
                )
            # eva needs a call of initialize_lora_eva_weights, and monteclora_config another loss.
            for name, value in self._train.lora_config.items():
                if value == "eva" or (name == "monteclora_config" and value is not None):
                    yield (
                        f"{key}.lora_config.{name}: peft leaves a part of this to the program that trains, and "
                        "here it would be plain LoRA; drop it, or train by a command"
                    )
        yield from (f"{key}.base_model: {text}" for text in self._facts.problems)
        yield from (f"{key}.{text}" for text in self._facts.training_problems)

    def disk_bytes(self, count: int) -> int:
        """Return what ``count`` trainings leave on disk, with a save beside it; 0: not known, or a head."""
        facts = self._facts
        parameters = facts.parameters if self._train.method == "full" else facts.trainable or 0
        return parameters * (_WEIGHT_BYTES * count + _SAVE_BYTES * bool(count))

    @property
    def program(self) -> str:
        """Return the module that trains as a process of its own, whose argument is a file with the spec."""
        return _HEAD_TRAINER if self._train.method == "head" else _TRAINER

    def spec(self, labels: Sequence[str]) -> dict[str, Any]:
        """Return what the program must know beside files, seed and saves, as JSON values."""
        size = self._train.per_device_train_batch_size
        if size == "auto":
            size = min(_MICRO_BATCH, self._train.effective_batch_size)
        return {
            "labels": labels,
            "settings": self._kind.training_settings(labels),
            "train": self._train.model_dump(mode="json"),
            "micro_batch": size,
        }

    def made_of(self, labels: Sequence[str], files: FileDigests) -> dict[str, str]:
        """Return digests of what the model depends on, beside rows and seed; a base that is gone is left out.

        Raises:
            CheckpointError: a file of the base model cannot be read.
        """
        keys = self._train.model_dump(mode="json", exclude=_NO_OTHER_MODEL)
        made_of = digests_of({f"train.{key}": value for key, value in keys.items()})
        folder, model = self.folder, self.model
        if folder is None:
            return made_of
        base = [
            hub_commit(self.base_model, folder),
            weights_digest(folder, model.model_kwargs, model.trust_remote_code, files),
            tokenizer_digest(folder, model.tokenizer_kwargs, files),
        ]
        settings = self._kind.training_settings(labels)
        member = {key: value for key, value in settings["member"].items() if key not in _OF_PREDICTION}
        made_of["the base model"] = digest_of(base)
        made_of["how the member reads rows"] = digest_of({**settings, "member": member})
        return made_of
