"""The plan of a run with all that it was made from, so that it can be made again when devices have changed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ensemble.common.device_trials import run_trials
from ensemble.common.gpus import Device
from ensemble.common.host import available_memory_bytes, total_memory_bytes
from ensemble.config import RunConfig
from ensemble.planning.forecast import Speed
from ensemble.planning.placement import MemberFacts, place
from ensemble.planning.plan import Plan, make_plan


@dataclass(frozen=True)
class Outlook:
    """A plan, and the facts behind it by member name; ``host`` is the CPU with its memory, where that is known."""

    config: RunConfig
    facts: Mapping[str, MemberFacts]
    gpus: tuple[Device, ...]
    host: Device | None
    speeds: Mapping[str, Speed]
    plan: Plan

    def again(self, gpus: Sequence[Device]) -> Outlook:
        """The same run on devices that have changed."""
        plan = make_plan(self.config, self.facts, gpus, self.host, self.speeds)
        return replace(self, gpus=tuple(gpus), plan=plan)


def look_ahead(
    config: RunConfig,
    facts: Mapping[str, MemberFacts],
    gpus: Sequence[Device],
    speeds: Mapping[str, Speed],
) -> Outlook:
    """Plan a run.

    Args:
        facts: by member name.
        speeds: by member name, as far as an earlier run has measured them.

    Raises:
        DeviceError: members that cannot run on these devices.
    """
    facts = _with_flash_attention(config, facts, gpus)
    host = _host()
    plan = make_plan(config, facts, gpus, host, speeds)
    return Outlook(config, facts, tuple(gpus), host, speeds, plan)


def _with_flash_attention(
    config: RunConfig, facts: Mapping[str, MemberFacts], gpus: Sequence[Device]
) -> Mapping[str, MemberFacts]:
    """The facts with whether flash-attention 2 works, which only a process with torch can tell: seconds.

    Asked where a member would take it and its package can be found.
    """
    if not gpus or importlib.util.find_spec("flash_attn") is None:
        return facts
    able = {}
    for name, one in facts.items():
        if one.memory is not None and (memory := one.memory.with_flash_attention()) is not None:
            able[name] = replace(one, memory=memory)
    would = any(
        model.name in able
        and place(config, index, able[model.name], gpus, None).attention == "flash_attention_2"
        for index, model in enumerate(config.models)
    )
    if not would:
        return facts
    report = run_trials(gpus[:1], flash_attention=True)[0].report
    return {**facts, **able} if report is not None and report.has_flash_attention else facts


def _host() -> Device | None:
    total, available = total_memory_bytes(), available_memory_bytes()
    if total is None or available is None:
        return None
    return Device("cpu", "CPU", None, total, max(0, total - available))
