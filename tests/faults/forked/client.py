"""Commands from a fork server (``server.py``): each takes a moment, where a fresh process takes half a second."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

SITE = Path(__file__).parent  # with the sitecustomize.py by which a worker is forked
ROOT = SITE.parents[2]
IDLE = b"idle?"
TRAINER = "ensemble.members.huggingface.training.trainer"
# An environment variable: fields, in JSON, that replace those of each spec that a trainer is started with.
TRAINER_FIELDS = "TEST_TRAINER_FIELDS"
_NUMBER = struct.Struct("=i")
# What Python, its locale and libraries heed when they start or are imported, and a forked process does not.
_AT_THE_START = ("PYTHON", "LC_", "LANG", "HF_", "LD_PRELOAD")


class Command:
    """``ensemble ARGUMENTS``, which waits for ``go``; for use in a ``with`` block, whose end kills it.

    Args:
        variables: its whole environment, with the server's ``variables``.
        descriptors: its standard input (None: /dev/null), output and error stream.
        module: whose ``main()`` runs instead of the command's, among those that the server forks for workers.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        variables: Mapping[str, str],
        descriptors: tuple[int | None, int, int],
        module: str = "",
    ) -> None:
        asked = {
            "argv": ["-c" if module else "ensemble", *arguments],
            "module": module,
            "folder": str(folder),
            "environment": dict(variables),
            "numbers": [0, 1, 2],
        }
        address = variables["TEST_FORK_SERVER"]
        self._line = _connect(workers_address(address) if module else address)
        given, *output = descriptors
        with open(os.devnull) as nothing:  # noqa: PTH123
            given = nothing.fileno() if given is None else given
            socket.send_fds(self._line, [json.dumps(asked).encode()], [given, *output])
        self.pid = self._receive()

    def __enter__(self) -> Command:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.close()

    def go(self) -> None:
        self._line.send(_NUMBER.pack(0))

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; negative for a signal.

        Raises:
            TimeoutError: it has not ended.
        """
        self._line.settimeout(timeout)
        return self._receive()

    def _receive(self) -> int:
        number: int = _NUMBER.unpack(self._line.recv(_NUMBER.size))[0]
        return number


def can_be_forked(variables: Mapping[str, str]) -> bool:
    """Whether a server is named, and a Python that starts is told nothing which the server was not."""
    names = {name for name in (*variables, *os.environ) if name.startswith(_AT_THE_START)} - {"PYTHONPATH"}
    folders = variables.get("PYTHONPATH", "").split(os.pathsep)
    return (
        bool(variables.get("TEST_FORK_SERVER"))
        and {str(ROOT), str(SITE)} == set(folders)
        and all(variables.get(name) == os.environ.get(name) for name in names)
    )


def server_variables(address: str) -> dict[str, str]:
    """What lets the workers of a command be forked."""
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), str(SITE)]), "TEST_FORK_SERVER": address}


def server_command(address: str, models: Path) -> list[str]:
    return [sys.executable, "-m", "tests.faults.forked.server", address, str(models)]


def server_options() -> dict[str, Any]:
    """How the server is started, as ``subprocess.Popen`` takes it."""
    return {
        "cwd": ROOT,
        "env": {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
    }


def new_address() -> str:
    return f"ensemble-test-{uuid.uuid4()}"


@contextlib.contextmanager
def fork_server(models: Path) -> Iterator[str]:
    """A server that runs until the block ends; gives its address.

    Args:
        models: a folder of tiny ones, loaded once before, so that all modules which they need are there.
    """
    address = new_address()
    with subprocess.Popen(server_command(address, models), **server_options()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield address
        process.communicate()


def wait_until_idle(address: str, timeout: float | None = None) -> None:
    """Return once no forked process is left.

    Raises:
        TimeoutError: one still is.
    """
    for each in (address, workers_address(address)):
        with _connect(each) as line:
            line.settimeout(timeout)
            line.send(IDLE)
            line.recv(8)


def workers_address(address: str) -> str:
    return f"{address}-workers"


def _connect(address: str) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect(f"\0{address}")
    return line
