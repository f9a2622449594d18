"""Report GPU memory that other programs use, and wait for it before the run if the config says so."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

from ensemble.common.errors import DeviceError
from ensemble.common.gpus import MIN_REPORTED_BYTES, Device, gpu_users
from ensemble.common.text import gib
from ensemble.planning.placement import together
from ensemble.planning.plan import ModelPlan, Plan
from ensemble.scheduling.launchers.base import Launcher


def held_texts(devices: Sequence[Device]) -> Iterator[str]:
    """Yield a sentence for each GPU of which others use a good part."""
    for device in devices:
        if device.is_held or device.used_bytes >= MIN_REPORTED_BYTES:
            yield _held_text(device)


def _held_text(device: Device) -> str:
    if device.is_held:
        return f"{device.title} is held by another job of the cluster"
    usage = f"{gib(device.used_bytes)} of {gib(device.total_bytes)} held by others"
    return f"{device.title}: {usage}; {gpu_users(device)}"


def wait_for_gpu_memory(
    plan: Plan, launcher: Launcher, say: Callable[[str], None], max_seconds: float = math.inf
) -> Plan:
    """Wait until every model has the GPU memory that it needs, or the time is over, and return the plan.

    A model that has no GPU to run on even then is a DeviceError.
    """
    wait_seconds = max(0.0, min(plan.config.wait_for_gpu, max_seconds))
    now = began = time.monotonic()
    message_due = began
    while any(model.placement.held for model in plan.models) and now - began < wait_seconds:
        if now >= message_due:
            message_due = now + 30
            awaited = {uuid for model in plan.models for uuid in model.placement.held}
            for device in plan.gpus:
                if device.uuid in awaited:
                    seconds_left = wait_seconds - (now - began)
                    say(f"{_held_text(device)}; waiting up to {seconds_left:,.0f} s more for it")
        time.sleep(min(1.0, wait_seconds))
        gpus = launcher.current(plan.gpus)
        if gpus != tuple(plan.gpus):
            plan = plan.again(gpus)
        now = time.monotonic()
    problems = []
    for model in plan.models:
        usable = [device for device in plan.gpus if device.uuid in model.placement.devices]
        if model.gpus > together(usable):
            problems.append(_problem(plan, model, wait_seconds))
    if problems:
        raise DeviceError(problems)
    for model in plan.models:
        left_out = [uuid for uuid in model.placement.held if uuid not in model.placement.devices]
        if left_out:
            say(f"{model.name} leaves out {', '.join(left_out)}: too little of it is free")
    return plan


def _problem(plan: Plan, model: ModelPlan, waited_seconds: float) -> str:
    placement, needed_bytes = model.placement, model.request.gpu_memory
    if placement.footprint is not None:
        needed_bytes = placement.footprint.resident_bytes(placement.gpus)
    needed = gib(needed_bytes) if isinstance(needed_bytes, int) else "all"
    which = "a GPU" if model.gpus == 1 else f"each of {model.gpus} GPUs"
    states = "; ".join(_held_text(device) for device in plan.gpus if device.uuid in placement.held)
    waited = f" after {waited_seconds:g} s" if waited_seconds else ""
    return (
        f"models[{model.loaded.index}] ({model.name}) needs {needed} of {which}: {states}{waited}; end what runs "
        f"there, or set wait_for_gpu: {'1h' if waited_seconds else '10m'}"
    )
