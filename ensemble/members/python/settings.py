"""Define the keys of a user's function."""

# No "from __future__ import annotations": pydantic would evaluate every annotation from its text again.

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from annotated_types import Len
from pydantic import Field

from ensemble.config import ReaderConfig
from ensemble.config.document import Problem
from ensemble.config.values import (
    Column,
    Count,
    Devices,
    File,
    MemorySize,
    MustBe,
    Settings,
    Text,
    with_home,
)

_PREDICT_FORM = (
    "package.module:function of what is installed, or a file, as in ${CONFIG_DIR}/my_model.py:predict"
)

Columns = Annotated[tuple[Column, ...], Len(1), MustBe("a list of columns of the table", list)]
Files = Annotated[tuple[File, ...], MustBe("a list of files and folders", list)]


class PythonSettings(ReaderConfig):
    """A function of your own, called in a process of its own with a pandas frame of some rows."""

    task_type: Literal["python"] = "python"
    # package.module:function of what is installed, or a file's, such as ${CONFIG_DIR}/my_model.py:predict
    predict: Text = Field(examples=["${CONFIG_DIR}/my_model.py:predict"])
    setup: Text | None = None  # a function of the same module, called once, before the first rows
    columns: Columns = Field(examples=[["text"]])  # columns of the table that the function gets
    kwargs: Settings = Field(default_factory=dict)  # values that the function finds in context.kwargs
    depends_on: Files = ()  # files and folders that it reads; if one changes, its predictions are computed again
    activation: Literal["softmax", "sigmoid", "none"] = "softmax"  # what the values are; none: any numbers
    batch_size: Count | None = None  # most rows of one call; None: the rows of a chunk
    num_gpus: Devices = 0  # for each replica; 0: the CPU
    # Memory of each of its GPUs, such as 8GiB; None: it has its GPUs to itself.
    gpu_memory: MemorySize | None = None
    replicas: Count | Literal["auto"] = "auto"  # processes that share the rows

    older_keys: ClassVar[Mapping[str, str]] = {
        "predict": "function callable entrypoint predict_fn",
        "columns": "column text_column input_columns features",
        "kwargs": "args params model_kwargs",
        "depends_on": "files dependencies artifacts",
        "activation": "problem_type",
        "num_gpus": "gpus n_gpus device devices",
        "gpu_memory": "max_memory gpu_memory_gb memory vram",
        "batch_size": "bs chunk_size",
    }

    @property
    def module_and_function(self) -> tuple[str, str]:
        """Return the module, or the path of its file, and the name of the function."""
        module, _, function = self.predict.rpartition(":")
        return with_home(module), function

    @property
    def is_file(self) -> bool:
        """Return whether ``predict`` names a file."""
        return names_file(self.module_and_function[0])

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        yield from super().broken_rules(labels)
        module, _, function = self.predict.rpartition(":")
        parts = [] if names_file(module) else module.split(".")
        if not (module and function.isidentifier() and all(part.isidentifier() for part in parts)):
            yield ("predict",), f"must be {_PREDICT_FORM}"
        if self.setup is not None and not self.setup.isidentifier():
            yield ("setup",), "must be the name of a function in the module of predict"
        if self.gpu_memory is not None and self.num_gpus == 0:
            yield ("gpu_memory",), "without num_gpus it runs on the CPU; set num_gpus: 1, or leave this out"


def names_file(module: str) -> bool:
    """Return whether ``module`` is the path of a file, not the name of a module."""
    return module.endswith(".py") or "/" in module
