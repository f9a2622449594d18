"""Check whether a run can start here: Python, packages, memory, CPUs, disk, the hub, the driver, and devices.

Test processes try torch on the devices (``device_trials``); nothing here imports torch or changes anything.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from ensemble.common.device_trials import CPU, INSTALL_TORCH, DeviceTrial, run_trials, unusable_gpu
from ensemble.common.errors import DeviceError, EnsembleError
from ensemble.common.files import free_bytes, unwritable_reason
from ensemble.common.gpus import (
    MIN_REPORTED_BYTES,
    Device,
    Inventory,
    driver_cuda_version,
    gpu_users,
    inventory,
    processes_on,
)
from ensemble.common.host import available_memory_bytes, own_groups, total_memory_bytes
from ensemble.common.packages import ANALYSIS, MODULES, Requirement, installed_versions, own_requirements
from ensemble.common.python_process import keep_pandas_out
from ensemble.common.text import NO_BREAK, gib, plural
from ensemble.common.torch_build import torch_problem
from ensemble.config import LoadedConfig, RunConfig
from ensemble.jobs.job import compile_models
from ensemble.members.huggingface.checkpoint.hub import hub_can_be_reached
from ensemble.members.registry import member_kind
from ensemble.pipeline.load import load
from ensemble.pipeline.prepare import may_use_gpus, needed_packages, nodes_of, prepare
from ensemble.pipeline.prepared import Prepared
from ensemble.planning.placement import chosen_devices
from ensemble.scheduling.launchers.base import Launcher, Node, make_launcher

# A worker takes 0.4 GiB after it has imported torch and transformers.
_MEMORY_NEEDED, _MEMORY_WANTED = 512 << 20, 2 << 30
_DISK_NEEDED, _DISK_WANTED = 50 << 20, 1 << 30
_ELSEWHERE = "choose another directory, or make room there"
_MASK_ADVICE = "to use GPUs set CUDA_VISIBLE_DEVICES to some that nvidia-smi -L lists, or unset it"
# Errors of CUDA and cuBLAS if a build does not support a GPU's architecture.
_NO_CODE = ("no kernel image", "ARCH_MISMATCH")

Mark = Literal["ok", "note", "problem"]
Version = tuple[int, int]


@dataclass(frozen=True)
class Finding:
    """State a fact about this machine, with advice; with a problem no run can start."""

    mark: Mark
    text: str
    advice: str = ""

    @classmethod
    def of_sentence(cls, mark: Mark, sentence: str, otherwise: str) -> Finding:
        """Split one of this package's sentences, most of which end with advice after a semicolon."""
        text, _, advice = sentence.rpartition("; ")
        return cls(mark, text, advice) if text else cls(mark, sentence, otherwise)

    @classmethod
    def of_amount(cls, text: str, size: float, needed: float, enough: float, *advice: str) -> Finding:
        """Judge an amount: the first advice is for less than ``needed``, the last for less than ``enough``."""
        if size < enough:
            return cls("problem", text, advice[0]) if size < needed else cls("note", text, advice[-1])
        return cls("ok", text)


def examine(
    paths: Sequence[Path] = (),
    overrides: Sequence[str] = (),
    check_trainings: Callable[[LoadedConfig], tuple[LoadedConfig, list[str]]] = lambda loaded: (loaded, []),
) -> Iterator[Finding]:
    """Look at this machine, for a config if one is given; yield findings as they are made.

    ``check_trainings`` returns the config with the members that are trained, and warnings; it may raise.
    """
    yielded = set()
    for finding in _findings(paths, overrides, check_trainings):
        # The checks of the config and those of the machine may find the same problem.
        if (finding.mark, finding.text) not in yielded:
            yielded.add((finding.mark, finding.text))
            yield finding


