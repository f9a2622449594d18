"""Every call by which a run changes files, in order, over all its processes; and what shall become of each.

The kernel holds each call until this process has said what to do (seccomp_unotify(2)).  So a run can be killed at
exactly its n-th step, before that takes effect, or be told that the disk is full.  What libc, NumPy and Arrow do
is seen alike, because these are system calls.  Only files below one folder count.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import platform
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tests.faults.enter import CHANGES, OPENS, SYNCS

# struct seccomp_notif (the call's data at its end) and seccomp_notif_resp; requests from linux/seccomp.h.
_NOTIFICATION, _RESPONSE = struct.Struct("=QIIiIQ6Q"), struct.Struct("=QqiI")
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_GO_ON = 1
_AT_FDCWD = -100
_ENTER = Path(__file__).with_name("enter.py")
_NAMES = {number: name for name, number in {**OPENS, **CHANGES, **SYNCS}.items()}
# Which arguments name the files that a call changes: (descriptor, None), (None, path), (folder's descriptor, path).
_DESCRIPTORS = "write pwrite64 writev pwritev pwritev2 fallocate ftruncate fchmod sendfile".split()
_PATHS = "open creat truncate unlink mkdir rmdir mknod chmod".split()
_PATHS_AT = "openat openat2 unlinkat mkdirat mknodat fchmodat fchmodat2".split()
_FILES: dict[str, tuple[tuple[int | None, int | None], ...]] = {
    **dict.fromkeys((*_DESCRIPTORS, *SYNCS), ((0, None),)),
    **dict.fromkeys(("copy_file_range", "splice"), ((2, None),)),
    **dict.fromkeys(_PATHS, ((None, 0),)),
    **dict.fromkeys(_PATHS_AT, ((0, 1),)),
    **dict.fromkeys(("rename", "link"), ((None, 0), (None, 1))),
    **dict.fromkeys(("renameat", "renameat2", "linkat"), ((0, 1), (2, 3))),
    **{"symlink": ((None, 1),), "symlinkat": ((1, 2),)},
}
_NEW = "open openat openat2 creat mkdir mkdirat mknod mknodat symlink symlinkat fallocate".split()
_SIZED = {**dict.fromkeys(_DESCRIPTORS[:5], 2), "sendfile": 3, "copy_file_range": 4}


class Verdict(enum.Enum):
    """What becomes of a step."""

    GO = enum.auto()
    KILL = enum.auto()  # the whole run, its first process first, before the step takes effect
    KILL_IT = enum.auto()  # only the process that makes the call
    NO_SPACE = enum.auto()  # the call fails as on a full disk


@dataclass(frozen=True)
class Step:
    """One call; ``paths`` are relative to the watched folder, ``number`` counts from 1 over all of the run's."""

    number: int
    call: str
    paths: tuple[str, ...]
    pid: int
    thread: int
    size: int = 0  # bytes that it would write at most; of writev and the like, pieces

    @property
    def is_sync(self) -> bool:
        """Whether it changes nothing that a process could see, only what a power loss would leave."""
        return self.call in SYNCS

    @property
    def takes_space(self) -> bool:
        return self.call in _NEW or self.size > 0

    def __str__(self) -> str:
        return (
            f"step {self.number}: {self.call} {' -> '.join(self.paths)} ({self.size}) by process {self.pid}"
        )


@dataclass(frozen=True)
class _Call:
    """A system call that waits for an answer."""

    id: int
    thread: int
    name: str
    arguments: tuple[int, ...]

    def pid(self) -> int:
        status = Path(f"/proc/{self.thread}/status").read_text(encoding="utf-8", errors="replace")
        return int(status.partition("Tgid:")[2].split()[0])

    def files(self) -> list[Path]:
        return [Path(os.path.normpath(self._file(*places))) for places in _FILES[self.name]]

    def has_effect(self, files: Sequence[Path]) -> bool:
        """Whether it can succeed and change something, as far as that is known before."""
        exists = os.path.lexists(files[0])
        if self.name in ("open", "openat"):
            flags = self.arguments[1 if self.name == "open" else 2]
            return not exists or (bool(flags & os.O_TRUNC) and files[0].stat().st_size > 0)
        if self.name in ("unlink", "unlinkat", "rmdir"):
            return exists
        return not (self.name in ("mkdir", "mkdirat") and exists)

    def size(self) -> int:
        return self.arguments[_SIZED[self.name]] if self.name in _SIZED else 0

    def _file(self, descriptor: int | None, path: int | None) -> Path:
        folder = f"/proc/{self.thread}/cwd"
        if descriptor is not None:
            number = struct.unpack("=i", struct.pack("=Q", self.arguments[descriptor])[:4])[0]
            folder = folder if number == _AT_FDCWD else f"/proc/{self.thread}/fd/{number}"
        place = Path(folder).readlink()
        return place if path is None else place / self._text(self.arguments[path])

    def _text(self, address: int) -> str:
        result = b""
        with Path(f"/proc/{self.thread}/mem").open("rb", buffering=0) as memory:
            while b"\0" not in result:
                memory.seek(address + len(result))
                result += memory.read(4096 - (address + len(result)) % 4096)  # the next page may not be there
        return os.fsdecode(result.partition(b"\0")[0])


