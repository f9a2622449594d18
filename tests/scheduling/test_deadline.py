"""What fits into the time, as arithmetic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble.common.protocol import Counters
from ensemble.planning.forecast import Speed
from ensemble.scheduling.deadline import (
    MIN_ROWS,
    RESERVE_MAX_SHARE,
    SAFETY,
    SHUTDOWN_SECONDS,
    Deadline,
    Share,
    goals,
    reachable_fraction,
    reserve_seconds,
)
from ensemble.scheduling.state import ModelState
from tests.planning.test_plan import config, facts, make_plan
from tests.sampling import tries

SHARE = st.builds(
    Share,
    name=st.text("abcdef", min_size=1),
    fraction_done=st.one_of(st.sampled_from([0.0, 0.25, 1.0]), st.floats(0, 1)),
    seconds=st.floats(0, 1e6),
    startup_seconds=st.one_of(st.just(0.0), st.floats(0, 1e4)),
    devices=st.integers(1, 4),
)
SHARES = st.lists(SHARE, max_size=6, unique_by=lambda share: share.name)
SECONDS = st.floats(-10, 1e6)
# In whole seconds there is no time too short to bring anybody forward.
WHOLE_SHARES = st.lists(
    st.builds(
        Share,
        name=st.text("abcdef", min_size=1),
        fraction_done=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
        seconds=st.integers(0, 100_000).map(float),
        startup_seconds=st.one_of(st.just(0.0), st.integers(0, 1000).map(float)),
        devices=st.integers(1, 4),
    ),
    max_size=6,
    unique_by=lambda share: share.name,
)


def share(name: str, done: float, seconds: float, startup: float = 0.0, devices: int = 1) -> Share:
    return Share(name, done, seconds, startup, devices)


def demand(shares: list[Share], fraction: float) -> float:
    """Device-seconds that bring everybody to a fraction."""
    slowest = max((item.seconds for item in shares), default=0.0)
    below = [item for item in shares if item.fraction_done < fraction]
    return sum(
        item.devices * (item.startup_seconds + (fraction - item.fraction_done) * (item.seconds or slowest))
        for item in below
    )


def test_a_member_of_unknown_speed_counts_as_the_slowest() -> None:
    known, unknown = share("a", 0, 300), share("b", 0, 0)
    assert reachable_fraction([known, unknown], 1, 300) == pytest.approx(0.5)
    assert reachable_fraction([unknown], 1, 300) == 1.0
    assert reachable_fraction([replace(unknown, startup_seconds=400)], 1, 300) == pytest.approx(0.0)


def test_the_reach_by_hand() -> None:
    even = [share("a", 0, 100), share("b", 0, 300)]
    assert reachable_fraction(even, 1, 200) == pytest.approx(0.5)
    assert reachable_fraction(even, 2, 200) == 1.0
    # 20 s bring a to where b is; of the other 180, one part goes to a and three to b.
    ahead = [share("a", 0, 100), share("b", 0.2, 300)]
    assert reachable_fraction(ahead, 1, 200) == pytest.approx(0.2 + 180 / 400)
    # c is there already: neither its work nor its start counts.
    assert reachable_fraction([*ahead, share("c", 0.9, 1e9, 1e9)], 1, 200) == pytest.approx(0.65)
    # Three GPUs start for 10 s each, and compute as long.
    assert reachable_fraction([share("a", 0, 100, 10, devices=3)], 1, 180) == pytest.approx(0.5)
    assert reachable_fraction([share("a", 0, 100, 10)], 1, 60) == pytest.approx(0.5)
    assert reachable_fraction([share("a", 0.3, 100, 10)], 1, 9) == pytest.approx(0.3), "no time to start"
    assert reachable_fraction([], 1, 0) == 1.0


@tries(60)
@given(SHARES, st.integers(1, 8), SECONDS)
def test_the_reach_takes_the_time_there_is_and_no_more(
    shares: list[Share], devices: int, seconds: float
) -> None:
    budget = devices * max(seconds, 0)
    reached = reachable_fraction(shares, devices, seconds)
    slack = 1e-9 * (1 + budget + demand(shares, 1))
    assert demand(shares, reached) <= budget + slack
    if reached < 1 - 1e-6:
        assert demand(shares, reached + 1e-6) > budget - slack


@tries(60)
@given(WHOLE_SHARES, st.integers(1, 8), st.integers(0, 10_000))
def test_goals_leave_nobody_idle_who_could_go_on(shares: list[Share], devices: int, seconds: int) -> None:
    wanted = goals(shares, devices, seconds)
    assert wanted.keys() == {item.name for item in shares}
    assert all(wanted[item.name] >= item.fraction_done for item in shares)
    for item in shares:
        alone = reachable_fraction([item], devices, seconds)
        if item.startup_seconds < seconds and item.fraction_done < alone:
            assert any(wanted[other.name] > other.fraction_done for other in shares)
            break


def test_goals_leave_behind_who_cannot_start_in_time() -> None:
    running, late = share("a", 0.4, 100), share("b", 0.1, 100, startup=90)
    assert goals([running, late], 1, 200) == pytest.approx({"a": 0.8, "b": 0.8}), "120 s to where a is"
    assert goals([running, late], 1, 80) == {"a": 1.0, "b": 0.1}
    # Two starts of 60 s do not fit into 100 s on one GPU, one does; the shorter one is taken.
    first, second = share("a", 0, 100, startup=60), share("b", 0, 100, startup=50)
    assert goals([first, second], 1, 100) == {"a": 0.0, "b": 0.5}


def state_of(rows: int, seconds_per_row: float, is_measured: bool = True) -> ModelState:
    """A member of one chunk, of which an earlier run has measured the speed."""
    speed = Speed(1.0, seconds_per_row / (10 + 32), is_measured, is_startup_measured=True)
    lengths = np.full(rows, 10, dtype=np.int64)
    (plan,) = make_plan(config({}), {"m0": facts(lengths)}, [], speeds={"m0": speed}).models
    return ModelState(replace(plan, speed=speed))


def rows_that_fit(state: ModelState, seconds: float) -> int:
    fitting = Deadline(seconds, 1, lambda: 0.0).first_fitting(state, [state])
    return 0 if fitting is None else fitting[0].stop - fitting[1]


@pytest.mark.fault(26)
def test_a_chunk_fits_with_some_time_to_spare() -> None:
    state = state_of(100, 1.0)
    assert rows_that_fit(state, 100.1 * SAFETY) == 100
    assert rows_that_fit(state, 99.9 * SAFETY) == 99
    assert rows_that_fit(state, 0.1) == 1, "a single row before nobody has done any"
    assert rows_that_fit(state, 0.0) == 0
    state.speed_meter.add_chunk(0.5, 50.0)
    assert rows_that_fit(state, 16.1 * SAFETY) == MIN_ROWS
    assert rows_that_fit(state, 15.9 * SAFETY) == 0, "a batch at least"
    state.speed_meter.add_chunk(0.01, 2.0)
    assert rows_that_fit(state, 40.1 * SAFETY) == 20, "the latest chunk took twice as long as the mean"
    state.speed_meter.add_chunk(0.5, 10.0)
    assert rows_that_fit(state, 40.1 * SAFETY) == 65, "one that was quicker promises nothing"
    assert rows_that_fit(state_of(3, 1.0), 3.1 * SAFETY) == 3, "but a chunk may be that small"


def test_a_member_of_unknown_speed_begins_with_few_rows() -> None:
    state = state_of(100, 1.0, is_measured=False)
    assert rows_that_fit(state, 0.1) == MIN_ROWS
    request = replace(state.plan.request, batch_size=64)
    assert rows_that_fit(ModelState(replace(state.plan, request=request)), 0.1) == 64, "a batch at least"
    state.speed_meter.add_chunk(0.16, 1.0)
    state.counters += Counters(rows=16)
    assert rows_that_fit(state, 1000.0) == 32, "then twice what is done"


@tries(60)
@given(st.floats(0, 1e4), st.integers(1, 50), st.floats(1, 1e6))
def test_the_reserve_is_within_its_bounds(first: float, members: int, limit: float) -> None:
    kept = reserve_seconds(first, members, limit)
    assert kept <= RESERVE_MAX_SHARE * limit
    assert kept >= min(SHUTDOWN_SECONDS, RESERVE_MAX_SHARE * limit)
    assert kept <= reserve_seconds(first, members + 1, limit)


def test_the_reserve_grows_with_the_first_submission() -> None:
    assert reserve_seconds(0.0, 3, 3600) == SHUTDOWN_SECONDS
    once, twice = (reserve_seconds(first, 5, 36_000) - SHUTDOWN_SECONDS for first in (1.0, 2.0))
    assert twice == pytest.approx(2 * once)
    assert reserve_seconds(2.0, 5, 36_000) > 2.0 * (1 + 5), "each member is written once as well"
