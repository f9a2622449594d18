"""How much memory and CPU this machine has for us, within the limits of the container or job that we are in.

Such limits are set by Linux's control groups, versions 1 and 2.  Sources: the kernel's "Control Group v2" and
"cgroup-v1/memory", proc(5) for /proc/self/mountinfo, /proc/meminfo, /proc/stat and /proc/self/stat.
"""

from __future__ import annotations

import math
import os
import platform
import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

# Flags of a CPU as the kernel names them, x86 and ARM, that PyTorch and bitsandbytes have kernels for.
_PRODUCTS = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16", "amx_fp16"),
    *("asimdhp", "asimddp", "i8mm", "bf16", "sve"),
)
# What other programs may take of the cores that we can use: now, and by the system's average over a minute.
_BUSY, _BUSY_LOAD = 0.25, 0.5
_STAT = "/proc/stat"
# For so long it is looked at; the kernel counts in hundredths.
_LOOK_SECONDS = 0.3


def available_memory_bytes() -> int | None:
    """Bytes that can be used before the kernel swaps or kills; None where the system does not tell."""
    sizes = meminfo_bytes(_text("/proc/meminfo"), "MemAvailable"), own_groups("memory").memory_left()
    return min((size for size in sizes if size is not None), default=None)


def total_memory_bytes() -> int | None:
    """Bytes there are, or that the container or job may use; None where the system does not tell."""
    sizes = meminfo_bytes(_text("/proc/meminfo"), "MemTotal"), own_groups("memory").memory_limit()
    return min((size for size in sizes if size is not None), default=None)


def usable_cpus() -> int:
    """How many threads can compute at a time: on the CPUs that this process may use, within a container's limit and
    that of OMP_NUM_THREADS, where they are set."""
    limits = [float(len(os.sched_getaffinity(0))), own_groups("cpu").cpu_limit() or math.inf]
    if (asked := asked_threads()) is not None:
        limits.append(float(asked))
    return max(1, math.ceil(min(limits)))


def asked_threads() -> int | None:
    """How many OMP_NUM_THREADS asks for, on its first level; None where it names no number."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(asked) if asked.isdecimal() else None


def is_busy() -> bool:
    """Whether programs take so much of the CPUs that speeds measured now say little; looks for a moment.

    The system's average over a minute would still count what has just ended, such as the run before this one; it
    decides where the system does not tell more, as in some sandboxes.
    """
    groups, usable = own_groups("cpu"), usable_cpus()
    began, before, used = time.monotonic(), _text(_STAT), groups.cpu_budgets()
    time.sleep(_LOOK_SECONDS)
    idle = idle_cpus(before, _text(_STAT), os.sched_getaffinity(0))
    left = [] if idle is None else [idle]
    after = groups.cpu_budgets()
    seconds = time.monotonic() - began
    for folder, (limit, last) in after.items():  # what is idle outside of a container is not ours
        _, first = used.get(folder, (limit, None))
        left.append(
            math.nan if first is None or last is None else math.ceil(limit) - (last - first) / seconds
        )
    if not left or any(map(math.isnan, left)):
        return os.getloadavg()[0] > usable * _BUSY_LOAD
    return min(left) < usable * (1 - _BUSY)


def idle_cpus(before: str, after: str, cpus: Collection[int]) -> float | None:
    """How many of these CPUs had nothing to do between two texts of /proc/stat; None where those do not tell."""
    times = [
        {
            int(number): [int(value) for value in values.split()[:8]]  # guests' time is in user's, too
            for number, values in re.findall(r"^cpu(\d+)((?: \d+)+)", text, re.MULTILINE)
        }
        for text in (before, after)
    ]
    idle: list[float] = []
    for cpu in cpus:
        passed: list[int] = [
            last - first for first, last in zip(*(one.get(cpu, []) for one in times), strict=False)
        ]
        if len(passed) < 5 or sum(passed) <= 0:
            return None
        idle.append((passed[3] + passed[4]) / sum(passed))  # idle, and waiting for a disk
    return sum(idle)


def threads_of(cpus: int, share: float) -> int:
    """Threads of a worker that has this share of so many CPUs; thirds do not add up to 1."""
    return max(1, int(cpus * share + 1e-6))


def oom_kills() -> int:
    """How many processes the kernel has ended for want of memory: in this process's group, or the whole machine.

    A count that goes up between a worker's start and its end by SIGKILL tells why it was killed, probably.
    """
    of_group = own_groups("memory").oom_kills()
    return of_group if of_group is not None else _statistic("/proc/vmstat", "oom_kill") or 0


def meminfo_bytes(text: str, key: str) -> int | None:
    """One size out of the text of /proc/meminfo, whose kB are 1,024 bytes."""
    found = re.search(rf"^{key}:\s*(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def process_age_seconds() -> float:
    """Seconds since this process was started, imports included; 0 where the system does not tell."""
    try:
        started = int(_text("/proc/self/stat").rpartition(")")[2].split()[19])  # clock ticks after boot
        return max(0.0, float(_text("/proc/uptime").split()[0]) - started / os.sysconf("SC_CLK_TCK"))
    except (ValueError, IndexError):
        return 0.0


@dataclass(frozen=True)
class Groups:
    """The control groups a process is in, its own first, then those above it as far as they can be seen."""

    is_v2: bool
    folders: tuple[Path, ...]

    def memory_limit(self) -> int | None:
        """The most bytes these groups may use, None without a limit; version 1 says a huge number then."""
        name = "memory.max" if self.is_v2 else "memory.limit_in_bytes"
        limits = [int(text) for folder in self.folders if (text := _text(folder / name)).isdecimal()]
        return min(limits, default=None)

    def memory_left(self) -> int | None:
        """Bytes until the first of these groups is at its limit, None without a limit."""
        names = ("max", "current", "") if self.is_v2 else ("limit_in_bytes", "usage_in_bytes", "total_")
        left = []
        for folder in self.folders:
            limit, used = (_text(folder / f"memory.{name}") for name in names[:2])
            if limit.isdecimal() and used.isdecimal():
                # Files' pages are given up before anything is killed; the kernel's MemAvailable counts them too.
                kinds = (f"{names[2]}{kind}_file" for kind in ("active", "inactive"))
                files = sum(_statistic(folder / "memory.stat", kind) or 0 for kind in kinds)
                left.append(max(0, int(limit) - max(0, int(used) - files)))
        return min(left, default=None)

    def oom_kills(self) -> int | None:
        """How many processes of the innermost group the kernel has ended for want of memory, its own or not."""
        names = ("memory.events.local", "memory.events") if self.is_v2 else ("memory.oom_control",)
        counts = (_statistic(folder / name, "oom_kill") for folder in self.folders[:1] for name in names)
        return next((count for count in counts if count is not None), None)

    def cpu_limit(self) -> float | None:
        """How many CPUs' time these groups get, None without a limit."""
        return min((limit for limit, _ in self.cpu_budgets().values()), default=None)

    def cpu_budgets(self) -> dict[Path, tuple[float, float | None]]:
        """Of each group that has one: how many CPUs' time it gets, and how many seconds of it have been used; None
        where that is not told, as by version 1 with both controllers apart."""
        budgets: dict[Path, tuple[float, float | None]] = {}
        for folder in self.folders:
            if self.is_v2:
                quota, _, period = _text(folder / "cpu.max").partition(" ")
                used, unit = _statistic(folder / "cpu.stat", "usage_usec"), 1e-6
            else:
                quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
                text, unit = _text(folder / "cpuacct.usage"), 1e-9
                used = int(text) if text.isdecimal() else None
            if quota.isdecimal() and period.isdecimal() and int(period):  # "max" and -1: no limit
                budgets[folder] = int(quota) / int(period), None if used is None else used * unit
        return budgets


