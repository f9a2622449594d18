"""Memory that other programs hold of the GPUs: said before the run starts, waited for where that was asked."""

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

_LOOK_SECONDS = 1.0
_SAY_SECONDS = 30.0


def held_texts(devices: Sequence[Device]) -> Iterator[str]:
    """A sentence for each GPU of which others hold a good part."""
    for device in devices:
        if device.is_held:
            yield f"{device.title} is held by another job of the cluster"
        elif device.used_bytes >= MIN_REPORTED_BYTES:
            yield (
                f"{device.title}: {gib(device.used_bytes)} of {gib(device.total_bytes)} held by "
                f"others; {gpu_users(device)}"
            )


def _state(device: Device) -> str:
    if device.is_held:
        return f"{device.title} is held by another job of the cluster"
    return f"{device.title} has {gib(device.total_bytes - device.used_bytes)} free, {gpu_users(device)}"


def wait_for_room(
    plan: Plan, launcher: Launcher, say: Callable[[str], None], at_most_seconds: float = math.inf
) -> Plan:
    """The plan once every member finds the room it needs, or as it is when the time is over.

    Args:
        say: takes a sentence for the user.
        at_most_seconds: how long to wait, if that is less than ``wait_for_gpu``.

    Raises:
        DeviceError: a member has no GPU to run on, even now.
    """
    wait_seconds = max(0.0, min(plan.config.wait_for_gpu, at_most_seconds))
    began = time.monotonic()
    said_at = float("-inf")
    while time.monotonic() - began < wait_seconds:
        lacking = {uuid for member in plan.members for uuid in member.placement.held}
        if not lacking:
            break
        if time.monotonic() - said_at >= _SAY_SECONDS:
            said_at = time.monotonic()
            left = wait_seconds - (said_at - began)
            for text in held_texts([device for device in plan.gpus if device.uuid in lacking]):
                say(f"{text}; waiting up to {left:,.0f} s more for it")
        time.sleep(min(_LOOK_SECONDS, wait_seconds))
        gpus = launcher.current(plan.gpus)
        if gpus != tuple(plan.gpus):
            plan = plan.again(gpus)
    members = plan.members
    problems = []
    for member in members:
        placement = member.placement
        if member.gpus <= together([device for device in plan.gpus if device.uuid in placement.devices]):
            continue
        needed_bytes = member.request.gpu_memory
        if placement.footprint is not None:
            needed_bytes = placement.footprint.resident_bytes(placement.gpus)
        # Of what is not known any GPU is good, which nobody has.
        needed = gib(needed_bytes) if isinstance(needed_bytes, int) else "all"
        which = "a GPU" if member.gpus == 1 else f"each of {member.gpus} GPUs"
        states = "; ".join(_state(device) for device in plan.gpus if device.uuid in placement.held)
        waited = f" after {wait_seconds:g} s" if wait_seconds else ""
        problems.append(
            f"models[{member.index}] ({member.name}) needs {needed} of {which}: {states}{waited}; end "
            f"what runs there, or set wait_for_gpu: {'1h' if wait_seconds else '10m'}"
        )
    if problems:
        raise DeviceError(problems)
    for member in members:
        if left_out := [uuid for uuid in member.placement.held if uuid not in member.placement.devices]:
            say(f"{member.name} leaves out {', '.join(left_out)}: too little of it is free")
    return plan
