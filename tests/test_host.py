"""Memory and CPU limits of control groups, from files as the kernel writes them, and of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ensemble.common import host
from ensemble.common.host import (
    Groups,
    available_memory_bytes,
    find_groups,
    idle_cpus,
    is_busy,
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


def v2(mount: Path, root: str = "/") -> str:
    point = str(mount).replace(" ", r"\040")
    return f"24 23 0:22 / /proc rw - proc proc rw\n30 23 0:26 {root} {point} rw,nosuid - cgroup2 cgroup2 rw\n"


def v1(mount: Path, controllers: str, root: str = "/") -> str:
    return f"31 23 0:27 {root} {mount} rw shared:9 - cgroup cgroup rw,{controllers}\n"


def test_version_2_counts_every_group_up_to_the_root(tmp_path: Path) -> None:
    mount = tmp_path / "a mount"
    outer = write(mount / "slurm", memory__max=8 * GIB, memory__current=7 * GIB, cpu__max="150000 100000")
    write(outer, memory__stat=f"anon 5\nactive_file {GIB}\ninactive_file {2 * GIB}\nshmem 1")
    inner = write(
        outer / "job", memory__max="max", memory__current=GIB, cpu__max="max 100000", memory__stat=""
    )
    groups = find_groups("memory", "0::/slurm/job\n", v2(mount))
    assert groups == Groups(True, (inner, outer, mount))
    assert groups.memory_limit() == 8 * GIB
    assert groups.memory_left() == 4 * GIB, "the files' pages can be had back"
    assert groups.cpu_limit() == 1.5
    write(inner, memory__max=2 * GIB)
    assert (groups.memory_limit(), groups.memory_left()) == (2 * GIB, GIB)


def test_version_1_and_both_at_once(tmp_path: Path) -> None:
    memory, cpu = tmp_path / "memory", tmp_path / "cpu,cpuacct"
    own = write(
        memory / "docker" / "f00",
        memory__limit_in_bytes=4 * GIB,
        memory__usage_in_bytes=3 * GIB,
        memory__stat=f"active_file 7\ntotal_active_file 0\ntotal_inactive_file {GIB}",
    )
    write(memory, memory__limit_in_bytes=NO_LIMIT, memory__usage_in_bytes=9 * GIB)
    write(cpu / "docker" / "f00", cpu__cfs_quota_us=50000, cpu__cfs_period_us=100000)
    write(cpu, cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    unified = write(tmp_path / "unified", memory__max=1)
    memberships = "4:memory:/docker/f00\n3:cpu,cpuacct:/docker/f00\n0::/\n"
    mounts = v2(unified) + v1(memory, "memory") + v1(cpu, "cpu,cpuacct")
    groups = find_groups("memory", memberships, mounts)
    assert groups.folders[0] == own
    assert not groups.is_v2
    assert (groups.memory_limit(), groups.memory_left()) == (4 * GIB, 2 * GIB)
    assert find_groups("cpu", memberships, mounts).cpu_limit() == 0.5


def test_a_container_that_sees_only_its_own_part(tmp_path: Path) -> None:
    mount = write(tmp_path / "memory", memory__limit_in_bytes=GIB, memory__usage_in_bytes=2 * GIB)
    for path, root in (("/docker/f00", "/docker/f00"), ("/docker/f00", "/kubepods/1"), ("/gone", "/")):
        groups = find_groups("memory", f"4:memory:{path}\n", v1(mount, "memory", root))
        assert groups.folders == (mount,)
        assert (groups.memory_limit(), groups.memory_left()) == (GIB, 0)


def test_without_limits_or_groups(tmp_path: Path) -> None:
    mount = write(tmp_path / "group", memory__max="max", cpu__max="max 100000")
    groups = find_groups("memory", "0::/\n", v2(mount))
    assert groups.folders == (mount,)
    assert (groups.memory_limit(), groups.memory_left(), groups.cpu_limit()) == (None, None, None)
    assert find_groups("memory", "", v2(mount)).folders == ()
    assert find_groups("memory", "0::/\n", "").folders == ()
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
    write(own, **{"memory__events__local": "oom 1\noom_kill 1"})
    assert Groups(True, (own, above)).oom_kills() == 1, "and in those below"
    old = write(tmp_path / "old", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 4")
    assert Groups(False, (old,)).oom_kills() == 4
    older = write(tmp_path / "older", memory__oom_control="oom_kill_disable 0\nunder_oom 0")
    assert Groups(False, (older, old)).oom_kills() is None
    assert Groups(True, ()).oom_kills() is None


def stat(*times: str) -> str:
    """As /proc/stat has it: all CPUs together, each one, and other lines."""
    return "\n".join(["cpu  9 9 9 9 9 9 9 9 9 9", *times, "intr 1 2 3", "procs_running 2", ""])


def test_idle_cores_are_counted() -> None:
    before = stat("cpu0 10 0 5 100 3 0 0 0 0 0", "cpu1 10 0 5 100 3 0 0 0 0 0", "cpu10 1 0 0 1 0 0 0 0 0 0")
    after = stat("cpu0 10 0 5 120 13 0 0 0 0 0", "cpu1 20 2 8 107 3 0 1 7 9 9", "cpu10 9 0 0 1 0 0 0 0 0 0")
    assert idle_cpus(before, after, {0}) == 1.0, "who waits for a disk takes no core"
    assert idle_cpus(before, after, {1}) == 7 / 30, "of what others' machines steal nothing is left to us"
    assert idle_cpus(before, after, {0, 1}) == 1 + 7 / 30
    assert idle_cpus(before, after, {10}) == 0.0
    for unknown in (before, "", stat("cpu0 1 2", "cpu1 1 2 3")):
        assert idle_cpus(before, unknown, {0, 1}) is None
    assert idle_cpus(before, after, {0, 7}) is None, "a CPU that is not there"


@pytest.mark.parametrize(
    ("idle", "limit", "is_expected"),
    [(60, "max", False), (60, "200000", False), (1, "200000", True), (1, "max", True)],
)
def test_what_keeps_cores_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle: int, limit: str, is_expected: bool
) -> None:
    """On a machine of 64 CPUs, and in a container that gets the time of two."""
    clock = tmp_path / "stat"
    busy_times = [f"cpu{number} 50 0 0 0 0 0 0 0" for number in range(idle, 64)]
    idle_times = [f"cpu{number} 0 0 0 50 0 0 0 0" for number in range(idle)]
    group = write(tmp_path / "group", cpu__max=f"{limit} 100000")
    clock.write_text(stat(*(f"cpu{number} 0 0 0 0 0 0 0 0" for number in range(64))))
    monkeypatch.setattr(host, "_STAT", str(clock))
    monkeypatch.setattr(host, "own_groups", lambda _: Groups(True, (group,)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with monkeypatch.context() as patched:
        patched.setattr(time, "sleep", lambda _: clock.write_text(stat(*idle_times, *busy_times)))
        result = is_busy()
    assert result == is_expected


def test_the_load_decides_where_a_system_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = write(tmp_path / "group", cpu__max="200000 100000")
    monkeypatch.setattr(host, "_STAT", str(tmp_path / "nothing"))
    monkeypatch.setattr(host, "own_groups", lambda _: Groups(True, (group,)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.0, 0.0))
    assert not is_busy()
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 0.0, 0.0))
    assert is_busy(), "of two CPUs"


def test_limits_of_groups(tmp_path: Path) -> None:
    new = write(tmp_path / "new", cpu__max="150000 100000")
    above = write(tmp_path / "above", cpu__max="max 100000")
    assert Groups(True, (new, above)).cpu_limit() == 1.5
    old = write(tmp_path / "old", **{"cpu__cfs_quota_us": 400000, "cpu__cfs_period_us": 100000})
    assert Groups(False, (old,)).cpu_limit() == 4.0


def test_a_program_that_computes_keeps_cores_busy() -> None:
    """Within a moment, where the average over a minute takes half a minute."""
    program = [sys.executable, "-S", "-c", "while True: pass"]
    others = [subprocess.Popen(program) for _ in os.sched_getaffinity(0)]
    try:
        until = time.monotonic() + 60
        while not is_busy() and time.monotonic() < until:
            time.sleep(0.1)
        assert is_busy()
    finally:
        for one in others:
            one.kill()
            one.wait()
