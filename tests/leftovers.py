"""Nothing is left behind: a check around every test for processes, zombies and temporary files.

The test process asks Linux to get back the orphans of its descendants.  So whatever a test has started, and however
deep, is among this process's children once whoever started it has gone.  Temporary files are looked for below
the test's own folder and in a temporary directory that no other process uses.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

# What was told to end, or lost its parent, needs a moment to go, and a busy machine may take long to give it one.
GRACE_SECONDS = 20.0
_PR_SET_CHILD_SUBREAPER = 36
_IS_LINUX = sys.platform == "linux"


class _Process(NamedTuple):
    """A number alone could belong to another process by the time one looks again."""

    pid: int
    started: str


@pytest.fixture(scope="session", autouse=True)
def temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A temporary directory of this test process and those it starts."""
    if _IS_LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    folder = tmp_path_factory.mktemp("TMPDIR")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)  # or Python goes on with what it found at first
        yield folder


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest, temporary_directory: Path) -> Iterator[None]:
    """Fails a test that leaves a process or a temporary file; the first fixture, so that it looks last."""
    processes = set(_children())
    files = set(temporary_directory.iterdir())
    yield
    results = [*left_processes(processes)]
    if not os.environ.get("ENSEMBLE_TEST_OTHER_RELEASES"):  # some of torch leave folders of their own
        results += _left_temporary(temporary_directory, files)
    if (folder := request.node.funcargs.get("tmp_path")) is not None:
        results += _left_half_written(folder)
    if results:
        pytest.fail("this test leaves behind:\n" + "\n".join(f"  {text}" for text in results), pytrace=False)


def left_processes(before: set[_Process]) -> list[str]:
    """Sentences about what is left of the processes that are new; afterwards there are none."""
    give_up = time.monotonic() + GRACE_SECONDS
    results: list[str] = []
    while new := {process.pid: state for process, state in _children().items() if process not in before}:
        is_late = time.monotonic() >= give_up
        if not is_late and "Z" not in new.values():
            time.sleep(0.005)
            continue
        started = _started_here()
        for pid, state in new.items():
            if state == "Z" and pid in started:
                results.append(f"process {pid} ({_words(started[pid])}) has ended, and nobody waited for it")
            elif state != "Z" and is_late:
                whose = "was started here and" if pid in started else "is an orphan that"
                results.append(f"process {pid} {whose} still runs (state {state}): {_command(pid)}")
                os.kill(pid, signal.SIGKILL)
            elif state != "Z":
                continue
            # An orphan that has ended is no leak: to reap it is the part of the process that it comes back to.
            _reap(pid, started)
    return results


def _reap(pid: int, started: Mapping[int, subprocess.Popen[bytes]]) -> None:
    if pid in started:
        started[pid].wait()
    else:
        os.waitpid(pid, 0)


def _left_temporary(folder: Path, before: set[Path]) -> list[str]:
    results = []
    for path in sorted(set(folder.iterdir()) - before):
        if path.name.startswith("torchinductor_"):
            continue  # torch's cache of compiled code, one for all processes of a user and meant to stay
        results.append(f"{path}, in the temporary directory")
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return results


def _left_half_written(folder: Path) -> list[str]:
    """Files by the names that the package gives to those which are not complete yet."""
    return [
        f"{place}/{name}, a file half written"
        for place, _, names in os.walk(folder)
        for name in names
        if ".tmp-" in name or name.startswith(".probe")
    ]


def _children() -> dict[_Process, str]:
    """This process's children with their states, as /proc has them; orphans that came back included."""
    if not _IS_LINUX:
        return {}
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the usual case costs one system call
        return {}
    result = {}
    parent = str(os.getpid())
    for number in _numbers():
        try:
            stat = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # it has gone meanwhile
            continue
        fields = stat.rpartition(")")[2].split()
        if fields[1] == parent:
            result[_Process(int(number), fields[19])] = fields[0]
    return result


def _numbers() -> list[str]:
    """Return the numbers of this process's children, of each of its threads.

    A Linux that was built without these lists has all processes looked at: milliseconds, twice for each test.
    """
    lists = [*Path("/proc/self/task").glob("*/children")]
    if not lists:
        return [folder.name for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    numbers = []
    for path in lists:
        with contextlib.suppress(OSError):  # the thread has ended, and another has its children
            numbers += path.read_text(encoding="utf-8").split()
    return numbers


def _started_here() -> dict[int, subprocess.Popen[bytes]]:
    """What this process has started and not waited for; nothing else tells its children from orphans."""
    # Not isinstance, which runs code of the objects it is asked about.
    results = [item for item in gc.get_objects() if issubclass(type(item), subprocess.Popen)]
    return {item.pid: item for item in results if getattr(item, "returncode", 0) is None}


def _words(process: subprocess.Popen[bytes]) -> str:
    given = process.args
    return " ".join(map(str, given)) if isinstance(given, (list, tuple)) else str(given)


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