Judge = Callable[[Step], Verdict]


class Watched:
    """A command and all it starts, watched while they live; for use in a ``with`` block.

    Args:
        command: its process dies first when a step's verdict is to kill, unless ``first`` is set to another's.
        folder: whose files count; the attribute of this name can be set anew.
        judge: asked about every step, in a thread of its own; the run waits for the answer.
        options: as for ``subprocess.Popen``.
    """

    def __init__(self, command: Sequence[str], folder: Path, judge: Judge, **options: Any) -> None:
        self.steps: list[Step] = []
        self.first: int | None = None
        self.folder = folder.resolve()
        self._judge = judge
        self._is_over = False
        self._error: Exception | None = None
        ours, theirs = socket.socketpair()
        with ours, theirs:
            number = theirs.fileno()
            enter = [sys.executable, "-S", "-E", str(_ENTER), str(number)]
            self.process = subprocess.Popen([*enter, *command], pass_fds=[number], **options)
            theirs.close()
            message, listeners, _, _ = socket.recv_fds(ours, 1024, 1)
        if message != b"ok":
            self.process.wait()
            raise OSError(f"the kernel takes no filter: {message.decode()}")
        self._listener = listeners[0]
        self._thread = threading.Thread(target=self._serve, name="steps", daemon=True)
        self._thread.start()

    def __enter__(self) -> Watched:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._is_over = True
            self.process.kill()
        self.wait()

    def wait(self) -> int:
        """The first process's exit code, once none of the others is left either.

        Raises:
            Exception: whatever ``judge`` raised.
        """
        self._thread.join()
        code = self.process.wait()
        if self._error is not None:
            raise self._error
        return code

    def forget(self) -> None:
        """After a kill: counts from 1 again, and lets those live who have outlived it by right."""
        self.steps = []
        self._is_over = False

    def _serve(self) -> None:
        waiting = select.poll()
        waiting.register(self._listener, select.POLLIN)
        while not any(event & select.POLLHUP for _, event in waiting.poll()):
            # Whoever waits may be killed meanwhile.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                buffer = bytearray(_NOTIFICATION.size)
                fcntl.ioctl(self._listener, _RECEIVE, buffer)
                id_, thread, _, number, _, _, *arguments = _NOTIFICATION.unpack(buffer)
                self._answer(_Call(id_, thread, _NAMES[number], tuple(arguments)))
        os.close(self._listener)

    def _answer(self, call: _Call) -> None:
        try:
            verdict = self._verdict(call)
        except (FileNotFoundError, ProcessLookupError):
            return
        except Exception as error:
            self._error = self._error or error
            verdict = Verdict.KILL
        if verdict is Verdict.KILL and not self._is_over:
            self._is_over = True
            os.kill(self.first or self.process.pid, signal.SIGKILL)
        if verdict in (Verdict.KILL, Verdict.KILL_IT):
            os.kill(call.pid(), signal.SIGKILL)
            return
        error_number, flags = (-errno.ENOSPC, 0) if verdict is Verdict.NO_SPACE else (0, _GO_ON)
        fcntl.ioctl(self._listener, _SEND, _RESPONSE.pack(call.id, 0, error_number, flags))

    def _verdict(self, call: _Call) -> Verdict:
        files = call.files()
        inside = [str(file.relative_to(self.folder)) for file in files if file.is_relative_to(self.folder)]
        if not inside or not call.has_effect(files):
            return Verdict.GO
        if self._is_over:  # a process that has not noticed yet
            return Verdict.KILL
        step = Step(len(self.steps) + 1, call.name, tuple(inside), call.pid(), call.thread, call.size())
        self.steps.append(step)
        return self._judge(step)


def skip_unless_watchable() -> None:
    """Skips the test where a process's calls cannot be watched like this."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("system calls are watched on Linux on x86-64 only")
    try:
        with Watched(["true"], Path("/nowhere"), lambda step: Verdict.GO):
            pass
    except OSError as error:
        pytest.skip(str(error))
