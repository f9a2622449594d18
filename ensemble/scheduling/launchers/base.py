"""Where workers run: what a launcher is, what it starts, and how that ends.

The scheduler knows workers by their handles alone.  How they are started, reached and ended, on this machine or on
another one, is the launcher's matter.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ensemble.common import gpus, host
from ensemble.common.device_trials import Trial, run_trials
from ensemble.common.errors import ConfigError
from ensemble.common.extensions import Registry
from ensemble.common.files import HubFile
from ensemble.common.gpus import Device, Inventory, Telemetry
from ensemble.common.protocol import Command, Event, Start, WorkerSpec


@dataclass(frozen=True)
class WorkerStart:
    """What a worker is started with.

    Attributes:
        command: its first command.  The paths in it are this machine's: a launcher that goes elsewhere takes the
            table and the order along, and has each shard in ``shards_dir`` before it passes on that it is done.
        devices: the GPUs that it is to see, in this order, and no others; none: it runs on the CPU.
        environment: variables that it needs besides.
        log: the file on this machine that takes all that it prints.
        cpu_share: of a host's cores, for one that runs on the CPU; 0 for one that does not.
        cpu_threads: that it computes with there; None: as many as its share of the cores.
        scratch: a folder that is to be there where it runs, for it alone and as long as it runs; None: none is.
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
    """What has changed of the places where workers run.

    Attributes:
        joined: devices that can be had now, ``lost`` the UUIDs of those that cannot any more.
        hosts: the machines whose CPUs take a worker each.
        joined_nodes: the CPUs of nodes that have come.
        lost_nodes: why each node has gone that has, by name.
        news: sentences for the user.
    """

    joined: tuple[Device, ...]
    lost: tuple[str, ...]
    hosts: int
    joined_nodes: tuple[Device, ...] = ()
    lost_nodes: Mapping[str, str] = field(default_factory=dict)
    news: tuple[str, ...] = ()


@dataclass(frozen=True)
class MemberFiles:
    """What workers of a member will be told, and the names in it that stand for files.

    Attributes:
        sources: folders and files here, or what a hub has.
        row_folder: where the files begin that rows name, such as images; empty: rows name none.
        row_files: makes the paths of these.
    """

    spec: WorkerSpec
    sources: tuple[str, ...]
    row_folder: str = ""
    row_files: Callable[[], Sequence[str]] = tuple


@dataclass(frozen=True)
class Node:
    """A machine of a cluster, as people want to know it.

    Attributes:
        gpus: those of it that the run may use.
        cpus: that a worker there may use.
        total_bytes, available_bytes: of its memory.
        free_disk_bytes: where the run's files go; None: not known.
        versions: of what has to be the same everywhere, by name.
        models: by member, what is there of its files: "there", "on the hub", "missing", "sent" (missing, and to be
            sent there), "another" or "unreadable".
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
        """Say what the node has of the members' models, such as ``llama there, gemma missing``."""
        states = set(self.models.values())
        if len(states) == 1 and len(self.models) > 1:
            return f"all {states.pop()}"
        return ", ".join(f"{member} {state}" for member, state in self.models.items())


@dataclass(frozen=True)
class Exit:
    """How a worker ended.

    Attributes:
        code: its exit code; negative for the signal that ended it.
        text: the same in words, such as "was killed by signal 9 (SIGKILL)".
        is_out_of_memory: it was killed because its host ran out of memory, as far as one can tell.
        is_lost: the machine that it ran on has gone.
    """

    code: int
    text: str
    is_out_of_memory: bool = False
    is_lost: bool = False


class Handle(ABC):
    """A worker that was started.  None of its methods waits, and none minds that the worker has gone.

    Attributes:
        process: what it is known by, behind "process": a number, with the machine's name if that is another one.
        on_node: the name of the machine that it runs on, if that is another one.
        is_open: whether it may still say something.
    """

    process: str
    on_node: str = ""
    is_open: bool = True

    @abstractmethod
    def send(self, command: Command) -> None:
        """Send a command; it arrives after those that were sent before."""

    @abstractmethod
    def receive(self) -> list[Event]:
        """The events that have arrived since the last call, in order.

        Raises:
            ProtocolError: something arrived that is no event.
        """

    @abstractmethod
    def has_exited(self) -> bool: ...

    @abstractmethod
    def terminate(self) -> None:
        """Ask it to drop its work and end, as SIGTERM does."""

    @abstractmethod
    def abort(self) -> None:
        """End it, because it hangs; the stacks of its threads go to its log, as after SIGABRT."""

    @abstractmethod
    def close(self) -> Exit:
        """End what still runs of it, with all that it started.  Called last; may wait some seconds for the end."""


