"""What a part of this machine's cores is worth to a worker, measured once for each machine and torch.

One process with all cores, and several side by side with cores and threads of their own as workers have them,
compute a transformer's layers in turn, for a moment each: what other programs take meanwhile, they take of all.  So
it goes for each number of workers that is asked for.  The result is kept in the user's cache directory; what was
measured beside other programs is not.
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
_SCHEME = 2
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
# No further round after so many seconds for a number of workers: where a layer takes longer than a turn.
_ENOUGH_SECONDS = 8.0
# Of each process: torch imported, its layers and its numbers; about.
_PROCESS_BYTES = 450 << 20


class _NotMeasured(Exception):
    """Says why, in a few words."""


# The last two: what a process says is no number, or 0.
_FAILURES = (_NotMeasured, OSError, ValueError, ZeroDivisionError)


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
            scaling = known_scaling()  # whoever was here before may have measured it
            missing = [count for count in counts if count not in scaling.slowdowns]
            if not missing:
                return scaling
            _check_room(min(missing))
            early.end()  # its imports would be measured, too
            was_quiet = not is_busy()
            slowdowns, had_cores, problem = _measure(sorted(missing), until, check)
            scaling = replace(scaling, slowdowns={**scaling.slowdowns, **slowdowns}, problem=problem)
            if was_quiet and had_cores and not is_busy():
                _keep(scaling)
            return scaling
    except _FAILURES as error:
        what = "more could not be" if scaling.is_measured else "it could not be measured"
        return replace(scaling, problem=f"{what} ({error})")


def _keep(scaling: Scaling) -> None:
    if (path := _path(scaling.machine)) is None:
        return
    document = {"machine": scaling.machine, "CPU": cpu_name(), "slowdowns": dict(scaling.slowdowns)}
    with contextlib.suppress(
        OSError, WriteError
    ):  # such as a home that is read-only: then for this run alone
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(document, indent=2) + "\n")


def _check_room(count: int) -> None:
    """Whether there is memory for so many processes beside one.

    Raises:
        _NotMeasured: there is not.
    """
    needed, free = (1 + count) * _PROCESS_BYTES, available_memory_bytes()
    if free is not None and free < needed:
        raise _NotMeasured(f"that takes {gib(needed)} of memory, and {gib(free)} are free")


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
) -> tuple[dict[int, float], bool, str]:
    """Slowdowns by number of workers, up to the first that could not be measured, and why that could not.

    Between them: whether each process had cores of its own, where it can have them.

    Raises:
        one of ``_FAILURES``: there are none.
    """
    found: dict[int, float] = {}
    had_cores = True
    with _side_by_side(1, until, check) as (alone, _):
        for count in counts:
            try:
                _check_room(count)
                with _side_by_side(count, until, check) as (group, has_cores):
                    ratios: list[float] = []
                    began = time.monotonic()
                    while len(ratios) < _ROUNDS and (
                        not ratios or time.monotonic() < began + _ENOUGH_SECONDS
                    ):
                        ratios.append(_speed(alone, check) / _speed(group, check))
                if not _is_possible(slowdown := median(ratios)):
                    raise _NotMeasured(f"it came out as {slowdown}")
            except _FAILURES as error:
                if not found:
                    raise
                return found, had_cores, f"{count} side by side could not be ({error})"
            found[count] = slowdown
            had_cores &= has_cores
    return found, had_cores, ""


@contextlib.contextmanager
def _side_by_side(
    count: int, until: float, check: Callable[[], None]
) -> Iterator[tuple[list[_Process], bool]]:
    """So many test processes that are ready to compute, and whether each has cores of its own, or could have none.

    Raises:
        _NotMeasured: one failed, or they took too long.
        OSError: none could be started.
    """
    processes: list[_Process] = []
    with contextlib.ExitStack() as stack:
        cores = [Cores(1 / count) for _ in range(count)]
        had_cores = all(own.numbers or not own.may_hold for own in cores)
        try:
            for own in cores:
                with own.inherited():
                    processes.append(_Process(own.environment, until))
                stack.callback(processes[-1].kill)
        finally:  # they keep them; the next ones get the same
            for own in cores:
                own.close()
        for process in processes:
            process.line(check)
        yield processes, had_cores


def _speed(processes: Sequence[_Process], check: Callable[[], None]) -> float:
    """Of the mean process, while all of them compute for a moment.

    Raises:
        _NotMeasured: one failed, or they took too long.
    """
    for process in processes:
        process.ask(_TURN_SECONDS)
    return mean(float(process.line(check)) for process in processes)


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