def _findings(
    paths: Sequence[Path],
    overrides: Sequence[str],
    check_trainings: Callable[[LoadedConfig], tuple[LoadedConfig, list[str]]],
) -> Iterator[Finding]:
    version = platform.python_version()
    yield Finding("ok", f"Python {version} ({sys.executable}), {platform.platform(terse=True)}")
    config: RunConfig | None = None
    prepared: Prepared | None = None
    if paths:
        try:
            loaded = load(paths, overrides)
            config = loaded.config
            keep_pandas_out()
            loaded, warnings = check_trainings(loaded)
            config = loaded.config
            yield from (Finding("note", text) for text in warnings)
            for model in config.trained_members:
                advice = "`ensemble train CONFIG` trains it, and `ensemble plan CONFIG` says what that takes"
                yield Finding("note", f"{model.name} is not trained yet", advice)
            prepared = prepare(loaded)
            # The inventory's warnings come with the devices.
            notes = [text for text in prepared.warnings if text not in prepared.inventory.warnings]
            yield from (Finding("note", text) for text in (*notes, *prepared.plan.warnings))
        except EnsembleError as error:
            advice = "fix the config, or what it names"
            yield from (Finding.of_sentence("problem", text, advice) for text in error.problems)
        except Exception as error:
            yield _not_checked("the config", error)
    of_models = {} if prepared is None else prepared.of_models
    models = () if config is None else compile_models(config.models, config.labels)
    needed = needed_packages(models, of_models)
    key, folder = ("working directory", Path()) if config is None else ("output_dir", config.output_dir)
    launcher: Launcher | None = None
    nodes: tuple[Node, ...] = ()
    if config is not None and config.launcher != "local":
        with contextlib.suppress(EnsembleError):  # already reported
            launcher = make_launcher(config.launcher, config.hang_timeout)
            with contextlib.suppress(DeviceError):  # nodes of other versions can be shown
                launcher.inventory()
            nodes = nodes_of(models, of_models, launcher)
    devices = _devices(config, needed)
    if launcher is not None and nodes:  # this machine's devices are not used unless it is a node
        devices = _of_nodes(launcher, nodes, _imports(needed))
    plan_bytes = 0 if prepared is None or nodes else prepared.plan.host_bytes
    checks = {
        "the packages": package_findings(own_requirements(), needed),
        "memory and CPUs": host_findings(plan_bytes),
        "the disk": disk_findings(key, folder),
        "the Hugging Face hub": _hub(),
        "the devices": devices,
    }
    try:
        for subject, findings in checks.items():
            try:
                yield from findings
            except Exception as error:  # must not hide the other findings
                yield _not_checked(subject, error)
    finally:
        if launcher is not None:
            launcher.close()


def _not_checked(subject: str, error: Exception) -> Finding:
    text = f"{subject} could not be checked ({type(error).__name__}: {error})"
    return Finding("problem", text, "fix the other problems first; if this one stays, please report it")


def package_findings(requirements: Iterable[Requirement], needed: Mapping[str, str]) -> Iterator[Finding]:
    """Check packages' versions; ``needed`` has the key that needs a package of an extra, by the package's name."""
    good = []
    installed = installed_versions([requirement.name for requirement in requirements])
    for requirement in requirements:
        name, version = requirement.name, installed.get(requirement.name)
        mark: Mark = "note" if requirement.extra or name in ANALYSIS else "problem"
        why = "; fit, compare and the report need it, a run does not" if name in ANALYSIS else ""
        if name in needed:
            mark, why = "problem", f", which {needed[name]} needs"
        if version is None:
            if not requirement.extra:
                yield Finding(mark, f"{name} is not installed{why}", requirement.install)
        elif requirement.wrong(version):
            yield Finding(mark, f"{name} {version} is {requirement.wrong(version)}{why}", requirement.install)
        else:
            good.append(f"{name}{NO_BREAK}{version}")
    if good:
        yield Finding("ok", ", ".join(good))


def host_findings(plan_bytes: int = 0) -> Iterator[Finding]:
    """Check memory and CPUs within the container's limits, for a plan that takes so much memory."""
    available, total = available_memory_bytes(), total_memory_bytes()
    if available is not None and total is not None:
        text = f"{gib(available)} of {gib(total)} memory free"
        advice = "end other programs or raise the container's limit; "
        too_few, few = f"{advice}a worker needs more", f"{advice}only small models fit"
        yield Finding.of_amount(text, available, _MEMORY_NEEDED, _MEMORY_WANTED, too_few, few)
        if available < plan_bytes:
            text = f"the plan's workers take about {gib(plan_bytes)} of memory at once, {gib(available)} are free"
            yield Finding("note", text, f"{advice}or set fewer replicas or a lower max_workers_per_gpu")
    allowed, limit = len(os.sched_getaffinity(0)), own_groups("cpu").cpu_limit()
    text, advice = f"{allowed} of {os.cpu_count()} CPUs may be used", ""
    if limit is not None and limit < allowed:
        # torch starts a thread for each CPU, and the threads then wait for each other.
        text += f", and the container's limit is the time of {limit:g}"
        advice = f"set OMP_NUM_THREADS={max(1, int(limit))}, or raise the limit"
    yield Finding("note" if advice else "ok", text, advice)