def own_groups(controller: str) -> Groups:
    """This process's groups for a controller such as "memory"; none where the system has no such thing."""
    return find_groups(controller, _text("/proc/self/cgroup"), _text("/proc/self/mountinfo"))


def find_groups(controller: str, memberships: str, mounts: str) -> Groups:
    """The groups for a controller; version 1 where it has the controller, as on systems with both.

    Args:
        memberships: the text of /proc/<pid>/cgroup.
        mounts: the text of /proc/<pid>/mountinfo.
    """
    paths: dict[str, str] = {}
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    is_v2 = controller not in paths
    group = PurePosixPath(paths.get("" if is_v2 else controller, ""))
    for line in mounts.splitlines() if group.parts else ():
        before, _, after = line.partition(" - ")
        # mountinfo writes spaces and the like as \040.
        fields = [re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), one) for one in before.split()]
        kind, _, *options = [*after.split(), "", ""]
        is_of_it = kind == "cgroup" and controller in ",".join(options).split(",")
        if len(fields) >= 5 and (kind == "cgroup2" if is_v2 else is_of_it):
            # Which part of the file system is mounted, and where.  In a container the group's path can be the
            # host's, of which it sees only what is below that part.
            root, point = fields[3], Path(fields[4])
            inside = group.relative_to(root) if group.is_relative_to(root) else PurePosixPath()
            folders = (point / part for part in (inside, *inside.parents))
            return Groups(is_v2, tuple(folder for folder in folders if folder.is_dir()))
    return Groups(is_v2, ())


@cache
def cpu_name() -> str:
    """What the CPU is called, such as "AMD EPYC 9B14"; on systems that do not say, its architecture."""
    for line in _text("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def cpu_products() -> str:
    """What the CPU is called, and which products of short numbers it has: they decide which precision is fast.

    One name stands for CPUs that have them and CPUs that do not, on virtual machines above all.
    """
    found = cpu_flags()
    has = ", ".join(one for one in _PRODUCTS if one in found)
    return f"{cpu_name()} ({has})" if has else cpu_name()


def cpu_flags() -> frozenset[str]:
    """What the CPU has, as the kernel names it; nothing on systems that do not say."""
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return frozenset(line[1].split() if line else ())


def _text(file: Path | str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _statistic(file: Path | str, name: str) -> int | None:
    """A number in a file with one on each line, behind its name; None where it has none of this name."""
    found = re.search(rf"^{name} (\d+)$", _text(file), re.MULTILINE)
    return int(found[1]) if found else None
