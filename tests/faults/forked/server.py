"""Two processes that have imported everything, and fork for each command and each worker: no start takes seconds.

    python -m tests.faults.forked.server ADDRESS MODELS

Each request comes over a connection of its own to the abstract socket ADDRESS (of commands; ADDRESS-workers, of
workers and of the processes that train, describe checkpoints and write reports): one line of JSON with argv,
environment, folder, and the numbers which the descriptors that come with it shall have.  The answer is the
process's number.
Then the asking side sends numbers: 0 starts it, others are signals for its group; it gets the exit code at the end.
A connection that is closed before that kills the group.
The servers end with their standard input.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import itertools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.faults.faulty import stand_at_embeddings
from tests.faults.forked.client import IDLE, workers_address

_READY = b"ready\n"
_NUMBER = struct.Struct("=i")
_DRIVER = "libnvidia-ml.so.1"


@dataclass
class _Forked:
    pid: int
    line: socket.socket
    gate: int
    has_started: bool = False


def main() -> None:
    address, models, *role = sys.argv[1:]
    if role:
        _import_for_workers(Path(models))
        _Server(workers_address(address), _work).serve()
    # Another process, because a command imports no torch.
    workers = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.forked.server", address, models, "workers"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    import ensemble.cli.app  # noqa: F401

    assert workers.stdout is not None
    assert workers.stdout.readline() == _READY
    _Server(address, _run).serve()


def _import_for_workers(models: Path) -> None:
    import pandas  # noqa: F401  for members that are Python functions
    import tqdm
    import transformers

    os.environ["MPLBACKEND"] = "svg"  # as the process that writes a report has it
    import ensemble.analysis.report.page
    import ensemble.members.huggingface.loading.describe
    import ensemble.members.huggingface.training.trainer
    import ensemble.members.seq_cls.predictor
    import ensemble.worker.session  # noqa: F401

    with contextlib.suppress(ImportError):
        import bitsandbytes  # noqa: F401  a second, for each trial of tune in 8 or 4 bits
    # Its own lock is one for all processes that come of this one, and for ever when one is killed that holds it.
    tqdm.tqdm.set_lock(threading.RLock())
    for model in sorted(models.iterdir()):
        transformers.AutoModelForSequenceClassification.from_pretrained(model)
    # Or each collection in a forked process looks at all that was imported: of a tiny training, half of the time.
    gc.freeze()


class _Server:
    def __init__(self, address: str, become: Callable[[dict[str, Any], dict[int, int]], NoReturn]) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{address}")
        self._listener.listen(64)
        self._become = become
        self._poll = select.poll()
        self._by_line: dict[int, _Forked] = {}
        self._by_end: dict[int, _Forked] = {}  # by a descriptor that can be read when the process has ended
        self._asking: list[socket.socket] = []
        # Names of modules that commands have imported when they came to their end: the next ones find them.
        self._learns, self._learnt = os.pipe()
        self._names = b""

    def serve(self) -> NoReturn:
        for descriptor in (0, self._listener.fileno(), self._learns):
            self._poll.register(descriptor, select.POLLIN)
        os.write(1, _READY)
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == 0:
                    for forked in self._by_end.values():
                        _signal(forked.pid, signal.SIGKILL)
                    os._exit(0)
                if descriptor == self._learns:
                    self._learn()
                elif descriptor == self._listener.fileno():
                    self._fork()
                elif descriptor in self._by_end:
                    self._end(descriptor)
                elif descriptor in self._by_line:
                    self._heed(descriptor)
            if not self._by_end:
                for line in self._asking:
                    with line:
                        _send(line, b"yes")
                self._asking.clear()

    def _learn(self) -> None:
        *names, self._names = (self._names + os.read(self._learns, 1 << 16)).split(b"\n")
        for name in names:
            with contextlib.suppress(ImportError):  # some libraries make modules that cannot be imported
                importlib.import_module(name.decode())

    def _fork(self) -> None:
        line, _ = self._listener.accept()
        try:
            message, descriptors, _, _ = socket.recv_fds(line, 1 << 20, 4)
        except ConnectionResetError:
            message = b""
        if not message:  # who asked has been killed
            line.close()
            return
        if message == IDLE:
            self._asking.append(line)
            return
        asked = json.loads(message)
        gate, opens_gate = os.pipe()
        before = set(sys.modules)
        pid = os.fork()
        if pid == 0:
            os.close(opens_gate)
            if not os.read(gate, 1):
                os._exit(1)
            asked["known"], asked["learnt"] = before, self._learnt
            self._become(asked, dict(zip(asked["numbers"], descriptors, strict=True)))
        for each in (gate, *descriptors):
            os.close(each)
        forked, end = _Forked(pid, line, opens_gate), os.pidfd_open(pid)
        self._by_line[line.fileno()] = self._by_end[end] = forked
        self._poll.register(line, select.POLLIN)
        self._poll.register(end, select.POLLIN)
        _send(line, _NUMBER.pack(pid))

    def _heed(self, descriptor: int) -> None:
        forked = self._by_line[descriptor]
        try:
            message = forked.line.recv(_NUMBER.size)
        except ConnectionResetError:
            message = b""
        if not message:
            self._forget(forked)
            _signal(forked.pid, signal.SIGKILL)
        elif number := _NUMBER.unpack(message)[0]:
            _signal(forked.pid, number)
        else:
            os.write(forked.gate, b"x")

    def _end(self, descriptor: int) -> None:
        forked = self._by_end.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        os.close(forked.gate)
        code = os.waitstatus_to_exitcode(os.waitpid(forked.pid, 0)[1])
        _send(forked.line, _NUMBER.pack(code))
        self._forget(forked)

    def _forget(self, forked: _Forked) -> None:
        if forked.line.fileno() >= 0:
            del self._by_line[forked.line.fileno()]
            self._poll.unregister(forked.line)
            forked.line.close()


def _signal(pid: int, number: int) -> None:
    """To a process and its group, which it leads from its first moment on, or nearly so."""
    for send in (os.killpg, os.kill):
        try:
            send(pid, number)
            return
        except ProcessLookupError:
            continue


def _send(line: socket.socket, message: bytes) -> None:
    try:
        line.send(message)
    except OSError:  # who waited has been killed
        return


def _run(asked: dict[str, Any], descriptors: dict[int, int]) -> NoReturn:
    from ensemble.__main__ import main as run

    end = os._exit

    def tell_and_end(status: int) -> NoReturn:
        if "torch" not in sys.modules:
            for name in sys.modules.keys() - asked["known"]:
                os.write(asked["learnt"], f"{name}\n".encode())
        end(status)

    os._exit = tell_and_end
    _become(run, asked, {**descriptors, asked["learnt"]: asked["learnt"]})


def _work(asked: dict[str, Any], descriptors: dict[int, int]) -> NoReturn:
    main = importlib.import_module(asked["module"]).main
    words = asked["argv"]
    # Its parent is this server now; where the true one has gone, its standard input ends.
    if asked["module"] == "ensemble.analysis.report.__main__":
        words[-1] = str(os.getppid())
    asked["argv"] = [f"--parent-pid={os.getppid()}" if "parent-pid" in word else word for word in words]
    if "TEST_FAULTS" in asked["environment"]:
        stand_at_embeddings(json.loads(asked["environment"]["TEST_FAULTS"]))
    _become(main, asked, descriptors)


def _become(main: Callable[[], None], asked: Mapping[str, Any], descriptors: Mapping[int, int]) -> NoReturn:
    """What a fresh process finds: its words, environment, folder and files; then its main function."""
    os.setsid()
    # First to numbers that none of them shall have; all that is left besides is the server's own.
    copies = {number: fcntl.fcntl(given, fcntl.F_DUPFD, 512) for number, given in descriptors.items()}
    for number, copy in copies.items():
        os.dup2(copy, number)
    for first, next_ in itertools.pairwise([*sorted(copies), 1024]):
        os.closerange(first + 1, next_)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    _load_simulated_driver(os.environ.get("LD_LIBRARY_PATH", ""))
    sys.argv = list(asked["argv"])
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = open(number, "w", encoding="utf-8", closefd=False, errors=getattr(sys, name).errors)  # noqa: SIM115
        stream.reconfigure(line_buffering=name == "stderr" or stream.isatty())
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    code = 1
    try:
        main()
        code = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
            code = 1
        else:
            code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _load_simulated_driver(folders: str) -> None:
    """The loader has read LD_LIBRARY_PATH long ago; but a library that is there already is taken by its name."""
    for folder in filter(None, folders.split(os.pathsep)):
        if (library := Path(folder, _DRIVER)).exists():
            ctypes.CDLL(str(library))
            return


if __name__ == "__main__":
    main()
