"""Modules that wait: executed once, whole, in the order of an ordinary import, when truly asked for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ensemble.members.huggingface.loading.lazy_modules import (
    Waiting,
    after_import,
    call_later,
    class_later,
    forget,
    mark_later,
    plain_later,
    wait,
    wrap_later,
)

# What happens, in its order; the package's own files append to it.
LOG = "import builtins\nbuiltins.waiting_log.append(__name__)\n"
FILES = {
    "slow/__init__.py": LOG,
    "slow/compiler/__init__.py": LOG
    + "from . import parts\nfrom .parts import answer\nmarked = []\n"
    + "def mark(function):\n    marked.append(function)\n    return function\n"
    + "def twice(function, times=2):\n    return lambda value: times * function(value)\n"
    + "def add(first, second=0):\n    return first + second\n"
    + "def same(value):\n    return value\n"
    + "class Symbol(str):\n    kind = 'real'\n",
    "slow/compiler/parts.py": LOG + "import slow.compiler\nanswer = 42\n",
    "slow/compiler/apart.py": LOG + "name = 'apart'\n",
}
STAND_INS = {
    "mark": mark_later,
    "twice": wrap_later,
    "add": call_later,
    "Symbol": class_later(__name__),
    "same": plain_later(lambda value: type(value) is bool, lambda value: value),
}


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the modules of the package that have been executed; the package waits."""
    import builtins

    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    executed: list[str] = []
    monkeypatch.setattr(builtins, "waiting_log", executed, raising=False)
    assert wait("slow.compiler", STAND_INS, alone=["slow.compiler.apart"])
    yield executed
    forget("slow.compiler")
    del sys.modules["slow"]


def the_package() -> Any:
    import slow.compiler  # type: ignore[import-not-found]

    return slow.compiler


def test_nothing_runs_before_it_is_asked_for(log: list[str]) -> None:
    package = the_package()
    assert log == ["slow"]
    assert not hasattr(package, "__wrapped__")
    assert package.__path__
    assert type(package) is Waiting
    from slow.compiler import answer

    assert answer == 42
    assert log == ["slow", "slow.compiler", "slow.compiler.parts"]
    assert the_package() is package is sys.modules["slow"].compiler
    assert type(package) is ModuleType
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = package.missing


def test_stand_ins_become_the_real_thing(log: list[str]) -> None:
    package = the_package()

    def same(value: int) -> int:
        """Itself."""
        return value

    assert package.mark(same) is same
    doubled, tripled, add = package.twice(same), package.twice(times=3)(same), package.add
    assert doubled.__doc__ == "Itself."
    assert (doubled(5), tripled(5)) == (5, 5)
    assert log == ["slow"]
    assert add(1, second=2) == 3
    assert log == ["slow", "slow.compiler", "slow.compiler.parts"]
    assert package.marked == [same]
    assert (doubled(5), tripled(5)) == (10, 15)
    assert (package.twice(same)(5), package.add(1)) == (10, 1)


def test_plain_values_are_answered_without_it(log: list[str]) -> None:
    same = the_package().same
    assert same(True) is True
    assert same(False) is False
    assert log == ["slow"]
    assert same(7) == 7
    assert "slow.compiler" in log


def test_one_module_can_ask_for_instances_of_a_class_that_is_not_there(log: list[str]) -> None:
    symbol: Any = the_package().Symbol
    assert not isinstance("x", (int, symbol))
    assert log == ["slow"]
    real = the_package().answer and the_package().Symbol
    assert isinstance(real, type)
    assert isinstance(real("x"), symbol)
    assert not isinstance("x", symbol)


def test_every_other_module_gets_the_class_itself(log: list[str]) -> None:
    space: dict[str, Any] = {"__name__": "another"}
    exec("from slow.compiler import Symbol", space)
    assert isinstance(space["Symbol"], type)
    assert "slow.compiler" in log


def test_what_is_no_function_is_left_to_the_real_decorator(log: list[str]) -> None:
    assert the_package().twice(int)("21") == 42
    assert "slow.compiler" in log


def test_a_submodule_executes_its_package_first_and_is_made_once(log: list[str]) -> None:
    import slow.compiler.parts as parts  # type: ignore[import-not-found]

    assert log == ["slow", "slow.compiler", "slow.compiler.parts"]
    assert parts is the_package().parts is sys.modules["slow.compiler.parts"]
    assert parts.__spec__ is not None
    assert parts.__spec__.origin == parts.__file__


def test_a_submodule_that_stands_apart_is_imported_by_itself(log: list[str]) -> None:
    from slow.compiler.apart import name  # type: ignore[import-not-found]

    assert name == "apart"
    assert log == ["slow", "slow.compiler.apart"]
    assert the_package().answer == 42
    assert log.count("slow.compiler.apart") == 1


def test_other_threads_never_see_half_a_module(log: list[str]) -> None:
    answers: list[int] = []
    package = the_package()
    threads = [threading.Thread(target=lambda: answers.append(package.answer)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [42] * 8
    assert log.count("slow.compiler") == 1


def test_one_that_cannot_be_imported_says_so_each_time(log: list[str], tmp_path: Path) -> None:
    (tmp_path / "slow/compiler/parts.py").write_text("raise ImportError('broken')\n")
    for _ in range(2):
        with pytest.raises(ImportError, match="broken"):
            _ = the_package().answer


def test_what_is_there_or_missing_does_not_wait(log: list[str]) -> None:
    assert not wait("slow.compiler", {})
    assert not wait("slow.nothing", {})
    assert not wait("no_such_package.inner", {})
    forget("slow.compiler")
    assert the_package().answer == 42
    assert type(the_package()) is ModuleType


def test_a_module_is_changed_before_its_importer_goes_on(log: list[str]) -> None:
    finders = len(sys.meta_path)
    after_import("slow.compiler.apart", lambda module: setattr(module, "name", f"{module.__name__}, changed"))
    from slow.compiler.apart import __spec__, name

    assert name == "slow.compiler.apart, changed"
    assert log == ["slow", "slow.compiler.apart"]
    assert type(__spec__.loader).__name__ == "SourceFileLoader"
    assert len(sys.meta_path) == finders
