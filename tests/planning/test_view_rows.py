"""Members with views that may not compute some rows: each has its own rows, and the plan counts these alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ensemble.planning.plan import MemberPlan, make_plan, with_rows, with_view, without_done
from tests.planning.test_plan import config, facts

ROWS = 3000
TEMPLATES = [{"name": f"v{number}", "prompt_template": "{{ text }}" + "?" * number} for number in range(3)]
LENGTHS = np.random.default_rng(0).integers(1, 4000, ROWS)
# Each row in one view, but for the last hundred, which are in all.
VIEW_ROWS = np.arange(ROWS) % 3 == np.arange(3)[:, None]
VIEW_ROWS[:, -100:] = True


def rows_in(member: MemberPlan) -> list[set[int]]:
    """The rows of each view; each one in a chunk of its view, once."""
    results: list[list[int]] = [[], [], []]
    for chunk in member.chunks:
        views, rows = divmod(member.order[chunk.start : chunk.stop], ROWS)
        assert set(views.tolist()) == {chunk.view}
        results[chunk.view] += rows.tolist()
    assert len({chunk.index for chunk in member.chunks}) == len(member.chunks)
    assert all(len(rows) == len(set(rows)) for rows in results)
    return [set(rows) for rows in results]


def wanted(is_selected: Any = True) -> list[set[int]]:
    return [set(np.flatnonzero(rows & is_selected).tolist()) for rows in VIEW_ROWS]


@pytest.mark.parametrize("limit", [None, 60.0])
def test_each_view_has_its_rows(limit: float | None) -> None:
    settings = config({"views": TEMPLATES}, time_limit=limit)
    of_member = facts(LENGTHS, views=TEMPLATES)
    whole = make_plan(settings, {"m0": of_member}, []).members[0]
    plan = make_plan(settings, {"m0": replace(of_member, view_rows=VIEW_ROWS)}, [])
    (member,) = plan.members
    assert rows_in(member) == wanted()
    assert len(member.order) == VIEW_ROWS.sum()
    assert sum(chunk.cost for chunk in member.chunks) == pytest.approx(1.0)
    # What the rows are to the whole, at 32 bytes more for each.
    share = (VIEW_ROWS * (LENGTHS + 32)).sum() / (3 * (LENGTHS + 32).sum())
    assert member.work / whole.work == pytest.approx(share)
    lengths = LENGTHS[member.order % ROWS]
    for chunk in member.chunks:
        assert (np.diff(lengths[chunk.start : chunk.stop]) <= 0).all(), (
            "as of any view: the longest row first"
        )
    half = np.concatenate([np.arange(ROWS) % 2 == 0] * 3)
    left = without_done(member, half, is_timed=limit is not None)
    assert rows_in(left) == wanted(np.arange(ROWS) % 2 == 1)


def test_selected_rows_of_members_and_of_views() -> None:
    is_selected, doubt = np.arange(ROWS) < 1000, np.zeros(ROWS)
    models = {"when": {"share": 0.5}, "views": TEMPLATES}
    known = {"m0": facts(LENGTHS), "m1": replace(facts(LENGTHS, views=TEMPLATES), view_rows=VIEW_ROWS)}
    plan = make_plan(config({}, models), known, [])
    member = with_rows(plan, plan.members[1], is_selected, doubt)
    assert rows_in(member) == wanted(is_selected)
    assert sum(chunk.cost for chunk in member.chunks) == pytest.approx(1.0)

    views = [*TEMPLATES[:2], {**TEMPLATES[2], "when": {"share": 0.5}}]
    known["m1"] = replace(facts(LENGTHS, views=views), view_rows=VIEW_ROWS)
    plan = make_plan(config({}, {"views": views}), known, [])
    nothing = np.zeros(3 * ROWS, dtype=np.bool_)
    member = without_done(plan.members[1], nothing, is_timed=False)
    assert rows_in(member) == [*wanted()[:2], set()]
    member = with_view(plan, member, 2, is_selected, doubt, nothing)
    assert rows_in(member) == [*wanted()[:2], wanted(is_selected)[2]]
    assert sum(chunk.cost for chunk in member.chunks) < 1.0
