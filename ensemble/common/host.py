"""Read how much memory and CPU this machine has for us, within the limits of a container or job.

Linux's control groups, versions 1 and 2, set such limits. Sources: the kernel's "Control Group v2" and
"cgroup-v1/memory", proc(5) for /proc/meminfo and /proc/self/stat.
"""

from __future__ import annotations

import math
import os
import platform
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

# Flags of a CPU as the kernel names them, x86 and ARM, for which PyTorch and bitsandbytes have kernels.
_PRODUCTS = (
    "avx2 avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_int8 amx_bf16 amx_fp16 asimdhp asimddp i8mm bf16 sve"
).split()
# The control groups' file systems, where Linux distributions and containers mount them.
_MOUNT = Path("/sys/fs/cgroup")


def available_memory_bytes() -> int | None:
    """Return the bytes that can be used before the kernel swaps or kills; None if the system does not say."""
    sizes = meminfo_bytes(_text("/proc/meminfo"), "MemAvailable"), own_groups("memory").memory_left()
    return min((size for size in sizes if size is not None), default=None)


def total_memory_bytes() -> int | None:
    """Return the bytes that the machine, container or job has; None if the system does not say."""
    sizes = meminfo_bytes(_text("/proc/meminfo"), "MemTotal"), own_groups("memory").memory_limit()
    return min((size for size in sizes if size is not None), default=None)


def is_wsl(kernel: str | None = None) -> bool:
    """Return whether a kernel's release, by default this machine's, is that of the Windows Subsystem for Linux."""
    return "microsoft" in (platform.release() if kernel is None else kernel).lower()


def usable_cpus() -> int:
    """Return how many threads can compute at a time, within the limits of a container and OMP_NUM_THREADS."""
    limits = [float(len(os.sched_getaffinity(0))), own_groups("cpu").cpu_limit() or math.inf]
    threads = asked_threads()
    if threads is not None:
        limits.append(float(threads))
    return max(1, math.ceil(min(limits)))


def asked_threads() -> int | None:
    """Return the first number in OMP_NUM_THREADS; None if it is not a number."""
    first_level = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(first_level) if first_level.isdecimal() else None


def threads_of(cpus: int, share: float) -> int:
    """Return the threads of a worker with this share of the CPUs; thirds do not add up to 1."""
    return max(1, int(cpus * share + 1e-6))


def oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory, in this group or on this machine.

    If the count grows while a worker runs that ends by SIGKILL, that is probably why it was killed.
    """
    in_group = own_groups("memory").oom_kills()
    return in_group if in_group is not None else _statistic("/proc/vmstat", "oom_kill") or 0


def meminfo_bytes(text: str, key: str) -> int | None:
    """Return one size in the text of /proc/meminfo, whose kB are 1,024 bytes."""
    match = re.search(rf"^{key}:\s*(\d+) kB$", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def process_age_seconds() -> float:
    """Return the seconds since this process was started, imports included; 0 if the system does not say."""
    try:
        started = int(_text("/proc/self/stat").rpartition(")")[2].split()[19])  # clock ticks after boot
        return max(0.0, float(_text("/proc/uptime").split()[0]) - started / os.sysconf("SC_CLK_TCK"))
    except (ValueError, IndexError):
        return 0.0


@dataclass(frozen=True)
class Groups:
    """Read the control groups of a process: its own first, then those above it as far as they can be seen."""

    is_v2: bool
    folders: tuple[Path, ...]

    def memory_limit(self) -> int | None:
        """Return the most bytes these groups may use; None, or a huge number in version 1, without a limit."""
        name = "memory.max" if self.is_v2 else "memory.limit_in_bytes"
        limits = [_text(folder / name) for folder in self.folders]
        return min((int(limit) for limit in limits if limit.isdecimal()), default=None)

    def memory_left(self) -> int | None:
        """Return the bytes until the first of these groups is at its limit; None without a limit."""
        names = ("max", "current", "") if self.is_v2 else ("limit_in_bytes", "usage_in_bytes", "total_")
        limit_name, used_name, prefix = names
        sizes = []
        for folder in self.folders:
            limit, used = _text(folder / f"memory.{limit_name}"), _text(folder / f"memory.{used_name}")
            if limit.isdecimal() and used.isdecimal():
                # The kernel drops cached pages of files before it kills; its MemAvailable counts them, too.
                kinds = (f"{prefix}active_file", f"{prefix}inactive_file")
                files = sum(_statistic(folder / "memory.stat", kind) or 0 for kind in kinds)
                sizes.append(max(0, int(limit) - max(0, int(used) - files)))
        return min(sizes, default=None)

    def oom_kills(self) -> int | None:
        """Return how many processes of the innermost group the kernel has killed for lack of memory."""
        name = "memory.events" if self.is_v2 else "memory.oom_control"
        return _statistic(self.folders[0] / name, "oom_kill") if self.folders else None

    def cpu_limit(self) -> float | None:
        """Return how many CPUs' time these groups get; None without a limit."""
        limits = []
        for folder in self.folders:
            if self.is_v2:
                quota, _, period = _text(folder / "cpu.max").partition(" ")
            else:
                quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
            if quota.isdecimal() and period.isdecimal() and int(period):  # "max" and -1: no limit
                limits.append(int(quota) / int(period))
        return min(limits, default=None)


def own_groups(controller: str) -> Groups:
    """Return this process's groups for a controller such as "memory"; none if the system has no groups."""
    return find_groups(controller, _text("/proc/self/cgroup"), _MOUNT)


def find_groups(controller: str, memberships: str, mount: Path) -> Groups:
    """Return a controller's groups, by the text of /proc/<pid>/cgroup; version 1 if that has the controller."""
    paths: dict[str, str] = {}
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    is_v2 = controller not in paths
    group = PurePosixPath(paths.get("" if is_v2 else controller, "").lstrip("/"))
    root = mount if is_v2 else mount / controller
    # In a container the path may be the host's; the container then sees its own group as the root.
    folders = [root / part for part in (group, *group.parents)]
    return Groups(is_v2, tuple(dict.fromkeys(folder for folder in folders if folder.is_dir())))


@cache
def cpu_name() -> str:
    """Return the CPU's name, such as "AMD EPYC 9B14"; on systems that do not say, its architecture."""
    for line in _text("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def cpu_products() -> str:
    """Return the CPU's name and its instructions for short numbers, which decide which precision is fast.

    CPUs of one name may differ in these instructions, above all on virtual machines.
    """
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", _text("/proc/cpuinfo"), re.MULTILINE)
    flags = set(line[1].split()) if line else set()
    products = ", ".join(product for product in _PRODUCTS if product in flags)
    return f"{cpu_name()} ({products})" if products else cpu_name()


def _text(file: Path | str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _statistic(file: Path | str, name: str) -> int | None:
    """Return the number of this name in a file of lines "name number"; None if there is none."""
    match = re.search(rf"^{name} (\d+)$", _text(file), re.MULTILINE)
    return int(match[1]) if match else None