def disk_findings(key: str, folder: Path) -> Iterator[Finding]:
    """Check whether a directory can be written, and its free space."""
    reason = unwritable_reason(key, folder)
    if reason is not None:
        yield Finding.of_sentence("problem", reason, _ELSEWHERE)
        return
    free = free_bytes(folder) or 0
    text = f"{key}: {gib(free)} free at {folder.absolute()}"
    few = "make room: the results and a copy of the table go there"
    yield Finding.of_amount(text, free, _DISK_NEEDED, _DISK_WANTED, _ELSEWHERE, few)


def _hub() -> Iterator[Finding]:
    from huggingface_hub import constants, get_token

    host = urlsplit(constants.ENDPOINT).hostname or "its address"
    if hub_can_be_reached():
        missing = "without a token: gated models, such as Gemma, need HF_TOKEN"
        token = "with a token" if get_token() else missing
        yield Finding("ok", f"the Hugging Face hub can be reached ({host}), {token}")
    else:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"no connection to {host}"
        advice = "name models by folders; what is in the hub's cache works too"
        yield Finding("note", f"the Hugging Face hub cannot be reached ({why})", advice)


def _devices(config: RunConfig | None, needed: dict[str, str]) -> Iterator[Finding]:
    machine, driver_cuda = inventory(), driver_cuda_version()
    wants = [True] if config is None else may_use_gpus(config)
    yield from inventory_findings(machine, driver_cuda, any(wants))
    devices: list[Device] = list(machine.gpus) or [CPU]
    if config is not None:
        with contextlib.suppress(EnsembleError):  # already reported
            gpus = list(chosen_devices(machine.gpus, config.devices)) if any(wants) else []
            devices = gpus if gpus and all(wants) else [*gpus, CPU]
    with_code = [device for device in devices if not device.torch_problem]
    if any(device.is_gpu for device in with_code):  # a run leaves out the others
        left_out = [
            f"{device.title}: {device.torch_problem}" for device in devices if device not in with_code
        ]
        yield from (Finding.of_sentence("note", sentence, "") for sentence in left_out)
        devices = with_code
    if installed_versions(["torch"]):  # otherwise already reported
        environment: dict[str, str] = {}
        for model in config.models if config is not None else ():
            environment |= member_kind(model).environment()
        imports, free = _imports(needed), available_memory_bytes()
        trials = run_trials(devices, imports, free, environment=environment)
        yield from trial_findings(trials, driver_cuda)


def _imports(needed: Mapping[str, str]) -> list[str]:
    """Return the modules that the first test process imports besides torch."""
    installed = [MODULES.get(name, name) for name in needed if installed_versions([name])]
    return ["ensemble.members.seq_cls.predictor", *installed]  # as a worker does before it loads a model


def _of_nodes(launcher: Launcher, nodes: Sequence[Node], imports: Sequence[str]) -> Iterator[Finding]:
    """Check each node of a cluster: its resources, its copies of the models, and torch on its devices."""
    devices = [device for node in nodes for device in node.gpus or [replace(CPU, node=node.name)]]
    trials = launcher.trials(devices, imports)
    for node in nodes:
        title = f"node {node.name}"
        versions = ", ".join(f"{name}{NO_BREAK}{version}" for name, version in node.versions.items())
        yield Finding("ok", f"{title}: {versions}")
        memory = f"{gib(node.available_bytes)} of {gib(node.total_bytes)} memory free"
        text, few = f"{title}: {memory}, {plural(node.cpus, 'CPU')}", "end other programs there"
        yield Finding.of_amount(text, node.available_bytes, _MEMORY_NEEDED, _MEMORY_WANTED, few, few)
        if node.free_disk_bytes is not None:
            text = f"{title}: {gib(node.free_disk_bytes)} of disk free for the run's files"
            few = "make room there, or let TMPDIR name another disk there"
            yield Finding.of_amount(text, node.free_disk_bytes, _DISK_NEEDED, _DISK_WANTED, few, few)
        yield from map(_of_gpu, node.gpus)
        if not node.gpus:
            yield Finding("note", f"{title} has no GPU that this run may use: it computes on its CPUs")
        if node.models:
            is_ready = set(node.models.values()) <= {"there", "on the hub", "sent"}
            yield Finding("ok" if is_ready else "note", f"{title}: models: {node.models_text}")
        yield from (Finding.of_sentence("problem", text, "look at the node") for text in node.problems)
        yield from trial_findings([trial for trial in trials if trial.device.node == node.name], None)


