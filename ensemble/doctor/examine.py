"""Every check of ``doctor``, in the order of the list it prints."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ensemble.devices import Device, Inventory, driver_cuda_version, inventory
from ensemble.doctor.finding import Finding
from ensemble.doctor.gpus import inventory_findings, trial_findings
from ensemble.doctor.packages import (
    installed_versions,
    own_requirements,
    package_findings,
    python_findings,
)
from ensemble.doctor.places import disk_findings, host_findings
from ensemble.doctor.sources import named_sources, source_findings
from ensemble.doctor.trials import CPU, run_trials
from ensemble.errors import EnsembleError
from ensemble.hostmemory import available_memory_bytes

if TYPE_CHECKING:
    from ensemble.config import ModelConfig, RunConfig

# What a worker imports before it loads a model.
_WORKER = "ensemble.worker.member"


def examine(path: Path | None = None, overrides: Sequence[str] = ()) -> Iterator[Finding]:
    """Look at this machine, in the light of a config where one is given; findings come as they are made.

    Args:
        path: the config's file.
        overrides: as ``load_config`` takes them.
    """
    yield from python_findings(sys.version_info[:2], platform.python_version())
    config: RunConfig | None = None
    if path is not None:
        try:
            config = _load(path, overrides)
        except EnsembleError as error:
            yield from (Finding.of_sentence("problem", text, "mend the config") for text in error.problems)
        except Exception as error:
            yield _not_checked("the config", error)
    needed = _needed_packages(config)
    sources = [] if config is None else [*named_sources(config.models)]
    yield from _guarded("the packages", lambda: _packages(needed))
    yield from _guarded("memory and CPUs", host_findings)
    key, place = ("working directory", Path()) if config is None else ("output_dir", config.output_dir)
    yield from _guarded("the disk", lambda: disk_findings(key, place))
    yield from _guarded("the Hugging Face hub", lambda: source_findings(sources))
    yield from _guarded("the devices", lambda: _devices(config, needed))


def _guarded(subject: str, findings: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Findings as they come; a check that breaks is a finding too and hides none of the others."""
    try:
        yield from findings()
    except Exception as error:
        yield _not_checked(subject, error)


def _not_checked(subject: str, error: Exception) -> Finding:
    text = f"{subject} could not be checked ({type(error).__name__}: {error})"
    return Finding("problem", text, "mend the other problems first; please report it if it stays")


def _load(path: Path, overrides: Sequence[str]) -> RunConfig:
    from ensemble.config import load_config

    return load_config(path, overrides).config


def _packages(needed: dict[str, str]) -> Iterator[Finding]:
    requirements = own_requirements()
    if not requirements:
        advice = "install this package with pip, which checks them"
        yield Finding("note", "nothing says which versions of the packages are needed", advice)
    yield from package_findings(requirements, installed_versions([one.name for one in requirements]), needed)


def _needed_packages(config: RunConfig | None) -> dict[str, str]:
    """Packages of extras that the config needs, and the first key that needs each."""
    needed: dict[str, str] = {}
    for index, model in enumerate(config.models if config is not None else ()):
        method = (model.quantization_config or {}).get("quant_method", "bitsandbytes")
        if model.quantization_config is not None and method == "bitsandbytes":
            needed.setdefault("bitsandbytes", f"models[{index}].quantization_config")
        elif _stored_quantization(model) == "bitsandbytes":
            needed.setdefault("bitsandbytes", f"models[{index}], a quantized checkpoint,")
        if model.adapter_name_or_path is not None:
            needed.setdefault("peft", f"models[{index}].adapter_name_or_path")
        if model.gguf_file is not None:
            needed.setdefault("gguf", f"models[{index}].gguf_file")
    return needed


def _stored_quantization(model: ModelConfig) -> str | None:
    """How a checkpoint in a folder was quantized before it was saved."""
    try:
        document = json.loads((Path(model.model_name_or_path) / "config.json").read_text(encoding="utf-8"))
        return str(document["quantization_config"]["quant_method"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _devices(config: RunConfig | None, needed: dict[str, str]) -> Iterator[Finding]:
    machine, driver_cuda = inventory(), driver_cuda_version()
    yield from inventory_findings(machine, driver_cuda)
    devices: list[Device] = list(machine.gpus) or [CPU]
    if config is not None:
        devices, problems = _wanted_devices(config, machine)
        yield from problems
    if not installed_versions(["torch"]):
        return  # said before; it cannot be tried
    imports = [_WORKER, *(name for name in needed if installed_versions([name]))]
    yield from trial_findings(run_trials(devices, imports, available_memory_bytes()), driver_cuda)


def _wanted_devices(config: RunConfig, machine: Inventory) -> tuple[list[Device], list[Finding]]:
    """The devices that the config's members run on, and members that ask for more than there are."""
    from ensemble.planning.placement import chosen_devices

    try:
        gpus = chosen_devices(machine.gpus, config.devices)
    except EnsembleError as error:
        return list(machine.gpus) or [CPU], [
            Finding.of_sentence("problem", text, "mend the config") for text in error.problems
        ]
    problems = [
        Finding(
            "problem",
            f"models[{index}].num_gpus: {model.name} asks for {model.num_gpus}, but {len(gpus)} can be used here",
            "lower it, or make more visible (CUDA_VISIBLE_DEVICES, devices)",
        )
        for index, model in enumerate(config.models)
        if (model.num_gpus or 0) > len(gpus)
    ]
    on_gpus = list(gpus) if any(model.num_gpus != 0 for model in config.models) else []
    needs_cpu = not on_gpus or any(model.num_gpus == 0 for model in config.models)
    return [*on_gpus, *([CPU] if needs_cpu else [])], problems
