"""Import a module of the user's, and take a function of it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def names_file(module: str) -> bool:
    """Return whether ``module`` is the path of a file, not the name of a module."""
    return module.endswith(".py") or "/" in module


def import_module(name: str, file: str | None) -> ModuleType:
    """Import what is installed by its name, or a file under this name."""
    if file is None:
        return importlib.import_module(name)
    # At the end of the path: a file of the user's does not replace an installed module.
    if str(Path(file).parent) not in sys.path:
        sys.path.append(str(Path(file).parent))
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickle looks classes up there
    spec.loader.exec_module(module)
    return module


def function_of(module: ModuleType, name: str, role: str, arguments: tuple[str, ...]) -> Callable[..., Any]:
    """Return a function of a module; a ValueError says that it is none, or cannot be called with the arguments."""
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{role}: {name} must be a function of {module.__file__}")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ValueError(f"{role}: {name} is called with {' and '.join(arguments)}: {error}") from error
    except ValueError:  # a function without a signature, written in C
        pass
    return function
