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
import queue
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ensemble.protocol import (
    ChunkDone,
    ChunkFailed,
    Closed,
    Command,
    Event,
    Failed,
    Predict,
    Progress,
    Ready,
    Start,
    Started,
    Stop,
    WorkerSpec,
    decode,
    encode,
)
from ensemble.redact import Redactor, guard_output
from ensemble.worker.ending import Terminated, end_by, end_on_sigterm
from ensemble.worker.faults import Verdict, judge, one_line
from ensemble.worker.parent import die_with_parent
from ensemble.worker.pulse import Pulse

if TYPE_CHECKING:
    from ensemble.worker.member import Member

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
    os.set_inheritable(arguments.events_fd, False)
    send = _sender(arguments.events_fd)
    pulse = Pulse(send)
    pulse.start()
    try:
        end_on_sigterm()
        _exit(serve(_commands(pulse), send, pulse.step, began))
    except Terminated:
        _log("ended by SIGTERM")
        end_by(signal.SIGTERM)


def serve(
    commands: Iterator[Command], send: Callable[[Event], None], step: Callable[[], None], began: float
) -> int:
    """Do as told until the end, and answer with events.

    Args:
        step: called whenever the work has got somewhere.
        began: when this process started, on the monotonic clock, in seconds.

    Returns:
        The process's exit code.

    Raises:
        Terminated: SIGTERM has come.
    """
    chunk: int | None = None
    redact = Redactor(os.environ)

    def tell(event: Event) -> None:
        send(redact.document(event))

    try:
        start = next(commands)
        assert isinstance(start, Start), start
        redact = Redactor(os.environ, start.spec)
        guard_output(redact)
        _import_libraries(began, tell)
        step()
        member = _load(start.worker_spec(), tell)
        for command in commands:
            if isinstance(command, Stop):
                break
            assert isinstance(command, Predict), command
            chunk = command.chunk
            try:
                tell(_predict(member, command, tell, step))
            except Exception as error:
                if judge(error) is not Verdict.SOUND:
                    raise
                member.check_devices()
                tell(ChunkFailed(chunk, type(error).__name__, one_line(error, redact), _logged_traceback()))
            chunk = None
        tell(Closed(_peak_memory_bytes(), member.peak_gpu_memory_bytes()))
    except Terminated:
        raise
    except BaseException as error:  # whatever it is, the parent must hear of it before this process ends
        can_retry = judge(error) is Verdict.SUSPECT
        tell(Failed(type(error).__name__, one_line(error, redact), _logged_traceback(), chunk, can_retry))
        return 1
    return 0


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


def _sender(events_fd: int) -> Callable[[Event], None]:
    lock = threading.Lock()

    def send(event: Event) -> None:
        data = encode(event).encode()
        try:
            with lock:
                while data:
                    data = data[os.write(events_fd, data) :]
        except OSError:
            os._exit(1)  # the parent has gone: there is nobody to compute for

    return send


def _commands(pulse: Pulse) -> Iterator[Command]:
    """Commands as they arrive. Standard input itself becomes empty, so that no library can wait on it."""
    line_fd = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    arrived: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def read() -> None:
        try:
            with os.fdopen(line_fd, encoding="utf-8") as lines:
                for line in lines:
                    arrived.put(decode(line))
        finally:
            os._exit(1)  # the parent has gone or talks nonsense: there is nobody to compute for

    threading.Thread(target=read, name="commands", daemon=True).start()
    while True:
        pulse.rest()
        command = arrived.get()
        pulse.step()
        yield command


def _import_libraries(began: float, send: Callable[[Event], None]) -> None:
    import platform
    from importlib.metadata import version
    from importlib.util import find_spec

    import torch
    import transformers

    from ensemble.arrow import keep_pandas_out

    keep_pandas_out()
    from ensemble.worker import member  # noqa: F401  imports what a member needs, as part of start-up

    names = ("accelerate", "bitsandbytes", "pyarrow", "tokenizers")
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "transformers": transformers.__version__,
        **{name: version(name) for name in names if find_spec(name) is not None},
    }
    send(Started(versions, round(time.monotonic() - began, 3)))


def _load(spec: WorkerSpec, send: Callable[[Event], None]) -> Member:
    from ensemble.worker.member import Member

    began = time.monotonic()
    member = Member(spec)
    send(
        Ready(
            load_seconds=round(time.monotonic() - began, 3),
            device=member.device_name,
            dtype=member.dtype,
            attn_implementation=member.attn_implementation,
            parameters=member.parameters,
            max_length=member.max_length,
            token_budget=member.token_budget,
            notes=member.notes(),
        )
    )
    return member


def _predict(
    member: Member, command: Predict, send: Callable[[Event], None], step: Callable[[], None]
) -> ChunkDone:
    began = last = time.monotonic()

    def report(rows: int, tokens: int, padded_tokens: int) -> None:
        nonlocal last
        step()
        if time.monotonic() - last >= PROGRESS_SECONDS:
            last = time.monotonic()
            send(Progress(command.chunk, rows, tokens, padded_tokens))

    work = member.predict_chunk(command, report)
    return ChunkDone(
        chunk=command.chunk,
        rows=command.stop - command.start,
        tokens=work.tokens,
        padded_tokens=work.padded_tokens,
        batches=work.batches,
        truncated_rows=work.truncated_rows,
        oom_events=work.oom_events,
        recomputed_rows=work.recomputed_rows,
        seconds=round(time.monotonic() - began, 4),
        part=work.part,
        bad_rows=work.bad_rows,
        bad_row_reasons=work.bad_row_reasons,
    )


if __name__ == "__main__":
    main()
