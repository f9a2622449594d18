"""List the GPUs, measure their state, and pin workers to them.

NVML, NVIDIA's driver library, answers without starting CUDA. Devices are named by UUID, because NVML and CUDA
number them differently. The rules for CUDA_VISIBLE_DEVICES are those of the CUDA C++ Programming Guide ("CUDA
Environment Variables") and the NVIDIA MIG User Guide ("Device Enumeration").
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from types import ModuleType
from typing import Any, TypeVar

from ensemble.common.errors import DeviceError
from ensemble.common.host import available_memory_bytes, total_memory_bytes
from ensemble.common.text import gib
from ensemble.common.torch_build import built_for, torch_problem

_MASK = "CUDA_VISIBLE_DEVICES"
_ORDER = "CUDA_DEVICE_ORDER"
_PCI_ORDER = "PCI_BUS_ID"
# Entries with which people end the list on purpose.
_LIST_ENDS = ("", "-1", "NoDevFiles")
_T = TypeVar("_T")
# A desktop or the driver itself uses less than this.
MIN_REPORTED_BYTES = 512 << 20


@dataclass(frozen=True)
class Device:
    """Describe a GPU, a MIG slice of one, or the CPU."""

    uuid: str  # as CUDA_VISIBLE_DEVICES takes it, "GPU-..." or "MIG-..."; "cpu" for the CPU
    name: str
    compute_capability: tuple[int, int] | None
    total_bytes: int  # available to processes: without what the driver reserves; 0 for the CPU
    used_bytes: int  # by all processes, when the device was listed
    node: str = ""  # of a cluster; empty on the run's own machine
    is_held: bool = False  # another job of the cluster has the device
    torch_problem: str = ""  # why the installed torch cannot compute on it, as far as that is known

    @property
    def is_gpu(self) -> bool:
        return self.uuid != "cpu"

    @property
    def title(self) -> str:
        """Return the name, with the UUID of a GPU and the node of a cluster."""
        title = f"{self.name} ({self.uuid})" if self.is_gpu else self.name
        return f"{title} on {self.node}" if self.node else title

    @property
    def is_slice(self) -> bool:
        """Return whether this is a MIG slice; CUDA gives a process one at most."""
        return self.uuid.startswith("MIG-")


@dataclass(frozen=True)
class Inventory:
    """List the GPUs that a run may use."""

    # Within the inherited CUDA_VISIBLE_DEVICES and in its order, else in PCI bus order.
    gpus: tuple[Device, ...]
    note: str  # a sentence on why there are none
    driver_version: str | None
    warnings: tuple[str, ...]
    mask_problem: str = ""  # if CUDA_VISIBLE_DEVICES hides all GPUs because it names an unknown one
    # The CPUs of a cluster's nodes, each of which takes a worker at a time; empty without a cluster.
    hosts: tuple[Device, ...] = ()


@dataclass
class _Gpu:
    label: str
    uuid: str | None = None
    model: tuple[str, tuple[int, int] | None] | None = None
    pci: tuple[int, int, int] | None = None
    devices: tuple[Device, ...] = ()  # the GPU itself, or its MIG slices, or nothing if it cannot be used


class _NoDriverError(Exception):
    """Report why NVML cannot be asked."""


class _SilentDriverError(_NoDriverError):
    """Report that NVML does not come back from a call, as after a hardware error of a GPU."""


class _Driver:
    """Ask NVML in a thread for each question, because a driver that hangs never comes back from a call.

    While a call hangs nothing else is asked, and nobody waits any more. NVML stays open, because opening it can
    take a second.
    """

    def __init__(self) -> None:
        self._process = 0

    def ask(self, question: Callable[[], _T], patience: float) -> _T:
        """Return what ``question`` returns in the thread, or raise what it raises.

        Raises:
            _SilentDriverError: there is no answer within ``patience`` seconds, or to the question before.
        """
        if self._process != os.getpid():  # a fork asks for itself
            self._lock = Lock()
            self._unanswered: Future[Any] | None = None
            self._process = os.getpid()
        with self._lock:
            if self._unanswered is None or self._unanswered.done():
                future: Future[_T] = Future()
                self._unanswered = future

                def answer() -> None:
                    try:
                        future.set_result(question())
                    except BaseException as error:  # for the thread that asks
                        future.set_exception(error)

                thread = Thread(target=answer, name="nvml", daemon=True)
                thread.start()
                # A timeout of a future and one that a question raises are of the same class.
                if wait([future], patience).done:
                    thread.join()  # so that no thread is left behind
                    return future.result()
        raise _SilentDriverError(f"the NVIDIA driver does not respond (no answer in {patience:g} s)")


_driver = _Driver()
# How long an answer is waited for: one that is needed, one that is asked for again and again, and the same if there
# is an earlier answer to use.
_PATIENCE_SECONDS, _SHORT_PATIENCE_SECONDS, _NO_HURRY_SECONDS = 30.0, 1.0, 0.25
# While the driver is silent, answers count for so long.
_MAX_AGE_SECONDS = 30.0
# The process that has NVML open, and when it was last opened anew; used in the driver's thread alone.
_opened_by = 0
_reopened_at = -math.inf
# The last bytes used by UUID, and when the answer came.
_answers: dict[str, tuple[float, int | None]] = {}


def inventory(environ: Mapping[str, str] | None = None) -> Inventory:
    """Return the GPUs that this environment, or another, makes visible; none without a working driver."""
    environ = os.environ if environ is None else environ
    try:
        gpus, version, warnings = _driver.ask(lambda: _ask(_read_gpus), _PATIENCE_SECONDS)
    except _SilentDriverError as error:
        problem = f"{error}, nor will nvidia-smi; restart the machine, or set {_MASK}=-1 to run on the CPU"
        return Inventory((), str(error), None, (), problem)
    except _NoDriverError as error:
        other = ""  # names GPUs of other makers, so that nobody wonders why they are idle
        if sys.platform == "darwin":
            other = ", and Apple's GPUs are not used"
        elif Path("/dev/kfd").exists():  # of AMD's compute driver, as ROCm's installation guide names it
            other = ", and AMD's GPUs are not used"
        return Inventory((), f"{error}{other}: running on the CPU", None, ())
    devices = tuple(
        replace(gpu, torch_problem=torch_problem(gpu.compute_capability, built_for()))
        for gpu in _visible(gpus, environ, warnings)
    )
    if devices:
        return Inventory(devices, "", version, tuple(warnings))
    reason = "no GPU can be used" if gpus else "the NVIDIA driver shows no GPU"
    problem = ""
    usable_uuids = [device.uuid for gpu in gpus for device in gpu.devices]
    if usable_uuids:
        mask = environ.get(_MASK, "")
        first_entry = mask.split(",")[0].strip()
        reason = f"{_MASK}={mask} leaves no GPU"
        if first_entry not in _LIST_ENDS:  # by a slip of the pen, a 9B model would take weeks on the CPU
            warnings.clear()
            problem = (
                f"{_MASK}={mask}: {first_entry!r} names no GPU here, which hides all of them; "
                f"there are {len(gpus)} ({', '.join(usable_uuids)}); fix it, or set it to -1 to run on the CPU"
            )
    return Inventory((), f"{reason}: running on the CPU", version, tuple(warnings), problem)


def used_memory(uuids: Iterable[str]) -> dict[str, int | None]:
    """Return the bytes used now, by UUID; None if unknown (a lost GPU, the CPU, no driver).

    While the driver does not respond, the last answers count for half a minute.
    """
    uuids = list(uuids)

    def read(uuid: str, nvml: ModuleType) -> int:
        return _memory(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))[1]

    def read_all() -> dict[str, int | None]:
        answers: dict[str, int | None] = dict.fromkeys(uuids)
        for uuid in uuids:
            with contextlib.suppress(_NoDriverError):
                answers[uuid] = _ask(partial(read, uuid))
        # In the driver's thread, because an answer that comes when nobody waits any more counts, too.
        now = time.monotonic()
        _answers.update({uuid: (now, answer) for uuid, answer in answers.items()})
        return answers

    earliest = time.monotonic() - _MAX_AGE_SECONDS
    last = {uuid: _answers.get(uuid, (-math.inf, None)) for uuid in uuids}
    is_known = all(when >= earliest for when, _ in last.values())
    try:
        return _driver.ask(read_all, _NO_HURRY_SECONDS if is_known else _SHORT_PATIENCE_SECONDS)
    except _SilentDriverError:
        return {uuid: answer if when >= earliest else None for uuid, (when, answer) in last.items()}


def driver_cuda_version() -> tuple[int, int] | None:
    """Return the newest CUDA that the driver supports, major and minor; None if it does not say."""
    with contextlib.suppress(_NoDriverError):
        ask = partial(_ask, lambda nvml: nvml.nvmlSystemGetCudaDriverVersion_v2())
        number = _driver.ask(ask, _PATIENCE_SECONDS)  # 12040 for 12.4
        return number // 1000, number % 1000 // 10
    return None


def processes_on(uuid: str) -> list[tuple[int, str | None, int | None]]:
    """Return who computes on a device: (process id, name, bytes used); empty with drivers before R510.

    In a container, ids may be the host's, and processes may be missing.
    """

    def read(nvml: ModuleType) -> list[tuple[int, str | None, int | None]]:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        processes: list[tuple[int, str | None, int | None]] = []
        for process in nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle):
            name = None
            # The driver cuts long names anywhere, also inside a character.
            with contextlib.suppress(nvml.NVMLError, UnicodeDecodeError):
                name = nvml.nvmlSystemGetProcessName(process.pid)
            processes.append((process.pid, name, process.usedGpuMemory))
        return processes

    with contextlib.suppress(_NoDriverError):
        return _driver.ask(partial(_ask, read), _SHORT_PATIENCE_SECONDS)
    return []


def gpu_users(device: Device) -> str:
    """Return a sentence on who uses a GPU's memory, as far as NVML shows; on a node, how to find out."""
    if device.node:
        return f"nvidia-smi on {device.node} shows who"
    users = []
    for pid, name, size in processes_on(device.uuid):
        name_text = f" ({name})" if name else ""
        size_text = f" with {gib(size)}" if size else ""
        users.append(f"process {pid}{name_text}{size_text}")
    return f"NVML shows {', '.join(users) or 'no process'} there"


