"""GPUs: which there are, how they are doing, and how a worker is pinned to some of them.

All by NVML, NVIDIA's driver library that answers without starting CUDA.  Devices are known by UUID, because
NVML's numbers and CUDA's are not the same.  The rules for CUDA_VISIBLE_DEVICES are those of the CUDA C++
Programming Guide ("CUDA Environment Variables") and the NVIDIA MIG User Guide ("Device Enumeration").
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from ensemble.common.errors import DeviceError
from ensemble.common.text import gib

_MASK = "CUDA_VISIBLE_DEVICES"
_ORDER = "CUDA_DEVICE_ORDER"
_PCI_ORDER = "PCI_BUS_ID"
# Entries that people write to end the list on purpose.
_LIST_ENDS = ("", "-1", "NoDevFiles")
_T = TypeVar("_T")
# Less than this of a GPU is a desktop's or the driver's own.
MIN_REPORTED_BYTES = 512 << 20
# Why a GPU's clocks are lower than they could be: the bits of nvmlDeviceGetCurrentClocksEventReasons by the names
# that nvidia-smi has for them (NVML API reference, "NvmlClocksEventReasons").  Bit 0, that it is idle, is left out.
_CLOCK_EVENTS = {
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}


@dataclass(frozen=True)
class Device:
    """A GPU, a MIG slice of one, or the CPU."""

    uuid: str  # as CUDA_VISIBLE_DEVICES takes it, "GPU-..." or "MIG-..."; "cpu" for the CPU
    name: str
    compute_capability: tuple[int, int] | None
    total_bytes: int  # that processes can have, without what the driver reserves; 0 for the CPU
    used_bytes: int  # what all processes held when it was looked at
    node: str = ""  # of a cluster; empty on the run's own machine
    is_held: bool = False  # another job of the cluster has it: nobody else can until that lets go

    @property
    def is_gpu(self) -> bool:
        return self.uuid != "cpu"

    @property
    def title(self) -> str:
        """Its name, with its UUID if it is a GPU and its node if it has one."""
        own = f"{self.name} ({self.uuid})" if self.is_gpu else self.name
        return own + (f" on {self.node}" if self.node else "")

    @property
    def is_slice(self) -> bool:
        """Whether it is a MIG slice, of which CUDA gives a process one at most."""
        return self.uuid.startswith("MIG-")


@dataclass(frozen=True)
class Inventory:
    """The GPUs that a run may use."""

    gpus: tuple[
        Device, ...
    ]  # within the inherited CUDA_VISIBLE_DEVICES and in its order, else in PCI bus order
    note: str  # a sentence on why there are none
    driver_version: str | None
    warnings: tuple[str, ...]
    mask_problem: str = ""  # where CUDA_VISIBLE_DEVICES hides them all by naming one that is not there
    # The CPUs of a cluster's nodes, each of which takes a worker at a time; empty: this machine's own.
    hosts: tuple[Device, ...] = ()


@dataclass(frozen=True)
class Telemetry:
    """How a GPU is doing now; None for what it does not tell.  A MIG slice is doing as its GPU is."""

    sm_clock_mhz: int | None
    max_sm_clock_mhz: int | None
    temperature_celsius: int | None
    power_watts: float | None
    clock_events: tuple[str, ...]  # why its clocks are lower than they could be, in nvidia-smi's names


@dataclass
class _Gpu:
    label: str
    uuid: str | None = None
    model: tuple[str, tuple[int, int] | None] | None = None
    pci: tuple[int, int, int] | None = None
    devices: tuple[Device, ...] = ()  # itself, or its MIG slices, or nothing when it cannot be used
    slices: dict[str, Device] = field(default_factory=dict)  # by CUDA's older names, which a mask may use


class _NoDriverError(Exception):
    """Says why NVML cannot be asked."""


@dataclass
class _Session:
    """NVML, open while somebody holds it; what is asked of it is asked by one thread at a time."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    holders: int = 0
    process: int = 0  # that opened it; 0: it is not open


_session = _Session()


@contextlib.contextmanager
def driver_session() -> Iterator[None]:
    """Keep NVML open from the first question on: to start it can take a second, where nothing keeps the driver up.

    May be nested, by threads too; the last one to end closes it.
    """
    with _session.lock:
        _session.holders += 1
    try:
        yield
    finally:
        with _session.lock:
            _session.holders -= 1
            if not _session.holders:
                _close()


