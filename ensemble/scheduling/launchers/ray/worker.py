"""A worker on a node of the cluster, as the scheduler sees it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError

from ensemble.common.files import open_log
from ensemble.common.protocol import Command, Event, ProtocolError
from ensemble.scheduling.launchers.base import Exit, Handle, WorkerStart
from ensemble.scheduling.launchers.ray.agent import Ended
from ensemble.scheduling.launchers.ray.cluster import ray
from ensemble.scheduling.launchers.ray.nodes import ClusterNode, in_short

if TYPE_CHECKING:
    from ensemble.scheduling.launchers.ray.launcher import RayLauncher

# A node answers within these, unless it is lost.
_ANSWER_SECONDS = 30.0


class RayWorker(Handle):
    """A worker on a node."""

    def __init__(self, number: int, node: ClusterNode, start: WorkerStart, launcher: RayLauncher) -> None:
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
        self._launcher = launcher

    def call(self, name: str, *arguments: Any) -> Any:
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
            self.problem, problem = "", self.problem
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
        with contextlib.suppress(OSError), open_log(self._log) as file:
            file.write(text)

    def close(self) -> Exit:
        self.node.workers.pop(self.number, None)
        self.is_open = False
        # It counts as hung, by the same time, because its node does not respond.
        self._launcher.check_silence(self.node)
        if self.node.why_lost:
            return Exit(-9, f"ended when {self.node.label} {self.node.why_lost}", is_lost=True)
        try:
            ended: Ended = ray.get(self.call("close"), timeout=_ANSWER_SECONDS)
        except (RayError, OSError) as error:
            self._launcher.lose(self.node, in_short(error))
            return self.close()
        self.print(ended.printed)
        return ended.exit
