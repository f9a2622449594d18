"""Every check of ``doctor``, in the order of the list it prints."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ensemble.cli.doctor.finding import Finding
from ensemble.cli.doctor.gpus import inventory_findings, trial_findings
from ensemble.cli.doctor.hub import hub_findings
from ensemble.cli.doctor.packages import package_findings, python_findings
from ensemble.cli.doctor.resources import disk_findings, host_findings
from ensemble.common.device_trials import CPU, run_trials
from ensemble.common.errors import EnsembleError
from ensemble.common.gpus import Device, Inventory, driver_cuda_version, inventory
from ensemble.common.host import available_memory_bytes
from ensemble.common.packages import installed_versions, own_requirements

if TYPE_CHECKING:
    from ensemble.config import LoadedConfig, RunConfig
    from ensemble.pipeline.validate import Prepared

# What a worker imports before it loads a model.
_WORKER = "ensemble.members.seq_cls.predictor"
_FIX = "fix the config, or what it names"


def examine(path: Path | None = None, overrides: Sequence[str] = ()) -> Iterator[Finding]:
    """Look at this machine, in the light of a config where one is given; findings come as they are made.

    Args:
        path: the config's file.
        overrides: as ``load_config`` takes them.
    """
    said = set()
    for finding in _findings(path, overrides):
        # What ``validate`` finds wrong with a place or a mask, the checks of this machine find as well.
        if (finding.mark, finding.text) not in said:
            said.add((finding.mark, finding.text))
            yield finding


def _findings(path: Path | None, overrides: Sequence[str]) -> Iterator[Finding]:
    from ensemble.pipeline.validate import needed_packages

    yield from python_findings(sys.version_info[:2], platform.python_version())
    loaded: LoadedConfig | None = None
    prepared: Prepared | None = None
    if path is not None:
        try:
            loaded = _load(path, overrides)
            prepared = _prepare(loaded)
        except EnsembleError as error:
            yield from (Finding.of_sentence("problem", text, _FIX) for text in error.problems)
        except Exception as error:
            yield _not_checked("the config", error)
    config = None if loaded is None else loaded.config
    if prepared is not None:
        shown = prepared.inventory.warnings  # with the devices
        yield from (Finding("note", text) for text in prepared.warnings if text not in shown)
    needed = {} if config is None else needed_packages(config, {} if prepared is None else prepared.inspected)
    yield from _guarded("the packages", lambda: _packages(needed))
    yield from _guarded("memory and CPUs", host_findings)
    key, place = ("working directory", Path()) if config is None else ("output_dir", config.output_dir)
    yield from _guarded("the disk", lambda: disk_findings(key, place))
    yield from _guarded("the Hugging Face hub", hub_findings)
    yield from _guarded("the devices", lambda: _devices(config, needed))


def _guarded(subject: str, findings: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Findings as they come; a check that breaks is a finding too and hides none of the others."""
    try:
        yield from findings()
    except Exception as error:
        yield _not_checked(subject, error)


def _not_checked(subject: str, error: Exception) -> Finding:
    text = f"{subject} could not be checked ({type(error).__name__}: {error})"
    return Finding("problem", text, "fix the other problems first; if this one stays, please report it")


def _load(path: Path, overrides: Sequence[str]) -> LoadedConfig:
    from ensemble.pipeline.loading import load

    return load(path, overrides)


def _prepare(loaded: LoadedConfig) -> Prepared:
    from ensemble.pipeline.validate import prepare

    return prepare(loaded)


def _packages(needed: dict[str, str]) -> Iterator[Finding]:
    requirements = own_requirements()
    if not requirements:
        advice = "install this package with pip, which checks them"
        yield Finding("note", "it is not known which versions of the packages are needed", advice)
    yield from package_findings(requirements, installed_versions([one.name for one in requirements]), needed)


def _devices(config: RunConfig | None, needed: dict[str, str]) -> Iterator[Finding]:
    machine, driver_cuda = inventory(), driver_cuda_version()
    from ensemble.pipeline.validate import may_use_gpus

    needs_gpu = config is None or any(may_use_gpus(config))
    yield from inventory_findings(machine, driver_cuda, needs_gpu)
    devices = list(machine.gpus) or [CPU] if config is None else _wanted_devices(config, machine)
    if not installed_versions(["torch"]):
        return  # said before; it cannot be tried
    imports = [_WORKER, *(name for name in needed if installed_versions([name]))]
    yield from trial_findings(run_trials(devices, imports, available_memory_bytes()), driver_cuda)


def _wanted_devices(config: RunConfig, machine: Inventory) -> list[Device]:
    """The devices that the config's members run on; all of them where its ``devices`` is wrong."""
    from ensemble.pipeline.validate import may_use_gpus
    from ensemble.planning.placement import chosen_devices

    try:
        gpus = chosen_devices(machine.gpus, config.devices)
    except EnsembleError:  # said before
        return list(machine.gpus) or [CPU]
    wanted = may_use_gpus(config)
    on_gpus = list(gpus) if any(wanted) else []
    needs_cpu = not on_gpus or not all(wanted)
    return [*on_gpus, *([CPU] if needs_cpu else [])]
