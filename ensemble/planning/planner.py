"""The plan of a run with all that it was made from, so that it can be made again when devices have changed."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ensemble.common.device_trials import run_trials
from ensemble.common.errors import DataError
from ensemble.common.gpus import Device
from ensemble.common.host import available_memory_bytes, total_memory_bytes
from ensemble.config import RunConfig
from ensemble.members.huggingface.checkpoint.inspect import Checkpoint
from ensemble.members.huggingface.memory.facts import UNKNOWN, member_facts
from ensemble.members.huggingface.memory.replica import MemberFacts
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import RunReport
from ensemble.planning.forecast import Speed, measured_speeds
from ensemble.planning.placement import place
from ensemble.planning.plan import Plan, make_plan


@dataclass(frozen=True)
class Outlook:
    """A plan, and the facts behind it by member name; ``host`` is the CPU with its memory, where that is known."""

    config: RunConfig
    facts: dict[str, MemberFacts]
    gpus: tuple[Device, ...]
    host: Device | None
    speeds: dict[str, Speed]
    plan: Plan

    def again(self, gpus: Sequence[Device]) -> Outlook:
        """The same run on devices that have changed."""
        plan = make_plan(self.config, self.facts, gpus, self.host, self.speeds)
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
    facts = _with_flash_attention(config, facts, gpus)
    host = _host()
    speeds: dict[str, Speed] = {}
    with contextlib.suppress(DataError):  # there is none, or another version wrote it
        report = RunReport.read(RunDir(config.output_dir).run_json)
        computed_as = {model.name: model.computed_as for model in config.models}
        speeds = measured_speeds(report, [gpu.name for gpu in gpus], computed_as)
    plan = make_plan(config, facts, gpus, host, speeds)
    return Outlook(config, facts, tuple(gpus), host, speeds, plan)


def _with_flash_attention(
    config: RunConfig, facts: dict[str, MemberFacts], gpus: Sequence[Device]
) -> dict[str, MemberFacts]:
    """The facts with whether flash-attention 2 works, which only a process with torch can tell: seconds.

    Asked where a member would take it and its package can be found.
    """
    if not gpus or importlib.util.find_spec("flash_attn") is None:
        return facts
    able = {name: replace(one, has_flash_attention=True) for name, one in facts.items()}
    would = any(
        model.attn_implementation is None
        and place(config, index, able[model.name], gpus, None).attention == "flash_attention_2"
        for index, model in enumerate(config.models)
    )
    if not would:
        return facts
    report = run_trials(gpus[:1], flash_attention=True)[0].report
    return able if report is not None and report.has_flash_attention else facts


def _host() -> Device | None:
    total, available = total_memory_bytes(), available_memory_bytes()
    if total is None or available is None:
        return None
    return Device("cpu", "CPU", None, total, max(0, total - available))
