"""A node of the cluster as the run knows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import GetTimeoutError, RayActorError

from ensemble.common.gpus import Device, Telemetry
from ensemble.scheduling.launchers.ray.agent import NodeFacts, versions


@dataclass(eq=False)
class ClusterNode:
    """A node that takes part.

    Attributes:
        poll: the object reference of the agent's next batch; None: it was not asked for.
        polled_at: when it was asked for, by the launcher's watch.
        uuids_of_others: GPUs of the node that Ray has given to others.
        holders: actors that wait for these GPUs, by the references of what they will answer.
        supplied_members: members whose files the run has sent to the node.
        why_lost: empty while the node is there.
    """

    name: str
    agent: Any
    facts: NodeFacts
    poll: Any = None
    polled_at: float = 0.0
    used_bytes: Mapping[str, int | None] = field(default_factory=dict)
    telemetry: Mapping[str, Telemetry | None] = field(default_factory=dict)
    available_bytes: int | None = None
    uuids_of_others: set[str] = field(default_factory=set)
    holders: dict[Any, Any] = field(default_factory=dict)
    supplied_members: set[str] = field(default_factory=set)
    why_lost: str = ""

    @property
    def label(self) -> str:
        return f"node {self.name}"

    @property
    def cpu(self) -> Device:
        return Device("cpu", "CPU", None, self.facts.total_bytes, self.facts.used_bytes, self.name)

    def call_files(self, name: str, argument: Any) -> Any:
        """Call a method of the agent that handles files, and return the reference of its result."""
        return getattr(self.agent, name).options(concurrency_group="files").remote(argument)


def version_problems(nodes: Iterable[ClusterNode]) -> Iterator[str]:
    """Yield what speaks against nodes with other versions than this machine's."""
    required = versions()
    for node in nodes:
        for name, version in required.items():
            node_version = node.facts.versions.get(name)
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
    if isinstance(error, GetTimeoutError):
        return "it does not respond"
    return (str(error).splitlines() or [type(error).__name__])[0]
