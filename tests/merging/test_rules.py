"""Rules: conditions over the table's rows that override or mask what was merged."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml

from ensemble.config.schema import RuleConfig
from ensemble.data.table import InputTable
from ensemble.data.template import compile_condition
from ensemble.merging.post_process import RowRules, rows_that_meet
from tests.project import ROOT, Project

LABELS = ["a", "b", "tie"]
pytestmark = pytest.mark.usefixtures("warm")


def applied(
    values: list[list[float]], *rules: dict[str, Any], exclusive: bool = True, hits: Any = None
) -> list[list[float]]:
    """The values once the rules have been applied to all rows, or to ``hits``, bool [rules, rows]."""
    table = np.array(values, order="F")
    rows = np.ones((len(rules), len(values)), bool) if hits is None else np.array(hits)
    given = [RuleConfig.model_validate({"when": "x", **rule}) for rule in rules]
    RowRules(given, LABELS, rows).apply(0, table, exclusive)
    result: list[list[float]] = table.tolist()
    return result


def test_values_that_are_set_leave_the_rest_to_the_others() -> None:
    row = [[0.2, 0.6, 0.2]]
    assert applied(row, {"set": {"tie": 1.0}}) == [[0.0, 0.0, 1.0]]
    np.testing.assert_allclose(applied(row, {"set": {"tie": 0.6}}), [[0.1, 0.3, 0.6]], rtol=1e-15)
    np.testing.assert_allclose(applied(row, {"set": {"a": 0.5, "b": 0.25}}), [[0.5, 0.25, 0.25]], rtol=1e-15)
    np.testing.assert_allclose(applied([[0, 0, 1.0]], {"set": {"tie": 0.5}}), [[0.25, 0.25, 0.5]], rtol=1e-15)
    assert applied(row, {"set": {"tie": 1.0}}, exclusive=False) == [[0.2, 0.6, 1.0]]
    assert applied([[-4.0, 9.0, 3.0]], {"set": {"a": 2.5}}, exclusive=False) == [[2.5, 9.0, 3.0]]


def test_masks_scale_exclusive_labels_and_leave_others_alone() -> None:
    row = [[0.2, 0.6, 0.2]]
    np.testing.assert_allclose(applied(row, {"mask": ["b"]}), [[0.5, 0.0, 0.5]], rtol=1e-15)
    assert applied(row, {"mask": ["b", "tie"]}) == [[1.0, 0.0, 0.0]]
    assert applied([[0.0, 1.0, 0.0]], {"mask": ["b"]}) == [[0.5, 0.0, 0.5]], "nothing to go by"
    assert applied([[0.0, 1.0, 0.0]], {"mask": ["a"]}, {"mask": ["b"]}) == [[0.0, 0.0, 1.0]]
    assert applied(row, {"mask": ["b"]}, exclusive=False) == [[0.2, 0.0, 0.2]]
    assert applied(row, {"mask": LABELS}, exclusive=False) == [[0.0, 0.0, 0.0]]


def test_rules_count_in_their_order_and_each_for_its_own_rows() -> None:
    rows = [[0.2, 0.6, 0.2], [0.2, 0.6, 0.2], [0.25, 0.25, 0.5]]
    hits = [[True, True, False], [False, True, True]]
    result = applied(rows, {"mask": ["a"]}, {"set": {"b": 0.5}}, hits=hits)
    np.testing.assert_allclose(result, [[0, 0.75, 0.25], [0, 0.5, 0.5], [1 / 6, 0.5, 1 / 3]], rtol=1e-15)
    assert applied(rows, {"mask": ["a"]}, hits=[[False] * 3]) == rows, "bit for bit"


def test_a_row_that_nobody_reached_is_left_unless_all_of_it_is_set() -> None:
    nobody = [[np.nan] * 3]
    assert applied(nobody, {"set": {"tie": 1.0}}) == [[0.0, 0.0, 1.0]]
    for rule in ({"mask": ["a"]}, {"set": {"tie": 0.5}}):
        assert np.isnan(applied(nobody, rule)).all()
    assert np.isnan(applied(nobody, {"set": {"tie": 1.0}}, exclusive=False)).all()


@pytest.mark.parametrize("seed", range(5))
def test_rows_sum_to_1_whatever_the_rules(seed: int) -> None:
    chooser = np.random.default_rng(seed)
    values = chooser.dirichlet(np.full(3, 0.05), 500)
    values[chooser.random(500) < 0.2] = np.eye(3)[chooser.integers(3)]
    rules = [{"mask": ["a"]}, {"set": {"b": 0.3}}, {"mask": ["tie"]}, {"set": {"a": 0.25, "tie": 0.25}}]
    order = chooser.permutation(4)
    hits = chooser.random((4, 500)) < 0.5
    actual = np.array(applied(values.tolist(), *(rules[item] for item in order), hits=hits))
    np.testing.assert_allclose(actual.sum(axis=1), 1, rtol=1e-12)
    assert actual.min() >= 0
    untouched = ~hits.any(axis=0)
    np.testing.assert_array_equal(actual[untouched], values[untouched])
    last = {name: hits[place] for place, name in enumerate(order.tolist())}
    if order[-1] == 0:
        assert (actual[last[0], 0] == 0).all()


CELLS = ["", "x", "X", " ", "é", "true", None, '["a"]', "\u3000x\n", "éx ", "\U0001f600"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ t == u }}", lambda t, u: t == u),
        ("{{ not t }}", lambda t, u: not t),
        ("{{ t != u and not t.strip() }}", lambda t, u: t != u and not t.strip()),
        ("{{ t | length < u | length or 'x' in t }}", lambda t, u: len(t) < len(u) or "x" in t),
        ("{% if t %}true{% endif %}", lambda t, u: bool(t)),
    ],
)
def test_rows_that_meet_a_condition(source: str, expected: Callable[[str, str], bool]) -> None:
    chooser = random.Random(1)
    cells = {name: [chooser.choice(CELLS) for _ in range(300)] for name in "tu"}
    table = InputTable(pa.table(cells), pa.chunked_array([pa.array(map(str, range(300)))]), None, {})
    pairs = zip(cells["t"], cells["u"], strict=True)
    result = rows_that_meet(table, compile_condition(source))
    assert result.tolist() == [expected(first or "", second or "") for first, second in pairs]


def write(project: Project, **changes: Any) -> np.ndarray:
    """A table of pairs of responses, one member's predictions and a config with rules; returns the predictions."""
    chooser, names = random.Random(3), ["winner_a", "winner_b", "tie"]
    cells = ["yes", "no", "", '["x", null]', "yes"]
    rows, given = [], []
    for number in range(200):
        pair = [cells[number % 5], chooser.choice(cells)]
        rows.append([f"{number:03d}", *pair, json.dumps(pair), names[number % 3]])
        first = chooser.random()
        given.append([first, (1 - first) / 4, (1 - first) * 3 / 4])
    project.write_csv("test.csv", ["id", "left", "right", "both", "label"], rows)
    ids = [row[0] for row in rows]
    project.write_csv(
        "mate.csv", ["id", *names], [[i, *map(repr, v)] for i, v in zip(ids, given, strict=True)]
    )
    project.write_csv("sample.csv", ["id", *names], [[row_id, "0.3", "0.3", "0.4"] for row_id in ids[::-1]])
    rules = [
        {"when": "{{ left == right }}", "set": {"tie": 1.0}},
        {"when": "{% if not (both | fromjson)[0] %}true{% endif %}", "mask": ["winner_a"]},
    ]
    members = [{"name": "mate", "task_type": "csv", "path": "mate.csv"}]
    config = project.config(**{"models": members, "rules": rules, "defaults": None, **changes})
    project.write_config(config)
    return np.array(given)


