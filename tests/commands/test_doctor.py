"""``doctor``: what it finds on this machine, on simulated ones, and of test processes that hang or die."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ensemble.cli.app import _finding_lines
from ensemble.commands import doctor
from ensemble.commands.doctor import (
    Finding,
    disk_findings,
    examine,
    host_findings,
    inventory_findings,
    package_findings,
    trial_findings,
)
from ensemble.common.device_trials import CPU, DeviceReport, DeviceTrial, run_trials
from ensemble.common.gpus import Device, Inventory
from ensemble.common.host import Groups
from ensemble.common.packages import Requirement
from ensemble.common.python_process import python_command
from ensemble.common.text import not_attached
from ensemble.common.torch_build import torch_problem
from ensemble.worker.probe import probe, product_error
from tests.checkpoints import prime
from tests.nvml.sim import GIB, GPU_IS_LOST, Fail, Memory, NvmlSim, gpu_uuid, gpus
from tests.oom.limit import AllocatorLimit
from tests.project import ROOT, Project
from tests.waiting import PATIENCE_SECONDS, wait_until

MIB = 1 << 20
T4 = Device(gpu_uuid(1), "Tesla T4", (7, 5), 15 * GIB, 0)
# Before CUDA 13 builds had code for GPUs from 5.0 on; this is a build of today.
BUILD = ("sm_80", "sm_90a", "sm_100", "sm_120")
NO_CODE = "AcceleratorError: CUDA error: no kernel image is available for execution on the device"

# Does something when torch is first imported; torch itself never is.
AT_TORCH = """
import os, signal, subprocess, sys, time
print("what others print")
class AtTorch:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            DEED
sys.meta_path.insert(0, AtTorch())
"""


@pytest.fixture
def empty_project(tmp_path: Path) -> Project:
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    return Project(folder, folder)


def at_torch(monkeypatch: pytest.MonkeyPatch, folder: Path, deed: str) -> None:
    """Let test processes do ``deed``, a line of Python, instead of importing torch."""
    (folder / "sitecustomize.py").write_text(AT_TORCH.replace("DEED", deed))
    monkeypatch.setenv("PYTHONPATH", str(folder))


def marks(findings: list[Finding]) -> list[str]:
    return [finding.mark for finding in findings]


# The command


@pytest.mark.long
def test_a_machine_without_gpus_can_run(empty_project: Project) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "-1", "HF_HUB_OFFLINE": "1", "HF_TOKEN": "hf_s3cret"}
    done = empty_project.ensemble("doctor", environment=environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert f"the CPU: torch {torch.__version__} computes correctly in float32" in done.stdout
    assert f"transformers {version('transformers')}" in done.stdout
    assert "HF_HUB_OFFLINE is set" in done.stdout
    assert done.stdout.endswith("\nA run can start.\n")
    assert "s3cret" not in done.stdout
    assert not [line for line in done.stdout.splitlines() if len(line) > 100 and " " in line[9:].strip()]
    assert not list(empty_project.folder.iterdir())


@pytest.mark.long
def test_gpus_that_torch_cannot_use_and_a_config_that_cannot_run(
    empty_project: Project, nvml_sim: NvmlSim
) -> None:
    held = {4711: 3 * GIB}
    machine = gpus(2)
    machine[1] = replace(machine[1], memory=Memory(used=3 * GIB), processes=held)
    nvml_sim.write(machine, cuda=12040, process_names={4711: "train.py"})
    (empty_project.folder / "out").write_text("a file")
    models = [
        {"name": "a", "model_name_or_path": "./nope", "num_gpus": 3},
        {"name": "b", "model_name_or_path": "some/model"},
    ]
    config = empty_project.config(models=models, devices=[0], output_dir="out/x", submission=None)
    empty_project.write_config(config)
    done = empty_project.ensemble(
        "doctor", "config.yaml", environment={**nvml_sim.environment(), "HF_HUB_OFFLINE": "1"}
    )
    assert (done.returncode, done.stderr) == (2, "")
    text = " ".join(done.stdout.split())  # as it is before it is broken into lines
    for words in (
        "NVIDIA driver 550.90.07, CUDA up to 12.4",
        f"Simulated T4 ({gpu_uuid(0)}), capability 7.5",
        "process 4711 (train.py) with 3.0 GiB",
        f"Simulated T4 ({gpu_uuid(0)}): torch {torch.__version__} is "
        + ("a build without CUDA" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"),
        "the driver knows CUDA up to 12.4",
        "install a build of torch for CUDA 12",
        "models[0].num_gpus: a asks for 3 GPUs, but 1 GPU can be used here",
        "models[0] (a): ./nope: no such folder",
        "models[1] (b): some/model: no such folder",
        "test.csv: no such file",
        "output_dir: out/x cannot be a directory, because out is a file -> choose another directory",
        "6 problems to fix: no run can start",
    ):
        assert words in text, done.stdout
    assert done.stdout.count("\nproblem  ") == 6, done.stdout


def test_with_a_config_all_is_said_that_validate_says(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, dict[str, Any]] = {
        "other labels": {"id2label": {"0": "x", "1": "y", "2": "z"}},
        "no package": {"quantization_config": {"quant_method": "aqlm", "nbits_per_codebook": 16}},
    }
    for name, change in changes.items():
        saved = Path(shutil.copytree(project.models / "llama", project.folder / name))
        config = json.loads((saved / "config.json").read_text())
        (saved / "config.json").write_text(json.dumps({**config, **change}))
        prime(saved)
    models = [{"name": name.split()[1], "model_name_or_path": f"./{name}"} for name in changes]
    llama = {"name": "llama", "model_name_or_path": str(project.models / "llama")}
    mapped = {**llama, "model_kwargs": {"device_map": "auto"}}
    project.write_config(project.config(models=[*models, mapped], output_dir="test.csv"))
    at_torch(monkeypatch, tmp_path, "raise ImportError('stands for torch')")
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]), "CUDA_VISIBLE_DEVICES": "-1"}
    validated = project.ensemble("validate", "config.yaml", environment=environment)
    done = project.ensemble("doctor", "config.yaml", environment=environment)
    assert (validated.returncode, done.returncode, done.stderr) == (2, 2, "")
    message = " ".join(done.stdout.split())
    problems = [line.removeprefix("error: ") for line in validated.stderr.splitlines()]
    for words in ("the labels of", "needs the package aqlm", "device_map", "output_dir: "):
        assert any(words in problem for problem in problems), problems
    for problem in problems:
        text, _, advice = problem.rpartition("; ")
        assert (f"problem {text} -> {advice} " if text else f"problem {problem} ") in message
    assert done.stdout.count("\nproblem  ") == len(problems) + 1, "one of torch, and none twice"


@pytest.mark.long
def test_a_wrong_mask_stops_only_members_that_want_a_gpu(
    project: Project, nvml_sim: NvmlSim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml_sim.write(gpus(1))
    at_torch(monkeypatch, tmp_path, "raise ImportError('stands for torch')")
    environment = {**nvml_sim.environment(), "CUDA_VISIBLE_DEVICES": "7", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(tmp_path)])
    project.write_config(project.config())
    done = project.ensemble("doctor", "config.yaml", environment=environment)
    assert done.stdout.count("problem  CUDA_VISIBLE_DEVICES") == 1, done.stdout
    assert "2 problems to fix: no run can start" in done.stdout
    done = project.ensemble("doctor", "config.yaml", "--set", "defaults.num_gpus=0", environment=environment)
    assert done.stdout.count("note     CUDA_VISIBLE_DEVICES") == 1, done.stdout
    assert "problem  the CPU: torch" in done.stdout
    assert "1 problem to fix: no run can start" in done.stdout


@pytest.mark.long
def test_what_the_plan_warns_of_is_said(
    project: Project, nvml_sim: NvmlSim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml_sim.write(gpus(1))
    at_torch(monkeypatch, tmp_path, "raise ImportError('stands for torch')")
    environment = {**nvml_sim.environment(), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(tmp_path)])
    project.write_config(project.config(defaults={"text_column": "text", "replicas": 3}))
    done = project.ensemble("doctor", "config.yaml", environment=environment)
    text = " ".join(done.stdout.split())
    assert "note models[0].replicas: " in text, done.stdout
    assert "asks for 3 replicas of 1 GPU each, but there is room for 1 at a time" in text


def test_quiet_says_problems_only(
    empty_project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_torch(monkeypatch, tmp_path, "raise ImportError('libcudart.so.12: cannot open')")
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]), "HF_HUB_OFFLINE": "1"}
    done = empty_project.ensemble(
        "doctor", "nope.yaml", "-q", environment={**environment, "CUDA_VISIBLE_DEVICES": "-1"}
    )
    assert done.returncode == 2
    assert [line for line in done.stdout.splitlines() if line.startswith("problem")] == [
        "problem  nope.yaml: no such file",
        "problem  the CPU: torch cannot be imported (ImportError: libcudart.so.12: cannot open)",
    ]
    assert not [line for line in done.stdout.splitlines() if line.startswith(("ok", "note"))]


@pytest.mark.long
def test_a_config_decides_where_torch_is_tried(
    empty_project: Project, nvml_sim: NvmlSim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml_sim.write(gpus(3))
    at_torch(monkeypatch, tmp_path, "raise ImportError(os.environ['CUDA_VISIBLE_DEVICES'] or 'no GPU')")
    environment = {**nvml_sim.environment(), "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    model = {"name": "a", "model_name_or_path": "."}
    cpu_only = {**model, "num_gpus": 0}
    both = [model, {**cpu_only, "name": "b"}]
    for models, devices, tried in (
        ([cpu_only], None, ["no GPU"]),
        ([model], [2, gpu_uuid(0)], [gpu_uuid(2), gpu_uuid(0)]),
        (both, [1], [gpu_uuid(1), "no GPU"]),
    ):
        config = empty_project.config(models=models, devices=devices, submission=None)
        empty_project.write_config(config)
        done = empty_project.ensemble("doctor", "config.yaml", "-q", environment=environment)
        text = " ".join(done.stdout.split())
        assert re.findall(r"cannot be imported \(ImportError: (.*?)\)", text) == tried, done.stdout


# Test processes


def test_each_device_has_a_process_pinned_to_it_and_no_more_than_four_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = tmp_path / "steps"
    note = f"open({str(steps)!r}, 'a').write('%s\\n')"
    # Each of the first four waits for the others: they can only end if they run at the same time.
    meet = f"[time.sleep(0.01) for _ in iter(lambda: open({str(steps)!r}).read().count('begins') < 4, False)]"
    tell = (
        "raise ImportError(' '.join([os.environ['CUDA_VISIBLE_DEVICES'], os.environ['CUDA_DEVICE_ORDER']]))"
    )
    at_torch(monkeypatch, tmp_path, f"{note % 'begins'}; {meet}; {note % 'ends'}; {tell}")
    devices = [replace(T4, uuid=gpu_uuid(index)) for index in range(5)]
    trials = run_trials([*devices, CPU], host_bytes=GIB)
    told = [trial.report.errors["import torch"] for trial in trials if trial.report]
    assert told == [f"ImportError: {device.uuid} PCI_BUS_ID" for device in devices] + [
        "ImportError: PCI_BUS_ID"
    ]
    noted = steps.read_text().split()
    running = [2 * noted[:index].count("begins") - index for index in range(1, 13)]
    assert max(running) == 4
    assert running[-1] == 0


def test_a_process_that_hangs_is_ended_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child"
    started = f"open({str(child)!r}, 'w').write(str(subprocess.Popen(['sleep', '100']).pid))"
    at_torch(monkeypatch, tmp_path, f"{started}; time.sleep(100)")
    for seconds in (2, 10, 60):  # it must have got as far as hanging
        trial = run_trials([T4], timeout_seconds=seconds)[0]
        assert trial.report is None
        assert f"no answer within {seconds} s" in trial.ending
        if child.exists():
            break
    state = Path(f"/proc/{child.read_text()}/stat")
    wait_until(lambda: not state.exists() or state.read_text().split()[2] == "Z", "the child's end")


def test_a_device_that_hangs_does_not_hide_the_answer_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_first = f"os.environ['CUDA_VISIBLE_DEVICES'] == {gpu_uuid(0)!r}"
    at_torch(monkeypatch, tmp_path, f"time.sleep(100 * ({is_first})); raise ImportError('none')")
    hangs, answers = run_trials([replace(T4, uuid=gpu_uuid(0)), T4], timeout_seconds=20)
    assert hangs.report is None
    assert answers.report is not None
    assert answers.report.errors["import torch"] == "ImportError: none"


def test_a_process_that_nobody_ends_ends_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_torch(monkeypatch, tmp_path, "time.sleep(100)")
    command = [
        *python_command("ensemble.worker.probe"),
        "--allocate-bytes=1",
        f"--parent-pid={os.getpid()}",
        "--seconds=1",
    ]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path)]))
    assert (
        subprocess.run(command, timeout=PATIENCE_SECONDS, capture_output=True).returncode == -signal.SIGALRM
    )


@pytest.mark.parametrize(
    ("deed", "ending", "advice"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was ended by SIGSEGV", "try again"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL", "memory"),
        (
            "print('no such version', file=sys.stderr, flush=True); os._exit(3)",
            "exit code 3: no such version",
            "try",
        ),
        ("os._exit(0)", "exit code 0", "try again"),
    ],
)
def test_a_process_that_dies_is_a_problem(
    deed: str, ending: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_torch(monkeypatch, tmp_path, deed)
    (finding,) = trial_findings(run_trials([T4]), None)
    assert finding.mark == "problem"
    assert ending in finding.text
    assert advice in finding.advice


class WrongProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A device that multiplies matrices in float32 wrongly."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_product = func is torch.ops.aten.mm.default and result.dtype == torch.float32
        return result * 1.01 if is_product else result


def test_what_a_probe_tries() -> None:
    report = probe(False, MIB, ["json", "no_such_module"])
    assert report["torch"] == torch.__version__
    assert report["passed"] == ["float32"]
    assert list(report["errors"]) == ["import no_such_module"]
    assert DeviceReport(**json.loads(json.dumps(report))).torch == torch.__version__
    with WrongProducts():  # type: ignore[no-untyped-call]
        report = probe(False, MIB, [])
    assert "off by 1." in report["errors"]["multiply in float32"]
    assert not report["passed"]
    with AllocatorLimit(largest_bytes=4 * MIB):
        report = probe(False, 8 * MIB, [])
    assert "OutOfMemoryError" in report["errors"]["allocate 8 MiB"]


def test_right_products_are_within_the_tolerances() -> None:
    for dtype, bound in ((torch.float32, 1e-5), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)):
        assert 0 < product_error(dtype, torch.device("cpu")) < bound


# What test processes mean


def judged(
    report: DeviceReport, device: Device = T4, cuda: tuple[int, int] | None = (12, 4)
) -> list[Finding]:
    return [*trial_findings([DeviceTrial(device, report)], cuda)]


GOOD = DeviceReport("2.9", "12.4", True, ("sm_70", "sm_75"), (7, 5), 14 * GIB, ("float32", "float16"))


@pytest.mark.parametrize(
    ("report", "mark", "words"),
    [
        (GOOD, "ok", ["torch 2.9 (CUDA 12.4) computes correctly in float32, float16, 14.0 GiB free"]),
        (
            replace(GOOD, architectures=BUILD, errors={"multiply in float32": NO_CODE, "allocate": NO_CODE}),
            "problem",
            ["torch has no code for capability 7.5, only for sm_80, sm_90a", "that has sm_75"],
        ),
        (
            replace(GOOD, sees_gpu=False, cuda="13.0"),
            "problem",
            ["built for CUDA 13.0", "up to 12.4", "update the driver", "for CUDA 12 "],
        ),
        (
            replace(GOOD, errors={"multiply in float16": "RuntimeError: CUBLAS_STATUS_ARCH_MISMATCH"}),
            "problem",
            ["no code for capability 7.5", "a build of torch that has sm_75"],
        ),
        (
            replace(GOOD, sees_gpu=False, errors={"start CUDA": "RuntimeError: unknown error"}),
            "problem",
            ["CUDA up to 12.4 (RuntimeError: unknown error)", "nvidia-smi"],
        ),
        (replace(GOOD, sees_gpu=False, cuda=None), "problem", ["without CUDA", "for CUDA 12 "]),
        (
            replace(GOOD, errors={"allocate 256 MiB": "OutOfMemoryError: CUDA out of memory"}),
            "problem",
            ["could not allocate 256 MiB", "end what holds the memory"],
        ),
        (replace(GOOD, errors={"multiply in float16": "x"}), "problem", ["multiply in float16", "driver"]),
        (
            DeviceReport(errors={"import torch": "OSError: libtorch.so"}),
            "problem",
            ["libtorch.so", "reinstall"],
        ),
    ],
)
def test_what_a_report_means(report: DeviceReport, mark: str, words: list[str]) -> None:
    (finding,) = judged(report)
    assert finding.mark == mark
    for word in words:
        assert word in f"{finding.text} -> {finding.advice}"


# As torch is on a T4: built for CUDA 13, with GPUs that its driver, or nothing but bitsandbytes, keeps it from.
CUDA_BUILD = """
import os, sys
if any("ensemble.worker.probe" in argument for argument in sys.orig_argv):
    import torch
    seen = int(os.environ["CUDA_VISIBLE_DEVICES"] == "SEEN")
    def start():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).")
    torch.version.cuda, torch.cuda._cudart = "13.0", object()
    torch._C._cuda_getDeviceCount, torch._C._cuda_init = lambda: seen, start
    torch._C._cuda_getArchFlags, torch._C._cuda_getCurrentRawStream = lambda: "sm_75 sm_80", None
    if seen:
        torch.cuda.get_device_capability = lambda device=None: (7, 5)
