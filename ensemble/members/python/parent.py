"""Describe a user's function on the parent's side, which reads the code and never imports it."""

# No "from __future__ import annotations": pydantic would evaluate every annotation from its text again.

import contextlib
import importlib
import os
import symtable
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import decode_source
from modulefinder import Module, ModuleFinder
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar, Literal

from pydantic import Field

from ensemble.common.digests import FileDigests, digest_of
from ensemble.common.errors import CheckpointError
from ensemble.common.files import files_below, unreadable
from ensemble.common.protocol import Activation
from ensemble.common.text import did_you_mean, shown_path
from ensemble.common.user_code import names_file
from ensemble.config import InputsConfig, MemberConfig, ViewConfig
from ensemble.config.document import Problem
from ensemble.config.schema import TrainConfig
from ensemble.config.values import (
    Count,
    Devices,
    FileOrFolder,
    Files,
    MemorySize,
    MustBe,
    Settings,
    TableColumns,
    Text,
    with_home,
)
from ensemble.members.base import Assigned, Inspection, MemberKind, OutputColumns, Reads, ResourceRequest
from ensemble.members.huggingface.checkpoint.digests import any_digest

_PACKAGE, _BUILT_IN = 5, 6  # modulefinder's numbers
_PREDICT_FORM = (
    "package.module:function of what is installed, or a file, as in ${CONFIG_DIR}/my_model.py:predict"
)


class PythonView(ViewConfig):
    """A view of each row for a function: also with another model."""

    # Instead of the member's own model, in a process of its own.
    model: FileOrFolder | None = Field(default=None, examples=["models/fold0"])

    @property
    def changes(self) -> dict[str, Any]:
        return {} if self.model is None else {"model": self.model}


PythonViews = Annotated[tuple[PythonView, ...], MustBe("a list of views", list)]


class PythonSettings(InputsConfig):
    """A function of your own, called in a process of its own with a pandas frame of some rows."""

    task_type: Literal["python"] = "python"
    # package.module:function of what is installed, or a file's, such as ${CONFIG_DIR}/my_model.py:predict
    predict: Text = Field(examples=["${CONFIG_DIR}/my_model.py:predict"])
    setup: Text | None = None  # a function of the same module, called once, before the first rows
    # A file or folder that the function finds in context.model; train makes it.
    model: FileOrFolder | None = Field(default=None, examples=["models/trees"])
    train: TrainConfig | None = None  # how a command trains the member, whose {out} is then the model
    # Columns of the table that the function gets; with inputs they may be left out.
    columns: TableColumns = Field(default=(), examples=[["text"]])
    kwargs: Settings = Field(default_factory=dict)  # values that the function finds in context.kwargs
    depends_on: Files = ()  # files and folders that it reads; if one changes, its predictions are computed again
    activation: Literal["softmax", "sigmoid", "none"] = "softmax"  # what the values are; none: any numbers
    batch_size: Count | None = None  # most rows of one call; None: the rows of a chunk
    num_gpus: Devices = 0  # for each replica; 0: the CPU
    # Memory of each of its GPUs, such as 8GiB; None: it has its GPUs to itself.
    gpu_memory: MemorySize | None = None
    replicas: Count | Literal["auto"] = "auto"  # processes that share the rows
    # Ways in which it reads each row, each with its own name; left out: every row once, as it is.
    views: PythonViews | None = Field(default=None, examples=["[{name: a, model: a.txt}]"])

    loaded_keys: ClassVar[tuple[str, ...]] = ("model",)
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
    def training(self) -> TrainConfig | None:
        return self.train

    @property
    def module_and_function(self) -> tuple[str, str]:
        """Return the module, or the path of its file, and the name of the function."""
        module, _, function = self.predict.rpartition(":")
        return with_home(module), function

    @property
    def is_file(self) -> bool:
        return names_file(self.module_and_function[0])

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        yield from super().broken_rules(labels)
        if "columns" not in self.model_fields_set and not self.inputs:
            yield ("columns",), "is missing; name columns of the table, or inputs"
        module, _, function = self.predict.rpartition(":")
        parts = [] if names_file(module) else module.split(".")
        if not (module and function.isidentifier() and all(part.isidentifier() for part in parts)):
            yield ("predict",), f"must be {_PREDICT_FORM}"
        if self.setup is not None and not self.setup.isidentifier():
            yield ("setup",), "must be the name of a function in the module of predict"
        if self.gpu_memory is not None and self.num_gpus == 0:
            yield ("gpu_memory",), "without num_gpus it runs on the CPU; set num_gpus: 1, or leave this out"
        if self.train is None:
            return
        if self.train.command is None:
            yield ("train",), "a python member is trained by train.command; give it, and drop base_model"
        if self.train.predict_with == "average":
            yield ("train", "predict_with"), "average is of adapters or checkpoints; choose folds or refit"
        if self.model is not None:
            yield ("model",), "with train the training makes the member's models; drop this"


