"""The worker's ends of the channel to the parent: commands as they arrive, events as they are sent.

Everything a library prints goes to the log file that is this process's standard output and error; the events
have a pipe of their own, so that no print can break the protocol.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator

from ensemble.common.protocol import Command, Event, Prepare, Stop, decode, encode
from ensemble.worker.heartbeat import HeartbeatThread


class EventSender:
    """Sends events, from any thread.

    Args:
        events_fd: where they go.
    """

    def __init__(self, events_fd: int) -> None:
        os.set_inheritable(events_fd, False)
        self._events_fd = events_fd
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        data = encode(event).encode()
        try:
            with self._lock:
                while data:
                    data = data[os.write(self._events_fd, data) :]
        except OSError:
            os._exit(1)  # the parent has gone: there is nobody to compute for


class CommandReader:
    """Commands as they arrive on standard input, which itself becomes empty, so that no library can wait on it.

    Args:
        heartbeat: is told when the main thread waits, and when it has got a command.
    """

    def __init__(self, heartbeat: HeartbeatThread) -> None:
        self._heartbeat = heartbeat
        self._arrived: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._on_prepare: Callable[[Prepare], None] | None = None

    def start(self) -> None:
        """Begin to read."""
        commands_fd = os.dup(0)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        threading.Thread(target=self._read, args=(commands_fd,), name="commands", daemon=True).start()

    def on_prepare(self, callback: Callable[[Prepare], None]) -> None:
        """From now on hints go straight there, in the reading thread: the main one computes meanwhile."""
        self._on_prepare = callback

    def stop(self) -> None:
        """Let the main thread come to its end as if it had been told to, from any thread."""
        self._arrived.put(Stop())

    def __iter__(self) -> Iterator[Command]:
        while True:
            self._heartbeat.wait()
            command = self._arrived.get()
            self._heartbeat.step()
            yield command

    def _read(self, commands_fd: int) -> None:
        try:
            with os.fdopen(commands_fd, encoding="utf-8") as lines:
                for line in lines:
                    command = decode(line)
                    if isinstance(command, Prepare) and self._on_prepare is not None:
                        self._on_prepare(command)
                    else:
                        self._arrived.put(command)
        finally:
            os._exit(1)  # the parent has gone or talks nonsense: there is nobody to compute for