"""


@pytest.mark.long
@pytest.mark.skipif(torch.version.cuda is not None, reason="of a torch for the CPU, which asks no driver")
def test_a_driver_that_is_too_old_and_a_bitsandbytes_without_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real torch and real bitsandbytes: only what torch asks CUDA itself is made up."""
    other = replace(T4, uuid=gpu_uuid(2))
    (tmp_path / "sitecustomize.py").write_text(CUDA_BUILD.replace("SEEN", T4.uuid))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path)]))
    seen, unseen = run_trials([T4, other], ["bitsandbytes"])
    (too_old,) = trial_findings([unseen], (12, 4))
    assert (too_old.mark, "is built for CUDA 13.0, and the driver knows CUDA up to 12.4" in too_old.text) == (
        "problem",
        True,
    )
    assert too_old.advice.startswith("install a build of torch for CUDA 12 ")
    assert "or update the driver" in too_old.advice
    *_, library = trial_findings([seen], (12, 4))
    assert library.mark == "problem"
    assert (
        "could not open the CUDA library of bitsandbytes for torch's CUDA 13.0 (RuntimeError: "
        in library.text
    )
    assert library.advice.startswith("install a release of bitsandbytes that has it")
    (no_number,) = judged(
        replace(GOOD, sees_gpu=False, errors={"start CUDA": "driver is too old"}), cuda=None
    )
    assert "CUDA 12.4, " in no_number.text
    assert no_number.text.endswith("(driver is too old)")


