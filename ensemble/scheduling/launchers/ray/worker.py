"""A worker on a node of the cluster, as the scheduler sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ensemble.common.files import open_log
from ensemble.common.protocol import Command, Event, ProtocolError
from ensemble.scheduling.launchers.base import Exit, Handle, WorkerStart
from ensemble.scheduling.launchers.ray.nodes import ClusterNode


class RayWorker(Handle):
    """A worker on a node.

    Args:
        close: ends the worker on its node, and returns how it ended.
    """

    def __init__(
        self, number: int, node: ClusterNode, start: WorkerStart, close: Callable[[RayWorker], Exit]
    ) -> None:
        self.number = number
        self.node = node
        self.on_node = node.name
        self.process = f"{number} on {node.name}"
        self.devices = start.devices
        self.events: list[Event] = []
        self.exited = False
        self.problem = ""
        self.shards_dir = Path(start.command.spec.common.shards_dir)
        self._log = start.log
        self._close = close

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the node's agent with the worker's number, and return the reference of its result."""
        method = getattr(self.node.agent, name).options(concurrency_group="commands")
        return method.remote(self.number, *arguments)

    @property
    def has_news(self) -> bool:
        return bool(self.events or self.problem or (self.exited and self.is_open))

    def send(self, command: Command) -> None:
        self._order("send", command)

    def receive(self) -> list[Event]:
        events, self.events = self.events, []
        if self.exited and not events:
            self.is_open = False
        if self.problem and not events:
            problem, self.problem = self.problem, ""
            raise ProtocolError(problem)
        return events

    def has_exited(self) -> bool:
        return self.exited and not self.events

    def terminate(self) -> None:
        self._order("terminate")

    def abort(self) -> None:
        self._order("abort")

    def _order(self, name: str, *arguments: Any) -> None:
        """Call without waiting; a broken socket of Ray's is noticed at the next poll."""
        if not self.exited:
            with contextlib.suppress(OSError):
                self.call(name, *arguments)

    def print(self, text: bytes) -> None:
        """Append what the worker has printed to its log on this machine."""
        with contextlib.suppress(OSError), open_log(self._log) as file:
            file.write(text)

    def close(self) -> Exit:
        self.is_open = False
        return self._close(self)
