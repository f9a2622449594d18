"""Define the interface of launchers, which start workers, and of handles, which reach workers for the scheduler.

A launcher decides how workers are started, reached and ended, on this machine or on another machine.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ensemble.common import gpus, host
from ensemble.common.device_trials import DeviceTrial, run_trials
from ensemble.common.errors import ConfigError
from ensemble.common.extensions import Registry
from ensemble.common.files import HubFile
from ensemble.common.gpus import Device, Inventory
from ensemble.common.protocol import Command, Event, Start, WorkerSpec
from ensemble.scheduling.records import NodeChange


@dataclass(frozen=True)
class WorkerStart:
    """Say how to start a worker.

    Attributes:
        command: its first command.  The paths in it are this machine's: a launcher for other machines copies the
            table and the order there, and writes each shard to ``shards_dir`` before it passes on ``ChunkDone``.
        devices: the GPUs that it sees, in this order; none: it runs on the CPU.
        environment: further variables.
        log: the file on this machine for everything that it prints.
        cpu_share: its share of a host's cores; 0: its threads are not limited.
        cpu_threads: None: as many as its share of the cores.
        scratch: a folder that the launcher makes where the worker runs and removes after its end; None: none.
    """

    command: Start
    devices: tuple[Device, ...]
    environment: Mapping[str, str]
    log: Path
    cpu_share: float = 0.0
    cpu_threads: int | None = None
    scratch: Path | None = None


@dataclass(frozen=True)
class Changes:
    """Hold what has changed of the devices and nodes that workers run on.

    Attributes:
        joined: devices that can be used from now on.
        lost: the UUIDs of devices that cannot be used any more.
        hosts: how many machines have CPUs that workers can share.
        expects_nodes: whether lost nodes may soon be back; what becomes of them is told by other changes.
        nodes: those that have joined or are lost.
        news: sentences for the user.
    """

    joined: tuple[Device, ...]
    lost: tuple[str, ...]
    hosts: int
    expects_nodes: bool = False
    nodes: tuple[NodeChange, ...] = ()
    news: tuple[str, ...] = ()


@dataclass(frozen=True)
class MemberFiles:
    """Name the files that workers of a member read.

    Attributes:
        spec: what the workers are told.
        sources: folders and files of this machine, or names of a hub.
        row_folder: the folder of the files that rows name, such as images; empty: rows name none.
        row_files: returns the paths of these files.
    """

    spec: WorkerSpec
    sources: tuple[str, ...]
    row_folder: str = ""
    row_files: Callable[[], Sequence[str]] = tuple


@dataclass(frozen=True)
class Node:
    """Describe a machine of a cluster, as it is shown to users.

    Attributes:
        gpus: its GPUs that the run may use.
        cpus: how many a worker there may use.
        total_bytes, available_bytes: of its memory.
        free_disk_bytes: where the run's files go; None: not known.
        versions: of the packages that must be the same everywhere, by name.
        models: the state of each member's files: "there", "on the hub", "missing", "sent" (missing, and sent when
            the run begins) or "another" (other content).
        problems: why members cannot run there, a sentence each.
    """

    name: str
    gpus: tuple[Device, ...]
    cpus: int
    total_bytes: int
    available_bytes: int
    free_disk_bytes: int | None
    versions: Mapping[str, str]
    models: Mapping[str, str]
    problems: tuple[str, ...] = ()

    @property
    def models_text(self) -> str:
        """Return which of the members' models the node has, such as ``llama there, gemma missing``."""
        states = set(self.models.values())
        if len(states) == 1 and len(self.models) > 1:
            return f"all {states.pop()}"
        return ", ".join(f"{member} {state}" for member, state in self.models.items())


@dataclass(frozen=True)
class Exit:
    """Say how a worker ended.

    Attributes:
        code: its exit code; negative for the signal that ended it.
        text: the same in words, such as "was killed by signal 9 (SIGKILL)".
        is_out_of_memory: it was probably killed because its host ran out of memory.
        is_lost: its machine is lost.
    """

    code: int
    text: str
    is_out_of_memory: bool = False
    is_lost: bool = False


class Handle(ABC):
    """Reach a started worker.  Methods do not wait, except ``close``, and do not fail if the worker has ended.

    Attributes:
        process: what messages call its process: a number, with the machine's name if that is another machine.
        on_node: the name of its machine; empty: this machine.
        is_open: whether more events may come.
    """

    process: str
    on_node: str = ""
    is_open: bool = True

    @abstractmethod
    def send(self, command: Command) -> None:
        """Send a command; commands arrive in order."""

    @abstractmethod
    def receive(self) -> list[Event]:
        """Return the events that have arrived since the last call, in order.

        Raises:
            ProtocolError: something arrived that is no event.
        """

    @abstractmethod
    def has_exited(self) -> bool: ...

    @abstractmethod
    def terminate(self) -> None:
        """Ask the worker to drop its work and end, as SIGTERM does."""

    @abstractmethod
    def abort(self) -> None:
        """End a worker that hangs; the stacks of its threads go to its log, as after SIGABRT."""

    @abstractmethod
    def close(self) -> Exit:
        """End the worker with all that it started, and return how it ended.  Called last; may wait some seconds."""


