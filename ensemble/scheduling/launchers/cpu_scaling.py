"""What a part of this machine's cores is worth to a worker, measured once for each machine and torch.

One process with all cores, and as many side by side as are asked for, with cores and threads of their own as
workers have them, compute a transformer's layers in turn, for a moment each: what other programs take meanwhile,
they take of all.  The result is kept in the user's cache directory; what was measured beside other programs is not.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

from ensemble.common.digests import digest_of
from ensemble.common.errors import WriteError
from ensemble.common.files import read_json, user_cache_folder, write_text
from ensemble.common.gpus import worker_environment
from ensemble.common.host import available_memory_bytes, cpu_name, is_busy, usable_cpus
from ensemble.common.packages import installed_versions
from ensemble.common.python_process import python_command, python_environment
from ensemble.common.text import gib
from ensemble.planning.forecast import Scaling
from ensemble.scheduling.launchers import early
from ensemble.scheduling.launchers.cores import Cores, layout

# To be raised where what is measured, or how, changes: older measurements then count as another machine's.
_SCHEME = 1
# Who measures has this name; as with cores, the kernel takes it back however that one ends.
_NAME = "\0ensemble-cpu-scaling"
# What lines of the test processes begin with.
_MARK = "cpu-speed"
_LINE = re.compile(rf"^{_MARK} (.*)\n".encode(), re.MULTILINE)
# For all of it, waiting for others included.  Where the first import of torch takes longer, as from a cold network
# disk, the next run's does not.
_TIMEOUT_SECONDS = 60.0
_ROUNDS = 5
_TURN_SECONDS = 0.4
# No further round after so many seconds: where a layer takes longer than a turn.
_ENOUGH_SECONDS = 8.0
# Of each process: torch imported, its layers and its numbers; about.
_PROCESS_BYTES = 450 << 20


class _NotMeasured(Exception):
    """Says why, in a few words."""


def known_scaling() -> Scaling:
    """What an earlier measurement on this machine has found; without one, what is assumed."""
    cpus = {"CPU": cpu_name(), "cores": layout(), "threads": usable_cpus()}
    machine = digest_of({"scheme": _SCHEME, **cpus, **installed_versions(["torch"])})
    kept = {} if (path := _path(machine)) is None else read_json(path)
    slowdowns: dict[int, float] = {}
    # Whoever edits the file, or copies it here, gets what is assumed.
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        slowdowns = {int(count): float(value) for count, value in kept["slowdowns"].items()} if kept else {}
    is_good = all(count > 1 and _is_possible(value) for count, value in slowdowns.items())
    return Scaling(slowdowns if is_good and kept.get("machine") == machine else {}, machine=machine)


def measured_scaling(counts: Sequence[int], check: Callable[[], None] = lambda: None) -> Scaling:
    """Measure so many workers side by side, each number of them, if nobody has: some seconds.

    Args:
        counts: each from 2 on.
        check: called meanwhile, many times; may raise.

    Returns:
        What was measured, or else what is assumed with the reason; no error.
    """
    scaling = known_scaling()
    until = time.monotonic() + _TIMEOUT_SECONDS
    try:
        with _alone(until, check):
            scaling = known_scaling()  # whoever was here before has measured it
            if set(counts) <= set(scaling.slowdowns):
                return scaling
            is_quiet = not is_busy()
            slowdowns, had_cores = _measure(counts, until, check)
    except (_NotMeasured, OSError, ValueError) as error:
        return replace(scaling, problem=f"it could not be measured ({error})")
    scaling = replace(scaling, slowdowns=slowdowns)
    if is_quiet and had_cores and (path := _path(scaling.machine)) is not None:
        document = {"machine": scaling.machine, "CPU": cpu_name(), "slowdowns": slowdowns}
        with contextlib.suppress(
            OSError, WriteError
        ):  # such as a home that is read-only: then for this run alone
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(document, indent=2) + "\n")
    return scaling


def _path(machine: str) -> Path | None:
    """The file of a machine; None: there is no place for one."""
    folder = user_cache_folder()
    return None if folder is None else folder / f"cpu-scaling-{machine[:16]}.json"


def _is_possible(slowdown: float) -> bool:
    return math.isfinite(slowdown) and slowdown > 0


@contextlib.contextmanager
def _alone(until: float, check: Callable[[], None]) -> Iterator[None]:
    """No two of these at a time on a machine.

    Raises:
        _NotMeasured: another one goes on for too long.
        OSError: the system has no such names.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        while True:
            try:
                own.bind(_NAME)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                if time.monotonic() > until:
                    raise _NotMeasured("another process measures it all the time") from None
            check()
            time.sleep(0.1)
        yield