def test_a_run_with_rules(project: Project) -> None:
    values = write(project)
    _, table = project.read("test.csv")
    same = np.array([row[1] == row[2] for row in table])
    empty = np.array([not row[1] for row in table])
    assert min(same.sum(), empty.sum(), (same & empty).sum()) > 3
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr + done.stdout
    expected = values.copy()
    expected[same] = [0, 0, 1]
    expected[empty, 0] = 0
    expected /= expected.sum(axis=1, keepdims=True)
    written = project.values("runs/first/ensemble.csv")
    np.testing.assert_allclose(written, expected, rtol=1e-12)
    np.testing.assert_array_equal(written[~same & ~empty], values[~same & ~empty])
    np.testing.assert_array_equal(project.values("out/submission.csv"), written[::-1])
    np.testing.assert_array_equal(project.values("runs/first/predictions/mate.csv"), values)
    report = project.run_json()
    assert [rule["rows"] for rule in report["rules"]] == [same.sum(), empty.sum()]
    assert (report["rules"][0]["set"], report["rules"][1]["mask"]) == ({"tie": 1.0}, ["winner_a"])
    truth = [["winner_a", "winner_b", "tie"].index(row[4]) for row in table]
    right = (written.argmax(axis=1) == truth).mean()
    assert report["scores"]["ensemble"]["accuracy"] == pytest.approx(right), "of what is written"
    assert report["null_texts"] == {}, "no column is read"
    message = " ".join(done.stdout.split())
    assert f"rules[0]: set tie 1 in {same.sum()} of 200 rows, by {{{{ left == right }}}}" in message
    assert f"rules[1]: mask winner_a in {empty.sum()} of 200 rows" in message
    again = project.ensemble("run", "config.yaml", "--set", "rules=null")
    assert again.returncode == 0, again.stderr
    assert "reused" in again.stdout
    np.testing.assert_array_equal(project.values("runs/first/ensemble.csv"), values)
    page = project.ensemble("run", "config.yaml", "--set", "report=true")
    assert page.returncode == 0, page.stderr
    text = (project.folder / "runs/first/report.html").read_text(encoding="utf-8")
    assert "{{ left == right }}" in text
    assert "set tie 1" in text