def device_names(devices: Iterable[Device]) -> dict[str, str]:
    """Return names for a run's devices by UUID: GPU 0, GPU 1 on node-b; a CPU's key is "cpu" and its node."""
    names: dict[str, str] = {}
    gpus = 0
    for device in devices:
        node = f" on {device.node}" if device.node else ""
        if device.is_gpu:
            names[device.uuid] = f"GPU {gpus}{node}"
            gpus += 1
        else:
            names[f"{device.uuid}{node}"] = f"CPU{node}"
    return names


def worker_environment(devices: Sequence[Device]) -> dict[str, str]:
    """Return the environment that pins a worker to ``devices``, in their order; without a GPU it hides all GPUs.

    A MIG slice together with another device is a DeviceError, because CUDA would hide all but one.
    """
    uuids = [device.uuid for device in devices if device.is_gpu]
    if len(uuids) > 1 and any(uuid.startswith("MIG-") for uuid in uuids):
        raise DeviceError(f"a process can use one MIG slice alone, not {', '.join(uuids)}: set num_gpus: 1")
    return {_MASK: ",".join(uuids), _ORDER: _PCI_ORDER}


def _ask(question: Callable[[ModuleType], _T]) -> _T:
    """Return NVML's answer, in the driver's thread; if an open NVML fails, open it again and ask once more.

    A driver that was reloaded, or a GPU that was lost and is back, is then seen again. Other errors of NVML become
    a _NoDriverError.
    """
    global _opened_by, _reopened_at
    try:
        import pynvml
    except ImportError:
        raise _NoDriverError("nvidia-ml-py is not installed, so no NVIDIA GPU can be seen") from None
    was_open = _opened_by == os.getpid()
    try:
        if not was_open:
            pynvml.nvmlInit()
            _opened_by = os.getpid()
        return question(pynvml)
    except pynvml.NVMLError_LibraryNotFound:
        raise _NoDriverError("no NVIDIA driver found") from None
    except pynvml.NVMLError as error:
        is_stale = error.value in (
            pynvml.NVML_ERROR_UNINITIALIZED,
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
            pynvml.NVML_ERROR_GPU_IS_LOST,
            pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
            pynvml.NVML_ERROR_UNKNOWN,
        )
        # These errors may last, and opening takes a second: the driver is opened anew twice a minute at most.
        may_last = error.value in (pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_GPU_IS_LOST)
        is_recent = time.monotonic() - _reopened_at < 30
        if was_open and is_stale and not (may_last and is_recent):
            _opened_by, _reopened_at = 0, time.monotonic()
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
            return _ask(question)
        if error.value == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
            raise _NoDriverError("the NVIDIA driver is installed but not loaded") from None
        raise _NoDriverError(f"the NVIDIA driver does not answer ({error})") from None


