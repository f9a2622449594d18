"""Check trainings before any begins, with what the installed libraries and the base models say.

transformers and peft are asked in a process of its own (``members/huggingface/training/questions.py``).
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Final

from ensemble.common.errors import CheckpointError, ConfigError
from ensemble.common.files import free_bytes
from ensemble.common.packages import installed_versions, unsupported
from ensemble.common.python_process import path_of_commands
from ensemble.common.text import gib, nearest
from ensemble.config import LoadedConfig
from ensemble.config.training import DEFAULT_FOLDS, PLACEHOLDERS, TrainConfig
from ensemble.members.huggingface.checkpoint.description import Description, checkpoint_question
from ensemble.members.huggingface.checkpoint.hub import find_file, how_to_install
from ensemble.members.huggingface.checkpoint.inspect import read_checkpoint
from ensemble.members.huggingface.parent import HuggingFaceMember
from ensemble.members.huggingface.settings import HuggingFaceSettings
from ensemble.members.huggingface.spec import BACKBONE, CLASSIFIER
from ensemble.members.questions import Answer, Question, ask
from ensemble.members.registry import KINDS
from ensemble.pipeline.trained_members import missing_parts
from ensemble.pipeline.training_dir import TrainingDir

_MODULE: Final = "ensemble.members.huggingface.training.questions"
# The packages of each method; those of "full" come with every installation.
_PACKAGES: Final = {"lora": ("peft",), "qlora": ("peft", "bitsandbytes"), "head": ("scikit-learn",)}
_ASKED: Final = ("transformers", "torch", "accelerate", "peft", "bitsandbytes", "pydantic")
# Of each trained parameter: its float32 weight, and with it AdamW's two averages in a save.
_WEIGHT_BYTES, _SAVE_BYTES = 4, 12


def check_trainings(loaded: LoadedConfig) -> list[str]:
    """Check all that shows before a training begins, and return warnings.

    Raises:
        ConfigError: with every problem, each with its key.
    """
    problems: list[str] = []
    members: list[_BuiltIn] = []
    for index, model in enumerate(loaded.config.models):
        key, train = f"models[{index}].train", model.training
        if train is not None and train.command is not None:
            problems += (f"{key}.command: {text}" for text in command_problems(train.command))
        elif train is not None:
            assert isinstance(model, HuggingFaceSettings)
            members.append(_BuiltIn(key, model, train))
    ask([question for member in members for question in member.questions()])
    for member in members:
        problems += (f"{member.key}.{text}" for text in member.problems())
    problems += _disk_problems(loaded, members)
    if problems:
        raise ConfigError(problems)
    return [f"{member.key}: {text}" for member in members for text in member.warnings()]


def _disk_problems(loaded: LoadedConfig, members: Sequence[_BuiltIn]) -> Iterator[str]:
    """Yield that the disk cannot hold the checkpoints that are missing, and a save of a training beside them."""
    root, written = TrainingDir(loaded.config.output_dir).root, 0
    for member in members:
        missing = len(missing_parts(loaded, member.model, splits=DEFAULT_FOLDS))
        written += member.trained_parameters * (_WEIGHT_BYTES * missing + _SAVE_BYTES * bool(missing))
    free = free_bytes(root)
    if free is not None and written > free:
        yield (
            f"output_dir: its trainings write about {gib(written)} to {root}, where {gib(free)} are "
            "free; make room, choose another output_dir, or train with method: lora"
        )


def command_problems(command: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with a user's command, as far as it shows without running it."""
    program = command[0]
    if shutil.which(program, path=path_of_commands()) is None:
        problem = "is no file that may be executed" if "/" in program else "is not on the PATH"
        yield f"the program {program} {problem}; name an installed program, or its path"
    for name in re.findall(r"\{(\w+)\}", " ".join(command)):
        near = nearest(name, PLACEHOLDERS)
        if name not in PLACEHOLDERS and near is not None:
            yield f"{{{name}}} stands for nothing; did you mean {{{near}}}?"


class _BuiltIn:
    """Check a member that is trained from a base model; problems begin with their key below ``train``."""

    def __init__(self, key: str, model: HuggingFaceSettings, train: TrainConfig) -> None:
        self.key = key
        self.model = model
        self.train = train
        self._base = model.model_copy(update={"model_name_or_path": train.base_model})
        kind = KINDS.load(model.task_type)
        assert issubclass(kind, HuggingFaceMember)
        self._auto_class = BACKBONE if train.method == "head" else kind.auto_class
        self._packages = _PACKAGES.get(train.method, ())
        self._lacking = [package for package in self._packages if not installed_versions([package])]

    def questions(self) -> Iterator[Question]:
        """Yield what is asked about the training, and about its base model if that is found."""
        with contextlib.suppress(CheckpointError):
            folder = find_file(self._base.model_name_or_path, "config.json", self._base.revision).parent
            about_base = checkpoint_question(self._base, folder, self._auto_class)
            if about_base is not None:
                yield about_base
            yield self._question(folder)

    def _question(self, folder: Path) -> Question:
        is_lora = "peft" in self._packages
        arguments = {
            "training_arguments": self.train.training_arguments,
            "lora_config": self.train.lora_config if is_lora and not self._lacking else None,
            "auto_class": self._auto_class,
            "peft_task": "SEQ_CLS" if self._auto_class == CLASSIFIER else "CAUSAL_LM",
        }
        return Question(_MODULE, folder, arguments, (folder / "config.json",), _ASKED)

    @cached_property
    def _found(self) -> tuple[Sequence[str], Description, Answer]:
        """Return the base model's problems, and what the libraries say of it and of the training."""
        try:
            files = read_checkpoint(self._base, self._auto_class)
        except CheckpointError as error:
            return error.problems, Description(), Answer({"problems": [], "trainable": None})
        return (), files.described, ask([self._question(files.folder)])[0]

    def problems(self) -> Iterator[str]:
        method = self.train.method
        for package in self._lacking:
            how = how_to_install(package)
            yield f"method: {method} needs the package {package}, which is not installed: {how}"
        for text in unsupported((), dict.fromkeys(self._packages, f"{self.key}.method")):
            yield f"method: {text}"
        of_base, _, answer = self._found
        yield from (f"base_model: {text}" for text in of_base)
        yield from (answer.fields or {}).get("problems", ())

    def warnings(self) -> Iterator[str]:
        failure = self._found[2].failure
        if failure:
            yield f"transformers could not be asked about it ({failure}); the training checks it when it begins"

    @property
    def trained_parameters(self) -> int:
        """Return the number of parameters that are trained; 0 if it is not known, or of a head."""
        _, described, answer = self._found
        if self.train.method == "full":
            return sum(math.prod(shape) for shape in described.parameters.values())
        return (answer.fields or {}).get("trainable") or 0
