"""Connect a worker to its parent: commands, events and the heartbeat.

What libraries print goes to the log file, which is this process's standard output and error. Events have a pipe of
their own, so that no print can break the protocol.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator

from ensemble.common.clock import Watch
from ensemble.common.files import keep_log_end
from ensemble.common.protocol import Command, Event, Finish, Heartbeat, decode, encode

INTERVAL_SECONDS = 2.0


def event_sender(events_fd: int) -> Callable[[Event], None]:
    """Return a function that sends an event to the parent, from any thread."""
    os.set_inheritable(events_fd, False)
    lock = threading.Lock()

    def send(event: Event) -> None:
        data = encode(event).encode()
        try:
            with lock:
                while data:
                    data = data[os.write(events_fd, data) :]
        except OSError:
            os._exit(1)  # the parent is gone

    return send


class HeartbeatThread:
    """Send how long ago the main thread finished a step, at its start and then every ``INTERVAL_SECONDS``.

    Attributes:
        clock: in seconds, without the time in which this process was stopped.
        is_stopped: whether the run is stopped, and no batch after this one is wanted.
    """

    def __init__(self, send: Callable[[Event], None]) -> None:
        self._send = send
        self.clock: Callable[[], float] = Watch(1.5 * INTERVAL_SECONDS)  # read at every heartbeat
        self._last_step: float | None = self.clock()
        self.is_stopped = False

    def start(self) -> None:
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def step(self) -> None:
        """Note that the main thread finished a step: a command has come, a batch is done."""
        self._last_step = self.clock()

    def wait(self) -> None:
        """Note that the main thread waits for a command, and does not hang."""
        self._last_step = None

    def idle_seconds(self) -> float:
        """Return the seconds since the last step; 0 while there is nothing to do."""
        now = self.clock()  # always, because the clock must be read at every heartbeat
        return 0.0 if self._last_step is None else round(now - self._last_step, 3)

    def _run(self) -> None:
        while True:
            self._send(Heartbeat(self.idle_seconds()))
            keep_log_end(1)
            time.sleep(INTERVAL_SECONDS)


def commands_from_stdin(heartbeat: HeartbeatThread) -> Iterator[Command]:
    """Yield commands from standard input, which becomes empty, so that no library can wait for it.

    The heartbeat learns when the main thread waits and when a command comes.
    """
    commands_fd = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    arrived: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def read_commands() -> None:
        try:
            with os.fdopen(commands_fd, encoding="utf-8") as lines:
                for line in lines:
                    command = decode(line)
                    if isinstance(command, Finish):  # the main thread reads it after its chunk
                        heartbeat.is_stopped = True
                    arrived.put(command)
        finally:
            os._exit(1)  # the parent is gone, or does not follow the protocol

    threading.Thread(target=read_commands, name="commands", daemon=True).start()
    while True:
        heartbeat.wait()
        command = arrived.get()
        heartbeat.step()
        yield command
