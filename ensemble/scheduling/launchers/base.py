"""Where workers run: what a launcher is, what it starts, and how that ends.

The scheduler knows workers by their handles alone.  How they are started, reached and ended, on this machine or on
another one, is the launcher's matter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ensemble.common import gpus, host
from ensemble.common.errors import ConfigError
from ensemble.common.extensions import Registry
from ensemble.common.gpus import Device, Inventory, Telemetry
from ensemble.common.protocol import Command, Event, Start


@dataclass(frozen=True)
class WorkerStart:
    """What a worker is started with.

    Attributes:
        command: its first command.  The paths in it are this machine's: a launcher that goes elsewhere takes the
            table and the order along, and has each shard in ``shards_dir`` before it passes on that it is done.
        devices: the GPUs that it is to see, in this order, and no others; none: it runs on the CPU.
        environment: variables that it needs besides.
        log: the file on this machine that takes all that it prints.
    """

    command: Start
    devices: tuple[Device, ...]
    environment: Mapping[str, str]
    log: Path


@dataclass(frozen=True)
class Exit:
    """How a worker ended.

    Attributes:
        code: its exit code; negative for the signal that ended it.
        text: the same in words, such as "was killed by signal 9 (SIGKILL)".
        is_out_of_memory: it was killed because its host ran out of memory, as far as one can tell.
    """

    code: int
    text: str
    is_out_of_memory: bool = False


class Handle(ABC):
    """A worker that was started.  None of its methods waits, and none minds that the worker has gone.

    Attributes:
        process: what it is known by, behind "process": a number, with the machine's name if that is another one.
        is_open: whether it may still say something.
    """

    process: str
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

    Raises:
        ConfigError: the settings are wrong; each problem begins with its key.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        if settings:
            raise ConfigError([f"{key}: unknown key; this launcher has no settings" for key in settings])

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

    def used_memory(self, uuids: Collection[str]) -> dict[str, int | None]:
        """Bytes used on these devices by anybody, by UUID; None where a device does not answer."""
        return gpus.used_memory(uuids)

    def telemetry(self, uuids: Collection[str]) -> dict[str, Telemetry | None]:
        """How these devices are doing, by UUID; None where a device does not tell."""
        return gpus.telemetry(uuids)

    def available_memory(self, devices: Sequence[Device]) -> int | None:
        """Bytes of memory that a host has for a worker with these devices; None if it does not tell."""
        return host.available_memory_bytes()

    def close(self) -> None:  # noqa: B027  few have something to close
        """The run is over; all handles are closed."""


LAUNCHERS: Registry[Launcher] = Registry(
    group="ensemble.launchers",
    what="launcher",
    base=Launcher,  # type: ignore[type-abstract]
    package="ensemble.scheduling.launchers",
    built_in={"local": ".local:LocalLauncher"},
)


def make_launcher(chosen: str | Mapping[str, Mapping[str, Any]]) -> Launcher:
    """The launcher that a config names, with its settings if it has any.

    Raises:
        ConfigError: there is none of this name, or its settings are wrong.
    """
    name, settings = (chosen, {}) if isinstance(chosen, str) else next(iter(chosen.items()))
    launcher = LAUNCHERS.load(name)
    try:
        return launcher(settings)
    except ConfigError as error:
        raise ConfigError([f"{name}.{problem}" for problem in error.problems]) from None
