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

    def __init__(self, used: int) -> None:
        super().__init__()
        self.used, self.seconds = used, 0.0

    def used_memory(self, uuids: Collection[str]) -> dict[str, int | None]:
        return dict.fromkeys(uuids, self.used)

    def now(self) -> float:
        return self.seconds


def release(
    before: int, with_worker: Sequence[int], after: Sequence[int], timeout_seconds: float = 60.0
) -> tuple[DevicePool, list[str]]:
    """Lease a device, and release it: its memory then, a reading each half second; the last one stays."""
    (gpu,) = gpus(1)
    launcher, said = Readings(before), list[str]()
    pool = DevicePool([gpu], 1, timeout_seconds, launcher, said.append, launcher.now)
    assert pool.acquire(1, [gpu.uuid]) == (gpu,)
    for used in with_worker:
        launcher.used, launcher.seconds = used, launcher.seconds + 0.5
        pool.poll()
    pool.release([gpu])
    readings = [*after]
    while pool.is_releasing():
        launcher.used = readings.pop(0) if len(readings) > 1 else readings[0]
        launcher.seconds += 0.5
        pool.poll()
    return pool, said


@pytest.mark.parametrize(
    ("with_worker", "after"),
    [
        ([9 * GIB], [GIB + 400 * MIB]),  # a browser has grown
        ([9 * GIB], [2 * GIB]),  # by as much as counts as a browser's
        ([3 * GIB], [3 * GIB, 2 * GIB, GIB + 300 * MIB]),  # and the driver takes its time
    ],
)
def test_what_other_programs_took_meanwhile_is_not_waited_for(
    with_worker: list[int], after: list[int]
) -> None:
    pool, said = release(GIB, with_worker, after)
    (ended,) = pool.releases
    assert (ended.is_free, ended.used_bytes, said) == (True, after[-1], [])
    assert ended.seconds == 5.0, "seconds of the test's own clock"


@pytest.mark.parametrize(
    ("with_worker", "after"),
    [
        ([9 * GIB], [9 * GIB]),  # its process holds all
        ([9 * GIB], [3 * GIB]),  # or a part
        ([9 * GIB], [2 * GIB + 1]),  # more than a browser grows by
    ],
)
def test_memory_that_a_worker_keeps_is_waited_for(with_worker: list[int], after: list[int]) -> None:
    pool, said = release(GIB, with_worker, after)
    (ended,) = pool.releases
    assert not ended.is_free
    assert ended.seconds == 60.0
    assert "still in use 60 s after its worker ended" in said[0]


def test_memory_that_is_back_is_free_at_once() -> None:
    pool, _ = release(GIB, [9 * GIB], [9 * GIB, GIB + 200 * MIB])
    assert (pool.releases[0].is_free, pool.releases[0].seconds) == (True, 1.0)