def _optional(nvml: ModuleType, name: str, *arguments: object) -> Any:
    """Return the answer of an NVML function; None if this GPU, driver, container or pynvml has none."""
    try:
        return getattr(nvml, name)(*arguments)
    except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_Uninitialized):
        raise
    except (nvml.NVMLError, AttributeError):
        return None


def _read_gpus(nvml: ModuleType) -> tuple[list[_Gpu], str | None, list[str]]:
    """Return every GPU that this process may open, in PCI bus order, the driver's version, and warnings.

    A GPU that fails keeps its place.
    """
    gpus: list[_Gpu] = []
    warnings: list[str] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu = _Gpu(f"GPU {index}")
        problem = "MIG mode is on, without a slice to use"
        try:
            _read_gpu(nvml, index, gpu)
        except nvml.NVMLError as error:
            if gpu.uuid is None and isinstance(error, nvml.NVMLError_NoPermission):
                continue  # hidden from this container or job: CUDA does not number it either
            problem = str(error)
        if not gpu.devices:
            warnings.append(f"{gpu.label} is left out: {problem}")
        gpus.append(gpu)
    if all(gpu.pci for gpu in gpus):
        gpus.sort(key=lambda gpu: gpu.pci or ())
    return gpus, _optional(nvml, "nvmlSystemGetDriverVersion"), warnings