def test_inputs_that_a_kaggle_notebook_does_not_have(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = {"name": "a", "model_name_or_path": "/kaggle/input/my-gemma/final"}
    hub = {"name": "b", "model_name_or_path": "some/model"}
    config = project.config(models=[lost, hub])
    config["data"]["path"] = "/kaggle/input/competitions/lmsys/test.csv"
    project.write_config(config)
    at_torch(monkeypatch, tmp_path, "raise ImportError('stands for torch')")
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]),
        "HF_ENDPOINT": "http://127.0.0.1:9",  # refused, as everything is where the internet is off
        "KAGGLE_KERNEL_RUN_TYPE": "Batch",
    }
    text = " ".join(project.ensemble("doctor", "config.yaml", environment=environment).stdout.split())
    for words in (
        "(a): /kaggle/input/my-gemma/final: no such folder (nothing is mounted at /kaggle/input/my-gemma) -> "
        "attach the dataset my-gemma to the notebook",
        "test.csv: no such file (nothing is mounted at /kaggle/input/competitions/lmsys) -> attach the "
        "competition lmsys",
        "as a model of the hub it is not in the cache, and cannot be downloaded (http://127.0.0.1:9 cannot be "
        "reached) -> add the model to the notebook as an input",
        "or switch the internet on",
    ):
        assert words in text, text
    mount = tmp_path / "input"
    (mount / "datasets/me/my-gemma").mkdir(parents=True)
    monkeypatch.setattr("ensemble.common.text._KAGGLE_MOUNT", mount)
    elsewhere = f"; my-gemma is mounted at {mount}/datasets/me/my-gemma: name that"
    assert not_attached(mount / "my-gemma" / "final").endswith(elsewhere)
    assert not_attached(mount / "datasets/me/my-gemma/final") == "", "it is there, and has no such folder"
    assert "attach the dataset other" in not_attached(mount / "datasets/me/other")
    assert "attach the model x" in not_attached(mount / "models/me/x/transformers/9b/1")
    assert not_attached(tmp_path / "nowhere") == ""


