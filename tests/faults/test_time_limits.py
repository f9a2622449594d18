"""A limit that is shorter than the work, repeated: each run gets further, none takes longer than it may."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ensemble.cli.progress import QuietDisplay
from ensemble.common.protocol import Predict
from ensemble.pipeline.load import load
from ensemble.pipeline.run import run
from ensemble.pipeline.run_report import RunReport, measured_speeds
from ensemble.planning.forecast import Speed
from ensemble.planning.plan import without_done
from ensemble.scheduling.deadline import Deadline, reserve_seconds, time_limit_text
from ensemble.scheduling.retry import Rules
from ensemble.scheduling.state import ModelState
from tests.cli.reports import member, report
from tests.faults.chunky import chunky_config
from tests.planning.test_plan import config, facts, make_plan
from tests.pretended import SimulatedLauncher, make_scheduler
from tests.project import Project
from tests.sampling import one_in

pytestmark = pytest.mark.usefixtures("warm")

# Until workers can start, and what the first submission takes.
BEFORE_SECONDS, FIRST_SECONDS = 1.0, 0.05


class Repeated:
    """The same command again and again: each run knows what is done, and what the one before has measured."""

    def __init__(
        self, limit: float, rows: int, startup_seconds: Sequence[float], row_seconds: Sequence[float]
    ) -> None:
        self.limit = limit
        self._startup_seconds, self._row_seconds = startup_seconds, row_seconds
        self._facts = {
            f"m{index}": facts(np.full(rows, 400, dtype=np.int64)) for index in range(len(row_seconds))
        }
        self._is_done = {name: np.zeros(rows, dtype=np.bool_) for name in self._facts}
        self._speeds: dict[str, Speed] = {}
        self.explanation = ""
        self.kept = reserve_seconds(FIRST_SECONDS, len(row_seconds), limit)

    @property
    def rows(self) -> list[int]:
        """What is done of each member."""
        return [int(done.sum()) for done in self._is_done.values()]

    @property
    def is_complete(self) -> bool:
        return all(done.all() for done in self._is_done.values())

    def _chunk_seconds(self, member: int, devices: tuple[str, ...], command: Predict) -> float:
        return (command.stop - command.start) * self._row_seconds[member]

    def again(self) -> list[ModelState]:
        run = config(*({} for _ in self._facts), time_limit=self.limit)
        made = make_plan(run, self._facts, [], speeds=self._speeds)
        members = [
            ModelState(without_done(item, self._is_done[item.name][None], is_timed=True))
            for item in made.models
        ]
        over_at = self.limit - self.kept
        launcher = SimulatedLauncher(self._startup_seconds, self._chunk_seconds, over_at, BEFORE_SECONDS)
        make_scheduler(members, [], launcher, Rules(2, "fail", 60.0), Deadline(over_at, 1, launcher)).run()
        assert launcher.now <= max(over_at, BEFORE_SECONDS), "the limit is held"
        for state in members:
            done = self._is_done[state.plan.name]
            done[:] = True
            for chunk in (*state.chunks.pending, *state.chunks.in_hand.values()):
                done[state.plan.order[chunk.start : chunk.stop]] = False
        computed_as = {state.plan.name: state.plan.model.computed_as for state in members}
        results = [
            member(name, computed_as=computed_as[name], speed=state.speed)
            for name, state in zip(computed_as, members, strict=True)
        ]
        self._speeds = measured_speeds(report(*results), [], computed_as)
        self.explanation = time_limit_text(members, self.limit, BEFORE_SECONDS, self.kept)
        return members


# Seconds: the limit, a worker's start, a row. For rows 0.8 * limit - 1 - start are left, more of a long limit.
TIMES = [
    (8.0, 5.0, 0.001),
    (8.0, 5.0, 0.3),
    (13.0, 4.0, 0.001),
    (13.0, 4.0, 0.1),
    (13.0, 4.0, 1.5),
    (13.0, 4.0, 4.0),
    (20.0, 12.0, 0.02),
    (20.0, 1.0, 2.0),
    (60.0, 5.0, 0.5),
    (60.0, 45.0, 0.5),
    (300.0, 150.0, 1.0),
    (3600.0, 5.0, 0.5),
]


@pytest.mark.fault(34)
@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize(("limit", "startup", "row"), one_in(3, TIMES))
def test_each_repetition_gets_further(limit: float, startup: float, row: float, members: int) -> None:
    runs = Repeated(limit, 200, [startup] * members, [row] * members)
    learned = 0
    while not runs.is_complete:
        before = runs.rows
        states = runs.again()
        assert all(state.failure is None for state in states)
        assert all(now >= then for now, then in zip(runs.rows, before, strict=True))
        if runs.rows == before:  # it has learned how long rows take, which is more than there was time for
            assert "the same command again may get further" in runs.explanation
            learned += 1
            assert learned <= 5 * members


@pytest.mark.fault(34)
@pytest.mark.parametrize("limit", [1.0, 3.0, 6.0])
def test_a_limit_that_is_too_short_is_tried_and_explained(limit: float) -> None:
    runs = Repeated(limit, 200, [5.0], [0.1])
    for _ in range(3):
        (state,) = runs.again()
        assert runs.rows == [0]
        assert bool(state.workers) == (limit > 1.3), "tried wherever there is any time"
        assert f"1.0 s of time_limit ({limit:g} s) were over before a worker could start" in runs.explanation
        assert f"{runs.kept:.1f} s are kept for the last submission" in runs.explanation
        assert "longer time_limit" in runs.explanation, "nobody has measured what it would take"


@pytest.mark.fault(34)
def test_the_explanation_knows_what_was_measured() -> None:
    """A worker was ready once; then the limit was made shorter."""
    runs = Repeated(13.0, 200, [5.0], [1.0])
    runs.again()
    runs.again()
    (done,) = runs.rows
    assert done
    runs.limit, runs.kept = 6.0, reserve_seconds(FIRST_SECONDS, 1, 6.0)
    runs.again()
    assert runs.rows == [done]
    assert "; a start takes 5.0 s, so time_limit must be more than 8 s" in runs.explanation
    runs.limit, runs.kept = 13.0, reserve_seconds(FIRST_SECONDS, 1, 13.0)
    runs.again()
    assert runs.rows[0] > done, "what was measured before is still known"


class Listening(QuietDisplay):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.fault(34)
@pytest.mark.parametrize("name", ["submission.csv", "submission.parquet"])
def test_a_limit_without_a_predicted_row_leaves_an_earlier_submission_as_it_is(
    project: Project, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(project.folder)
    submission = {"sample": "sample.csv", "path": f"out/{name}"}
    project.write_config(project.config(time_limit="1s", submission=submission))

    def run_without_time() -> tuple[RunReport, str]:
        display = Listening()
        report = run(load([Path("config.yaml")]), display, elapsed_seconds=1.0, owns_process=False)
        assert report.status == "time_limit"
        return report, "\n".join(display.lines)

    places = [Path("runs/first/submission.csv"), Path("out", name)]
    _, message = run_without_time()
    assert "a first submission is written" in message
    good = pd.read_csv("sample.csv", dtype={"id": str}).assign(tie=0.1, winner_a=0.2, winner_b=0.7)
    write = {".csv": pd.DataFrame.to_csv, ".parquet": pd.DataFrame.to_parquet}
    for place in places:
        write[place.suffix](good, place, index=False)
    before = [place.read_bytes() for place in places]
    report, message = run_without_time()
    assert [place.read_bytes() for place in places] == before
    kept = f"{places[1]} of an earlier run stays until a member has predicted a row"
    assert kept in message
    assert kept in report.explanation
    assert report.files["submission"] == str(places[1].absolute())
    # One of other rows is no submission of this table.
    for place in places:
        write[place.suffix](good[1:], place, index=False)
    _, message = run_without_time()
    assert "a first submission is written" in message
    read = {".csv": pd.read_csv, ".parquet": pd.read_parquet}
    for place in places:
        written = read[place.suffix](place)
        assert len(written) == len(good)
        assert (written["tie"] == 1 / 3).all()


@pytest.mark.long
@pytest.mark.fault(34)
def test_short_limits_repeated_until_all_is_done(chunky: Project) -> None:
    """Real runs, each with twice the time of the one before; how many that takes is the machine's matter."""
    chunky.write_config(chunky_config(chunky, fill="sample"))
    reached = 0
    for limit in itertools.takewhile(lambda seconds: seconds <= 1024, (2**power for power in range(11))):
        done = chunky.ensemble("run", "config.yaml", "--set", f"time_limit={limit}s", timeout=1100)
        assert done.returncode in (0, 4), done.stdout + done.stderr
        _, rows = chunky.read("out/submission.csv")
        assert [row[0] for row in rows] == sorted(chunky.ids), "a complete submission, whatever came of it"
        before = reached
        reached = chunky.run_json()["merged_rows"].get("llama", 0)
        assert reached >= before
        if done.returncode == 0:
            break
        if reached == before:
            assert "error: no new row was kept: " in done.stderr
            assert f"of time_limit ({limit} s) were over" in " ".join(done.stderr.split())
    assert reached == len(chunky.ids)
