"""Members with views that may not compute some rows: each has its own rows, and the plan counts these alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ensemble.planning.plan import ModelPlan, with_job, without_done
from tests.planning.test_plan import config, facts, make_plan

ROWS = 3000
TEMPLATES = [{"name": f"v{number}", "prompt_template": "{{ text }}" + "?" * number} for number in range(3)]
LENGTHS = np.random.default_rng(0).integers(1, 4000, ROWS)
# Each row in one view, but for the last hundred, which are in all.
VIEW_ROWS = np.arange(ROWS) % 3 == np.arange(3)[:, None]
VIEW_ROWS[:, -100:] = True


def job_rows(member: str) -> dict[str, npt.NDArray[np.bool_]]:
    return {f"{member}@v{number}": rows for number, rows in enumerate(VIEW_ROWS)}


def rows_in(member: ModelPlan) -> list[set[int]]:
    """The rows of each view; each one in a chunk of its view, once."""
    results: list[list[int]] = [[], [], []]
    for chunk in member.chunks:
        results[chunk.job] += member.order[chunk.start : chunk.stop].tolist()
    assert len({chunk.index for chunk in member.chunks}) == len(member.chunks)
    assert all(len(rows) == len(set(rows)) for rows in results)
    return [set(rows) for rows in results]


def wanted(is_selected: Any = True) -> list[set[int]]:
    return [set(np.flatnonzero(rows & is_selected).tolist()) for rows in VIEW_ROWS]


@pytest.mark.parametrize("limit", [None, 60.0])
def test_each_view_has_its_rows(limit: float | None) -> None:
    settings = config({"views": TEMPLATES}, time_limit=limit)
    of_member = facts(LENGTHS, views=TEMPLATES)
    whole = make_plan(settings, {"m0": of_member}, []).models[0]
    plan = make_plan(settings, {"m0": replace(of_member, job_rows=job_rows("m0"))}, [])
    (member,) = plan.models
    assert rows_in(member) == wanted()
    assert len(member.order) == VIEW_ROWS.sum()
    assert sum(chunk.cost for chunk in member.chunks) == pytest.approx(1.0)
    # What the rows are to the whole, at 32 bytes more for each.
    share = (VIEW_ROWS * (LENGTHS + 32)).sum() / (3 * (LENGTHS + 32).sum())
    assert member.work / whole.work == pytest.approx(share)
    lengths = LENGTHS[member.order]
    for chunk in member.chunks:
        assert (np.diff(lengths[chunk.start : chunk.stop]) <= 0).all(), (
            "as of any view: the longest row first"
        )
    half = np.array([np.arange(ROWS) % 2 == 0] * 3)
    left = without_done(member, half, is_timed=limit is not None)
    assert rows_in(left) == wanted(np.arange(ROWS) % 2 == 1)


def test_selected_rows_of_members_and_of_views() -> None:
    is_selected, doubt = np.arange(ROWS) < 1000, np.zeros(ROWS)
    models = {"when": {"share": 0.5}, "views": TEMPLATES}
    known = {"m0": facts(LENGTHS), "m1": replace(facts(LENGTHS, views=TEMPLATES), job_rows=job_rows("m1"))}
    plan = make_plan(config({}, models), known, [])
    nothing = np.zeros((3, ROWS), dtype=np.bool_)
    member = without_done(plan.models[1], nothing, is_timed=False)
    assert rows_in(member) == [set()] * 3
    for number in range(3):
        member = with_job(plan, member, number, is_selected, doubt, nothing[number])
    assert rows_in(member) == wanted(is_selected)
    # A view's share of the work is taken for a third of it before its rows are selected.
    assert sum(chunk.cost for chunk in member.chunks) + member.left_out == pytest.approx(1.0, abs=0.01)

    views = [*TEMPLATES[:2], {**TEMPLATES[2], "when": {"share": 0.5}}]
    known["m1"] = replace(facts(LENGTHS, views=views), job_rows=job_rows("m1"))
    plan = make_plan(config({}, {"views": views}), known, [])
    member = without_done(plan.models[1], nothing, is_timed=False)
    assert rows_in(member) == [*wanted()[:2], set()]
    member = with_job(plan, member, 2, is_selected, doubt, nothing[2])
    assert rows_in(member) == [*wanted()[:2], wanted(is_selected)[2]]
    assert sum(chunk.cost for chunk in member.chunks) < 1.0


@pytest.mark.parametrize("asked", [1, "auto", 4])
def test_a_model_without_rows_of_its_own_has_nothing_to_compute_and_still_needs_no_file(asked: Any) -> None:
    """As the model of a fold, if the table has no row that this fold has not seen."""
    views = [{"name": "v0"}, {"name": "v1", "model_name_or_path": "other"}]
    rows = {"m0@v0": np.ones(ROWS, dtype=np.bool_), "m0@v1": np.zeros(ROWS, dtype=np.bool_)}
    known = {name: replace(facts(LENGTHS), name=name, job_rows={name: rows[name]}) for name in rows}
    _, empty = make_plan(config({"views": views}, cpu_workers=asked), known, []).models
    assert empty.needs_worker
    assert not empty.chunks
    assert without_done(empty, np.zeros((1, ROWS), dtype=np.bool_), is_timed=True).chunks == ()