def test_less_memory_than_the_plan_takes(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's process takes a GiB of the host, about, for each GPU."""
    monkeypatch.setattr(doctor, "available_memory_bytes", lambda: 2 * GIB)
    results = [*host_findings(3 * GIB)]
    assert marks(results)[:2] == ["ok", "note"]
    assert results[1].text == "the plan's workers take about 3.0 GiB of memory at once, 2.0 GiB are free"
    assert "fewer replicas" in results[1].advice
    assert len([*host_findings(2 * GIB)]) == len(results) - 1
    project.write_config(project.config(models=project.config()["models"][:1], submission=None))
    monkeypatch.setattr(doctor, "available_memory_bytes", lambda: 100 * MIB)
    monkeypatch.setattr(doctor, "run_trials", lambda *_: [])
    monkeypatch.chdir(project.folder)
    texts = [finding.text for finding in examine([Path("config.yaml")])]
    (told,) = [text for text in texts if text.startswith("the plan's workers take about ")]
    assert told.endswith(" of memory at once, 100.0 MiB are free")


def test_devices_of_which_the_same_is_to_be_said_share_a_finding() -> None:
    unseen = replace(GOOD, sees_gpu=False, cuda=None)
    others = [replace(T4, uuid=gpu_uuid(index)) for index in (2, 3)]
    reports = zip((T4, *others), (unseen, GOOD, unseen), strict=True)
    first, second = trial_findings([DeviceTrial(device, report) for device, report in reports], (12, 4))
    told = f"Tesla T4 ({gpu_uuid(1)}), Tesla T4 ({gpu_uuid(3)}): torch 2.9 is a build without CUDA, "
    assert first.text.startswith(told)
    assert second.text.startswith(f"Tesla T4 ({gpu_uuid(2)}): torch 2.9 (CUDA 12.4) computes correctly")


def test_a_gpu_without_code_is_told_as_the_plan_tells_it() -> None:
    """So that the config's check and the test process make one finding."""
    p100 = replace(T4, name="Tesla P100-PCIE-16GB", compute_capability=(6, 0))
    of_plan = f"{p100.title}: {torch_problem(p100.compute_capability, BUILD)}"
    report = replace(GOOD, capability=(6, 0), architectures=BUILD, errors={"multiply in float32": NO_CODE})
    assert judged(report, p100) == [Finding.of_sentence("problem", of_plan, "fix the config")]


def test_a_gpu_without_expandable_segments_is_told_the_key_that_turns_them_off() -> None:
    error = "RuntimeError: CUDA driver error: operation not supported"
    (finding,) = judged(replace(GOOD, errors={"allocate 256 MiB": error, "multiply in float32": error}))
    assert finding.mark == "problem"
    assert finding.advice.startswith("set expandable_segments: false")
    first, _ = judged(replace(GOOD, errors={"allocate 256 MiB": error, "multiply in float32": "another"}))
    assert "expandable_segments" not in first.advice


def test_imports_that_fail_are_told_besides() -> None:
    result = judged(
        replace(GOOD, errors={"import ensemble.members.seq_cls.predictor": "a", "import peft": "b"})
    )
    assert marks(result) == ["ok", "problem", "problem"]
    assert "a worker's imports fail (a)" in result[1].text
    assert "peft cannot be imported (b)" in result[2].text


def test_a_lost_gpu_and_a_wrong_mask_come_with_advice(
    empty_project: Project, nvml_sim: NvmlSim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = gpus(2)
    machine[1] = replace(machine[1], fails=[Fail("DeviceGetMemoryInfo", GPU_IS_LOST)])
    nvml_sim.write(machine)
    at_torch(monkeypatch, tmp_path, "raise ImportError()")
    environment = {**nvml_sim.environment(), "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    done = empty_project.ensemble("doctor", environment=environment)
    assert f"note     GPU 1 ({gpu_uuid(1)}) is left out" in done.stdout
    assert "restart" in done.stdout
    masked = Inventory(
        (), "x: running on the CPU", "550", (), "CUDA_VISIBLE_DEVICES=7: '7' names no GPU; fix it"
    )
    results = [*inventory_findings(masked, None)]
    assert marks(results) == ["ok", "problem"]
    assert results[1].advice == "fix it"


# Packages


@pytest.mark.parametrize(
    ("installed", "needed", "mark", "text"),
    [
        ({"torch": "2.6.0a0+df5bbc09d1.nv24.11"}, {}, "ok", "torch\xa02.6.0a0+df5bbc09d1.nv24.11"),
        ({"torch": "2.10"}, {}, "ok", "torch\xa02.10"),
        ({"torch": "2.5.1"}, {}, "problem", "torch 2.5.1 is older than 2.6"),
        ({}, {}, "problem", "torch is not installed"),
        ({"torch": "2.6", "peft": "0.13.2"}, {}, "note", "peft 0.13.2 is older than 0.14"),
        (
            {"torch": "2.6", "peft": "0.13"},
            {"peft": "models[0].x"},
            "problem",
            "peft 0.13 is older than 0.14, which models[0].x needs",
        ),
    ],
)
def test_packages(
    installed: dict[str, str], needed: dict[str, str], mark: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "installed_versions", lambda _: installed)
    requirements = [Requirement("torch", "2.6"), Requirement("peft", "0.14", extra="adapters")]
    first = next(package_findings(requirements, needed))
    assert (first.mark, text in first.text) == (mark, True), first
    assert mark == "ok" or first.advice.startswith("pip install '")


@pytest.mark.parametrize("needed", [{}, {"peft": "models[0].x"}])
def test_extras_are_not_missed_here(needed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_versions", lambda _: {})
    assert not [*package_findings([Requirement("peft", "0.14", extra="adapters")], needed)]


# Memory, CPUs, disk


@pytest.mark.parametrize(
    ("available", "limit", "marks_expected", "advice"),
    [
        (20 * GIB, None, ["ok", "ok"], ""),
        (GIB, 2.5, ["note", "note"], "set OMP_NUM_THREADS=2, "),
        (100 * MIB, 0.5, ["problem", "note"], "set OMP_NUM_THREADS=1, "),
        (None, 4.0, ["ok"], ""),
    ],
)
def test_memory_and_cpus(
    available: int | None,
    limit: float | None,
    marks_expected: list[str],
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "available_memory_bytes", lambda: available)
    monkeypatch.setattr(Groups, "cpu_limit", lambda self: limit)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    results = [*host_findings()]
    assert marks(results) == marks_expected
    assert all(finding.advice or finding.mark == "ok" for finding in results)
    assert results[-1].text.startswith("4 of ")
    assert results[-1].advice.startswith(advice)


def test_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (result,) = disk_findings("output_dir", tmp_path / "a" / "b")
    assert "output_dir: " in result.text
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("x")
    (result,) = disk_findings("output_dir", tmp_path / "file" / "b")
    assert (result.mark, result.advice) == ("problem", "choose another directory")
    (result,) = disk_findings("output_dir", Path("/proc/self/nowhere"))
    assert result.mark == "problem"
    for free, mark in ((2 * GIB, "ok"), (GIB // 2, "note"), (40 * MIB, "problem")):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        assert marks([*disk_findings("k", tmp_path)]) == [mark]


# The list


def test_lines_are_broken_and_advice_stands_below() -> None:
    long = _finding_lines(Finding("note", "word " * 30, "do " * 40), None)
    assert all(len(line) <= 100 for line in long)
    assert long[0].startswith("note     word")
    assert next(line for line in long if "->" in line).startswith("         -> do")
    assert Finding.of_sentence("problem", "a; b; c", "d") == Finding("problem", "a; b", "c")
    assert Finding.of_sentence("problem", "a", "d") == Finding("problem", "a", "d")


def test_a_check_that_breaks_hides_no_other(
    empty_project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_torch(monkeypatch, tmp_path, "raise ImportError()")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    # A directory for the hub's settings that no library can make anything of.
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    results = [*examine()]
    broken = [finding for finding in results if "could not be checked" in finding.text]
    assert broken[0].mark == "problem"
    assert "the disk" in broken[0].text
    assert results[-1].text.startswith("the CPU: torch cannot")
