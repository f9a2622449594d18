"""The user's code on the parent's side: where it is, what it is made of, what it defines.  None of it is run.

What counts as a module's code is its own file and every module that it imports, itself or through others, and that
belongs to the same user: whatever lies in the folder of a named file; for a named module, whatever lies beside its
top-level package, or within that package alone where it is installed among others (site-packages).  Import
statements are found wherever they stand (``modulefinder``); modules that are imported by names made at run time
are not.
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
_PACKAGE = 5  # modulefinder's number for a folder that is a package
_ARGUMENTS = {"predict": ("the frame and the context", 2), "setup": ("the context", 1)}


@dataclass(frozen=True)
class Source:
    """A module of the user's.

    Attributes:
        file: its own.
        root: the folder whose modules count as its code.
        package: the only top-level name in ``root`` that does; empty: all of them.
        name: how it is imported.
    """

    file: Path
    root: Path
    package: str
    name: str

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """The files that are its code, its own first; others that cannot be compiled are left out."""
        finder = _Finder(self.root, self.package)
        # As in files that are no Python; what was found until then counts.
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
        """Modules in the folder of a file that would not be imported, because installed ones have their names."""
        if self.package or self.file.parent != self.root:
            return ()
        names = dict.fromkeys(Path(path.relative_to(self.root).parts[0]).stem for path in self.files)
        return tuple(name for name in names if _is_installed(name, self.root))

    def problems(self, function: str, role: str) -> Iterator[str]:
        """What speaks against a function of it, as "predict" or as "setup"; none where only running tells.

        Raises:
            CheckpointError: the file cannot be read, or is no Python.
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
        bound = dict(_bound(tree.body))
        if function not in bound:
            if "*" not in bound and "__getattr__" not in bound:
                guess = did_you_mean(function, [name for name, node in bound.items() if node is not None])
                yield f"{role}: {self.file} defines no {function}{guess}"
            return
        node = bound[function]
        if isinstance(node, ast.AsyncFunctionDef):
            yield f"{role}: {function} is async; give a plain function"
        elif isinstance(node, ast.ClassDef):
            yield f"{role}: {function} is a class; give a function, and make instances in setup"
        elif isinstance(node, ast.FunctionDef) and not node.decorator_list:
            words, count = _ARGUMENTS[role]
            arguments = node.args
            most = len(arguments.posonlyargs) + len(arguments.args)
            least = most - len(arguments.defaults)
            named = [
                argument
                for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
                if not value
            ]
            if named or least > count or (most < count and arguments.vararg is None):
                yield f"{role}: {function} is called with {words}; let it take {count} arguments, in this order"


class _Finder(ModuleFinder):
    """Follows imports within a folder; with ``package``, within that package of it alone."""

    def __init__(self, root: Path, package: str) -> None:
        super().__init__(path=[str(root)])
        self._package = package

    def find_module(
        self, name: str, path: Any, parent: Module | None = None
    ) -> tuple[IO[Any] | None, str | None, tuple[str, str, int]]:
        if path is None and self._package and name != self._package:
            raise ImportError(name)
        folder = next((Path(place, name) for place in path or self.path if Path(place, name).is_dir()), None)
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
    """Where a module is, by its name or by the path of its file.

    Raises:
        CheckpointError: it is nowhere.
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
    importlib.invalidate_caches()  # a package may have come since this process looked
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
    """What a worker would import; ``importlib.util.find_spec`` would import the packages around it."""
    # A worker has no folder of the user's on its path that PYTHONPATH does not name.
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    here = os.getcwd()  # noqa: PTH109
    path: list[str] = [place for place in sys.path if place in added or place not in ("", here)]
    spec, name = None, ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = None
        with contextlib.suppress(
            KeyError
        ):  # a namespace within a package, which Python wants to have imported
            spec = next(filter(None, (finder.find_spec(name, path) for finder in sys.meta_path)), None)
        if spec is not None and spec.origin is not None:
            path = list(spec.submodule_search_locations or ())
        elif not (path := [str(Path(place, part)) for place in path if Path(place, part).is_dir()]):
            return None
    return spec


def _is_installed(name: str, folder: Path) -> bool:
    spec = _find_spec(name)
    if spec is None or spec.origin is None:  # a namespace gives way
        return False
    # The folder may itself be on the path.
    return folder.resolve() not in Path(spec.origin).resolve().parents


def _bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt | None]]:
    """The names that a module's statements bind; with a definition where it is one, and "*" for names not known."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0], None
        else:
            # Whatever else can bind a name, however deep: assignments, loops, with, if and try.
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    yield inner.id, None
            for inner_body in _bodies(node):
                yield from _bound(inner_body)


def _bodies(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    for key in ("body", "orelse", "finalbody"):
        if isinstance(inner := getattr(node, key, None), list):
            yield inner
    for handler in getattr(node, "handlers", ()):
        yield handler.body
    for case in getattr(node, "cases", ()):
        yield case.body
