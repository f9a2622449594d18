"""Simulated GPUs: builds the stand-in driver library, describes its GPUs, and points a process at it.

The library is chosen when a process starts (LD_LIBRARY_PATH), its GPUs at every question (NVML_SIM_STATE): a
test starts a process with ``NvmlSim.environment()`` and may call ``NvmlSim.write()`` again while that runs.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

GIB = 1 << 30

# Codes that calls of the driver return, as in the NVML API reference.
HANGS = -1  # not NVML's: the call never returns
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
GPU_IS_LOST = 15
LIBRARY_VERSION_MISMATCH = 18
UNKNOWN = 999

_SOURCE = Path(__file__).with_name("nvml_sim.c")
_SONAME = "libnvidia-ml.so.1"


@dataclass(frozen=True)
class Fail:
    """``call`` (without "nvml"; "*": any) returns ``code`` once the GPU was asked ``after_calls`` questions.

    The questions are counted per process.  ``after_calls`` means nothing for calls that are about no GPU.
    """

    call: str
    code: int
    after_calls: int = 0


@dataclass(frozen=True)
class Memory:
    """Bytes of a GPU or slice.

    ``reserved`` counts as used in answers of version 1 only.
    """

    total: int = 16 * GIB
    used: int = 0
    reserved: int = 0


@dataclass(frozen=True)
class Slice:
    """A MIG slice; ``number`` is NVML's index of it, which may leave holes."""

    number: int
    uuid: str
    gpu_instance: int
    compute_instance: int = 0
    name: str = ""
    memory: Memory = field(default_factory=Memory)
    processes: Mapping[int, int | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Gpu:
    """A GPU; ``pci`` is (domain, bus, device), ``processes`` the bytes by process id, None where not told."""

    uuid: str
    name: str = "Simulated T4"
    pci: tuple[int, int, int] = (0, 1, 0)
    compute_capability: tuple[int, int] | None = (7, 5)
    memory: Memory = field(default_factory=Memory)
    processes: Mapping[int, int | None] = field(default_factory=dict)
    mig_mode: bool | None = None
    slices: Sequence[Slice] = ()
    fails: Sequence[Fail] = ()


class NvmlSim:
    """One simulated machine.

    Args:
        libraries: folder that ``build`` has filled.
        state: file that describes the machine; ``write`` makes it.
    """

    def __init__(self, libraries: Path, state: Path) -> None:
        self._libraries = libraries
        self._state = state
        self.write([])

    def write(
        self,
        gpus: Sequence[Gpu],
        driver: str = "550.90.07",
        fails: Sequence[Fail] = (),
        process_names: Mapping[int, str] | None = None,
        cuda: int | None = None,
        loaded: int = 0,
    ) -> None:
        """Replace the machine, for running processes too; ``gpus`` in NVML's order, not always PCI's.

        Args:
            cuda: the newest CUDA that the driver knows, 12040 for 12.4; None: not told.
            loaded: how often the driver was loaded; what was opened with another number answers "Uninitialized".
        """
        lines = [f"driver {driver}", f"loaded {loaded}", *_fail_lines(fails)]
        lines += [] if cuda is None else [f"cuda {cuda}"]
        lines += [f"process_name {pid} {name}" for pid, name in (process_names or {}).items()]
        for gpu in gpus:
            lines += _gpu_lines(gpu)
        # Renamed into place, because a running process may be reading.
        new = self._state.with_suffix(".new")
        new.write_text("\n".join([*lines, ""]), encoding="utf-8")
        new.replace(self._state)

    def sessions(self) -> list[tuple[str, int]]:
        """What was opened and closed so far, with the process: ("open", 17), ("close", 17)."""
        file = self._state.with_name(f"{self._state.name}.sessions")
        lines = file.read_text().splitlines() if file.exists() else []
        return [(line.split()[0], int(line.split()[1])) for line in lines]

    def environment(self, old_driver: bool = False) -> dict[str, str]:
        """What a process must be started with to see this machine.

        Args:
            old_driver: a driver before R510, which lacks version 2 of memory and version 3 of processes.
        """
        folders = [
            str(self._libraries / ("old" if old_driver else "new")),
            os.environ.get("LD_LIBRARY_PATH", ""),
        ]
        return {
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders)),
            "NVML_SIM_STATE": str(self._state),
            # Without it a worker refuses to compute on the CPU what was planned for a GPU.
            "ENSEMBLE_SIMULATED_GPUS": "1",
        }


def build(folder: Path) -> None:
    """Compile the library into ``folder``/new and, as an old driver has it, into ``folder``/old, with gcc."""
    for name, options in (("new", []), ("old", ["-DOLD_DRIVER"])):
        (folder / name).mkdir()
        library = folder / name / _SONAME
        strict = ["-std=gnu11", "-Wall", "-Wextra", "-Werror"]
        shared = ["-shared", "-fPIC", f"-Wl,-soname,{_SONAME}"]
        subprocess.run(["gcc", *strict, *shared, *options, "-o", library, _SOURCE], check=True)


def gpus(count: int) -> list[Gpu]:
    """``count`` GPUs alike, in PCI order, with UUIDs "GPU-00000000-...", "GPU-11111111-..." and so on."""
    return [Gpu(gpu_uuid(index), pci=(0, 1 + index, 0)) for index in range(count)]


def gpu_uuid(digit: int) -> str:
    """A UUID in the driver's form whose first eight digits are ``digit``."""
    return f"GPU-{f'{digit:x}' * 8}-aaaa-bbbb-cccc-0123456789ab"


def _gpu_lines(gpu: Gpu) -> list[str]:
    lines = [f"gpu {gpu.uuid}", "pci {:x} {:x} {:x}".format(*gpu.pci), *_fail_lines(gpu.fails)]
    if gpu.compute_capability is not None:
        lines.append("cc {} {}".format(*gpu.compute_capability))
    if gpu.mig_mode is not None:
        slots = 1 + max((part.number for part in gpu.slices), default=-1)
        lines.append(f"mig {int(gpu.mig_mode)} {slots}")
    lines += _part_lines(gpu)
    for part in gpu.slices:
        lines.append(f"slice {part.number} {part.uuid} {part.gpu_instance} {part.compute_instance}")
        lines += _part_lines(part)
    return lines


def _part_lines(part: Gpu | Slice) -> list[str]:
    memory = part.memory
    lines = [f"memory {memory.total} {memory.reserved} {memory.used}"]
    if part.name:
        lines.append(f"name {part.name}")
    lines += [f"process {pid} {'-' if used is None else used}" for pid, used in part.processes.items()]
    return lines


def _fail_lines(fails: Sequence[Fail]) -> list[str]:
    return [f"fail {fail.call} {fail.code} {fail.after_calls}" for fail in fails]