class Launcher(ABC):
    """Start workers, on this machine or elsewhere.

    Args:
        settings: what the config has below the launcher's name.

    Attributes:
        hang_timeout: the config's: seconds after which a machine that does not respond counts as lost.

    Raises:
        ConfigError: the settings are wrong; each problem begins with its key.
    """

    hang_timeout = math.inf

    def __init__(self, settings: Mapping[str, Any]) -> None:
        if settings:
            raise ConfigError([f"{key}: unknown key; this launcher has no settings" for key in settings])

    def begin(self, members: Mapping[str, MemberFiles]) -> None:  # noqa: B027  most have nothing to do
        """Prepare to start workers of these members, by name; a launcher for other machines copies files there.

        Raises:
            CheckpointError: a machine does not have what a member needs.
        """

    @abstractmethod
    def start(self, start: WorkerStart) -> Handle:
        """Start a worker, and send its first command.

        Raises:
            OSError: it could not be started.
        """

    @abstractmethod
    def wait(self, handles: Sequence[Handle], timeout_seconds: float) -> Collection[Handle]:
        """Wait until workers may have events, and return their handles; none after the time-out."""

    def inventory(self) -> Inventory:
        """Return the devices that workers can get; UUIDs are unique.

        Raises:
            DeviceError: they cannot be read.
        """
        return gpus.inventory()

    def nodes(
        self, sources: Mapping[str, Sequence[str]], hub_files: Mapping[str, Sequence[HubFile]]
    ) -> tuple[Node, ...]:
        """Return the machines of the inventory's devices; none if all devices are on this machine.

        Args:
            sources: of each member by its name, see ``MemberFiles``.
            hub_files: the files that each member needs from the hub.
        """
        return ()

    def trials(
        self, devices: Sequence[Device], imports: Sequence[str] = (), flash_attention: bool = False
    ) -> list[DeviceTrial]:
        """Try torch on each of these devices, see :func:`run_trials`."""
        return run_trials(devices, imports, host.available_memory_bytes(), flash_attention=flash_attention)

    def used_memory(self, uuids: Collection[str]) -> dict[str, int | None]:
        """Return the bytes used on these devices by all processes, by UUID; None if a device does not answer."""
        return gpus.used_memory(uuids)

    def current(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """Return these devices as they are now; a launcher may ask for those that others hold."""
        used = self.used_memory([device.uuid for device in devices])
        updated = []
        for device in devices:
            used_bytes = used[device.uuid]
            if used_bytes is None:  # a device that does not answer has not become free
                used_bytes = device.used_bytes
            updated.append(replace(device, used_bytes=used_bytes))
        return tuple(updated)

    def available_memory(self, devices: Sequence[Device]) -> int | None:
        """Return how much memory a host has left for a worker with these devices; None if it is not known."""
        return host.available_memory_bytes()

    def changes(self) -> Changes | None:
        """Return what has changed since the last call; None: nothing."""
        return None

    def close(self) -> None:  # noqa: B027  few have something to close
        """Close connections at the end of a run or a check; all handles are closed.  May be called again."""


LAUNCHERS: Registry[Launcher] = Registry(
    group="ensemble.launchers",
    what="launcher",
    base=Launcher,  # type: ignore[type-abstract]
    package="ensemble.scheduling.launchers",
    built_in={"local": ".local:LocalLauncher", "ray": ".ray.launcher:RayLauncher"},
)


def make_launcher(chosen: str | Mapping[str, Any], hang_timeout: float = math.inf) -> Launcher:
    """Return the launcher that a config names, with its settings if there are any.

    Raises:
        ConfigError: there is no launcher of this name, or its settings are wrong.
    """
    if isinstance(chosen, str):
        chosen = {chosen: None}
    name, settings = next(iter(chosen.items()))
    launcher_class = LAUNCHERS.load(name)
    if settings is None:  # "ray:" without anything below it
        settings = {}
    if not isinstance(settings, Mapping):
        raise ConfigError([f"{name}: must be a mapping of settings to their values, not {settings!r}"])
    try:
        launcher = launcher_class(settings)
    except ConfigError as error:
        raise ConfigError([f"{name}.{problem}" for problem in error.problems]) from None
    launcher.hang_timeout = hang_timeout
    return launcher