def _read_gpu(nvml: ModuleType, index: int, gpu: _Gpu) -> None:
    """Fill in ``gpu`` as far as the driver answers; its errors are the caller's to handle."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    gpu.uuid = nvml.nvmlDeviceGetUUID(handle)
    gpu.label += f" ({gpu.uuid})"
    address = nvml.nvmlDeviceGetPciInfo(handle)
    gpu.pci = (address.domain, address.bus, address.device)
    name = nvml.nvmlDeviceGetName(handle)
    capability = _optional(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
    gpu.model = (name, capability)
    mode = _optional(nvml, "nvmlDeviceGetMigMode", handle)
    if mode is None or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
        gpu.devices = (Device(gpu.uuid, name, capability, *_memory(nvml, handle)),)
        return
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        # Numbers have holes where no slice was made; a container may open some slices only.
        with contextlib.suppress(nvml.NVMLError_NotFound, nvml.NVMLError_NoPermission):
            mig_slice = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            slice_name = _optional(nvml, "nvmlDeviceGetName", mig_slice) or name
            uuid = nvml.nvmlDeviceGetUUID(mig_slice)
            gpu.devices += (Device(uuid, slice_name, capability, *_memory(nvml, mig_slice)),)


def _memory(nvml: ModuleType, handle: object) -> tuple[int, int]:
    """Return total and used bytes; those of the host where a GPU has no memory of its own."""
    # Version 1 counts what the driver reserves as used; version 2 reports it separately.
    try:
        try:
            info = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        except nvml.NVMLError_FunctionNotFound:  # a driver before R510
            info = nvml.nvmlDeviceGetMemoryInfo(handle)
            return int(info.total), int(info.used)
    except nvml.NVMLError_NotSupported:  # unified memory, as on GB10 and Jetson (nvitop issue 208)
        total, free = total_memory_bytes() or 0, available_memory_bytes() or 0
        return total, total - free
    return int(info.total) - int(info.reserved), int(info.used)


def _visible(gpus: Sequence[_Gpu], environ: Mapping[str, str], warnings: list[str]) -> tuple[Device, ...]:
    """Return the devices in CUDA_VISIBLE_DEVICES, read as CUDA does; warn about each surprise in it."""
    mask = environ.get(_MASK)
    if mask is None:
        return tuple(device for gpu in gpus for device in gpu.devices)
    # The devices by name: all slices of a GPU in MIG mode, none of a lost GPU.
    by_name: dict[str, tuple[Device, ...]] = {}
    for index, gpu in enumerate(gpus):
        by_name |= {device.uuid: (device,) for device in gpu.devices}
        by_name |= {str(index): gpu.devices, gpu.uuid or str(index): gpu.devices}
    entries = [entry.strip() for entry in mask.split(",")]
    models = {gpu.model for gpu in gpus if gpu.model}
    if any(map(str.isdigit, entries)) and environ.get(_ORDER) != _PCI_ORDER and len(models) > 1:
        warnings.append(
            f"{_MASK}={mask} counts in CUDA's order, fastest first, and the GPUs are not alike: read here in PCI "
            f"bus order, as nvidia-smi lists them; set {_ORDER}={_PCI_ORDER} or name the GPUs by UUID"
        )
    chosen: dict[str, Device] = {}
    for entry in entries:
        names = [entry] if entry in by_name else []
        if entry.startswith(("GPU-", "MIG-")):  # CUDA accepts the beginning of a UUID if only one begins so
            names = [name for name in by_name if name.startswith(entry)]
        if entry in _LIST_ENDS:
            break
        if not names and entry.startswith("GPU-") and any(gpu.uuid is None for gpu in gpus):
            continue  # a lost GPU may not tell its UUID: it must not hide the GPUs that work
        if len(names) != 1:
            warnings.append(
                f"{_MASK}={mask}: {entry!r} names no single GPU here; it and all after it are hidden"
            )
            break
        devices = by_name[names[0]]
        if len(devices) > 1:
            warnings.append(
                f"{_MASK}={mask}: {entry!r} is in MIG mode and stands for {devices[0].uuid} only; "
                f"name the slices' UUIDs to use all {len(devices)}"
            )
        chosen |= {device.uuid: device for device in devices[:1]}
    return tuple(chosen.values())