@dataclass(frozen=True)
class Source:
    """Describe a module of the user's.

    Its code is its own file and every module of the same user that it imports, directly or through others: for a
    named file, the modules in its folder; for a named module, those beside its top-level package, or only those in
    that package where it is installed among others (site-packages). Import statements are found wherever they stand
    (``modulefinder``); imports by names that are made at run time are not.

    Attributes:
        root: the folder whose modules count as the user's code.
        package: the only top-level name in ``root`` that counts; empty: all do.
        name: the name for the import.
    """

    file: Path
    root: Path
    package: str
    name: str

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """Return the files of its code, its own first, without those that cannot be compiled."""
        finder = _Finder(self.root, self.package)
        # A file that is not Python ends the search; the files found before it count.
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, OSError, ImportError):
            if self.name == self.file.stem and self.file.suffix == ".py":
                finder.run_script(str(self.file))
            else:
                finder.import_hook(self.name)
        names = [getattr(module, "__file__", None) or "" for module in finder.modules.values()]
        code = {Path(file) for file in names if file.endswith(".py")}
        return (self.file, *sorted(code - {self.file}))

    def shadowed(self) -> Iterator[str]:
        """Yield the modules beside a named file that installed modules of the same names hide."""
        if self.package or self.file.parent != self.root:
            return
        for name in dict.fromkeys(Path(path.relative_to(self.root).parts[0]).stem for path in self.files):
            spec = _find_spec(name)
            if spec is None or spec.origin is None:  # a namespace does not hide the file
                continue
            # The folder may itself be on the path.
            if self.root.resolve() not in Path(spec.origin).resolve().parents:
                yield name

    def problems(self, functions: Mapping[str, str]) -> Iterator[str]:
        """Yield a sentence for each function, by its key, that the module does not define.

        Raises:
            CheckpointError: the file cannot be read, or is no Python.
        """
        if self.file.suffix != ".py":
            return
        try:
            text = decode_source(self.file.read_bytes())
            symbols = symtable.symtable(text, str(self.file), "exec").get_symbols()
        except OSError as error:
            raise CheckpointError(f"predict: {unreadable(self.file, error)}") from error
        except (SyntaxError, ValueError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            where = f"{self.file}, line {line}" if line else str(self.file)
            raise CheckpointError(f"predict: {where}: {getattr(error, 'msg', error)}; correct it") from error
        names = [symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()]
        for key, function in functions.items():
            if function not in names and "import *" not in text and "__getattr__" not in text:
                yield f"{key}: {self.file} defines no {function}{did_you_mean(function, names)}"


class _Finder(ModuleFinder):
    """Follow imports within a folder; with ``package``, only within that package."""

    def __init__(self, root: Path, package: str) -> None:
        super().__init__(path=[str(root)])
        self._package = package

    def find_module(
        self, name: str, path: Any, parent: Module | None = None
    ) -> tuple[IO[Any] | None, str | None, tuple[str, str, int]]:
        if path is None and self._package and name != self._package:
            raise ImportError(name)
        spec = PathFinder.find_spec(name, path or self.path)
        if spec is None and name == "__init__":
            return None, path[0], ("", "", _BUILT_IN)
        if spec is not None and spec.origin is None:  # a package without __init__.py
            return None, next(iter(spec.submodule_search_locations or ())), ("", "", _PACKAGE)
        return super().find_module(name, path, parent)


def find_source(module: str, is_file: bool) -> Source:
    """Find a module by its name or by the path of its file."""
    if is_file:
        file = Path(module).absolute()
        if not file.is_file():
            problem = "is a folder" if file.is_dir() else "no such file"
            raise CheckpointError(
                f"predict: {file}: {problem}; a relative path starts at the working directory, one that starts "
                "with ${CONFIG_DIR} at the config's"
            )
        return Source(file, file.parent, "", file.stem)
    importlib.invalidate_caches()  # a package may have been installed since this process started
    spec = _find_spec(module)
    if spec is None or spec.origin is None or not os.path.isfile(spec.origin):  # noqa: PTH113
        raise CheckpointError(
            f"predict: no module {module} is installed; install it, or name a file, as in "
            "${CONFIG_DIR}/my_model.py:predict"
        )
    file = Path(spec.origin).absolute()
    root = file.parents[module.count(".") + (file.name == "__init__.py")]
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    is_shared = str(root) in installed or root.name in ("site-packages", "dist-packages")
    return Source(file, root, module.split(".")[0] if is_shared else "", module)


def _find_spec(module: str) -> ModuleSpec | None:
    """Find the module that a worker would import; ``importlib.util.find_spec`` would import its packages."""
    # Unlike this process, a worker has the working directory on its path only where PYTHONPATH names it.
    python_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    working_directory = os.getcwd()  # noqa: PTH109
    path = [folder for folder in sys.path if folder in python_path or folder not in ("", working_directory)]
    first, *others = module.split(".")
    spec = next(filter(None, (finder.find_spec(first, path) for finder in sys.meta_path)), None)
    for part in others:
        if spec is not None:
            spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or ()))
    return spec


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
        return tuple(map(str, filter(None, (*code, self.settings.model, *self.settings.depends_on))))

    def inspect(self, columns: OutputColumns) -> PythonInspection:
        model = self.settings
        named = [("model", model.model), *(("depends_on", path) for path in model.depends_on)]
        problems = [
            f"{key}: {path}: no such file or folder" for key, path in named if path and not path.exists()
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
            source=source,
            id_column=columns.id_column,
        )

    def fingerprint(self, inspected: PythonInspection, assigned: Assigned) -> Mapping[str, object]:
        keys = self.settings.model_dump(include={"setup", "columns", "kwargs", "activation"})
        return {"function": self.settings.module_and_function[1], **keys}

    def content(self, inspected: PythonInspection, files: FileDigests) -> Mapping[str, str]:
        """Return the digests of the code, of the model, and of the files that ``depends_on`` names."""
        source = inspected.source
        digests = {"code": files.together(source.root, dict.fromkeys(source.files))}
        if self.settings.depends_on:
            digests["files"] = digest_of([any_digest(path, files) for path in self.settings.depends_on])
        if self.settings.model is not None:
            digests["model"] = any_digest(self.settings.model, files)
        return digests

    def problems_before_training(self) -> Iterator[str]:
        try:
            self.inspect(OutputColumns("", ()))
        except CheckpointError as error:
            yield from error.problems

    def learned_activation(self, labels: int) -> Activation:
        return self.settings.activation

    def arrange_training(self, folder: Path) -> str:
        if not files_below(folder):
            text = f"its command ended well, but left no file in {shown_path(folder)}"
            raise CheckpointError(f"{text}; save the model there ({{out}})")
        return ""

    def trained_settings(self, folder: Path) -> Mapping[str, str]:
        return {"model": str(folder)}

    def worker_settings(
        self, inspected: PythonInspection, assigned: Assigned, offload_folder: Path | None
    ) -> Mapping[str, Any]:
        model, source = self.settings, inspected.source
        return {
            "module": source.name,
            "file": str(source.file) if model.is_file else None,
            "function": model.module_and_function[1],
            "model": None if model.model is None else str(model.model.absolute()),
            "id_column": inspected.id_column,
            **model.model_dump(include={"setup", "columns", "kwargs", "batch_size"}),
        }
