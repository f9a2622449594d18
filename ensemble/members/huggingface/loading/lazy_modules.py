"""Modules that wait in ``sys.modules`` and are executed, whole, when something of them is truly asked for.

``importlib.util.LazyLoader`` does this for modules of which nothing is asked during start-up.  Here a few names
have stand-ins: a decorator, or a function that is imported by name long before anybody calls it.  Everything else
executes the module first, as does the import of a submodule, so that what runs is what would always have run, in
its order.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, MethodType, ModuleType
from typing import Any

StandIn = Callable[["Waiting", str], Any]
"""A waiting module and the name of one of its functions -> what is used in that function's place until then."""


@dataclass
class _State:
    stand_ins: Mapping[str, StandIn]
    alone: frozenset[str]
    marks: list[tuple[str, Any]] = field(default_factory=list)
    is_executing: bool = False
    # Another thread must not see half a module, and the executing one meets itself in circular imports.
    lock: threading.RLock = field(default_factory=threading.RLock)


_states: dict[str, _State] = {}


class Waiting(ModuleType):
    """A module that has not been executed yet; becomes an ordinary one when it is."""

    def __getattr__(self, name: str) -> Any:
        # Whoever goes through all of sys.modules asks for such names (inspect, warnings), and wants nothing.
        if name.startswith("__") and name.endswith("__") and name not in ("__version__", "__all__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        state = _states[self.__name__]
        with state.lock:
            if type(self) is Waiting and not state.is_executing:
                if name in state.stand_ins:
                    return state.stand_ins[name](self, name)
                execute(self)
            return ModuleType.__getattribute__(self, name) if type(self) is Waiting else getattr(self, name)


def wait(name: str, stand_ins: Mapping[str, StandIn], alone: Sequence[str] = ()) -> bool:
    """Let a module wait until it is needed; the package that it is in is imported.

    Args:
        stand_ins: by the names that can be used before.
        alone: submodules that may be imported without it.

    Returns:
        Whether it waits now; not if it is imported already, or cannot be.
    """
    package, _, own_name = name.rpartition(".")
    try:
        parent = importlib.import_module(package) if package else None
    except ImportError:
        return False
    path = None if parent is None else parent.__path__
    spec = None if name in sys.modules else PathFinder.find_spec(name, path)
    if spec is None:
        return False
    module = Waiting(name)
    module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
    module.__package__ = spec.parent
    if spec.submodule_search_locations is not None:
        module.__path__ = spec.submodule_search_locations
    _states[name] = _State(stand_ins, frozenset(alone))
    if not any(isinstance(finder, _Submodules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Submodules())
    sys.modules[name] = module
    if parent is not None:
        setattr(parent, own_name, module)
    return True


def forget(name: str) -> None:
    """Take a waiting module back, with what was imported of it, as if ``wait`` had not been called."""
    package, _, own_name = name.rpartition(".")
    if package:
        vars(sys.modules[package]).pop(own_name, None)
    for known in [known for known in sys.modules if known == name or known.startswith(f"{name}.")]:
        del sys.modules[known]


def forget_all() -> None:
    """Take back all modules that still wait, and every change that was to come."""
    for name in list(_states):
        if type(sys.modules.get(name)) is Waiting:
            forget(name)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, (_Submodules, _Once))]


def execute(module: ModuleType) -> None:
    """Execute a waiting module as its first import would have.

    Raises:
        ImportError: it cannot be imported; it goes on waiting.
    """
    state = _states[module.__name__]
    with state.lock:
        if type(module) is not Waiting or state.is_executing:
            return
        state.is_executing = True
        try:
            if sys.modules.get(module.__name__) is module:
                importlib.reload(module)
            else:  # it was taken back: who still holds it gets what the ordinary import made
                vars(module).update(vars(importlib.import_module(module.__name__)))
            module.__class__ = ModuleType  # type: ignore[assignment]
        finally:
            state.is_executing = False
        for name, function in state.marks:
            getattr(module, name)(function)