def ruled(project: Project, values: np.ndarray) -> np.ndarray:
    """What the usual rules make of values, [200, 3]."""
    _, table = project.read("test.csv")
    same, empty = np.array([row[1] == row[2] for row in table]), np.array([not row[1] for row in table])
    changed = values.copy()
    changed[same] = [0, 0, 1]
    changed[empty, 0] = 0
    return np.asarray(changed / changed.sum(axis=1, keepdims=True))


@pytest.mark.long
def test_what_is_held_against_the_ensemble_is_so_with_the_same_rules(project: Project) -> None:
    names = ["winner_a", "winner_b", "tie"]
    members: list[dict[str, Any]] = [
        {"name": name, "task_type": "csv", "path": f"{name}.csv"} for name in ("mate", "other")
    ]
    first = write(project, models=members, report=True)
    header, table = project.read("test.csv")
    # The truth agrees with the rules, where it is not the members' to say.
    for number, row in enumerate(table):
        row[4] = "tie" if row[1] == row[2] else names[1 + number % 2] if not row[1] else row[4]
    project.write_csv("test.csv", header, table)
    truth = np.array([names.index(row[4]) for row in table])
    second = 0.3 * np.eye(3)[truth] + 0.7 * np.random.default_rng(5).dirichlet(np.ones(3), 200)
    rows = [[row[0], *map(repr, item)] for row, item in zip(table, second.tolist(), strict=True)]
    project.write_csv("other.csv", ["id", *names], rows)

    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr + done.stdout
    merged = ruled(project, (first + second) / 2)
    np.testing.assert_allclose(project.values("runs/first/ensemble.csv"), merged, rtol=1e-12)

    def losses(values: np.ndarray) -> np.ndarray:
        return np.asarray(-np.log(np.clip(values[np.arange(200), truth], 2**-52, 1 - 2**-52)))

    report = project.run_json()
    assert report["scores"]["other"]["log_loss"] == pytest.approx(losses(second).mean(), rel=1e-9)
    gain = losses(ruled(project, second)).mean() - losses(merged).mean()
    assert report["gain"]["best_member"] == "other"
    assert report["gain"]["gain"] == pytest.approx(gain, rel=1e-9)
    assert "than its best member other with the same rules" in " ".join(done.stdout.split())
    page = (project.folder / "runs/first/report.html").read_text(encoding="utf-8")
    assert "could not be made" not in page
    assert "than its best member other with the same rules" in " ".join(page.split())

    fitted = project.ensemble("fit", "config.yaml", "-o", "weights.yaml")
    assert fitted.returncode == 0, fitted.stderr
    same = sum(row[1] == row[2] for row in table)
    assert f"Rules decide {same} further rows" in " ".join(fitted.stdout.split())
    refused = project.ensemble("fit", "config.yaml", "--set", "rules=null", "-o", "more.yaml")
    assert refused.returncode == 2
    assert "runs/first: its run has other rules" in " ".join(refused.stderr.split())

    without = project.ensemble("run", "config.yaml", "--set", "rules=null", "--set", "output_dir=plain")
    assert without.returncode == 0, without.stderr
    compared = project.ensemble("compare", "plain", "runs/first")
    text = " ".join(compared.stdout.split())
    assert compared.returncode == 0, compared.stderr
    assert (
        "rules[0].when: not set -> '{{ left == right }}' rules[0].set.tie: not set -> 1.0 rules[1].when"
        in text
    )
    assert re.search(r"other\W+200\W+0\W", text), "members' own predictions have no rules"

    cascade = [members[0], {**members[1], "when": {"margin_below": 0.2}}]
    done = project.ensemble("run", "config.yaml", "--set", f"models={json.dumps(cascade)}", "--fresh")
    assert done.returncode == 0, done.stderr
    top = np.sort(first, axis=1)
    asked = top[:, 2] - top[:, 1] < 0.2
    (result,) = project.run_json()["comparisons"].values()
    assert project.run_json()["members"][1]["cascade"]["rows"] == result["rows"] == asked.sum()
    alone, both = losses(ruled(project, first))[asked], losses(merged)[asked]
    assert result["difference"]["value"] == pytest.approx((both - alone).mean(), rel=1e-9)


