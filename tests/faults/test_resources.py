"""A machine that has too little of something, or loses it: memory, room on the disk, a GPU, time."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.chunky import ROWS, chunky_config, ids_of, results
from tests.faults.forked.runs import ForkedRuns
from tests.faults.inject import Fault, Injected
from tests.faults.machine import memory_group, small_disk
from tests.faults.test_workers import POISON, faults_of, workers_of
from tests.nvml.sim import GIB, GPU_IS_LOST, HANGS, Fail, Gpu, NvmlSim, gpu_uuid
from tests.project import Project
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.usefixtures("warm")


@pytest.mark.long
@pytest.mark.fresh
@pytest.mark.fault(8)
def test_the_kernel_kills_a_worker_for_its_memory(
    chunky: Project, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    """One of two replicas takes more than the group has; the other one does its rows."""
    injected = Injected(tmp_path, Fault("eat", ids_of(chunky, 5), times=1, bytes=4 * GIB))
    options = ["--set", "models.llama.replicas=2"]
    with memory_group(2 * GIB) as group:
        done = subprocess.run(
            group.command([sys.executable, "-m", "ensemble", "run", "config.yaml", *options]),
            cwd=chunky.folder,
            env={**os.environ, **injected.environment, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert group.kills() == 1
    printed = " ".join(done.stdout.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "was killed, probably by the kernel because the host ran out of memory (RAM, not the GPU's)"
        in printed
    )
    assert faults_of(chunky) == [("memory", [4, 8], "again")]
    workers = workers_of(chunky)
    (killed,) = (worker for worker in workers if int(worker["process"]) in injected.pids())
    assert killed["exit_code"] == -signal.SIGKILL
    others = [worker for worker in workers if worker is not killed]
    assert sum(worker["counters"]["rows"] for worker in (killed, *others)) == ROWS
    # A third one is started only where the second had nothing left to do before the first was killed.
    for item, following in itertools.pairwise(others):
        ended = item["started_after_seconds"] + item["life_seconds"]
        assert following["started_after_seconds"] >= ended - 0.1, "one at a time"
    assert results(chunky) == undisturbed


@pytest.mark.fault(14)
def test_a_run_goes_on_when_there_is_room_again(
    chunky: Project, forked: ForkedRuns, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    """A file system that holds the table and not much more."""
    with small_disk(chunky.folder / "runs", "296k") as disk:
        (disk / "ballast").write_bytes(bytes(20_000))
        assert forked.run(chunky.folder) == 1, forked.printed
        assert re.search(r"error: .* runs/first/.*No space left on device", forked.printed), forked.printed
        assert not [path for path in disk.rglob("*") if ".tmp-" in path.name]
        (disk / "ballast").unlink()
        subprocess.run(["mount", "-o", "remount,size=1m", disk], check=True)
        assert forked.run(chunky.folder) == 0, forked.printed
        assert results(chunky) == undisturbed


@pytest.mark.fault(15)
def test_a_directory_that_cannot_be_written_is_said_before_any_model_loads(chunky: Project) -> None:
    with small_disk(chunky.folder / "runs", "64k") as disk:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        done = chunky.ensemble("run", "config.yaml")
        assert done.returncode == 2, done.stdout
        assert re.match(r"error: output_dir: cannot write to .*runs", done.stderr), done.stderr
        assert "Traceback" not in done.stderr
        assert "starting Python" not in done.stdout
        assert list(disk.iterdir()) == []


@pytest.mark.fault(23)
def test_a_gpu_is_lost_in_mid_run(
    chunky: Project, nvml_sim: NvmlSim, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    """The driver says so, and the worker there gets the error that CUDA gives then."""
    first, second = Gpu(gpu_uuid(0xA), pci=(0, 1, 0)), Gpu(gpu_uuid(0xB), pci=(0, 2, 0))
    nvml_sim.write([first, second])
    injected = Injected(
        tmp_path,
        Fault("wait", ids_of(chunky, 9), times=1),
        Fault("raise", ids_of(chunky, 9), times=1, text=POISON),
    )
    chunky.write_config(chunky_config(chunky, devices=[first.uuid, second.uuid]))
    environment = {**nvml_sim.environment(), **injected.environment}
    options = ("--set", "models.llama.replicas=1")
    with chunky.start("run", "config.yaml", *options, environment=environment) as process:
        injected.wait_for()
        nvml_sim.write([Gpu(first.uuid, pci=first.pci, fails=[Fail("*", GPU_IS_LOST)]), second])
        injected.let_go()
        printed, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, printed
    assert f"({first.uuid}) no longer answers" in printed
    assert [worker["devices"] for worker in workers_of(chunky)] == [[first.uuid], [second.uuid]]
    assert [worker["counters"]["rows"] for worker in workers_of(chunky)] == [8, 8]
    assert results(chunky) == undisturbed


@pytest.mark.fault(23)
def test_a_driver_that_hangs_stops_no_run(
    chunky: Project, nvml_sim: NvmlSim, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    """The question for the memory never comes back; the run ends as if nothing were."""
    gpu = Gpu(gpu_uuid(0xA))
    nvml_sim.write([gpu])
    injected = Injected(tmp_path, Fault("wait", ids_of(chunky, 9), times=1))
    chunky.write_config(chunky_config(chunky, devices=[gpu.uuid]))
    environment = {**nvml_sim.environment(), **injected.environment}
    options = ("--set", "release_timeout=2")
    with chunky.start("run", "config.yaml", *options, environment=environment) as process:
        injected.wait_for()
        nvml_sim.write([Gpu(gpu.uuid, fails=[Fail("DeviceGetMemoryInfo", HANGS)])])
        injected.let_go()
        printed, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, printed
    assert results(chunky) == undisturbed
