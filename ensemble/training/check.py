"""Check trainings before any begins, with what the installed libraries and the base models say."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Sequence

from ensemble.common.errors import ConfigError
from ensemble.common.files import free_bytes
from ensemble.common.python_process import path_of_commands
from ensemble.common.text import gib, nearest
from ensemble.config import LoadedConfig
from ensemble.config.schema import DEFAULT_FOLDS, PLACEHOLDERS
from ensemble.members.huggingface.training_from_base import TrainingFromBase, training_from_base
from ensemble.members.questions import ask
from ensemble.pipeline.trained_members import missing_parts
from ensemble.pipeline.training_dir import TrainingDir


def check_trainings(loaded: LoadedConfig) -> list[str]:
    """Check all that shows before a training begins, and return warnings.

    Raises:
        ConfigError: with every problem, each with its key.
    """
    problems: list[str] = []
    from_base: dict[str, TrainingFromBase] = {}
    for index, model in enumerate(loaded.config.models):
        key, training = f"models[{index}].train", training_from_base(model)
        if training is not None:
            from_base[key] = training
        elif model.training is not None:
            problems += (f"{key}.command: {text}" for text in command_problems(model.training.command or ()))
    ask([question for training in from_base.values() for question in training.questions()])
    for key, training in from_base.items():
        problems += training.problems(key)
    written, free = disk_of_trainings(loaded, from_base.values())
    if free is not None and written > free:
        problems.append(
            f"output_dir: its trainings write about {gib(written)} to "
            f"{TrainingDir(loaded.config.output_dir).root}, where {gib(free)} are free; make room, choose "
            "another output_dir, or train with method: lora"
        )
    if problems:
        raise ConfigError(problems)
    return [f"{key}: {text}" for key, training in from_base.items() for text in training.warnings()]


def disk_of_trainings(
    loaded: LoadedConfig, from_base: Iterable[TrainingFromBase] | None = None
) -> tuple[int, int | None]:
    """Return the bytes that missing trainings from base models write, and those that are free; None: not known.

    ``from_base``: these trainings; None: all of the config.
    """
    if from_base is None:
        from_base = filter(None, map(training_from_base, loaded.config.models))
    written = 0
    for training in from_base:
        written += training.disk_bytes(len(missing_parts(loaded, training.model, splits=DEFAULT_FOLDS)))
    return written, free_bytes(TrainingDir(loaded.config.output_dir).root)


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
