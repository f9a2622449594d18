"""Describe a user's function on the parent's side, which reads the code and never imports it."""

# No "from __future__ import annotations": pydantic would evaluate every annotation from its text again.

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Len
from pydantic import Field

from ensemble.common.digests import FileDigests, digest_of
from ensemble.common.errors import CheckpointError
from ensemble.common.text import shown_path
from ensemble.config import MemberConfig, ReaderConfig
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
from ensemble.members.base import Assigned, Inspection, MemberKind, OutputColumns, Reads, ResourceRequest
from ensemble.members.huggingface.checkpoint.digests import weight_samples
from ensemble.members.python.source import Source, find_source

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


@dataclass(frozen=True)
class PythonInspection(Inspection):
    """Add the user's code, and the name of the frames' index."""

    source: Source
    id_column: str


class PythonFunction(MemberKind[PythonSettings, PythonInspection]):
    """Describe a user's function."""

    Settings: ClassVar[type[MemberConfig]] = PythonSettings
    child: ClassVar[str] = "ensemble.members.python.child"
    activation_key: ClassVar[str] = "activation"

    def request(self) -> ResourceRequest:
        model = self.settings
        return ResourceRequest(
            num_gpus=model.num_gpus, replicas=model.replicas, gpu_memory=model.gpu_memory or "all"
        )

    def reads(self) -> Reads:
        return Reads(self.settings.columns, any_type=True, ids=True)

    def sources(self) -> tuple[str, ...]:
        try:
            code = find_source(self.settings.module_and_function[0], self.settings.is_file).files
        except CheckpointError:  # which inspect reports
            code = ()
        return tuple(str(path) for path in (*code, *self.settings.depends_on))

    def inspect(self, columns: OutputColumns) -> PythonInspection:
        model = self.settings
        problems = [
            f"depends_on: {path}: no such file or folder" for path in model.depends_on if not path.exists()
        ]
        module, function = model.module_and_function
        functions = {"predict": function} | ({} if model.setup is None else {"setup": model.setup})
        try:
            source = find_source(module, model.is_file)
            problems += source.problems(functions)
        except CheckpointError as error:
            raise CheckpointError([*error.problems, *problems]) from None
        problems += [
            f"predict: {name}, beside {source.file}, has the name of an installed module, which would be imported "
            "in its place; rename it"
            for name in source.shadowed()
        ]
        if problems:
            raise CheckpointError(problems)
        return PythonInspection(
            activation=model.activation,
            label_order=tuple(range(len(columns.labels))),
            summary=f"{function} of {shown_path(source.file) if model.is_file else module}",
            warnings=(),
            source=source,
            id_column=columns.id_column,
        )

    def fingerprint(self, inspected: PythonInspection, assigned: Assigned) -> Mapping[str, object]:
        model = self.settings
        return {
            "function": model.module_and_function[1],
            "setup": model.setup,
            "columns": model.columns,
            "kwargs": model.kwargs,
            "activation": model.activation,
        }

    def content(self, inspected: PythonInspection, files: FileDigests) -> Mapping[str, str]:
        """Return the digests of the code and, if ``depends_on`` names any, of further files."""
        source = inspected.source
        digests = {"code": files.together(source.root, dict.fromkeys(source.files))}
        if self.settings.depends_on:
            digests["files"] = digest_of([_digest(path, files) for path in self.settings.depends_on])
        return digests

    def worker_settings(
        self, inspected: PythonInspection, assigned: Assigned, offload_folder: Path | None
    ) -> Mapping[str, Any]:
        model, source = self.settings, inspected.source
        return {
            "module": source.name,
            "file": str(source.file) if model.is_file else None,
            "function": model.module_and_function[1],
            "setup": model.setup,
            "columns": list(model.columns),
            "kwargs": model.kwargs,
            "id_column": inspected.id_column,
            "batch_size": model.batch_size,
        }


def _digest(path: Path, files: FileDigests) -> str:
    paths = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    # Large files are sampled, unless the run asks for every byte (hash_weights).
    samples = {file: weight_samples(file) if file.stat().st_size > 256 << 20 else None for file in paths}
    return files.together(path if path.is_dir() else path.parent, samples)