def _measure(
    counts: Sequence[int], until: float, check: Callable[[], None]
) -> tuple[Mapping[int, float], bool]:
    """Slowdowns by number of workers, and whether each process had cores of its own, where it can have them.

    Raises:
        _NotMeasured: a process failed, or they took too long.
        OSError: none could be started.
    """
    early.end()  # its imports would be measured, too
    needed, free = (1 + sum(counts)) * _PROCESS_BYTES, available_memory_bytes()
    if free is not None and free < needed:
        raise _NotMeasured(f"that takes {gib(needed)} of memory, and {gib(free)} are free")
    processes: dict[int, list[_Process]] = {}
    had_cores = True
    with contextlib.ExitStack() as stack:
        for count in (1, *counts):
            processes[count] = []
            cores = [Cores(1 / count) for _ in range(count)]
            try:
                for own in cores:
                    had_cores &= bool(own.numbers) or count == 1 or not own.may_hold
                    with own.inherited():
                        processes[count].append(_Process(own.environment, until))
                    stack.callback(processes[count][-1].kill)
            finally:  # they keep them; the next ones get the same
                for own in cores:
                    own.close()
        for process in (one for group in processes.values() for one in group):
            process.line(check)
        rounds: list[dict[int, float]] = []
        began = time.monotonic()
        while len(rounds) < _ROUNDS and (not rounds or time.monotonic() < began + _ENOUGH_SECONDS):
            speeds = {}
            for count, group in processes.items():
                for process in group:
                    process.ask(_TURN_SECONDS)
                speeds[count] = mean(float(process.line(check)) for process in group)
            rounds.append({count: speeds[1] / speeds[count] for count in counts})
    found = {count: median(one[count] for one in rounds) for count in counts}
    if not all(map(_is_possible, found.values())):
        raise _NotMeasured(f"it came out as {found}")
    return found, had_cores


class _Process:
    """One of the test processes.

    Args:
        environment: added to this process's.
        until: when it must have answered, by the monotonic clock.
    """

    def __init__(self, environment: Mapping[str, str], until: float) -> None:
        self._until, self._buffer = until, b""
        seconds = max(1, math.ceil(until - time.monotonic()))
        self._process = subprocess.Popen(
            [
                *python_command("ensemble.worker.cpu_speed"),
                f"--parent-pid={os.getpid()}",
                f"--seconds={seconds}",
                f"--mark={_MARK}",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **python_environment(), **environment, **worker_environment(())},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()

    def ask(self, seconds: float) -> None:
        os.write(self._input, f"{seconds}\n".encode())

    def line(self, check: Callable[[], None]) -> str:
        """What it says next.

        Raises:
            _NotMeasured: nothing, in time.
        """
        while not (found := _LINE.search(self._buffer)):
            check()
            if (left := self._until - time.monotonic()) <= 0:
                raise _NotMeasured(f"it took more than {_TIMEOUT_SECONDS:.0f} s")
            if not select.select([self._output], [], [], min(left, 0.1))[0]:
                continue
            if not (data := os.read(self._output, 4096)):
                raise _NotMeasured("a test process ended")
            self._buffer += data
        self._buffer = self._buffer[found.end() :]
        return found[1].decode()

    def kill(self) -> None:
        """End it with all it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