def test_rows_that_are_filled_keep_to_the_rules(project: Project) -> None:
    values = write(project, time_limit="1h")
    _, rows = project.read("mate.csv")
    project.write_csv("mate.csv", ["id", "winner_a", "winner_b", "tie"], rows[:150])
    config_models = "models=[{name: mate, task_type: csv, path: mate.csv, partial: true}]"
    for fill in ("uniform", "prior"):
        done = project.ensemble(
            "run", "config.yaml", "--set", config_models, "--set", f"fill={fill}", "--fresh"
        )
        assert done.returncode in (0, 4), done.stderr
        written = project.values("runs/first/ensemble.csv")
        _, table = project.read("test.csv")
        same = np.array([row[1] == row[2] for row in table])
        empty = np.array([not row[1] for row in table])
        np.testing.assert_array_equal(
            written[same & ~empty], np.tile([0.0, 0.0, 1.0], (int((same & ~empty).sum()), 1))
        )
        assert (written[empty, 0] == 0).all()
        np.testing.assert_allclose(written.sum(axis=1), 1, rtol=1e-12)
        np.testing.assert_array_equal(
            written[:150][~(same | empty)[:150]], values[:150][~(same | empty)[:150]]
        )


COUNTING = """
from pathlib import Path

def predict(frame, context):
    with Path("calls").open("a") as calls:
        calls.write(f"{len(frame)}\\n")
    if Path("broken").exists():
        return [[1.0]] * len(frame)
    return [[0.5, 0.3, 0.2]] * len(frame)
"""


