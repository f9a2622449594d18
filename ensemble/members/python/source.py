"""Find the user's code without running it: its files, and what they define.

A module's code is its own file and every module of the same user that it imports, directly or through others: for a
named file, the modules in its folder; for a named module, those beside its top-level package, or only those in that
package where it is installed among others (site-packages).  Import statements are found wherever they stand
(``modulefinder``); imports by names that are made at run time are not.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.machinery import ModuleSpec, PathFinder
from modulefinder import Module, ModuleFinder
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

from ensemble.common.errors import CheckpointError
from ensemble.common.files import unreadable
from ensemble.common.text import did_you_mean

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_PACKAGE = 5  # modulefinder's number for a package
_ARGUMENTS = {"predict": ("the frame and the context", 2), "setup": ("the context", 1)}


@dataclass(frozen=True)
class Source:
    """Describe a module of the user's.

    Attributes:
        file: the module's file.
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
        names = [getattr(module, "__file__", None) for module in finder.modules.values()]
        code = {Path(file) for file in names if file is not None and file.endswith(".py")}
        return (self.file, *sorted(code - {self.file}))

    @cached_property
    def shadowed(self) -> tuple[str, ...]:
        """Return the modules beside a named file that installed modules of the same names hide."""
        if self.package or self.file.parent != self.root:
            return ()
        names = dict.fromkeys(Path(path.relative_to(self.root).parts[0]).stem for path in self.files)
        return tuple(name for name in names if _is_installed(name, self.root))

    def problems(self, function: str, role: str) -> Iterator[str]:
        """Yield why a function cannot be "predict" or "setup", as far as the code tells without running it.

        Raises:
            CheckpointError: the file cannot be read, or is not Python.
        """
        if self.file.suffix != ".py":
            return
        try:
            tree = ast.parse(self.file.read_bytes(), str(self.file))
        except OSError as error:
            raise CheckpointError(f"predict: {unreadable(self.file, error)}") from error
        except (SyntaxError, ValueError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            where = f"{self.file}, line {line}" if line else str(self.file)
            raise CheckpointError(f"predict: {where}: {getattr(error, 'msg', error)}; correct it") from error
        definitions = dict(_bindings(tree.body))
        if function not in definitions:
            if "*" not in definitions and "__getattr__" not in definitions:
                guess = did_you_mean(
                    function, [name for name, node in definitions.items() if node is not None]
                )
                yield f"{role}: {self.file} defines no {function}{guess}"
            return
        node = definitions[function]
        if isinstance(node, ast.AsyncFunctionDef):
            yield f"{role}: {function} is async; give a plain function"
        elif isinstance(node, ast.ClassDef):
            yield f"{role}: {function} is a class; give a function, and make instances in setup"
        elif isinstance(node, ast.FunctionDef) and not node.decorator_list:
            values, count = _ARGUMENTS[role]
            arguments = node.args
            max_count = len(arguments.posonlyargs) + len(arguments.args)
            min_count = max_count - len(arguments.defaults)
            required_keywords = [
                argument
                for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
                if not default
            ]
            takes_too_few = max_count < count and arguments.vararg is None
            if required_keywords or min_count > count or takes_too_few:
                yield f"{role}: {function} is called with {values}; let it take {count} arguments, in this order"


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
        folders = (Path(parent_folder, name) for parent_folder in path or self.path)
        folder = next((folder for folder in folders if folder.is_dir()), None)
        spec = PathFinder.find_spec(name, path or self.path)
        if folder is not None and (spec is None or spec.origin is None):  # a package without __init__.py
            return None, str(folder), ("", "", _PACKAGE)
        return super().find_module(name, path, parent)

    def load_package(self, fqname: str, pathname: str) -> Module:
        if Path(pathname, "__init__.py").is_file():
            return super().load_package(fqname, pathname)
        module: Any = self.add_module(fqname)
        module.__path__ = [pathname]
        return cast(Module, module)


def find_source(module: str, is_file: bool) -> Source:
    """Find a module by its name or by the path of its file.

    Raises:
        CheckpointError: there is no such module.
    """
    if is_file:
        file = Path(module).absolute()
        if not file.is_file():
            what = "is a folder" if file.is_dir() else "no such file"
            raise CheckpointError(
                f"predict: {file}: {what}; a relative path starts at the working directory, one that starts with "
                "${CONFIG_DIR} at the config's"
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
    depth = module.count(".") + (file.name == "__init__.py")
    root = file.parents[depth]
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    is_shared = str(root) in installed or root.name in ("site-packages", "dist-packages")
    return Source(file, root, module.split(".")[0] if is_shared else "", module)


def _find_spec(module: str) -> ModuleSpec | None:
    """Find the module that a worker would import; ``importlib.util.find_spec`` would import its packages."""
    # Unlike this process, a worker has the working directory on its path only where PYTHONPATH names it.
    python_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    working_directory = os.getcwd()  # noqa: PTH109
    path = [folder for folder in sys.path if folder in python_path or folder not in ("", working_directory)]
    spec, name = None, ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = None
        # KeyError: a namespace within a package, which Python would have to import.
        with contextlib.suppress(KeyError):
            spec = next(filter(None, (finder.find_spec(name, path) for finder in sys.meta_path)), None)
        if spec is not None and spec.origin is not None:
            path = list(spec.submodule_search_locations or ())
            continue
        path = [str(Path(folder, part)) for folder in path if Path(folder, part).is_dir()]
        if not path:
            return None
    return spec


def _is_installed(name: str, folder: Path) -> bool:
    spec = _find_spec(name)
    if spec is None or spec.origin is None:  # a namespace does not hide the file
        return False
    # The folder may itself be on the path.
    return folder.resolve() not in Path(spec.origin).resolve().parents


def _bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt | None]]:
    """Yield each name that statements bind with its definition, if it has one; "*" stands for unknown names."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0], None
        else:
            # All else that binds names, at any depth: assignments, loops, with, if and try.
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    yield inner.id, None
            for inner_body in _bodies(node):
                yield from _bindings(inner_body)


def _bodies(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    for key in ("body", "orelse", "finalbody"):
        inner = getattr(node, key, None)
        if isinstance(inner, list):
            yield inner
    for handler in getattr(node, "handlers", ()):
        yield handler.body
    for case in getattr(node, "cases", ()):
        yield case.body
