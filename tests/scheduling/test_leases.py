"""Runs on a simulated machine with GPUs: who gets which device, and when.

Only the driver library is simulated; the workers are real and, with a torch that has no CUDA, compute on the CPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from ensemble.common.host import usable_cpus
from ensemble.scheduling.device_pool import SAMPLE_SECONDS
from tests.faults.forked import client
from tests.faults.inject import Fault, Injected
from tests.nvml.sim import GIB, Gpu, Memory, NvmlSim, gpu_uuid
from tests.project import ROOT, Project, python_path
from tests.waiting import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.usefixtures("warm")

A, B = "GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-bbbbbbbb-0000-0000-0000-000000000000"


@pytest.fixture
def two_gpus(nvml_sim: NvmlSim) -> NvmlSim:
    """Two T4; NVML lists them against the order of their PCI addresses."""
    nvml_sim.write([Gpu(B, pci=(0, 2, 0)), Gpu(A, pci=(0, 1, 0))])
    return nvml_sim


def watch_run(
    project: Project, environment: dict[str, str], *options: str
) -> tuple[int, str, dict[int, str]]:
    """Run the config; returns exit code, everything printed, and each worker's CUDA_VISIBLE_DEVICES by pid."""
    told = project.folder / "workers"
    paths = {"PYTHONPATH": python_path(ROOT, client.SITE), "TEST_WORKERS": str(told)}
    done = subprocess.run(
        [sys.executable, "-m", "ensemble", "run", "config.yaml", *options],
        cwd=project.folder,
        env={**os.environ, **paths, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    lines = told.read_text().splitlines() if told.exists() else []
    workers = {worker["pid"]: worker["environment"] for worker in map(json.loads, lines)}
    assert all(variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" for variables in workers.values())
    seen = {pid: variables["CUDA_VISIBLE_DEVICES"] for pid, variables in workers.items()}
    return done.returncode, done.stdout, seen


# Stands in for a build of flash-attention for another torch: it can be found, and not used.
FLASH = "raise ImportError('undefined symbol: _ZN3c104cuda9SetDeviceEi')"


@pytest.mark.long
@pytest.mark.fault(30)
def test_a_flash_attention_that_does_not_work_is_not_planned_with(
    project: Project, nvml_sim: NvmlSim, tmp_path: Path
) -> None:
    nvml_sim.write([Gpu(A, name="Simulated A100", compute_capability=(8, 0))])
    package = tmp_path / "site" / "flash_attn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FLASH)
    project.write_config(project.config(defaults={"text_column": "text", "dtype": "float16"}))
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(package.parent)])}
    done = project.ensemble("plan", "config.yaml", environment={**nvml_sim.environment(), **paths})
    assert (done.returncode, done.stderr) == (0, "")
    text = " ".join(done.stdout.split())
    assert "float16, capped_blocks attention" in text, text
    assert "flash" not in text


