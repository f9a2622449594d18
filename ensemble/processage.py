"""How long this process has been running, which is where a time limit starts to count."""

from __future__ import annotations

import os
from pathlib import Path


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