def inventory(environ: Mapping[str, str] | None = None) -> Inventory:
    """Look at the GPUs within this process's environment, or another; without a working driver there are none."""
    environ = os.environ if environ is None else environ
    warnings: list[str] = []

    def look(nvml: ModuleType) -> tuple[list[_Gpu], str | None]:
        warnings.clear()
        found, version = _read_gpus(nvml, warnings), None
        with contextlib.suppress(nvml.NVMLError):
            version = nvml.nvmlSystemGetDriverVersion()
        return found, version

    try:
        gpus, version = _ask(look)
    except _NoDriverError as error:
        other = ""  # a GPU that is there but not NVIDIA's, so that nobody wonders
        if sys.platform == "darwin":
            other = ", and Apple's GPUs are not used"
        elif Path("/dev/kfd").exists():  # of AMD's compute driver, as ROCm's installation guide names it
            other = ", and AMD's GPUs are not used"
        return Inventory((), f"{error}{other}: running on the CPU", None, ())
    devices = _visible(gpus, environ, warnings)
    if devices:
        return Inventory(devices, "", version, tuple(warnings))
    reason, problem = "no GPU can be used" if gpus else "the NVIDIA driver shows no GPU", ""
    if there := ", ".join(device.uuid for gpu in gpus for device in gpu.devices):
        mask = environ.get(_MASK, "")
        reason, first = f"{_MASK}={mask} leaves no GPU", mask.split(",")[0].strip()
        if first not in _LIST_ENDS:  # a 9B model on the CPU by a slip of the pen would take weeks
            warnings.clear()
            problem = (
                f"{_MASK}={mask}: {first!r} names no GPU here, which hides all of them; there are {len(gpus)} "
                f"({there}); fix it, or set it to -1 to run on the CPU"
            )
    return Inventory((), f"{reason}: running on the CPU", version, tuple(warnings), problem)


def has_driver() -> bool:
    """Whether the library of NVIDIA's driver is here; it is not asked anything."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def used_memory(uuids: Iterable[str]) -> dict[str, int | None]:
    """Bytes used now, by UUID; None where it cannot be told (a lost GPU, the CPU, no driver)."""
    return _of_each(uuids, lambda nvml, handle: _memory(nvml, handle)[1])


def telemetry(uuids: Iterable[str]) -> dict[str, Telemetry | None]:
    """How devices are doing now, by UUID; None where it cannot be told."""
    return _of_each(uuids, _telemetry)


def driver_cuda_version() -> tuple[int, int] | None:
    """The newest CUDA that the driver knows, major and minor; None when it does not say."""
    with contextlib.suppress(_NoDriverError):
        number = _ask(lambda nvml: nvml.nvmlSystemGetCudaDriverVersion_v2())  # 12040 for 12.4
        return number // 1000, number % 1000 // 10
    return None


def processes_on(uuid: str) -> tuple[tuple[int, str | None, int | None], ...]:
    """Who computes on a device: (process id, name, bytes used); empty when a driver cannot tell (before R510).

    For messages only: in a container the ids may be the host's, so neither an id nor a missing one proves anything.
    """

    def look(nvml: ModuleType, handle: object) -> tuple[tuple[int, str | None, int | None], ...]:
        found: list[tuple[int, str | None, int | None]] = []
        for one in nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle):
            name = None
            # The driver cuts long names anywhere, also inside a character.
            with contextlib.suppress(nvml.NVMLError, UnicodeDecodeError):
                name = nvml.nvmlSystemGetProcessName(one.pid)
            found.append((one.pid, name, one.usedGpuMemory))
        return tuple(found)

    return _of_each([uuid], look)[uuid] or ()


def gpu_users(device: Device) -> str:
    """Who holds a GPU's memory, as far as NVML shows; of a GPU of a node, how to find out."""
    if device.node:
        return f"nvidia-smi on {device.node} shows who"
    found = [
        f"process {pid}{f' ({name})' if name else ''}{f' with {gib(size)}' if size else ''}"
        for pid, name, size in processes_on(device.uuid)
    ]
    return f"NVML shows {', '.join(found) or 'no process'} there"


def device_names(devices: Iterable[Device]) -> dict[str, str]:
    """What each of a run's devices is called, by UUID: GPU 0, GPU 1 on node-b; a CPU by "cpu" and its node."""
    names, gpus = dict[str, str](), 0
    for one in devices:
        where = f" on {one.node}" if one.node else ""
        names[f"{one.uuid}{'' if one.is_gpu else where}"] = (f"GPU {gpus}" if one.is_gpu else "CPU") + where
        gpus += one.is_gpu
    return names