@pytest.mark.long
@pytest.mark.parametrize(("count", "per_gpu"), [(2, 1), (1, 2), (1, 1)])
def test_threads_of_workers_on_gpus_are_their_share_of_the_cores(
    project: Project, nvml_sim: NvmlSim, count: int, per_gpu: int
) -> None:
    nvml_sim.write([Gpu(A), Gpu(B, pci=(0, 2, 0))][:count])
    project.write_config(project.config(models=project.config()["models"][1:], max_workers_per_gpu=per_gpu))
    environment = {**nvml_sim.environment(), "OMP_NUM_THREADS": "64", "RAYON_NUM_THREADS": "99"}
    code, printed, _ = watch_run(project, environment, "--limit", "20")
    assert code == 0, printed
    lines = map(json.loads, (project.folder / "workers").read_text().splitlines())
    threads = {
        (line["environment"]["OMP_NUM_THREADS"], line["environment"]["RAYON_NUM_THREADS"]) for line in lines
    }
    if count * per_gpu == 1:
        assert threads == {("64", "99")}, "it has the machine to itself"
    else:
        share = str(max(1, min(64, usable_cpus()) // 2))
        assert threads == {(share, share)}


def check_leases(report: dict[str, Any], seen: dict[int, str]) -> None:
    """What run.json says is what the processes had, and no device was held twice at a time."""
    workers = [worker for member in report["members"] for worker in member["workers"]]
    for worker in workers:
        assert seen[int(worker["process"])] == ",".join(worker["devices"])
    for combination, other in combinations(workers, 2):
        if set(combination["devices"]) & set(other["devices"]):
            first, second = sorted([combination, other], key=lambda worker: worker["leased_after_seconds"])
            end = first["leased_after_seconds"] + first["life_seconds"]
            assert end <= second["leased_after_seconds"] + 0.01


def devices(report: dict[str, Any]) -> list[list[str]]:
    return [
        [gpu for worker in member["workers"] for gpu in worker["devices"]] for member in report["members"]
    ]


def test_a_replica_on_each_gpu(project: Project, two_gpus: NvmlSim) -> None:
    project.write_table(rows=2500)  # several chunks, or one replica would be enough
    project.write_config(project.config())
    code, printed, seen = watch_run(project, two_gpus.environment(), "--set", "defaults.replicas=2")
    assert code == 0, printed
    assert [what for what, pid in two_gpus.sessions() if pid not in seen] == ["open"], "one session for all"
    report = project.run_json()
    check_leases(report, seen)
    first, second = devices(report)
    assert first == [A, B]
    assert sorted(second) == [A, B], "in whatever order the first member's replicas ended"
    assert [gpu["uuid"] for gpu in report["devices"]] == [A, B]
    assert "ENSEMBLE_SIMULATED_GPUS: the GPUs are simulated, running on the CPU" in printed


@pytest.mark.long
def test_gpus_that_torch_cannot_use_are_an_error_unless_they_are_simulated(
    project: Project, two_gpus: NvmlSim
) -> None:
    two_gpus.write([Gpu(A), Gpu(B, pci=(0, 2, 0))], cuda=12040)
    project.write_config(project.config())
    environment = {**two_gpus.environment(), "ENSEMBLE_SIMULATED_GPUS": ""}
    code, printed, _ = watch_run(project, environment, "--set", "defaults.replicas=1")
    assert code == 1, printed
    text = " ".join(printed.split())
    assert "a GPU was planned" in text
    assert "CUDA up to 12.4" in text
    assert "torch for CUDA 12 (see https://pytorch.org/get-started/locally/)" in text
    assert "to compute on the CPU set num_gpus: 0" in text
    report = project.run_json()
    faults = [fault["remedy"] for member in report["members"] for fault in member["faults"]]
    assert faults == ["given up", "given up"], "it would fail again"
    code, printed, _ = watch_run(project, environment, "--set", "defaults.num_gpus=0")
    assert code == 0, printed


@pytest.mark.long
def test_quantizing_workers_load_without_threads_and_stored_layers_compute_as_planned(
    project: Project, two_gpus: NvmlSim, tmp_path: Path
) -> None:
    """Of transformers 5.0, which put weights on the GPU ahead of their quantization; and float16 on a T4."""
    pytest.importorskip("bitsandbytes")
    saved = save_in_four_bits(project.models / "llama", tmp_path / "stored")
    four_bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config = project.config()
    gemma, llama = config["models"]
    stored = {**llama, "name": "stored", "model_name_or_path": str(saved)}
    project.write_config({**config, "models": [gemma, {**llama, "quantization_config": four_bits}, stored]})
    code, printed, _ = watch_run(project, two_gpus.environment(), "--limit", "20")
    assert code == 0, printed
    lines = (project.folder / "workers").read_text().splitlines()
    seen = {str(load["pid"]): load["environment"] for load in map(json.loads, lines)}
    members = {member["name"]: member["workers"] for member in project.run_json()["members"]}
    quantizes = {
        name: {seen[worker["process"]].get("HF_DEACTIVATE_ASYNC_LOAD") for worker in workers}
        for name, workers in members.items()
    }
    assert quantizes == {"gemma": {None}, "llama": {"1"}, "stored": {None}}
    notes = {name: [*workers[0]["ready"]["notes"]] for name, workers in members.items()}
    computes = {
        name: [item for item in told if "4-bit layers compute" in item] for name, told in notes.items()
    }
    assert computes["gemma"] == computes["llama"] == []
    (sentence,) = computes["stored"]
    assert sentence.startswith("4-bit layers compute in float16: bfloat16, as the checkpoint says,")
    assert "compute in float16" in " ".join(printed.split())


def save_in_four_bits(source: Path, folder: Path) -> Path:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, llm_int8_skip_modules=["score"]
    )
    AutoModelForSequenceClassification.from_pretrained(
        source, dtype=torch.float32, device_map={"": "cpu"}, quantization_config=settings
    ).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


@pytest.mark.long
def test_a_member_on_the_cpu_sees_no_gpu(project: Project, two_gpus: NvmlSim) -> None:
    project.write_config(project.config(models=project.config()["models"][1:]))
    code, printed, seen = watch_run(
        project, two_gpus.environment(), "--set", "defaults.num_gpus=0", "--limit", "20"
    )
    assert code == 0, printed
    assert set(seen.values()) == {""}
    assert devices(project.run_json()) == [["cpu"]]


@pytest.mark.long
@pytest.mark.parametrize("count", ["2", "auto"])
def test_two_members_share_a_gpu_where_that_is_asked(project: Project, nvml_sim: NvmlSim, count: str) -> None:
    nvml_sim.write([Gpu(A)])
    project.write_config(project.config())
    code, printed, _ = watch_run(
        project, nvml_sim.environment(), "--set", f"max_workers_per_gpu={count}", "--limit", "20"
    )
    assert code == 0, printed
    report = project.run_json()
    assert devices(report) == [[A], [A]]
    first, second = (member["workers"][0] for member in report["members"])
    assert second["leased_after_seconds"] < first["leased_after_seconds"] + first["life_seconds"]
    log = (project.folder / "runs/first/logs/run.log").read_text()
    assert log.count(f"{A} released after ") == 1, "proof is possible only once the GPU is empty"


def test_eight_gpus_in_an_order_unlike_cudas_are_pinned_by_uuid(project: Project, nvml_sim: NvmlSim) -> None:
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    nvml_sim.write([Gpu(gpu_uuid(number), pci=(0, 1 + number, 0)) for number in order])
    project.write_config(project.config())
    code, printed, seen = watch_run(
        project, nvml_sim.environment(), "--set", f"devices=[6, {gpu_uuid(3)}]", "--limit", "20"
    )
    assert code == 0, printed
    assert sorted(seen.values()) == [gpu_uuid(3), gpu_uuid(6)], (
        "number 6 of PCI's order, which is CUDA's here"
    )
    assert devices(project.run_json()) == [[gpu_uuid(6)], [gpu_uuid(3)]]


BAD_DEVICES = [
    (
        ["--set", "devices=[2]"],
        {},
        "devices[0]: 2: no visible GPU has this number or UUID; there are 0: GPU-aaaa",
    ),
    (
        ["--set", "devices=[0]", "--set", "devices=[0, 1]"],
        {"CUDA_VISIBLE_DEVICES": B},
        "devices[1]: 1: no visible",
    ),
    (["--set", "devices=[GPU-1234]"], {}, "devices[0]: GPU-1234: no visible GPU has this number or UUID"),
    (["--set", "devices=[0, 0]"], {}, "devices[1]: 0: named twice"),
    ([], {"CUDA_VISIBLE_DEVICES": "GPU-1234"}, "CUDA_VISIBLE_DEVICES=GPU-1234: 'GPU-1234' names no GPU here"),
    (
        [],
        {"CUDA_VISIBLE_DEVICES": "7"},
        "CUDA_VISIBLE_DEVICES=7: '7' names no GPU here, which hides all of them",
    ),
]


@pytest.mark.parametrize(("options", "environment", "sentence"), BAD_DEVICES)
def test_devices_that_are_not_there_are_named(
    options: list[str], environment: dict[str, str], sentence: str, project: Project, two_gpus: NvmlSim
) -> None:
    project.write_config(project.config())
    done = project.ensemble(
        "validate", "config.yaml", *options, environment={**two_gpus.environment(), **environment}
    )
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.count("error:") == 1


def held(used: int = 15 * GIB, **memory: Any) -> Gpu:
    return Gpu(A, memory=Memory(total=15 * GIB, used=used, **memory), processes={4242: 14 * GIB})


@pytest.mark.fault(24)
def test_memory_that_others_hold_is_named_before_anything_starts(project: Project, nvml_sim: NvmlSim) -> None:
    nvml_sim.write([held()], process_names={4242: "python train.py"})
    project.write_config(project.config())
    done = project.ensemble("run", "config.yaml", environment=nvml_sim.environment())
    assert done.returncode == 2
    assert (
        f"({A}): 15.0 GiB of 15.0 GiB held by others; NVML shows process 4242 (python train.py) with 14.0 GiB"
        in done.stderr
    )
    assert "wait_for_gpu: 10m" in done.stderr


@pytest.mark.long
@pytest.mark.fault(24)
def test_a_run_waits_for_memory_that_others_hold(project: Project, nvml_sim: NvmlSim) -> None:
    nvml_sim.write([held()])
    project.write_config(project.config(models=project.config()["models"][1:]))
    with start(project, nvml_sim, "--set", "wait_for_gpu=10m") as process:
        assert process.stdout is not None
        while "waiting up to 600 s more for it" not in (line := process.stdout.readline()):
            assert line, "it ended without waiting"
        nvml_sim.write([Gpu(A, memory=Memory(used=GIB // 4))])
        printed, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, printed
    assert devices(project.run_json()) == [[A]]


@pytest.mark.long
@pytest.mark.fault(24)
def test_a_held_gpu_is_left_out_where_there_is_another(project: Project, nvml_sim: NvmlSim) -> None:
    nvml_sim.write([held(), Gpu(B, pci=(0, 2, 0))])
    project.write_config(project.config(models=project.config()["models"][1:]))
    options = ["--set", "wait_for_gpu=1s", "--limit", "20"]
    done = project.ensemble("run", "config.yaml", *options, environment=nvml_sim.environment())
    assert done.returncode == 0, done.stderr
    assert f"llama leaves out {A}: too little of it is free" in done.stdout
    assert devices(project.run_json()) == [[B]]


def write_later(machine: NvmlSim, at_work: Injected, workers: int, *gpus: Gpu) -> None:
    """Replace the machine while so many workers compute, as if they had filled a GPU; then these go on."""
    wait_until(lambda: len(at_work.pids()) == workers, "the workers' first rows")
    machine.write(gpus)
    at_work.let_go()


@pytest.fixture
def at_work(tmp_path: Path) -> Injected:
    """The first worker waits at its first rows."""
    return Injected(tmp_path, Fault("wait", times=1))


@pytest.fixture
def two_at_work(tmp_path: Path) -> Injected:
    """The first two workers do."""
    return Injected(tmp_path, Fault("wait", times=2))


def start(
    project: Project, machine: NvmlSim, *options: str, faults: Injected | None = None
) -> subprocess.Popen[str]:
    environment = {**machine.environment(), **(faults.environment if faults else {})}
    return project.start("run", "config.yaml", "--limit", "20", *options, environment=environment)


def test_the_next_member_waits_until_the_memory_is_back(
    project: Project, nvml_sim: NvmlSim, at_work: Injected
) -> None:
    nvml_sim.write([Gpu(A, memory=Memory(used=GIB // 4))])
    project.write_config(project.config())
    log = project.folder / "runs/first/logs/run.log"
    with start(project, nvml_sim, faults=at_work) as process:
        write_later(nvml_sim, at_work, 1, Gpu(A, memory=Memory(used=9 * GIB)))
        wait_until(lambda: "gemma-0 ended" in log.read_text(), "the first worker's end")
        time.sleep(8 * SAMPLE_SECONDS)  # the run has read the memory in between
        nvml_sim.write([Gpu(A, memory=Memory(used=GIB // 4))])
        printed, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, printed
    steps = re.findall(r"gemma-0 ended|released|with \d+ bytes in use|llama-0 has", log.read_text())
    assert steps[:4] == ["gemma-0 ended", "released", f"with {GIB // 4} bytes in use", "llama-0 has"]


@pytest.mark.fault(38)
@pytest.mark.fresh
@pytest.mark.long
def test_a_device_that_never_comes_free_is_left_out(
    project: Project, two_gpus: NvmlSim, two_at_work: Injected
) -> None:
    config = project.config()
    # Two more members on the other device, so that the run is not over before the device's time is: a second, and
    # each fresh process takes longer to start.
    config["models"] += [{**config["models"][1], "name": name} for name in ("third", "fourth")]
    project.write_config(config)
    options = ["--set", "defaults.replicas=1", "--set", "release_timeout=1s"]
    with start(project, two_gpus, *options, faults=two_at_work) as process:
        held = Gpu(A, pci=(0, 1, 0), memory=Memory(used=9 * GIB), processes={4242: 8 * GIB})
        write_later(two_gpus, two_at_work, 2, Gpu(B, pci=(0, 2, 0)), held)
        printed, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, printed
    report = project.run_json()
    assert f"({A}): 9.0 GiB still in use 1 s after its worker ended" in printed
    assert "process 4242" in printed
    assert devices(report) == [[A], [B], [B], [B]]


@pytest.mark.long
@pytest.mark.fault(13)
def test_a_signal_while_waiting_for_memory_is_heeded(project: Project, nvml_sim: NvmlSim) -> None:
    nvml_sim.write([held()])
    project.write_config(project.config())
    with start(project, nvml_sim, "--set", "wait_for_gpu=1m") as process:
        assert process.stdout is not None
        while "waiting up to" not in process.stdout.readline():
            assert process.poll() is None
        process.terminate()
        printed = process.stdout.read()
    assert process.returncode == 143
    assert "stopped by SIGTERM" in printed
