"""Two processes that have imported everything, and fork for each run and each worker: no start takes seconds then.

    python -m tests.faults.forked.server MODEL

reads one line of JSON per run on standard input (arguments, folder, the file for what it prints), answers with the
process's number, starts it at the next line, and answers with its exit code once its workers have gone too.
A second process forks the workers, so that a run imports no torch here either.
"""

from __future__ import annotations

import fcntl
import importlib
import itertools
import json
import os
import pkgutil
import select
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.faults.sitecustomize import stand_at_embeddings
from tests.test_house import room_of

_FOLDER = Path(__file__).parent
_ROOT = _FOLDER.parents[2]
_IDLE = b"idle?"


def main() -> None:
    if sys.argv[1] == "workers":
        _serve_workers(sys.argv[2], sys.argv[3])
    else:
        _serve_runs(sys.argv[1])


def _serve_runs(model: str) -> None:
    address = f"ensemble-test-{os.getpid()}"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT), str(_FOLDER)])
    command = [sys.executable, "-m", "tests.faults.forked.server", "workers", address, model]
    with subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as workers:
        import ensemble
        from ensemble.__main__ import main as run

        for module in pkgutil.walk_packages(ensemble.__path__, "ensemble."):
            parts = tuple(module.name.split(".")[1:])
            if room_of(parts) not in ("worker", "predictor", "child"):
                importlib.import_module(module.name)
        assert workers.stdout is not None
        assert workers.stdout.readline() == b"ready\n"
        environment = {**os.environ, "TEST_FORK_SERVER": address}
        for line in sys.stdin:
            asked = json.loads(line)
            gate, opens_gate = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(opens_gate)
                os.read(gate, 1)
                output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                nothing = os.open(os.devnull, os.O_RDONLY)
                folder, argv = asked["folder"], ["ensemble", *asked["arguments"]]
                _become(
                    run,
                    argv,
                    {**environment, **asked["environment"]},
                    folder,
                    {0: nothing, 1: output, 2: output},
                )
            os.close(gate)
            _say({"pid": pid})
            sys.stdin.readline()
            os.close(opens_gate)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
                asking.connect(f"\0{address}")
                asking.send(_IDLE)
                asking.recv(8)
            _say({"code": code})


def _say(answer: Mapping[str, int]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _serve_workers(address: str, model: str) -> None:
    import tqdm
    import transformers

    # Its own lock is one for all processes that come of this one, and for ever when one is killed that holds it.
    tqdm.tqdm.set_lock(threading.RLock())
    transformers.AutoModelForSequenceClassification.from_pretrained(model)
    for module in ("members.seq_cls.predictor", "worker.shard_writer", "worker.__main__"):
        importlib.import_module(f"ensemble.{module}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{address}")
    listener.listen()
    waiting = select.poll()
    waiting.register(0, select.POLLIN)
    waiting.register(listener, select.POLLIN)
    working: dict[
        int, tuple[int, socket.socket]
    ] = {}  # by a descriptor that can be read when the process has ended
    asking: list[socket.socket] = []
    os.write(1, b"ready\n")
    while True:
        for descriptor, _ in waiting.poll():
            if descriptor == 0:
                os._exit(0)
            elif descriptor in working:
                pid, line = working.pop(descriptor)
                waiting.unregister(descriptor)
                os.close(descriptor)
                with line:
                    _tell(line, struct.pack("=i", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
            else:
                line, _ = listener.accept()
                message, descriptors, _, _ = socket.recv_fds(line, 1 << 20, 4)
                if message == _IDLE:
                    asking.append(line)
                    continue
                pid = os.fork()
                if pid == 0:
                    _work(json.loads(message), descriptors)
                for passed in descriptors:
                    os.close(passed)
                ended = os.pidfd_open(pid)
                working[ended] = (pid, line)
                waiting.register(ended, select.POLLIN)
        if not working:
            for line in asking:
                with line:
                    _tell(line, b"yes")
            asking.clear()


def _tell(line: socket.socket, message: bytes) -> None:
    try:
        line.send(message)
    except OSError:  # who waited has been killed
        return


def _work(asked: Mapping[str, Any], descriptors: Sequence[int]) -> NoReturn:
    from ensemble.worker.__main__ import main as work

    numbers = dict(zip((0, 1, 2, int(asked["events"])), descriptors, strict=True))
    # Its parent is this server now; where the true one has gone, its standard input ends.
    argv = [word if "parent-pid" not in word else f"--parent-pid={os.getppid()}" for word in asked["argv"]]
    if "TEST_FAULTS" in asked["environment"]:
        stand_at_embeddings(json.loads(asked["environment"]["TEST_FAULTS"]))
    _become(work, argv, asked["environment"], asked["folder"], numbers)


def _become(
    main: Any,
    argv: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
    descriptors: Mapping[int, int],
) -> NoReturn:
    """What a fresh process finds: its words, environment, folder and files; then its main function."""
    os.setsid()
    # First to numbers that none of them shall have; all that is left besides is the server's own.
    copies = {number: fcntl.fcntl(given, fcntl.F_DUPFD, 512) for number, given in descriptors.items()}
    for number, copy in copies.items():
        os.dup2(copy, number)
    for first, next_ in itertools.pairwise([*sorted(copies), 1024]):
        os.closerange(first + 1, next_)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = list(argv)
    code = 1
    try:
        main()
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