def worker_environment(devices: Sequence[Device]) -> dict[str, str]:
    """What pins a worker to ``devices``, in their order, before it starts; no GPU among them hides every GPU.

    Raises:
        DeviceError: a MIG slice together with another device, of which CUDA would show one and hide the rest.
    """
    uuids = [device.uuid for device in devices if device.is_gpu]
    if len(uuids) > 1 and any(uuid.startswith("MIG-") for uuid in uuids):
        raise DeviceError(f"a process can use one MIG slice alone, not {', '.join(uuids)}: set num_gpus: 1")
    return {_MASK: ",".join(uuids), _ORDER: _PCI_ORDER}


def _of_each(uuids: Iterable[str], question: Callable[[ModuleType, object], _T]) -> dict[str, _T | None]:
    """The answers by UUID; None for devices that do not answer."""

    def ask(uuid: str, nvml: ModuleType) -> _T:
        return question(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))

    answers: dict[str, _T | None] = dict.fromkeys(uuids)
    with driver_session():
        for uuid in answers:
            with contextlib.suppress(_NoDriverError):
                answers[uuid] = _ask(partial(ask, uuid))
    return answers


def _ask(question: Callable[[ModuleType], _T]) -> _T:
    """What NVML says; where it was open already and does not answer, what it says once it is opened anew.

    So a driver that was loaded anew, or a GPU that was lost and is back, shows again.

    Raises:
        _NoDriverError: NVML cannot be started, or an error of it was not dealt with in ``question``.
    """
    try:
        if sys.platform == "linux":
            # pynvml opens this very name; where it is missing, importing all of pynvml would be for nothing.
            ctypes.CDLL("libnvidia-ml.so.1")
        import pynvml
    except OSError:
        raise _NoDriverError("no NVIDIA driver found") from None
    except ImportError:
        raise _NoDriverError("nvidia-ml-py is not installed, so no NVIDIA GPU can be seen") from None
    may_be_stale = (
        pynvml.NVMLError_Uninitialized,
        pynvml.NVMLError_DriverNotLoaded,
        pynvml.NVMLError_GpuIsLost,
        pynvml.NVMLError_LibRmVersionMismatch,
        pynvml.NVMLError_Unknown,
    )
    try:
        with driver_session(), _session.lock:
            # A fork's copy of an open session is its parent's: NVML counts, so that what is opened and closed
            # beside it leaves it alone.
            if _session.process == os.getpid():
                try:
                    return question(pynvml)
                except may_be_stale:
                    _close()
            pynvml.nvmlInit()
            _session.process = os.getpid()
            return question(pynvml)
    except pynvml.NVMLError_LibraryNotFound:
        raise _NoDriverError("no NVIDIA driver found") from None
    except pynvml.NVMLError_DriverNotLoaded:
        raise _NoDriverError("the NVIDIA driver is installed but not loaded") from None
    except pynvml.NVMLError as error:
        raise _NoDriverError(f"the NVIDIA driver does not answer ({error})") from None


def _close() -> None:
    """Close NVML if this process has opened it."""
    if _session.process == os.getpid():
        import pynvml

        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    _session.process = 0


def _read_gpus(nvml: ModuleType, warnings: list[str]) -> list[_Gpu]:
    """Every GPU that this process may open, in PCI bus order; one that fails keeps its place."""
    gpus = []
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu = _Gpu(f"GPU {index}")
        problem = "MIG mode is on, without a slice to use"
        try:
            _read_gpu(nvml, index, gpu)
        except nvml.NVMLError as error:
            if gpu.uuid is None and isinstance(error, nvml.NVMLError_NoPermission):
                continue  # kept from this container or job: CUDA does not number it either
            problem = str(error)
        if not gpu.devices:
            warnings.append(f"{gpu.label} is left out: {problem}")
        gpus.append(gpu)
    if all(gpu.pci for gpu in gpus):
        gpus.sort(key=lambda gpu: gpu.pci or ())
    return gpus


def _read_gpu(nvml: ModuleType, index: int, gpu: _Gpu) -> None:
    """Fill in ``gpu`` as far as the driver answers; the error that stops it is the caller's."""

    def if_known(ask: Callable[[object], _T], handle: object, otherwise: _T) -> _T:
        try:
            return ask(handle)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):  # by this driver or GPU
            return otherwise

    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    gpu.uuid = nvml.nvmlDeviceGetUUID(handle)
    gpu.label += f" ({gpu.uuid})"
    address = nvml.nvmlDeviceGetPciInfo(handle)
    gpu.pci = (address.domain, address.bus, address.device)
    capability = if_known(nvml.nvmlDeviceGetCudaComputeCapability, handle, None)
    gpu.model = (name := nvml.nvmlDeviceGetName(handle), capability)
    mode = if_known(nvml.nvmlDeviceGetMigMode, handle, [nvml.NVML_DEVICE_MIG_DISABLE])
    if mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
        gpu.devices = (Device(gpu.uuid, name, capability, *_memory(nvml, handle)),)
        return
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        # Numbers have holes where no slice was made; a container may open some slices only.
        with contextlib.suppress(nvml.NVMLError_NotFound, nvml.NVMLError_NoPermission):
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            ids = nvml.nvmlDeviceGetGpuInstanceId(part), nvml.nvmlDeviceGetComputeInstanceId(part)
            shard_name = if_known(nvml.nvmlDeviceGetName, part, name)
            device = Device(nvml.nvmlDeviceGetUUID(part), shard_name, capability, *_memory(nvml, part))
            gpu.slices[f"MIG-{gpu.uuid}/{ids[0]}/{ids[1]}"] = device
    gpu.devices = tuple(gpu.slices.values())


