"""How much memory this machine has for us, within the limits of the container or job that we are in."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ensemble.common import cgroup
from ensemble.common.cgroup import memory_left, memory_limit, own_groups


def available_memory_bytes() -> int | None:
    """Bytes that can be used before the kernel swaps or kills; None where the system does not tell."""
    return _smaller(meminfo_bytes(_meminfo(), "MemAvailable"), memory_left(own_groups("memory")))


def total_memory_bytes() -> int | None:
    """Bytes there are, or that the container or job may use; None where the system does not tell."""
    return _smaller(meminfo_bytes(_meminfo(), "MemTotal"), memory_limit(own_groups("memory")))


def oom_kills() -> int:
    """How many processes the kernel has ended for want of memory: of this process's group, which its workers share.

    Where no group tells, of the whole machine.  A count that goes up between a worker's start and its end by
    SIGKILL tells why it was killed, probably.
    """
    of_group = cgroup.oom_kills(own_groups("memory"))
    if of_group is not None:
        return of_group
    found = re.search(r"^oom_kill (\d+)$", _text("/proc/vmstat"), re.MULTILINE)
    return int(found[1]) if found else 0


def meminfo_bytes(text: str, key: str) -> int | None:
    """One size out of the text of /proc/meminfo, whose kB are 1,024 bytes (proc(5))."""
    found = re.search(rf"^{key}:\s*(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _meminfo() -> str:
    return _text("/proc/meminfo")


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _smaller(one: int | None, other: int | None) -> int | None:
    return min((size for size in (one, other) if size is not None), default=None)


def process_age_seconds() -> float:
    """Seconds since this process was started, imports included; 0 where the system does not tell.

    Source: proc(5), starttime in /proc/self/stat (clock ticks after boot) and /proc/uptime.
    """
    try:
        started = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, uptime - started / os.sysconf("SC_CLK_TCK"))
