"""When a device is free again, by the readings of its memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from ensemble.scheduling.device_pool import DevicePool
from tests.nvml.sim import GIB
from tests.planning.test_plan import gpus
from tests.pretended import PretendedLauncher

MIB = 1 << 20


class Readings(PretendedLauncher):
    """A launcher whose only device has the memory that a test says, and whose clock a test moves."""

    def __init__(self, used: int | None) -> None:
        super().__init__()
        self.used, self.seconds = used, 0.0

    def used_memory(self, uuids: Collection[str]) -> dict[str, int | None]:
        return dict.fromkeys(uuids, self.used)

    def now(self) -> float:
        return self.seconds


def release(after: Sequence[int]) -> tuple[float, list[str]]:
    """Lease a device with a GiB in use, and release it: its memory then, a reading each half second.

    The last reading stays. Returns the seconds until it can be leased again, and what is said of it.
    """
    (gpu,) = gpus(1)
    launcher, sentences = Readings(GIB), list[str]()
    pool = DevicePool([gpu], 1, 60.0, launcher, sentences.append, launcher.now)
    assert pool.acquire(1, [gpu.uuid]) == (gpu,)
    launcher.used = 9 * GIB
    pool.poll()
    pool.release([gpu])
    readings = [*after]
    while pool.is_releasing():
        launcher.used = readings.pop(0) if len(readings) > 1 else readings[0]
        launcher.seconds += 0.5
        pool.poll()
    assert pool.acquire(1, [gpu.uuid]) == (gpu,), "there is no other"
    return launcher.seconds, sentences


@pytest.mark.fault(38)
@pytest.mark.parametrize(
    "after",
    [
        [GIB + 400 * MIB],  # a browser has grown
        [2 * GIB],  # by as much as counts as a browser's
        [3 * GIB, 2 * GIB, GIB + 300 * MIB],  # and the driver takes its time
    ],
)
def test_what_other_programs_took_meanwhile_is_not_waited_for(after: list[int]) -> None:
    assert release(after) == (5.0, []), "seconds of the test's own clock"


@pytest.mark.parametrize(
    "after",
    [
        [9 * GIB],  # its process holds all
        [3 * GIB],  # or a part
        [2 * GIB + 1],  # more than a browser grows by
    ],
)
def test_memory_that_a_worker_keeps_is_waited_for(after: list[int]) -> None:
    seconds, (sentence,) = release(after)
    assert seconds == 60.0
    assert "still in use 60 s" in sentence


def test_memory_that_is_back_is_free_at_once() -> None:
    assert release([9 * GIB, GIB + 200 * MIB]) == (1.0, [])


def test_a_device_that_does_not_tell_yet_when_it_is_leased_is_waited_for_all_the_same() -> None:
    """As over Ray, whose nodes are asked for the first time while the first workers start."""
    launcher = Readings(None)
    (gpu,) = gpus(1)
    pool = DevicePool([gpu], 1, 60.0, launcher, pytest.fail, launcher.now)
    assert pool.acquire(1, [gpu.uuid]) == (gpu,)
    pool.release([gpu])
    for seconds, used in enumerate([9 * GIB, 3 * GIB, gpu.used_bytes]):
        assert pool.is_releasing()
        assert not pool.acquire(1, [gpu.uuid])
        launcher.used, launcher.seconds = used, float(seconds)
        pool.poll()
    assert pool.acquire(1, [gpu.uuid]) == (gpu,)
