"""A node of the cluster as the run knows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ray.exceptions import GetTimeoutError, RayActorError

from ensemble.common.gpus import Device, Telemetry
from ensemble.scheduling.launchers.ray.agent import NodeFacts, versions
from ensemble.scheduling.launchers.ray.copies import Copy

if TYPE_CHECKING:
    from ensemble.scheduling.launchers.ray.worker import RayWorker


@dataclass(eq=False)
class ClusterNode:
    """A node that takes part.

    ``own_copies`` are the members whose files the run has brought there; ``known`` is what it has said of members'
    sources, as these were then: they are looked at once, not those that rows name.
    """

    name: str
    agent: Any
    facts: NodeFacts
    poll: Any = None  # the object reference of what it will say next
    asked_at: float = 0.0  # for it, by the launcher's watch
    workers: dict[int, RayWorker] = field(default_factory=dict)
    used_bytes: Mapping[str, int | None] = field(default_factory=dict)
    telemetry: Mapping[str, Telemetry | None] = field(default_factory=dict)
    available_bytes: int | None = None
    held: set[str] = field(default_factory=set)  # GPUs of it that others have, by UUID
    holders: dict[Any, Any] = field(default_factory=dict)  # that wait for these, by what they will answer
    own_copies: set[str] = field(default_factory=set)
    known: dict[tuple[str, Copy], str] = field(default_factory=dict)
    why_lost: str = ""

    @property
    def label(self) -> str:
        return f"node {self.name}"

    @property
    def cpu(self) -> Device:
        return Device("cpu", "CPU", None, self.facts.total_bytes, self.facts.used_bytes, self.name)

    @property
    def cpu_workers(self) -> int:
        return sum(not worker.devices for worker in self.workers.values())

    def call_files(self, name: str, argument: Any) -> Any:
        return getattr(self.agent, name).options(concurrency_group="files").remote(argument)


def version_problems(nodes: Iterable[ClusterNode]) -> Iterator[str]:
    """What speaks against nodes with other versions than this machine's."""
    own = versions()
    for node in nodes:
        for name, version in own.items():
            found = node.facts.versions.get(name)
            if found is None or (name != "python" and found != version):
                what = f"has {name} {found}" if found else f"has no {name}"
                yield (
                    f"launcher.ray: {node.label} {what}, and this machine {version}; install the same everywhere, "
                    "or let launcher.ray.runtime_env do it"
                )


def in_short(error: BaseException) -> str:
    """What has happened to a node, by Ray's error, in a few words."""
    if isinstance(error, RayActorError):
        return "its agent has died"
    if isinstance(error, GetTimeoutError):
        return "it does not respond"
    return (str(error).splitlines() or [type(error).__name__])[0]
