"""Memory that other programs hold of the GPUs: said before the run starts, waited for where that was asked."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ensemble.common.errors import DeviceError
from ensemble.common.gpus import MIN_REPORTED_BYTES, Device, gpu_users
from ensemble.common.text import gib
from ensemble.planning.plan import Plan
from ensemble.scheduling.launchers.base import Launcher

_LOOK_SECONDS = 1.0
_SAY_SECONDS = 30.0


def held_texts(devices: Sequence[Device]) -> Iterator[str]:
    """A sentence for each GPU of which others hold a good part."""
    for device in devices:
        if device.used_bytes >= MIN_REPORTED_BYTES:
            yield (
                f"{device.name} ({device.uuid}): {gib(device.used_bytes)} of {gib(device.total_bytes)} held by "
                f"others; NVML shows {gpu_users(device.uuid)} there"
            )


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
        used = launcher.used_memory([device.uuid for device in plan.gpus])
        # A GPU that does not answer has not come free.
        gpus = [
            one if (size := used[one.uuid]) is None else replace(one, used_bytes=size) for one in plan.gpus
        ]
        if gpus != list(plan.gpus):
            plan = plan.again(gpus)
    members = plan.members
    problems = []
    for member in members:
        placement = member.placement
        if member.gpus <= len(placement.devices):
            continue
        assert placement.footprint is not None
        states = "; ".join(
            f"{device.name} ({device.uuid}) has {gib(device.total_bytes - device.used_bytes)} free, NVML shows "
            f"{gpu_users(device.uuid)} there"
            for device in plan.gpus
            if device.uuid in placement.held
        )
        waited = f" after {wait_seconds:g} s" if wait_seconds else ""
        needed = gib(placement.footprint.resident_bytes(placement.gpus))
        problems.append(
            f"models[{member.index}] ({member.name}) needs {needed} of a GPU: {states}{waited}; end what runs "
            f"there, or set wait_for_gpu: {'1h' if wait_seconds else '10m'}"
        )
    if problems:
        raise DeviceError(problems)
    for member in members:
        if left_out := [uuid for uuid in member.placement.held if uuid not in member.placement.devices]:
            say(f"{member.name} leaves out {', '.join(left_out)}: too little of it is free")
    return plan
