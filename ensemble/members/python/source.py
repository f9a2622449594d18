"""Find the user's code without running it: its files, and what they define.

A module's code is its own file and every module of the same user that it imports, directly or through others: for a
named file, the modules in its folder; for a named module, those beside its top-level package, or only those in that
package where it is installed among others (site-packages).  Import statements are found wherever they stand
(``modulefinder``); imports by names that are made at run time are not.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import symtable
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import decode_source
from modulefinder import Module, ModuleFinder
from pathlib import Path
from typing import IO, Any

from ensemble.common.errors import CheckpointError
from ensemble.common.files import unreadable
from ensemble.common.text import did_you_mean

_PACKAGE, _BUILT_IN = 5, 6  # modulefinder's numbers


@dataclass(frozen=True)
class Source:
    """Describe a module of the user's.

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
