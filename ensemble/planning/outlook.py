"""The plan of a run with all that it was made from, so that it can be made again when devices have changed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ensemble.checkpoint.inspection import Checkpoint
from ensemble.config import RunConfig
from ensemble.devices import Device
from ensemble.hostmemory import available_memory_bytes
from ensemble.planning.facts import UNKNOWN, member_facts
from ensemble.planning.footprint import MemberFacts
from ensemble.planning.forecast import Speed, measured_speeds
from ensemble.planning.plan import Plan, make_plan
from ensemble.rundir import RunDir


@dataclass(frozen=True)
class Outlook:
    """A plan, and the facts behind it by member name; ``host_bytes`` is the memory for workers on the CPU."""

    config: RunConfig
    facts: dict[str, MemberFacts]
    gpus: tuple[Device, ...]
    host_bytes: int | None
    speeds: dict[str, Speed]
    plan: Plan

    def again(self, gpus: Sequence[Device]) -> Outlook:
        """The same run on devices that have changed."""
        plan = make_plan(self.config, self.facts, gpus, self.host_bytes, self.speeds)
        return replace(self, gpus=tuple(gpus), plan=plan)


def look_ahead(
    config: RunConfig,
    checkpoints: Mapping[str, Checkpoint],
    lengths: Mapping[str, npt.NDArray[np.int64]],
    gpus: Sequence[Device],
) -> Outlook:
    """Plan a run.

    Args:
        checkpoints: by member name, as far as they could be read.
        lengths: bytes of text per row, [rows], by member name, where the table could be read.

    Raises:
        DeviceError: members that cannot run on these devices.
        CheckpointError: a weight file is broken.
    """
    facts = {
        model.name: member_facts(model, checkpoints[model.name], lengths[model.name], len(config.labels))
        if model.name in checkpoints and model.name in lengths
        else UNKNOWN
        for model in config.models
    }
    host_bytes = available_memory_bytes()
    speeds = measured_speeds(_earlier_report(RunDir(config.output_dir).run_json), [gpu.name for gpu in gpus])
    plan = make_plan(config, facts, gpus, host_bytes, speeds)
    return Outlook(config, facts, tuple(gpus), host_bytes, speeds, plan)


def _earlier_report(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
