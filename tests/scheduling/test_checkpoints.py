"""Which checkpoint each worker gets where views have checkpoints of their own, with pretended workers."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ensemble.common.protocol import Load, Predict, Start
from ensemble.planning.plan import make_plan
from ensemble.scheduling.deadline import Deadline
from ensemble.scheduling.launchers.base import WorkerStart
from ensemble.scheduling.retry import Rules
from ensemble.scheduling.scheduler import Scheduler
from ensemble.scheduling.state import MemberState
from tests.planning.test_plan import config, facts, gpus
from tests.pretended import SPEC, Launched, PretendedLauncher, PretendedRun, computed, schedule

# The third view has the first one's checkpoint.
CHECKPOINTS = (0, 1, 0)
VIEWS = [{"name": name, "prompt_template": f"{name} {{{{ text }}}}"} for name in ("a", "b", "c")]


class CountingRun(PretendedRun):
    """Notes the checkpoint of each worker in the name of its log."""

    def worker_start(self, member: Any, replica: int, devices: Any, checkpoint: int) -> WorkerStart:
        return WorkerStart(Start(SPEC), tuple(devices), {}, Path(str(checkpoint)))


@pytest.mark.parametrize("is_timed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_worker_computes_views_of_its_checkpoint_alone(count: int, is_timed: bool) -> None:
    devices, launched = gpus(count), list[Launched]()
    keys: dict[str, Any] = {"text_column": None, "prompt_template": "{{ text }}", "views": VIEWS}
    lengths = {"m0": facts(np.full(8, 200_000, dtype=np.int64), **keys)}
    (member,) = make_plan(config(keys), lengths, devices).members
    state = MemberState(replace(member, checkpoints=CHECKPOINTS))
    views = {chunk.index: chunk.view for chunk in member.chunks}
    launcher, run = PretendedLauncher(computed, on_launch=launched.append), CountingRun()
    deadline = Deadline(state.clock() + 600.0, count, state.clock) if is_timed else None
    Scheduler([state], devices, launcher, run, Rules(2, "fail", 60.0), state.clock, deadline).run()
    assert state.finished
    seen = defaultdict[int, list[int]](list)
    for worker in launched:
        chunks = [command.chunk for command in worker.worker.got if isinstance(command, Predict)]
        seen[int(worker.member)] += [views[index] for index in chunks]
        assert {CHECKPOINTS[views[index]] for index in chunks} <= {int(worker.member)}
    assert {0, 1} == {*seen}
    assert {*seen[0]} <= {0, 2}
    assert {*seen[1]} == {1}
    assert len(seen[0]) + len(seen[1]) >= len(member.chunks)
    first_two = [worker.member for worker in launched[:2]]
    if is_timed and count > 1:
        assert first_two == ["0", "0"], "the first view is computed by all before another"
    else:
        assert first_two == ["0", "1"]
    if count == 1:
        assert len(launched) == 2, "a checkpoint is loaded once"


def test_nobody_stands_by_with_a_checkpoint_whose_chunks_others_have_taken() -> None:
    devices, launched = gpus(2), list[Launched]()
    views = {"text_column": None, "prompt_template": "{{ text }}", "views": VIEWS}
    keys: list[dict[str, Any]] = [{"replicas": 1}, views]
    known = {
        "m0": facts(np.full(20, 200_000, dtype=np.int64), **keys[0]),
        "m1": facts(np.full(10, 200_000, dtype=np.int64), **keys[1]),
    }
    plan = make_plan(config(*keys), known, devices)
    first, second = plan.members
    second = replace(second, checkpoints=(0, 1, 2), first_replicas=2)
    began = time.monotonic()
    deadline = Deadline(600.0, 2, lambda: time.monotonic() - began)
    members = (replace(first, first_replicas=1), second)
    states = schedule(replace(plan, members=members), devices, deadline=deadline, on_launch=launched.append)
    assert all(state.finished for state in states)
    loaded = [worker.worker.got for worker in launched if Load() in worker.worker.got]
    assert all(any(isinstance(command, Predict) for command in got) for got in loaded)