def _memory(nvml: ModuleType, handle: object) -> tuple[int, int]:
    """Total and used bytes."""
    # Version 1 counts what the driver reserves as used; version 2 tells it apart, and nobody can have it.
    # Which one is asked depends on the driver alone, so that all answers of one run can be compared.
    try:
        info = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError_FunctionNotFound:  # a driver before R510
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
        return int(info.total), int(info.used)
    return int(info.total) - int(info.reserved), int(info.used)


def _telemetry(nvml: ModuleType, handle: object) -> Telemetry:
    with contextlib.suppress(nvml.NVMLError):  # it is no slice, or the driver knows of none
        handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)

    def ask(name: str, *arguments: object) -> int | None:
        try:
            return int(getattr(nvml, name)(handle, *arguments))
        except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_Uninitialized):
            raise
        except (nvml.NVMLError, AttributeError):  # by this GPU, driver or pynvml; or by this container
            return None

    events = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if events is None:  # a driver before R535
        events = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    milliwatts = ask("nvmlDeviceGetPowerUsage")
    return Telemetry(
        sm_clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        max_sm_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        temperature_celsius=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        power_watts=None if milliwatts is None else milliwatts / 1000,
        clock_events=tuple(name for bit, name in _CLOCK_EVENTS.items() if (events or 0) & bit),
    )


def _visible(gpus: Sequence[_Gpu], environ: Mapping[str, str], warnings: list[str]) -> tuple[Device, ...]:
    """The devices within CUDA_VISIBLE_DEVICES, read as CUDA does; each surprise in it is a warning."""
    mask = environ.get(_MASK)
    if mask is None:
        return tuple(device for gpu in gpus for device in gpu.devices)
    # What each name stands for: all slices for a GPU in MIG mode, nothing for one that is lost.
    names: dict[str, tuple[Device, ...]] = {}
    for index, gpu in enumerate(gpus):
        names |= {device.uuid: (device,) for device in gpu.devices}
        names |= {name: (device,) for name, device in gpu.slices.items()}
        names |= {str(index): gpu.devices, gpu.uuid or str(index): gpu.devices}
    name = f"{_MASK}={mask}"
    entries = [entry.strip() for entry in mask.split(",")]
    models = {gpu.model for gpu in gpus if gpu.model}
    if any(map(str.isdigit, entries)) and environ.get(_ORDER) != _PCI_ORDER and len(models) > 1:
        warnings.append(
            f"{name} counts in CUDA's order, fastest first, and the GPUs are not alike: read here in PCI bus "
            f"order, as nvidia-smi lists them; set {_ORDER}={_PCI_ORDER} or name the GPUs by UUID"
        )
    chosen: dict[str, Device] = {}
    for position, entry in enumerate(entries, 1):
        found = names.get(entry)
        if found is None and entry.startswith(("GPU-", "MIG-")):
            # CUDA takes the beginning of a UUID for the whole where only one fits.
            fitting = [full for full in names if full.startswith(entry)]
            if len(fitting) == 1:
                found = names[fitting[0]]
            elif not fitting and any(gpu.uuid is None for gpu in gpus):
                continue  # a lost GPU may not tell its UUID: it must not hide the GPUs that work
        if found is None:
            if entry not in _LIST_ENDS or any(entries[position:]):
                warnings.append(f"{name}: {entry!r} names no single GPU here; it and all after it are hidden")
            break
        if len(found) > 1:
            hint = f"name the slices' UUIDs to use all {len(found)}"
            warnings.append(f"{name}: {entry!r} is in MIG mode and stands for {found[0].uuid} only; {hint}")
        for device in found[:1]:
            if device.uuid in chosen:
                warnings.append(f"{name}: {entry!r} names {device.uuid} again, which CUDA refuses; kept once")
            chosen[device.uuid] = device
    return tuple(chosen.values())