def inventory_findings(
    machine: Inventory, driver_cuda: Version | None, needs_gpu: bool = True
) -> Iterator[Finding]:
    """Check the driver and the GPUs; with ``needs_gpu``, a mask without a GPU is a problem."""
    if machine.driver_version is not None:
        cuda = f", CUDA up to {_dotted(driver_cuda)}" if driver_cuda else ""
        yield Finding("ok", f"NVIDIA driver {machine.driver_version}{cuda}")
    if machine.mask_problem:
        yield Finding.of_sentence("problem" if needs_gpu else "note", machine.mask_problem, _MASK_ADVICE)
    elif machine.note:
        missing = "to use GPUs install NVIDIA's driver (in a container: --gpus all)"
        advice = (
            f"big models are very slow there; {missing}" if machine.driver_version is None else _MASK_ADVICE
        )
        yield Finding("note", machine.note, advice)
    for warning in machine.warnings:
        is_mask = warning.startswith("CUDA_VISIBLE_DEVICES")
        advice = _MASK_ADVICE if is_mask else "look at nvidia-smi; a restart may help"
        yield Finding("note", warning, advice)
    yield from map(_of_gpu, machine.gpus)


def _of_gpu(gpu: Device) -> Finding:
    capability = f", capability {_dotted(gpu.compute_capability)}" if gpu.compute_capability else ""
    text = f"{gpu.title}{capability}, {gib(gpu.used_bytes)} of {gib(gpu.total_bytes)} used"
    if gpu.used_bytes < MIN_REPORTED_BYTES and (gpu.node or not processes_on(gpu.uuid)):
        return Finding("ok", text)
    advice = "end what holds the memory if the models need it, or set wait_for_gpu"
    return Finding("note", f"{text}; {gpu_users(gpu)}", advice)


def trial_findings(trials: Sequence[DeviceTrial], driver_cuda: Version | None) -> Iterator[Finding]:
    """Judge the test processes; devices with the same result share a finding."""
    together: dict[Finding, list[str]] = {}
    for trial in trials:
        for finding in _of_trial(trial, driver_cuda):
            together.setdefault(finding, []).append(trial.device.title)
    for finding, names in together.items():
        yield replace(finding, text=f"{', '.join(names)}: {finding.text}")


def _of_trial(trial: DeviceTrial, driver_cuda: Version | None) -> Iterator[Finding]:
    report, device = trial.report, trial.device
    if report is None:
        suspect = "GPU (nvidia-smi)" if device.is_gpu else "installation of torch"
        advice = f"try again; if it happens again, look at the {suspect}"
        if trial.signal_number == signal.SIGKILL:
            advice = "usually memory ran out: look at dmesg and at the container's memory limit"
        elif trial.signal_number == signal.SIGILL:
            advice = "this CPU is too old for this build of torch: install another build"
        yield Finding("problem", trial.ending, advice)
        return
    errors = dict(report.errors)
    if "import torch" in errors:
        text = f"torch cannot be imported ({errors['import torch']})"
        yield Finding("problem", text, f"reinstall it: {INSTALL_TORCH}")
        return
    imports = {tried: errors.pop(tried) for tried in report.errors if tried.startswith(("import ", "open "))}
    capability = report.capability or device.compute_capability
    if device.is_gpu and not report.sees_gpu:
        reason = report.errors.get("start CUDA", "it sees no GPU")
        yield Finding("problem", *unusable_gpu(report.torch, report.cuda, reason, driver_cuda))
    elif capability and any(words in error for words in _NO_CODE for error in errors.values()):
        sentence = torch_problem(capability, report.architectures, has_failed=True)
        yield Finding.of_sentence("problem", sentence, "")
    elif errors and all("CUDA driver error" in error for error in errors.values()):
        text = f"torch {report.torch} cannot allocate with expandable segments here, as on some vGPUs"
        yield Finding("problem", text, "set expandable_segments: false (under defaults, for all members)")
    elif errors:
        for tried, error in errors.items():
            advice = f"end what holds the memory, update the driver or reinstall torch: {INSTALL_TORCH}"
            yield Finding("problem", f"torch {report.torch} could not {tried} ({error})", advice)
    else:
        build = f"torch {report.torch}" + (f" (CUDA {report.cuda})" if report.cuda and capability else "")
        free = f", {gib(report.free_bytes)} free" if report.free_bytes is not None else ""
        passed = ", ".join(report.passed)
        yield Finding("ok", f"{build} computes correctly in {passed}{free}")
    for tried, error in imports.items():
        module = tried.removeprefix("import ")
        text, advice = f"{module} cannot be imported ({error})", "install what it names, or reinstall it"
        if module.startswith("ensemble."):
            text = f"a worker's imports fail ({error})"
        elif tried.startswith("open "):
            text = f"could not {tried} for torch's CUDA {report.cuda} ({error})"
            advice = "install a release of bitsandbytes that has it: python -m bitsandbytes says more"
        yield Finding("problem", text, advice)


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
