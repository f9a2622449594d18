"""GPUs: the driver, what each GPU holds, whether torch has code for it, and what the test processes mean."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from typing import Literal

from ensemble.cli.doctor.machine import Finding, Mark
from ensemble.common.device_trials import Report, Trial
from ensemble.common.gpus import MIN_REPORTED_BYTES, Inventory, gpu_users, processes_on
from ensemble.common.text import gib

Version = tuple[int, int]

# GPUs inside of Tegra chips; code for the others does not run there, nor the other way round.
_TEGRA = {(5, 3), (6, 2), (7, 2), (8, 7), (10, 1), (11, 0)}
_INSTALL = "see https://pytorch.org/get-started/locally/"
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")
_MASK_ADVICE = "to use GPUs set CUDA_VISIBLE_DEVICES to some that nvidia-smi -L lists, or unset it"
_ENDINGS: dict[int, str] = {
    signal.SIGKILL: "usually memory ran out: look at dmesg and at the container's memory limit",
    signal.SIGILL: "this CPU is too old for this build of torch: install another build",
}


def inventory_findings(
    found: Inventory, driver_cuda: Version | None, needs_gpu: bool = True
) -> Iterator[Finding]:
    """The driver and the GPUs that may be used.

    Args:
        driver_cuda: the newest CUDA that the driver knows, None where it does not say.
        needs_gpu: whether a mask that names no GPU keeps the run from starting.
    """
    if found.driver_version is not None:
        cuda = f", CUDA up to {_dotted(driver_cuda)}" if driver_cuda else ""
        yield Finding("ok", f"NVIDIA driver {found.driver_version}{cuda}")
    if found.mask_problem:
        mark: Mark = "problem" if needs_gpu else "note"
        yield Finding.of_sentence(mark, found.mask_problem, _MASK_ADVICE)
    elif found.note:
        advice = (
            "big models are very slow there; to use GPUs install NVIDIA's driver (in a container: --gpus all)"
        )
        yield Finding("note", found.note, advice if found.driver_version is None else _MASK_ADVICE)
    for warning in found.warnings:
        is_mask = warning.startswith("CUDA_VISIBLE_DEVICES")
        advice = _MASK_ADVICE if is_mask else "look at nvidia-smi; a restart may help"
        yield Finding("note", warning, advice)
    for gpu in found.gpus:
        capability = f", capability {_dotted(gpu.compute_capability)}" if gpu.compute_capability else ""
        used = f"{gib(gpu.used_bytes)} of {gib(gpu.total_bytes)} used"
        text = f"{gpu.name} ({gpu.uuid}){capability}, {used}"
        if gpu.used_bytes >= MIN_REPORTED_BYTES or processes_on(gpu.uuid):
            advice = "end what holds the memory if the models need it, or set wait_for_gpu"
            yield Finding("note", f"{text}; NVML shows {gpu_users(gpu.uuid)} there", advice)
        else:
            yield Finding("ok", text)


def code_for(architectures: Sequence[str], capability: Version) -> Literal["binary", "ptx"] | None:
    """What a build of torch has for a GPU: its machine code, PTX that the driver compiles at first use, or nothing.

    Machine code runs on the same major capability from its minor one on; PTX on any later one.  An "a" at the end
    binds either to its very capability, an "f" to its family (CUDA C++ Programming Guide, "Compute Capabilities").

    Args:
        architectures: as ``torch.cuda.get_arch_list()`` has them, such as "sm_90a" or "compute_120".
    """
    kinds: set[str] = set()
    for architecture in architectures:
        if not (found := _ARCHITECTURE.fullmatch(architecture)):
            continue
        kind, built, bound = found[1], (int(found[2]), int(found[3])), found[4]
        within_major = built[0] == capability[0] and built <= capability
        if (built in _TEGRA) != (capability in _TEGRA) and kind == "sm":
            within_major = False
        fits = built <= capability if kind == "compute" and not bound else within_major
        if built == capability or (fits and bound != "a"):
            kinds.add(kind)
    return "binary" if "sm" in kinds else "ptx" if "compute" in kinds else None


def trial_findings(trials: Sequence[Trial], driver_cuda: Version | None) -> Iterator[Finding]:
    """What the test processes say; devices of which the same is to be said share a finding."""
    together: dict[tuple[Mark, str, str], list[str]] = {}
    for trial in trials:
        name = f"{trial.device.name} ({trial.device.uuid})" if trial.device.is_gpu else trial.device.name
        for finding in _judge(trial, driver_cuda):
            together.setdefault((finding.mark, finding.text, finding.advice), []).append(name)
    for (mark, text, advice), names in together.items():
        yield Finding(mark, f"{', '.join(names)}: {text}", advice)


def _judge(trial: Trial, driver_cuda: Version | None) -> Iterator[Finding]:
    report, capability = trial.report, trial.device.compute_capability
    if report is None:
        advice = _ENDINGS.get(trial.signal_number or 0)
        tried = "GPU (nvidia-smi)" if trial.device.is_gpu else "installation of torch"
        again = f"try again; if it happens again, look at the {tried}"
        yield Finding("problem", trial.ending, advice or again)
        return
    if "import torch" in report.errors:
        text = f"torch cannot be imported ({report.errors['import torch']})"
        yield Finding("problem", text, f"reinstall it: {_INSTALL}")
        return
    capability = report.capability or capability
    if trial.device.is_gpu and not report.sees_gpu:
        yield _unseen(report, driver_cuda)
    elif capability and report.architectures and code_for(report.architectures, capability) is None:
        text = f"torch {report.torch} has no code for capability {_dotted(capability)}, only for "
        advice = f"install a build of torch that has sm_{capability[0]}{capability[1]}: {_INSTALL}"
        yield Finding("problem", text + ", ".join(report.architectures), advice)
    else:
        yield from _worked(trial, report, capability)
    for tried, error in report.errors.items():
        if tried.startswith("import "):
            module = tried.removeprefix("import ")
            what = f"{module} cannot be imported"
            if module.startswith("ensemble."):
                what = "a worker's imports fail"
            yield Finding("problem", f"{what} ({error})", "install what it names, or reinstall it")


def _unseen(report: Report, driver_cuda: Version | None) -> Finding:
    """Why torch does not see a GPU that the driver shows."""
    knows = f"the driver knows CUDA up to {_dotted(driver_cuda)}" if driver_cuda else "the driver shows a GPU"
    build = f"a build of torch for CUDA {driver_cuda[0]}" if driver_cuda else "a build of torch for CUDA"
    if report.cuda is None:
        text = f"torch {report.torch} is a build without CUDA, and {knows}"
        return Finding(
            "problem", text, f"install {build} ({_INSTALL}), or hide the GPU: CUDA_VISIBLE_DEVICES=-1"
        )
    if driver_cuda and int(report.cuda.split(".")[0]) > driver_cuda[0]:
        text = f"torch {report.torch} is built for CUDA {report.cuda}, and {knows}"
        return Finding("problem", text, f"update the driver, or install {build} ({_INSTALL})")
    reason = report.errors.get("start CUDA", "no reason given")
    advice = (
        "see whether nvidia-smi works and /dev/nvidia* may be opened; restart after an update of the driver"
    )
    return Finding("problem", f"torch {report.torch} cannot start CUDA ({reason})", advice)


def _worked(trial: Trial, report: Report, capability: Version | None) -> Iterator[Finding]:
    failed = {tried: error for tried, error in report.errors.items() if not tried.startswith("import ")}
    for tried, error in failed.items():
        short = "OutOfMemory" in error or "out of memory" in error
        advice = "end what holds the memory" if short else f"update the driver or reinstall torch: {_INSTALL}"
        yield Finding("problem", f"torch {report.torch} could not {tried} ({error})", advice)
    if failed:
        return
    build = f"torch {report.torch}" + (f" (CUDA {report.cuda})" if report.cuda and capability else "")
    free = f", {gib(report.free_bytes)} free" if report.free_bytes is not None else ""
    text = f"{build} computes correctly in {', '.join(report.passed)}{free} ({trial.seconds:.0f} s)"
    if capability and report.architectures and code_for(report.architectures, capability) == "ptx":
        advice = f"install a build that has sm_{capability[0]}{capability[1]}: {_INSTALL}"
        yield Finding("note", f"{text}, and its code is compiled at first use, which takes minutes", advice)
    else:
        yield Finding("ok", text)


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