@pytest.mark.long
def test_rules_count_anew_in_each_merge_and_leave_predictions_alone(project: Project) -> None:
    mate = {"name": "mate", "task_type": "csv", "path": "mate.csv"}
    mine = {"name": "mine", "task_type": "python", "predict": "./mine.py:predict", "columns": ["left"]}
    values = write(project, models=[mate, mine], on_member_failure="continue", retries=0)
    (project.folder / "mine.py").write_text(COUNTING)
    calls, written = project.folder / "calls", project.folder / "runs/first/ensemble.csv"

    def run(*overrides: str) -> str:
        done = project.ensemble(
            "run", "config.yaml", *(word for override in overrides for word in ("--set", override))
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return " ".join(done.stdout.split())

    (project.folder / "broken").touch()
    assert "merged without mine" in run()
    np.testing.assert_allclose(project.values("runs/first/ensemble.csv"), ruled(project, values), rtol=1e-12)
    (project.folder / "broken").unlink()
    run()
    both = (values + np.array([0.5, 0.3, 0.2])) / 2
    np.testing.assert_allclose(project.values("runs/first/ensemble.csv"), ruled(project, both), rtol=1e-12)
    first, computed = written.read_bytes(), calls.read_bytes()
    other = (
        'rules=[{when: "{{ left | length > 1000 }}", mask: [tie]}, {when: "{{ left == \'\' }}", mask: [tie]}]'
    )
    output = run(other)
    assert "rules[0]: mask tie in 0 of 200 rows" in output
    assert "rules[0].when: is true for no row of the table" in output
    _, table = project.read("test.csv")
    assert (project.values("runs/first/ensemble.csv")[:, 2] == 0).tolist() == [not row[1] for row in table]
    run("rules=null")
    np.testing.assert_allclose(project.values("runs/first/ensemble.csv"), both, rtol=1e-12)
    run()
    assert written.read_bytes() == first
    assert calls.read_bytes() == computed, "nothing was computed for it"
    validated = project.ensemble("validate", "config.yaml").stdout
    assert "rules[0]: set tie 1 in 65 of 200 rows, by {{ left == right }}" in " ".join(validated.split())


def test_labels_that_do_not_exclude_each_other_may_all_be_masked(project: Project) -> None:
    mate = {"name": "mate", "task_type": "csv", "path": "mate.csv", "activation": "sigmoid"}
    names = ["winner_a", "winner_b", "tie"]
    rules = [
        {"when": "{{ left == '' }}", "mask": names},
        {"when": "{{ left == 'no' }}", "set": {"winner_a": 0.75, "tie": 0.75}},
    ]
    values = write(project, models=[mate], rules=rules, data={"path": "test.csv"})
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    left = np.array([row[1] for row in project.read("test.csv")[1]])
    values[left == ""] = 0
    values[left == "no"] = np.where([True, False, True], 0.75, values[left == "no"])
    np.testing.assert_array_equal(project.values("runs/first/ensemble.csv"), values)


def test_what_is_wrong_with_rules_is_said_before_anything_runs(project: Project) -> None:
    def message_of(*rules: dict[str, Any], **changes: Any) -> str:
        write(project, rules=list(rules), **changes)
        done = project.ensemble("validate", "config.yaml")
        assert done.returncode == 2, done.stdout
        return " ".join(done.stderr.split())

    mask = {"mask": ["tie"]}
    sentence = message_of(
        {"when": "{{ left == lfet }}", **mask},
        {"when": "{{ left | nope }}", **mask},
        {"when": "left == right", **mask},
    )
    for words in (
        "test.csv: no column for rules[0].when (line ",
        "'lfet' (did you mean 'left'?)",
        "rules[1].when (line ",
        "line 1: no filter named 'nope'",
        "reads no column of the table; a condition gives true or false, as in {{ a == b }}",
    ):
        assert words in sentence, sentence
    sentence = message_of({"when": "{{ left }}", **mask})
    assert "rules[0].when (line " in sentence
    assert "row 1 (id '000'): gives 'yes'; a condition gives true or false" in sentence
    sentence = message_of({"when": "{{ 3 }}", **mask})
    assert "reads no column of the table; a condition gives true or false" in sentence
    sentence = message_of({"when": "{{ id | int - 60 }}", **mask})
    assert "row 1 (id '000'): gives '-60'; a condition gives true or false" in sentence
    sentence = message_of({"when": "{{ (left | fromjson) == [] }}", **mask})
    assert "test.csv: column 'left': broken JSON in" in sentence
    sentence = message_of(
        {"when": "{{ left == '' }}", "mask": ["tie"]}, {"when": "{{ (left ~ ']') | fromjson }}", **mask}
    )
    assert "rules[1].when (line " in sentence
    assert "row 1 (id '000'): line 1: not" in sentence
    # Of a row that no first look would reach.
    sentence = message_of({"when": "{{ left.x if id == '150' else false }}", **mask})
    assert "row 151 (id '150'): line 1: " in sentence
    sentence = message_of(
        {"when": "{{ left == '' }}", "set": {"neither": 1}},
        {"when": "{{ left == '' }}", "mask": ["nor"]},
        {"when": "{{ left == '' }}"},
        {"when": "{{ left == '' }}", "set": {"tie": 1}, **mask},
        {"when": "{{ left == '' }}", "set": {"tie": "high"}},
        {"wen": "{{ left == '' }}", **mask},
    )
    for words in (
        "rules[0].set.neither (line ",
        "rules[1].mask[0] (line ",
        "must be one of the labels",
        "is none of the labels, which are",
        "neither set nor mask is given; give one",
        "set and mask; make two rules",
        "rules[4].set.tie (line ",
        "rules[5].wen (line ",
        "did you mean when?",
    ):
        assert words in sentence, sentence
    sentence = message_of(
        {"when": "{{ left == '' }}", "set": {"tie": 0.9, "winner_a": 0.2}},
        {"when": "{{ left == '' }}", "set": {"tie": -0.1}},
        {"when": "{{ left == '' }}", "mask": ["tie", "winner_a", "winner_b"]},
    )
    for words in (
        "the probabilities sum to 1.1; those of exclusive labels sum to 1",
        "a probability is a number from 0 to 1",
        "masks every label; leave one",
    ):
        assert words in sentence, sentence
    sentence = message_of(
        {"when": "{{ left == '' }}", "mask": ["tie", "winner_a"]},
        {"when": "{{ id == '002' }}", "mask": ["winner_b"]},
    )
    assert "together they mask every label of 1 row, the first is row 3 (id '002'); leave one" in sentence
    raw = [{"name": "mate", "task_type": "csv", "path": "mate.csv", "activation": "none"}]
    sentence = message_of({"when": "{{ left == '' }}", **mask}, models=raw)
    assert "raw values (regression); use set" in sentence


def test_merge_of_files_alone_has_no_rows_for_rules(project: Project) -> None:
    write(project)
    rules = 'rules=[{when: "{{ a }}", mask: [tie]}]'
    done = project.ensemble("merge", "mate.csv", "-o", "out.csv", "--set", rules)
    assert done.returncode == 2
    assert "no such key; " in " ".join(done.stderr.split())


def test_the_conditions_of_the_documentation_are_true_for_what_stands_beside_them() -> None:
    page = (ROOT / "docs/how-to/labels-per-row.md").read_text(encoding="utf-8")
    results = re.findall(r'"(\{[{%].*?[}%]\})"', page)
    table = {
        "response_a": ["x", "", " "],
        "response_b": ["x", "y", "z"],
        "a": ["no ", "yes, as an AI", "maybe"],
        "b": ["no", "no", "no"],
        "turns": ['["", " "]', "[]", '["x"]'],
        "year": ["1949", "1950", "2000"],
        "kind": ["drink", "drink", "food"],
        "lang": ["en", "fr", "fr"],
    }
    rows = InputTable(pa.table(table), pa.chunked_array([["1", "2", "3"]]), None, {})
    expected = [[1, 0, 0], [0, 1, 1], [1, 0, 0], [0, 1, 0], [1, 1, 0], [1, 0, 0], [0, 1, 0]]
    assert len(results) == len(expected), results
    assert [rows_that_meet(rows, compile_condition(source)).tolist() for source in results] == expected
    shown = re.findall(r"^\| `((?:set|mask): .*)` \| ([\d., ]+) \|$", page, re.MULTILINE)
    assert len(shown) == 3
    for rule, after in shown:
        given = yaml.safe_load(rule.replace("winner_model_", "").replace("winner_", ""))
        np.testing.assert_allclose(
            applied([[0.2, 0.6, 0.2]], given)[0], [float(item) for item in after.split(",")]
        )
