"""GPU memory that other programs use: reported before a run starts, and waited for if the config says so."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

from ensemble.common.errors import DeviceError
from ensemble.common.gpus import MIN_REPORTED_BYTES, Device, gpu_users
from ensemble.common.text import gib
from ensemble.planning.placement import together
from ensemble.planning.plan import Plan
from ensemble.scheduling.launchers.base import Launcher

_POLL_SECONDS = 1.0
_SECONDS_BETWEEN_MESSAGES = 30.0


def held_texts(devices: Sequence[Device]) -> Iterator[str]:
    """Yield a sentence for each GPU of which others use a good part."""
    for device in devices:
        if device.is_held:
            yield f"{device.title} is held by another job of the cluster"
        elif device.used_bytes >= MIN_REPORTED_BYTES:
            yield (
                f"{device.title}: {gib(device.used_bytes)} of {gib(device.total_bytes)} held by "
                f"others; {gpu_users(device)}"
            )


def wait_for_gpu_memory(
    plan: Plan, launcher: Launcher, say: Callable[[str], None], max_seconds: float = math.inf
) -> Plan:
    """Wait until every member has the GPU memory that it needs, or the time is over, and return the plan.

    Raises:
        DeviceError: a member has no GPU to run on, even now.
    """
    wait_seconds = max(0.0, min(plan.config.wait_for_gpu, max_seconds))
    began = time.monotonic()
    last_message = -math.inf
    while time.monotonic() - began < wait_seconds:
        awaited = {uuid for member in plan.members for uuid in member.placement.held}
        if not awaited:
            break
        if time.monotonic() - last_message >= _SECONDS_BETWEEN_MESSAGES:
            last_message = time.monotonic()
            left = wait_seconds - (last_message - began)
            for text in held_texts([device for device in plan.gpus if device.uuid in awaited]):
                say(f"{text}; waiting up to {left:,.0f} s more for it")
        time.sleep(min(_POLL_SECONDS, wait_seconds))
        gpus = launcher.current(plan.gpus)
        if gpus != tuple(plan.gpus):
            plan = plan.again(gpus)
    problems = []
    for member in plan.members:
        placement = member.placement
        if member.gpus <= together([device for device in plan.gpus if device.uuid in placement.devices]):
            continue
        needed_bytes = member.request.gpu_memory
        if placement.footprint is not None:
            needed_bytes = placement.footprint.resident_bytes(placement.gpus)
        needed = gib(needed_bytes) if isinstance(needed_bytes, int) else "all"
        which = "a GPU" if member.gpus == 1 else f"each of {member.gpus} GPUs"
        states = "; ".join(
            f"{device.title} is held by another job of the cluster"
            if device.is_held
            else f"{device.title} has {gib(device.total_bytes - device.used_bytes)} free, {gpu_users(device)}"
            for device in plan.gpus
            if device.uuid in placement.held
        )
        waited = f" after {wait_seconds:g} s" if wait_seconds else ""
        problems.append(
            f"models[{member.index}] ({member.name}) needs {needed} of {which}: {states}{waited}; end "
            f"what runs there, or set wait_for_gpu: {'1h' if wait_seconds else '10m'}"
        )
    if problems:
        raise DeviceError(problems)
    for member in plan.members:
        left_out = [uuid for uuid in member.placement.held if uuid not in member.placement.devices]
        if left_out:
            say(f"{member.name} leaves out {', '.join(left_out)}: too little of it is free")
    return plan
