"""The message loop of a worker: commands in, events out, one member loaded in between.

Everything a library prints goes to the log file that is this process's standard output and error; the events
have a pipe of their own, so that no print can break the protocol.  Stacks go to the log too: an exception's, and
all threads' where SIGSEGV or SIGABRT ends the process (the parent sends the latter to one that hangs).  Neither
log nor events tell secrets.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ensemble.common.protocol import (
    ChunkDone,
    ChunkFailed,
    Closed,
    Command,
    Computed,
    Event,
    Failed,
    Load,
    Predict,
    Prepare,
    Progress,
    Ready,
    Start,
    Started,
    Stop,
)
from ensemble.common.python_process import die_with_parent
from ensemble.common.redact import Redactor, guard_output
from ensemble.common.torch_errors import Verdict, judge, one_line
from ensemble.worker.channel import Commands, Sender, watched
from ensemble.worker.heartbeat import Pulse
from ensemble.worker.shutdown import Terminated, end_by, end_on_sigterm

if TYPE_CHECKING:
    from ensemble.worker.member import Member
    from ensemble.worker.shard_writer import ChunkWork

PROGRESS_SECONDS = 0.5


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m ensemble.worker")
    parser.add_argument("--events-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent_pid)
    faulthandler.enable()
    _leave_no_core()
    send = Sender(arguments.events_fd)
    pulse = Pulse(send)
    pulse.start()
    commands = Commands(pulse)
    try:
        end_on_sigterm()
        commands.start()
        _exit(serve(commands, watched(send, pulse), pulse.step, began, pulse.watch))
    except Terminated:
        _log("ended by SIGTERM")
        end_by(signal.SIGTERM)


class Told(Protocol):
    """Where commands come from; see ``line.Commands``."""

    def __iter__(self) -> Iterator[Command]: ...
    def heed_hints(self, prepare: Callable[[int, int], None]) -> None: ...
    def stop(self) -> None: ...


def serve(
    told: Told,
    send: Callable[[Event], None],
    step: Callable[[], None],
    began: float,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Do as told until the end, and answer with events.

    Args:
        step: called whenever the work has got somewhere.
        began: when this process started, on the monotonic clock, in seconds.
        clock: what chunks are timed by, in seconds; a machine that was suspended is no slower for that.

    Returns:
        The process's exit code.

    Raises:
        Terminated: SIGTERM has come.
    """
    chunk: int | None = None
    member: Member | None = None
    redact = Redactor(os.environ)

    def tell(event: Event) -> None:
        send(redact.document(event))

    try:
        commands = iter(told)
        start = next(commands)
        assert isinstance(start, Start), start
        redact = Redactor(os.environ, start.spec)
        guard_output(redact)
        _import_libraries(began, tell)
        step()
        member, making_seconds = _make(start, told)
        for command in commands:
            if isinstance(command, Stop):
                break
            if isinstance(command, Prepare):
                member.prepare(command.start, command.stop)
            elif isinstance(command, Load):
                _load(member, making_seconds, tell)
            elif isinstance(command, Predict):
                chunk = command.chunk
                try:
                    _predict(member, command, tell, step, clock)
                except Exception as error:
                    if judge(error) is not Verdict.SOUND or member.unwritten_chunk is not None:
                        raise
                    member.check_devices()
                    trace = _logged_traceback()
                    tell(ChunkFailed(chunk, type(error).__name__, one_line(error, redact), trace))
                chunk = None
        member.finish()
        tell(Closed(_peak_memory_bytes(), member.peak_gpu_memory_bytes()))
    except Terminated:
        _let_writing_end(member)
        raise
    except BaseException as error:  # whatever it is, the parent must hear of it before this process ends
        trace = _logged_traceback()
        _let_writing_end(member)
        chunk = chunk if member is None or member.unwritten_chunk is None else member.unwritten_chunk
        can_retry = judge(error) is Verdict.SUSPECT
        tell(Failed(type(error).__name__, one_line(error, redact), trace, chunk, can_retry))
        return 1
    return 0


def _let_writing_end(member: Member | None) -> None:
    # A part that is being written takes a moment, and no half of it is left behind.
    if member is not None:
        with contextlib.suppress(Exception):
            member.finish()


def _logged_traceback() -> str:
    text = traceback.format_exc()
    _log(text)
    return text


def _log(text: str) -> None:
    with contextlib.suppress(OSError):  # the disk may be full, and the parent must hear of it all the same
        print(text, file=sys.stderr, flush=True)  # noqa: T201


def _leave_no_core() -> None:
    # The memory of a process that holds a model, written where the user's run stands: the log's stacks say more.
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def _peak_memory_bytes() -> int:
    """The most resident memory this process ever had."""
    # Not ru_maxrss first: on Linux it survives the exec and can be the parent's peak.
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _exit(code: int) -> None:
    # Not sys.exit: interpreter teardown with a CUDA context and thread pools alive takes seconds and can hang,
    # and everything this process owns on disk is already complete.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def _import_libraries(began: float, send: Callable[[Event], None]) -> None:
    import platform
    from importlib.metadata import version
    from importlib.util import find_spec

    from ensemble.common.import_guards import keep_pandas_out
    from ensemble.worker.lazy_imports import import_torch_and_transformers, no_collections

    with no_collections():
        import_torch_and_transformers()
        keep_pandas_out()
        from ensemble.worker import member  # noqa: F401  imports what a member needs, as part of start-up

    import torch
    import transformers

    names = ("accelerate", "bitsandbytes", "pyarrow", "tokenizers")
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "transformers": transformers.__version__,
        **{name: version(name) for name in names if find_spec(name) is not None},
    }
    send(Started(versions, round(time.monotonic() - began, 3)))


def _make(start: Start, told: Told) -> tuple[Member, float]:
    """The member without its model; returns it and the seconds that it took."""
    from ensemble.worker.member import Member

    began = time.monotonic()
    member = Member(start.worker_spec(), told.stop)
    told.heed_hints(member.prepare)
    if start.read_ahead_bytes:
        member.read_ahead(start.read_ahead_bytes)
    return member, time.monotonic() - began


def _load(member: Member, making_seconds: float, send: Callable[[Event], None]) -> None:
    began = time.monotonic()
    member.load()
    send(
        Ready(
            load_seconds=round(making_seconds + time.monotonic() - began, 3),
            device=member.device_name,
            dtype=member.dtype,
            attn_implementation=member.attn_implementation,
            parameters=member.parameters,
            max_length=member.max_length,
            token_budget=member.token_budget,
            notes=member.notes(),
        )
    )


def _predict(
    member: Member,
    command: Predict,
    send: Callable[[Event], None],
    step: Callable[[], None],
    clock: Callable[[], float],
) -> None:
    began, last = clock(), time.monotonic()
    is_over, is_announced = threading.Event(), False

    def report(rows: int, tokens: int, padded_tokens: int) -> None:
        nonlocal last
        step()
        if time.monotonic() - last >= PROGRESS_SECONDS:
            last = time.monotonic()
            send(Progress(command.chunk, rows, tokens, padded_tokens))

    def written(work: ChunkWork) -> None:
        is_over.wait()
        if not is_announced:  # the process comes to its end
            return
        send(
            ChunkDone(
                chunk=command.chunk,
                part=work.part,
                counters=replace(work.counters, predict_seconds=clock() - began),
                bad_rows=work.bad_rows,
                bad_row_reasons=work.bad_row_reasons,
            )
        )

    try:
        member.predict_chunk(command, report, written)
        send(Computed(command.chunk))
        is_announced = True
    finally:
        is_over.set()


if __name__ == "__main__":
    main()
