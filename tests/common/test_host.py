"""Memory and CPU limits of control groups, from files as the kernel writes them, and of this machine."""

from __future__ import annotations

import os
from pathlib import Path

from ensemble.common.host import (
    Groups,
    available_memory_bytes,
    find_groups,
    meminfo_bytes,
    total_memory_bytes,
)

GIB = 1 << 30
NO_LIMIT = 9223372036854771712  # how version 1 says it


def write(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")
    return folder


def test_version_2_counts_every_group_up_to_the_root(tmp_path: Path) -> None:
    mount = tmp_path / "a mount"
    outer = write(mount / "slurm", memory__max=8 * GIB, memory__current=7 * GIB, cpu__max="150000 100000")
    write(outer, memory__stat=f"anon 5\nactive_file {GIB}\ninactive_file {2 * GIB}\nshmem 1")
    inner = write(
        outer / "job", memory__max="max", memory__current=GIB, cpu__max="max 100000", memory__stat=""
    )
    groups = find_groups("memory", "0::/slurm/job\n", mount)
    assert groups == Groups(True, (inner, outer, mount))
    assert groups.memory_limit() == 8 * GIB
    assert groups.memory_left() == 4 * GIB, "the files' pages can be had back"
    assert groups.cpu_limit() == 1.5
    write(inner, memory__max=2 * GIB)
    assert (groups.memory_limit(), groups.memory_left()) == (2 * GIB, GIB)


def test_version_1_and_both_at_once(tmp_path: Path) -> None:
    memory, cpu = tmp_path / "memory", tmp_path / "cpu"
    own = write(
        memory / "docker" / "f00",
        memory__limit_in_bytes=4 * GIB,
        memory__usage_in_bytes=3 * GIB,
        memory__stat=f"active_file 7\ntotal_active_file 0\ntotal_inactive_file {GIB}",
    )
    write(memory, memory__limit_in_bytes=NO_LIMIT, memory__usage_in_bytes=9 * GIB)
    write(cpu / "docker" / "f00", cpu__cfs_quota_us=50000, cpu__cfs_period_us=100000)
    write(cpu, cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    write(tmp_path / "unified", memory__max=1)
    memberships = "4:memory:/docker/f00\n3:cpu,cpuacct:/docker/f00\n0::/\n"
    groups = find_groups("memory", memberships, tmp_path)
    assert groups.folders[0] == own
    assert not groups.is_v2
    assert (groups.memory_limit(), groups.memory_left()) == (4 * GIB, 2 * GIB)
    assert find_groups("cpu", memberships, tmp_path).cpu_limit() == 0.5


def test_a_container_that_sees_only_its_own_part(tmp_path: Path) -> None:
    mount = write(tmp_path / "memory", memory__limit_in_bytes=GIB, memory__usage_in_bytes=2 * GIB)
    for path in ("/docker/f00", "/", "/../../gone"):
        groups = find_groups("memory", f"4:memory:{path}\n", tmp_path)
        assert groups.folders[-1] == mount
        assert (groups.memory_limit(), groups.memory_left()) == (GIB, 0)


def test_without_limits_or_groups(tmp_path: Path) -> None:
    mount = write(tmp_path / "group", memory__max="max", cpu__max="max 100000")
    groups = find_groups("memory", "0::/\n", mount)
    assert groups.folders == (mount,)
    assert (groups.memory_limit(), groups.memory_left(), groups.cpu_limit()) == (None, None, None)
    assert find_groups("memory", "0::/\n", tmp_path / "gone").folders == ()
    assert Groups(True, (tmp_path / "gone",)).memory_left() is None


def test_meminfo() -> None:
    text = "MemTotal:       24644612 kB\nMemFree:         1 kB\nMemAvailable:   23554312 kB\nHugePages_Total: 3\n"
    assert meminfo_bytes(text, "MemTotal") == 24644612 * 1024
    assert meminfo_bytes(text, "MemAvailable") == 23554312 * 1024
    assert meminfo_bytes(text, "HugePages_Total") is None
    assert meminfo_bytes("", "MemTotal") is None


def test_this_machine() -> None:
    total, available = total_memory_bytes(), available_memory_bytes()
    assert total is not None
    assert available is not None
    assert 0 < available < total <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_who_was_killed_for_want_of_memory_is_counted_in_its_own_group(tmp_path: Path) -> None:
    own = write(tmp_path / "own", memory__events="low 0\noom 3\noom_kill 2\noom_group_kill 9")
    above = write(tmp_path / "above", memory__events="oom_kill 70")
    assert Groups(True, (own, above)).oom_kills() == 2, "others are in the groups above as well"
    old = write(tmp_path / "old", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 4")
    assert Groups(False, (old,)).oom_kills() == 4
    older = write(tmp_path / "older", memory__oom_control="oom_kill_disable 0\nunder_oom 0")
    assert Groups(False, (older, old)).oom_kills() is None
    assert Groups(True, ()).oom_kills() is None
