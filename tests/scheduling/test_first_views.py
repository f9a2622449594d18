"""Under a time limit members have all rows in their first views before any in a second: by simulated times."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble.common.gpus import Device
from ensemble.common.protocol import Predict
from ensemble.planning.chunks import Chunk
from ensemble.planning.forecast import Speed
from ensemble.planning.plan import ModelPlan, Plan, with_job, without_done
from ensemble.scheduling.deadline import SAFETY, Deadline
from ensemble.scheduling.retry import Rules
from ensemble.scheduling.scheduler import Scheduler
from ensemble.scheduling.state import ModelState
from tests.planning.test_plan import config, facts, gpus, make_plan
from tests.pretended import PretendedRun, SimulatedLauncher
from tests.sampling import tries

VIEWS: list[dict[str, Any]] = [
    {"name": "as_is"},
    {"name": "asked", "prompt_template": "{{ text }}?"},
    {"name": "told", "prompt_template": "{{ text }}!"},
]


@dataclass(frozen=True)
class Simulated:
    """A member.

    Attributes:
        views: how many.
        seconds: for all of its rows in one view.
        startup_seconds: of a worker; an earlier run has measured it.
        devices: numbers of the GPUs that it may use; None: all of them.
        replicas: at most; None: one on each GPU.
    """

    views: int = 1
    seconds: float = 100.0
    startup_seconds: float = 5.0
    devices: tuple[int, ...] | None = None
    replicas: int | None = None
    gpus: int = 1  # of a replica
    when: dict[str, Any] | None = None  # of its last view


@dataclass(frozen=True)
class Given:
    """A chunk that a worker of a member got, and what was true then."""

    member: int
    chunk: Chunk
    devices: tuple[str, ...]
    seconds: float  # that it takes
    seconds_left: float
    waiting: Collection[int]  # members with rows of their first view in nobody's hands
    running: Collection[int]  # members with workers


class SelectingRun(PretendedRun):
    """Selects all rows of a view with ``when``, once the views before it are done."""

    def __init__(self) -> None:
        super().__init__()
        self.plan: Plan | None = None

    def on_jobs_done(self, state: ModelState) -> None:
        assert self.plan is not None
        rows, job = len(self.plan.facts[state.plan.name].lengths), min(state.plan.undecided)
        nothing = np.zeros(rows, dtype=np.bool_)
        every, doubt = np.ones(rows, dtype=np.bool_), np.arange(rows, dtype=np.float64)
        state.extend(with_job(self.plan, state.plan, job, every, doubt, nothing))


@dataclass
class Outcome:
    """Of a simulated run: its members, which chunk was given when, and how often each member was loaded."""

    members: list[ModelState]
    given: list[Given]
    loads: dict[int, int]
    limit: float

    def fractions(self, view: int) -> list[float]:
        """How much of a view each member has, 0 for one that has no such view."""
        results = []
        for state in self.members:
            chunks = (*state.chunks.pending, *state.chunks.in_hand.values())
            left = sum(chunk.cost for chunk in chunks if chunk.job == view)
            jobs = len(state.plan.jobs)
            results.append(1 - left * jobs if view < jobs else 0.0)
        return results


def simulate(
    how: Sequence[Simulated], limit: float, devices: Sequence[Device] = (), rows: int = 400
) -> Outcome:
    """Run members of so many rows for so many seconds; without devices on the CPU."""
    keys: list[dict[str, Any]] = []
    for setting in how:
        keys.append({"replicas": setting.replicas or "auto", "num_gpus": min(setting.gpus, len(devices))})
        if setting.views > 1:
            prompt = {"text_column": None, "prompt_template": "{{ text }}"}
            keys[-1] |= {**prompt, "views": [dict(view) for view in VIEWS[: setting.views]]}
            keys[-1]["views"][-1] |= {} if setting.when is None else {"when": setting.when}
    lengths = np.full(rows, 2000, dtype=np.int64)
    known = {f"m{number}": facts(lengths, **key) for number, key in enumerate(keys)}
    speeds = {f"m{number}": Speed(item.startup_seconds, 0.0, False, True) for number, item in enumerate(how)}
    plan = make_plan(config(*keys, time_limit=1000.0), known, devices, speeds=speeds)
    assert not plan.problems

    def placed(member: ModelPlan, item: Simulated) -> ModelPlan:
        nothing = np.zeros((len(member.jobs), len(member.order)), dtype=np.bool_)
        member = without_done(member, nothing, is_timed=True)
        if item.devices is None or not devices:
            return member
        uuids = tuple(devices[number].uuid for number in item.devices)
        replicas = min(member.replicas, len(uuids))
        placement = replace(member.placement, devices=uuids)
        first = min(member.first_replicas, replicas)
        return replace(member, placement=placement, replicas=replicas, first_replicas=first)

    given: list[Given] = []

    def chunk_seconds(member: int, uuids: tuple[str, ...], command: Predict) -> float:
        chunk = members[member].chunks.in_hand[command.chunk]
        seconds = chunk.cost * how[member].views * how[member].seconds
        waiting = [n for n, item in enumerate(members) if any(not other.job for other in item.chunks.pending)]
        running = [n for n, item in enumerate(members) if item.running]
        given.append(Given(member, chunk, uuids, seconds, limit - launcher.now, waiting, running))
        return seconds

    launcher = SimulatedLauncher([item.startup_seconds for item in how], chunk_seconds, limit)
    plans = [placed(member, item) for member, item in zip(plan.models, how, strict=True)]
    members = [ModelState(member, clock=launcher) for member in plans]
    run = SelectingRun()
    run.plan = plan
    deadline = Deadline(limit, max(1, len(devices)), launcher)
    rules = Rules(2, "fail", 1e9, standby=False)
    Scheduler(members, devices, launcher, run, rules, launcher, deadline).run()
    assert all(item.failure is None for item in members)
    return Outcome(members, given, launcher.loads, limit)


def enough_seconds(state: ModelState, how: Simulated) -> float:
    """For any chunk of a member, and the one that its device has in hand."""
    return 4 * SAFETY * max(chunk.cost for chunk in state.plan.chunks) * how.views * how.seconds


def too_early(how: Sequence[Simulated], outcome: Outcome) -> list[tuple[Given, int]]:
    """Chunks of later views that were given where another member's first view could have been computed in time.

    A member that waits for two GPUs reserves the first that comes free; nothing is asked of the others then.
    """
    results = []
    for part in outcome.given:
        if any(how[other].gpus > 1 and other not in part.running for other in part.waiting):
            continue
        for other in part.waiting if part.chunk.job else ():
            state = outcome.members[other]
            is_able = not part.devices or set(part.devices) <= set(state.plan.placement.devices)
            enough = 2 * how[other].startup_seconds + enough_seconds(state, how[other])
            is_able = is_able and how[other].gpus == 1
            if other not in part.running and is_able and part.seconds_left > enough:
                results.append((part, other))
    return results


def left_idle(how: Sequence[Simulated], outcome: Outcome, devices: Sequence[Device]) -> list[tuple[str, int]]:
    """Devices that a member could have used that computed nowhere, from when both had their last chunk."""
    results = []
    for device in [device.uuid for device in devices] or ["cpu"]:
        for number, state in enumerate(outcome.members):
            last = [
                part.seconds_left - part.seconds
                for part in outcome.given
                if part.member == number or device in (part.devices or ("cpu",))
            ]
            enough = 2 * how[number].startup_seconds + enough_seconds(state, how[number])
            is_able = device in (state.plan.placement.devices or ("cpu",))
            if state.chunks.pending and is_able and min(last, default=outcome.limit) > enough:
                results.append((device, number))
    return results


@pytest.mark.parametrize("devices", [0, 1])
def test_on_one_device_the_first_views_of_all_come_first(devices: int) -> None:
    how = [Simulated(views=2), Simulated(views=3), Simulated()]
    outcome = simulate(how, 340.0, gpus(devices))
    assert outcome.fractions(0) == pytest.approx([1.0, 1.0, 1.0])
    assert not too_early(how, outcome)
    views = [part.chunk.job for part in outcome.given]
    assert views[: views.index(1)].count(0) == views.count(0)


def test_members_get_equally_far_in_their_first_views_and_then_in_the_others() -> None:
    """However many views a member has."""
    how = [Simulated(views=3), Simulated(), Simulated(views=3)]
    outcome = simulate(how, 195.0)
    assert {part.chunk.job for part in outcome.given} == {0}
    assert outcome.fractions(0) == pytest.approx([0.6, 0.6, 0.6], abs=0.15)
    # Two share a GPU; on the other one a first view is not over before the end.
    how = [Simulated(views=2, devices=(0,)), Simulated(views=2, devices=(0,)), Simulated(seconds=700.0)]
    how[2] = replace(how[2], devices=(1,))
    outcome = simulate(how, 320.0, gpus(2))
    assert outcome.fractions(0)[2] < 0.5
    assert outcome.fractions(0)[:2] == [1.0, 1.0]
    assert outcome.fractions(1)[:2] == pytest.approx([0.5, 0.5], abs=0.3)


def test_with_time_for_all_each_is_loaded_once_more_at_most() -> None:
    outcome = simulate([Simulated(views=2), Simulated(views=2), Simulated()], 1000.0)
    assert all(item.finished for item in outcome.members)
    assert dict(outcome.loads) == {0: 2, 1: 2, 2: 1}


def test_nobody_gives_way_to_one_who_takes_most_of_the_time_to_start() -> None:
    late = Simulated(startup_seconds=70.0)
    outcome = simulate([Simulated(views=2), late], 200.0)
    assert outcome.loads == {0: 1}
    assert outcome.fractions(0) == pytest.approx([1.0, 0.0])
    assert outcome.fractions(1)[0] > 0.5


MEMBERS = st.builds(
    Simulated,
    views=st.integers(1, 3),
    seconds=st.sampled_from([20.0, 100.0, 300.0]),
    startup_seconds=st.sampled_from([0.5, 5.0, 20.0]),
    devices=st.sampled_from([None, (0,), (0, 1)]),
    replicas=st.sampled_from([None, 1]),
    gpus=st.sampled_from([1, 1, 2]),
)


@tries(80)
@given(
    st.lists(MEMBERS, min_size=2, max_size=4),
    st.integers(0, 2),
    st.sampled_from([60.0, 200.0, 500.0, 2000.0]),
)
def test_no_second_view_comes_before_a_first_that_could_be_computed_there(
    how: list[Simulated], devices: int, limit: float
) -> None:
    how = [
        replace(setting, devices=None) if devices == 1 or setting.gpus == 2 else setting
        for setting in (replace(setting, gpus=min(setting.gpus, max(devices, 1))) for setting in how)
    ]
    outcome = simulate(how, limit, gpus(devices))
    assert too_early(how, outcome) == []
    if all(setting.gpus == 1 for setting in how):  # one that waits for two keeps the first that comes free
        assert left_idle(how, outcome, gpus(devices)) == []
    if limit == 2000.0 and sum(setting.views * setting.seconds for setting in how) < 1000.0:
        assert all(item.finished for item in outcome.members), "time enough, for all loads as well"


def order_of(outcome: Outcome) -> list[tuple[int, int]]:
    """Member and view of what was given, one after the other."""
    given = [(part.member, part.chunk.job) for part in outcome.given]
    return [now for before, now in zip([None, *given], given, strict=False) if now != before]


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_workers_wait_for_the_last_chunk_before_a_view_with_when(devices: int) -> None:
    """Instead of loading the model again; its rows come the closest first, and take the speed that is known."""
    outcome = simulate([Simulated(views=2, when={"share": 1.0})], 10_000.0, gpus(devices))
    (state,) = outcome.members
    assert outcome.loads == {0: devices}
    assert order_of(outcome) == [(0, 0), (0, 1)]
    assert state.finished
    assert state.fraction == pytest.approx(1.0)
    assert (state.rows, state.rows_done) == (800, 800)
    assert sum(part.chunk.cost for part in outcome.given) == pytest.approx(1.0)
    used = {part.devices for part in outcome.given if part.chunk.job}
    assert len(used) == devices
    numbers = [part.chunk.index for part in outcome.given]
    assert len({*numbers}) == len(numbers)
    (first, *_) = (part.chunk for part in outcome.given if part.chunk.job)
    rows = state.plan.order[first.start : first.stop]
    assert sorted(rows) == list(range(400 - len(rows), 400)), "of which the doubt is largest"


def test_no_worker_waits_on_a_device_that_another_member_needs() -> None:
    how = [Simulated(views=2, when={"share": 1.0}), Simulated(startup_seconds=1.0)]
    outcome = simulate(how, 10_000.0, gpus(1))
    assert order_of(outcome)[-1] == (0, 1)
    assert all(state.finished for state in outcome.members)


def test_what_is_to_have_the_time_that_is_left_comes_after_all_else() -> None:
    timed = {"share": "as_time_allows"}
    how = [Simulated(views=2, when=timed), Simulated(views=2), Simulated(views=3, when=timed)]
    outcome = simulate(how, 10_000.0, gpus(1))
    later = [given for given in order_of(outcome) if given[1]]
    assert {*later[:-2]} == {(1, 1), (2, 1)}
    assert {*later[-2:]} == {(0, 1), (2, 2)}
    assert all(state.finished for state in outcome.members)
    outcome = simulate(how, 700.0, gpus(1))
    assert outcome.fractions(0) == pytest.approx([1.0, 1.0, 1.0])
    assert [state.may_end_early for state in outcome.members] == [True, False, True]
    for state in outcome.members[::2]:
        rows = state.rows
        state.end_early()
        assert state.finished
        assert state.fraction == 1.0
        assert state.rows_done <= state.rows < rows
