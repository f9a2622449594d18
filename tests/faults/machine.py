"""A machine with little of something: a small file system, a group of processes with little memory.

Both are the kernel's own and need root; a test is skipped where they cannot be had.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_SECONDS


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Makes ``folder`` a file system of its own, of a size such as "64k", until the block ends."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, text=True
    )
    if made.returncode != 0:
        pytest.skip(f"no file system can be mounted: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@dataclass(frozen=True)
class MemoryGroup:
    """A control group whose processes the kernel kills when they use more than they may."""

    folder: Path
    is_v2: bool

    def command(self, command: Sequence[str]) -> list[str]:
        """What runs a command in this group, and with it all that it starts."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"), *command]

    def kills(self) -> int:
        """How many of its processes the kernel has killed for want of memory."""
        text = (self.folder / ("memory.events" if self.is_v2 else "memory.oom_control")).read_text()
        return int(text.partition("oom_kill ")[2].split()[0])


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """A group below this process's own, without swap."""
    try:
        group = _make_group(limit_bytes)
    except OSError as error:
        pytest.skip(f"no memory group can be made here: {error}")
    try:
        yield group
    finally:
        give_up = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                group.folder.rmdir()
                break
            except OSError:  # a process of it is still going
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.02)


def _make_group(limit_bytes: int) -> MemoryGroup:
    memberships = dict(
        line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    )
    is_v2 = "memory" not in memberships
    mount = Path("/sys/fs/cgroup") if is_v2 else Path("/sys/fs/cgroup/memory")
    own = mount / memberships["" if is_v2 else "memory"].lstrip("/")
    # In a container the path can be the host's; and version 2 limits only groups whose parent says so.
    parents = [parent for parent in (own, *own.parents) if parent.is_relative_to(mount) and parent.is_dir()]
    if is_v2:
        parents = [
            parent
            for parent in parents
            if "memory" in (parent / "cgroup.subtree_control").read_text().split()
        ]
    if not parents:
        raise OSError(f"{mount} offers none")
    folder = parents[0] / f"ensemble-test-{os.getpid()}"
    folder.mkdir()
    names = (
        ("memory.max", "memory.swap.max")
        if is_v2
        else ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
    )
    try:
        (folder / names[0]).write_text(str(limit_bytes))
        if (folder / names[1]).exists():
            (folder / names[1]).write_text("0" if is_v2 else str(limit_bytes))
    except OSError:
        folder.rmdir()
        raise
    return MemoryGroup(folder, is_v2)
