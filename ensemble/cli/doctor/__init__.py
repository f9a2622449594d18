"""Whether a run could start here: the whole of ``doctor``, every check in the order of the list it prints.

Nothing here imports torch or changes anything; what only torch can tell is asked of test processes
(``device_trials``, ``ensemble.worker.probe``).  The config and what it needs are imported when there is a config: a
machine that lacks pydantic shall hear so in a sentence.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ensemble.cli.doctor.gpus import inventory_findings, trial_findings
from ensemble.cli.doctor.machine import (
    Finding,
    disk_findings,
    host_findings,
    hub_findings,
    package_findings,
    python_finding,
)
from ensemble.common.device_trials import CPU, run_trials
from ensemble.common.errors import EnsembleError
from ensemble.common.gpus import Device, driver_cuda_version, inventory
from ensemble.common.host import available_memory_bytes
from ensemble.common.packages import installed_versions, own_requirements

if TYPE_CHECKING:
    from ensemble.config import RunConfig
    from ensemble.pipeline.validate import Prepared

__all__ = ["Finding", "examine"]
# What a worker imports before it loads a model.
_WORKER = "ensemble.members.seq_cls.predictor"


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
    from ensemble.pipeline.validate import needed_packages, prepare

    yield python_finding(sys.version_info[:2], platform.python_version())
    config: RunConfig | None = None
    prepared: Prepared | None = None
    if path is not None:
        try:
            from ensemble.common.python_process import keep_pandas_out
            from ensemble.pipeline.load import load

            loaded = load(path, overrides)
            config = loaded.config
            keep_pandas_out()
            prepared = prepare(loaded)
        except EnsembleError as error:
            advice = "fix the config, or what it names"
            yield from (Finding.of_sentence("problem", text, advice) for text in error.problems)
        except Exception as error:
            yield _not_checked("the config", error)
    if prepared is not None:
        shown = prepared.inventory.warnings  # with the devices
        yield from (Finding("note", text) for text in prepared.warnings if text not in shown)
    needed = {} if config is None else needed_packages(config, {} if prepared is None else prepared.inspected)
    key, place = ("working directory", Path()) if config is None else ("output_dir", config.output_dir)
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "the packages": lambda: _packages(needed),
        "memory and CPUs": host_findings,
        "the disk": lambda: disk_findings(key, place),
        "the Hugging Face hub": hub_findings,
        "the devices": lambda: _devices(config, needed),
    }
    for subject, findings in checks.items():
        try:
            yield from findings()
        except Exception as error:  # a check that breaks is a finding too and hides none of the others
            yield _not_checked(subject, error)


def _not_checked(subject: str, error: Exception) -> Finding:
    text = f"{subject} could not be checked ({type(error).__name__}: {error})"
    return Finding("problem", text, "fix the other problems first; if this one stays, please report it")


def _packages(needed: dict[str, str]) -> Iterator[Finding]:
    requirements = own_requirements()
    if not requirements:
        advice = "install this package with pip, which checks them"
        yield Finding("note", "it is not known which versions of the packages are needed", advice)
    yield from package_findings(requirements, installed_versions([one.name for one in requirements]), needed)


def _devices(config: RunConfig | None, needed: dict[str, str]) -> Iterator[Finding]:
    machine, driver_cuda = inventory(), driver_cuda_version()
    from ensemble.pipeline.validate import may_use_gpus

    wants = [True] if config is None else may_use_gpus(config)
    yield from inventory_findings(machine, driver_cuda, any(wants))
    devices: list[Device] = list(machine.gpus) or [CPU]
    if config is not None:
        from ensemble.planning.placement import chosen_devices

        try:
            chosen = chosen_devices(machine.gpus, config.devices)
            gpus = list(chosen) if any(wants) else []
            devices = gpus if gpus and all(wants) else [*gpus, CPU]
        except EnsembleError:  # said before
            pass
    if not installed_versions(["torch"]):
        return  # said before; it cannot be tried
    imports = [_WORKER, *(name for name in needed if installed_versions([name]))]
    yield from trial_findings(run_trials(devices, imports, available_memory_bytes()), driver_cuda)
