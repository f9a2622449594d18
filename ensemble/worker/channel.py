"""The worker's ends of the channel to the parent: commands as they arrive, events as they are sent, the heartbeat.

Everything a library prints goes to the log file that is this process's standard output and error; the events
have a pipe of their own, so that no print can break the protocol.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator

from ensemble.common.clock import Watch
from ensemble.common.protocol import Command, Event, Heartbeat, Stop, decode, encode

INTERVAL_SECONDS = 2.0


def event_sender(events_fd: int) -> Callable[[Event], None]:
    """What sends an event there, from any thread."""
    os.set_inheritable(events_fd, False)
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


class HeartbeatThread:
    """Says how long ago the main thread took a step: when it is started, and then every ``INTERVAL_SECONDS``.

    Attributes:
        clock: in seconds; leaves out the time in which this process was stopped.
    """

    def __init__(self, send: Callable[[Event], None]) -> None:
        self._send = send
        self.clock: Callable[[], float] = Watch(1.5 * INTERVAL_SECONDS)  # read at every heartbeat
        self._last_step: float | None = self.clock()
        self._writing_since: float | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def step(self) -> None:
        """The main thread got somewhere: a command has come, a batch is done."""
        self._last_step = self.clock()

    def wait(self) -> None:
        """The main thread waits for a command; however long that takes, it does not hang."""
        self._last_step = None

    def begin_write(self) -> None:
        """Another thread begins to write a shard: until ``end_write``, this process can hang in that."""
        self._writing_since = self.clock()

    def end_write(self) -> None:
        self._writing_since = None

    def idle_seconds(self) -> float:
        """Seconds since the last step; 0 while there is nothing to do."""
        now = self.clock()  # in any case, so that it is read at every heartbeat
        last = self._last_step if self._last_step is not None else self._writing_since
        return 0.0 if last is None else round(now - last, 3)

    def _run(self) -> None:
        while True:
            self._send(Heartbeat(self.idle_seconds()))
            time.sleep(INTERVAL_SECONDS)


class CommandReader:
    """Commands as they arrive on standard input, which itself becomes empty, so that no library can wait on it.

    The heartbeat is told when the main thread waits, and when it has got a command.
    """

    def __init__(self, heartbeat: HeartbeatThread) -> None:
        self._heartbeat = heartbeat
        self._arrived: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def start(self) -> None:
        """Begin to read."""
        commands_fd = os.dup(0)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        threading.Thread(target=self._read, args=(commands_fd,), name="commands", daemon=True).start()

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
                    self._arrived.put(decode(line))
        finally:
            os._exit(1)  # the parent has gone or talks nonsense: there is nobody to compute for
