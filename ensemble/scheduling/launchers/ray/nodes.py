"""Represent a node of the cluster, and a worker on the node, in the run's process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError

from ensemble.common.files import keep_log_end, open_log
from ensemble.common.gpus import Device
from ensemble.common.protocol import Command, Event
from ensemble.scheduling.launchers.base import Exit, Handle, WorkerStart
from ensemble.scheduling.launchers.ray.agent import Batch, NodeFacts, versions


@dataclass(eq=False)
class ClusterNode:
    """Hold the state of a node that takes part in the run."""

    node_id: str  # Ray's
    name: str
    agent: Any
    facts: NodeFacts
    uuids_of_others: set[str]  # GPUs of the node that Ray has given to others
    poll: Any = None  # the object reference of the agent's next batch, if that was asked for
    polled_at: float = 0.0  # when it was asked for, by the launcher's watch
    batch: Batch = field(default_factory=Batch)  # the last that has come
    supplied_members: set[str] = field(default_factory=set)  # whose files the run has sent to the node
    why_lost: str = ""  # empty while the node is there
    is_out_of_memory: bool = False  # whether Ray has ended it for that, and no worker has been blamed yet

    @property
    def label(self) -> str:
        return f"node {self.name}"

    @property
    def cpu(self) -> Device:
        total_bytes = self.facts.node.total_bytes
        used_bytes = max(0, total_bytes - self.facts.node.available_bytes)
        return Device("cpu", "CPU", None, total_bytes, used_bytes, self.name)

    def call(self, group: str, name: str, *arguments: Any) -> Any:
        """Call a method of the agent in one of its threads, and return the reference of its result."""
        return getattr(self.agent, name).options(concurrency_group=group).remote(*arguments)


class RayWorker(Handle):
    """Reach a worker on a node; ``close`` ends the worker, and returns how it ended."""

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
        self.shards_dir = Path(start.command.spec.common.shards_dir)
        self._log = start.log
        self._close = close

    @property
    def has_news(self) -> bool:
        return bool(self.events or (self.exited and self.is_open))

    def send(self, command: Command) -> None:
        self._order("send", command)

    def receive(self) -> list[Event]:
        events, self.events = self.events, []
        if self.exited and not events:
            self.is_open = False
        return events

    def has_exited(self) -> bool:
        return self.exited and not self.events

    def terminate(self) -> None:
        self._order("terminate")

    def abort(self) -> None:
        self._order("abort")

    def _order(self, method: str, *arguments: Command) -> None:
        """Call without waiting; a broken socket of Ray's is noticed at the next poll."""
        if not self.exited:
            with contextlib.suppress(OSError):
                self.node.call("commands", "order", self.number, method, *arguments)

    def print(self, text: bytes) -> None:
        """Append what the worker has printed to its log on this machine."""
        with contextlib.suppress(OSError), open_log(self._log) as file:
            file.write(text)
            keep_log_end(file.fileno())

    def close(self) -> Exit:
        self.is_open = False
        return self._close(self)


def version_problems(nodes: Iterable[ClusterNode]) -> Iterator[str]:
    """Yield what speaks against nodes with other versions than this machine's."""
    required = versions()
    for node in nodes:
        for name, version in required.items():
            node_version = node.facts.node.versions.get(name)
            if node_version is None or (name != "python" and node_version != version):
                what = f"has {name} {node_version}" if node_version else f"has no {name}"
                yield (
                    f"launcher.ray: {node.label} {what}, and this machine {version}; install the same everywhere, "
                    "or let launcher.ray.runtime_env do it"
                )


def in_short(error: BaseException) -> str:
    """Return what has happened to a node, by Ray's error, in a few words."""
    if isinstance(error, RayActorError):
        return "its agent has died"
    if isinstance(error, OutOfMemoryError):
        return "Ray's memory monitor has ended its agent, as its host's memory was nearly full"
    if isinstance(error, GetTimeoutError):
        return "it does not respond"
    return (str(error).splitlines() or [type(error).__name__])[0]