class Launcher(ABC):
    """Starts workers in one kind of place.

    Args:
        settings: what the config has below the launcher's name.

    Attributes:
        hang_timeout: seconds after which a place that does not respond counts as lost; the config's.

    Raises:
        ConfigError: the settings are wrong; each problem begins with its key.
    """

    hang_timeout = math.inf

    def __init__(self, settings: Mapping[str, Any]) -> None:
        if settings:
            raise ConfigError([f"{key}: unknown key; this launcher has no settings" for key in settings])

    def begin(self, members: Mapping[str, MemberFiles]) -> None:  # noqa: B027  most have nothing to do
        """Workers are to start soon, of these members by name: the place for what takes files along.

        Raises:
            CheckpointError: some place does not have what a member needs.
        """

    @abstractmethod
    def start(self, start: WorkerStart) -> Handle:
        """Start a worker, and send its first command.

        Raises:
            OSError: it could not be started.
        """

    @abstractmethod
    def wait(self, handles: Sequence[Handle], timeout_seconds: float) -> Collection[Handle]:
        """Wait until one of these may have something to receive; returns those, none once the time is over."""

    def inventory(self) -> Inventory:
        """The devices that workers can get; each has a UUID of its own.

        Raises:
            DeviceError: they cannot be read.
        """
        return gpus.inventory()

    def nodes(
        self, sources: Mapping[str, Sequence[str]], hub_files: Mapping[str, Sequence[HubFile]]
    ) -> tuple[Node, ...]:
        """The machines that the inventory's devices are on; none where all is on this one.

        Args:
            sources: what each member is made of, by its name, as ``MemberFiles`` has it.
            hub_files: what each has from the hub.
        """
        return ()

    def trials(
        self, devices: Sequence[Device], imports: Sequence[str] = (), flash_attention: bool = False
    ) -> list[Trial]:
        """Try torch on each of these devices, as :func:`run_trials` does."""
        return run_trials(devices, imports, host.available_memory_bytes(), flash_attention=flash_attention)

    def used_memory(self, uuids: Collection[str]) -> dict[str, int | None]:
        """Bytes used on these devices by anybody, by UUID; None where a device does not answer."""
        return gpus.used_memory(uuids)

    def current(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """These devices as they are now; who asks wants those that others hold."""
        used = self.used_memory([device.uuid for device in devices])
        # One that does not answer has not come free.
        return tuple(
            one if (size := used[one.uuid]) is None else replace(one, used_bytes=size) for one in devices
        )

    def telemetry(self, uuids: Collection[str]) -> dict[str, Telemetry | None]:
        """How these devices are doing, by UUID; None where a device does not tell."""
        return gpus.telemetry(uuids)

    def available_memory(self, devices: Sequence[Device]) -> int | None:
        """Bytes of memory that a host has for a worker with these devices; None if it does not tell."""
        return host.available_memory_bytes()

    def changes(self) -> Changes | None:
        """What has changed since the last call; None: nothing."""
        return None

    def close(self) -> None:  # noqa: B027  few have something to close
        """The run is over, or was only looked at; all handles are closed.  May be called again."""


LAUNCHERS: Registry[Launcher] = Registry(
    group="ensemble.launchers",
    what="launcher",
    base=Launcher,  # type: ignore[type-abstract]
    package="ensemble.scheduling.launchers",
    built_in={"local": ".local:LocalLauncher", "ray": ".ray.launcher:RayLauncher"},
)


def make_launcher(chosen: str | Mapping[str, Any], hang_timeout: float = math.inf) -> Launcher:
    """The launcher that a config names, with its settings if it has any.

    Raises:
        ConfigError: there is none of this name, or its settings are wrong.
    """
    name, settings = (chosen, None) if isinstance(chosen, str) else next(iter(chosen.items()))
    launcher = LAUNCHERS.load(name)
    settings = {} if settings is None else settings  # "ray:" without anything below it
    if not isinstance(settings, Mapping):
        raise ConfigError([f"{name}: must be a mapping of settings to their values, not {settings!r}"])
    try:
        made = launcher(settings)
    except ConfigError as error:
        raise ConfigError([f"{name}.{problem}" for problem in error.problems]) from None
    made.hang_timeout = hang_timeout
    return made
