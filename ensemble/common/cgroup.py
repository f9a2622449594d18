"""What a container or a job scheduler allows this process: Linux's control groups, versions 1 and 2.

Owns finding the groups and reading their limits.  How much memory the machine has besides is in ``hostmemory``.

Sources: the kernel's "Control Group v2" and "cgroup-v1/memory", proc(5) for /proc/self/mountinfo.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class Groups:
    """The groups a process is in, its own first, then those above it as far as they can be seen."""

    is_v2: bool
    folders: tuple[Path, ...]


def own_groups(controller: str) -> Groups:
    """This process's groups for a controller such as "memory"; none where the system has no such thing."""
    try:
        memberships = Path("/proc/self/cgroup").read_text(encoding="utf-8")
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return Groups(False, ())
    return find_groups(controller, memberships, mounts)


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
    name = "" if is_v2 else controller
    if name not in paths:
        return Groups(is_v2, ())
    for root, point, kind, options in _mounts(mounts):
        if kind == "cgroup2" if is_v2 else kind == "cgroup" and controller in options:
            return Groups(is_v2, tuple(_upwards(paths[name], root, point)))
    return Groups(is_v2, ())


def memory_limit(groups: Groups) -> int | None:
    """The most bytes these groups may use, None without a limit; version 1 says a huge number then."""
    name = "memory.max" if groups.is_v2 else "memory.limit_in_bytes"
    limits = [limit for folder in groups.folders if (limit := _number(folder / name)) is not None]
    return min(limits, default=None)


def memory_left(groups: Groups) -> int | None:
    """Bytes until the first of these groups is at its limit, None without a limit."""
    limit_name, used_name, prefix = (
        ("memory.max", "memory.current", "")
        if groups.is_v2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    )
    left = []
    for folder in groups.folders:
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None:
            # Files' pages are given up before anything is killed; the kernel's MemAvailable counts them too.
            files = sum(_statistic(folder, f"{prefix}{name}_file") for name in ("active", "inactive"))
            left.append(max(0, limit - max(0, used - files)))
    return min(left, default=None)


def oom_kills(groups: Groups) -> int | None:
    """How many processes of the innermost group the kernel has ended for want of memory; None where none is told.

    Whether it was the group's, that of one above it or the machine's that ran out: the kernel counts it where the
    process was.
    """
    names = ("memory.events.local", "memory.events") if groups.is_v2 else ("memory.oom_control",)
    for file in (folder / name for folder in groups.folders[:1] for name in names):
        found = re.search(r"^oom_kill (\d+)$", _text(file), re.MULTILINE)
        if found:
            return int(found[1])
    return None


def cpu_limit(groups: Groups) -> float | None:
    """How many CPUs' time these groups get, None without a limit."""
    limits = []
    for folder in groups.folders:
        if groups.is_v2:
            quota, _, period = _text(folder / "cpu.max").partition(" ")
        else:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):  # "max" and -1: no limit
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def _mounts(text: str) -> Iterator[tuple[str, Path, str, list[str]]]:
    """Per mount: the part of the file system that is mounted, where, its kind, its own options."""
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, *options) = before.split(), [*after.split(), "", ""]
        if len(fields) >= 5:
            yield _plain(fields[3]), Path(_plain(fields[4])), kind, ",".join(options).split(",")


def _plain(text: str) -> str:
    # mountinfo writes spaces and the like as \040.
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _upwards(path: str, root: str, point: Path) -> Iterator[Path]:
    group = PurePosixPath(path)
    # In a container the group's path can be the host's, of which the container sees only what is below root.
    inside = group.relative_to(root) if group.is_relative_to(root) else PurePosixPath()
    for part in (inside, *inside.parents):
        if (point / part).is_dir():
            yield point / part


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _number(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text.isdecimal() else None


def _statistic(folder: Path, name: str) -> int:
    return _count(_text(folder / "memory.stat"), name)


def _count(text: str, name: str) -> int:
    found = re.search(rf"^{name} (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0