def call_later(module: Waiting, name: str) -> Any:
    """Stand-in of a function that is called much later, if ever."""

    def call(*arguments: Any, **options: Any) -> Any:
        execute(module)
        return getattr(module, name)(*arguments, **options)

    return call


def mark_later(module: Waiting, name: str) -> Any:
    """Stand-in of a decorator that only takes note of its function, which is of use to the module alone."""

    def mark(function: Any) -> Any:
        _states[module.__name__].marks.append((name, function))
        return function

    return mark


def wrap_later(module: Waiting, name: str) -> Any:
    """Stand-in of a decorator that changes what its function does once the module is there, and nothing before."""

    def wrap(function: Any = None, *arguments: Any, **options: Any) -> Any:
        if function is None:
            return lambda function: wrap(function, *arguments, **options)
        if not isinstance(function, (FunctionType, MethodType)):
            execute(module)
        if type(module) is not Waiting:
            return getattr(module, name)(function, *arguments, **options)
        wrapped: Any = None

        @functools.wraps(function)
        def run(*inputs: Any, **named: Any) -> Any:
            nonlocal wrapped
            if wrapped is None:
                if type(module) is Waiting:
                    return function(*inputs, **named)
                wrapped = getattr(module, name)(function, *arguments, **options)
            return wrapped(*inputs, **named)

        return run

    return wrap


def plain_later(is_plain: Callable[[Any], bool], answer: Callable[..., Any]) -> StandIn:
    """Stand-in of a function whose answer for plain values is known; all others are the real one's."""

    def stand_in(module: Waiting, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if arguments and not options and all(map(is_plain, arguments)):
                return answer(*arguments)
            execute(module)
            return getattr(module, name)(*arguments, **options)

        return call

    return stand_in


def class_later(asking: str) -> StandIn:
    """Stand-in of a class for one module that only asks of values whether they are its instances.

    None is before the class is there.  Every other module gets the class itself.
    """

    def stand_in(module: Waiting, name: str) -> Any:
        # Two frames up, beyond Waiting.__getattr__, is the code that asks.
        if sys._getframe(2).f_globals.get("__name__") == asking:
            return _ClassLater(module, name)
        execute(module)
        return getattr(module, name)

    return stand_in


class _ClassLater:
    def __init__(self, module: Waiting, name: str) -> None:
        self._module = module
        self._name = name

    def __instancecheck__(self, value: object) -> bool:
        return type(self._module) is not Waiting and isinstance(value, getattr(self._module, self._name))


def after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    """Change a module the moment it has been executed, before whoever imports it goes on."""
    sys.meta_path.insert(0, _Once(name, change))


class _Once(MetaPathFinder):
    """Finds one module as Python would, once, to be changed."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Changing(spec.loader, self._change)
        return spec


class _Changing(Loader):
    """A module's own loader, and a change behind it; the module never sees this one."""

    def __init__(self, loader: Any, change: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._change = change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._change(module)


class _Submodules(MetaPathFinder):
    """Executes a waiting package before the first of its submodules, as every import does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = sys.modules.get(fullname.rpartition(".")[0])
        if type(package) is not Waiting:
            return None
        state = _states[package.__name__]
        if state.is_executing or fullname in state.alone:
            return None
        execute(package)
        # The package has most likely imported it; the import that asked must not make a second one.  As long as it
        # stands in sys.modules Python would take its own spec and do just that (importlib._bootstrap._find_spec).
        made = sys.modules.pop(fullname, None)
        return (
            None if made is None else ModuleSpec(fullname, _Made(made), is_package=hasattr(made, "__path__"))
        )


class _Made(Loader):
    """Hands out a module that is there already."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        with contextlib.suppress(
            AttributeError
        ):  # torch's config modules refuse it, and refused the import's own
            module.__spec__ = self._spec  # the import has put its own there
