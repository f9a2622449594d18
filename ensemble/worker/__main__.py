"""The message loop of a worker: commands in, events out, one member loaded in between.

Everything a library prints goes to the log file that is this process's standard output and error; the events
have a pipe of their own, so that no print can break the protocol.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import queue
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ensemble.protocol import (
    ChunkDone,
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
from ensemble.worker.parent import die_with_parent

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
    os.set_inheritable(arguments.events_fd, False)
    send = _sender(arguments.events_fd)
    commands = _commands()
    chunk: int | None = None
    try:
        start = next(commands)
        assert isinstance(start, Start), start
        spec = start.worker_spec()
        _import_libraries(began, send)
        member = _load(spec, send)
        for command in commands:
            if isinstance(command, Stop):
                break
            assert isinstance(command, Predict), command
            chunk = command.chunk
            _predict(member, command, send)
            chunk = None
        send(Closed(_peak_memory_bytes(), member.peak_gpu_memory_bytes()))
    except Exception as error:  # whatever it is, the parent must hear of it before this process ends
        text = traceback.format_exc()
        print(text, file=sys.stderr, flush=True)  # noqa: T201
        send(Failed(type(error).__name__, _one_line(error), text, chunk))
        _exit(1)
    _exit(0)


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
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _sender(events_fd: int) -> Callable[[Event], None]:
    lock = threading.Lock()

    def send(event: Event) -> None:
        data = encode(event).encode()
        with lock:
            while data:
                data = data[os.write(events_fd, data) :]

    return send


def _commands() -> Iterator[Command]:
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
        yield arrived.get()


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


def _predict(member: Member, command: Predict, send: Callable[[Event], None]) -> None:
    began = last = time.monotonic()

    def report(rows: int, tokens: int, padded_tokens: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_SECONDS:
            last = time.monotonic()
            send(Progress(command.chunk, rows, tokens, padded_tokens))

    work = member.predict_chunk(command, report)
    send(
        ChunkDone(
            chunk=command.chunk,
            rows=command.stop - command.start,
            tokens=work.tokens,
            padded_tokens=work.padded_tokens,
            batches=work.batches,
            truncated_rows=work.truncated_rows,
            oom_events=work.oom_events,
            recomputed_rows=work.recomputed_rows,
            seconds=round(time.monotonic() - began, 4),
        )
    )


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:500] if lines else repr(error)


if __name__ == "__main__":
    main()
