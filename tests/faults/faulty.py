"""Imported at the start of Python (forked/sitecustomize.py): the process gets the faults a test asks for.

They sit where a model makes embeddings of tokens or patches (or at the import of transformers), below every model,
and know nothing of the code under test.  tests/faults/inject.py writes TEST_FAULTS and says what the fields mean.
"""

import builtins
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

# By then torch is there, and no model yet.
_BEFORE_MODELS = "transformers.modeling_layers"


class _AtImport(MetaPathFinder):
    def __init__(self, faults: list[dict[str, Any]]) -> None:
        self._faults = faults

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname == "transformers":
            for fault in self._faults:
                if fault["at"] == "import" and _is_due(fault):
                    _do(fault)
        elif fullname == _BEFORE_MODELS:
            sys.meta_path.remove(self)
            stand_at_embeddings([fault for fault in self._faults if fault["at"] != "import"])
        return None


def stand_at_embeddings(faults: list[dict[str, Any]]) -> None:
    """Where a model looks up its tokens' embeddings, or makes those of the patches of an image."""
    from torch.nn import functional

    look_up, convolve = functional.embedding, functional.conv2d
    passes = 0

    def disturb(batch: list[list[int]], result: Any) -> None:
        nonlocal passes
        number, passes = passes, passes + 1
        for fault in faults:
            rows = _rows_with(fault["ids"], batch) if fault["ids"] else list(range(len(batch)))
            if rows and fault["at"] in (None, number) and _is_due(fault):
                _do(fault, result, rows)

    def embedding(input: Any, *arguments: Any, **options: Any) -> Any:
        result = look_up(input, *arguments, **options)
        disturb(input.tolist(), result)
        return result

    def conv2d(input: Any, *arguments: Any, **options: Any) -> Any:
        result = convolve(input, *arguments, **options)
        if input.dim() == 4 and input.shape[1] == 3:  # images in colours, from -1 to 1
            disturb([[round(red)] for red in ((input[:, 0, 0, 0] + 1) * 127.5).tolist()], result)
        return result

    functional.embedding, functional.conv2d = embedding, conv2d


def happen(batch: list[list[int]], result: Any) -> None:
    """For a function of a test's own: the faults of these rows, each of which holds its ``ids`` as numbers."""
    for fault in json.loads(os.environ.get("TEST_FAULTS", "[]")):
        if (rows := _rows_with(fault["ids"], batch)) and _is_due(fault):
            _do(fault, result, rows)


def _rows_with(ids: list[int], batch: list[list[int]]) -> list[int]:
    """Which rows of a batch hold these numbers, one behind the other."""
    count = len(ids)
    return [
        place
        for place, row in enumerate(batch)
        if any(row[start : start + count] == ids for start in range(len(row) - count + 1))
    ]


def _is_due(fault: dict[str, Any]) -> bool:
    """Writes down that the fault happens, unless it did as often as it shall, in whatever process."""
    with Path(fault["journal"]).open("a+", encoding="ascii") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        journal.seek(0)
        if fault["times"] is not None and len(journal.readlines()) >= fault["times"]:
            return False
        journal.write(f"{os.environ.get('TEST_STANDS_IN') or os.getpid()}\n")
    return True


def _do(fault: dict[str, Any], result: Any = None, rows: list[int] | None = None) -> None:
    deed, seconds = fault["deed"], fault["seconds"]
    if deed == "segfault":
        ctypes.string_at(0)
    elif deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif deed == "exit":
        os._exit(0)
    elif deed == "sleep":
        time.sleep(seconds)
    elif deed == "wait":
        while not Path(fault["journal"] + " go").exists():
            time.sleep(0.01)
    elif deed == "sleep with the interpreter":  # no other thread of this process gets to run
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    elif deed == "start a process":
        child = subprocess.Popen(["sleep", "600"])
        with Path(fault["journal"] + " started").open("a", encoding="ascii") as journal:
            journal.write(f"{child.pid}\n")
    elif deed == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif deed == "raise":
        raise _kind(fault["error"])(fault["text"])
    elif deed == "nan":
        result[rows] = float("nan")
    elif deed == "eat":
        eat(fault["bytes"])
    else:
        raise ValueError(deed)


def _kind(name: str) -> Any:
    """An exception's class by its name: a builtin, or "torch.OutOfMemoryError" and the like."""
    module, _, kind = name.rpartition(".")
    return getattr(__import__(module) if module else builtins, kind)


def eat(size: int) -> None:
    eaten = []
    for _ in range(size >> 20):
        eaten.append(b"x" * (1 << 20))  # written to, so that the kernel must find pages for it


if "TEST_FAULTS" in os.environ:
    sys.meta_path.insert(0, _AtImport(json.loads(os.environ["TEST_FAULTS"])))
