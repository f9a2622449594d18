"""Members that get each row in several views: real runs, held against plain transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import yaml

from ensemble.pipeline.load import load
from ensemble.pipeline.prediction_files import changed_members
from tests.checkpoints import label_reference, make_language_model, reference
from tests.project import GEMMA_LABELS, LABELS, Project

pytestmark = pytest.mark.usefixtures("warm")

_Values = npt.NDArray[np.float64]
TEMPLATE = "one {{ a }} other {{ b }}"
SHORT = "{{ a }}"
SWAP = {"columns": ["a", "b"], "labels": ["winner_a", "winner_b"]}
AS_IS: dict[str, Any] = {"name": "as_is"}
SWAPPED: dict[str, Any] = {"name": "swapped", "swap": SWAP}
ROWS = 40


@pytest.fixture
def pairs(project: Project) -> Project:
    """A project whose table has two texts a row, ``a`` and ``b``."""
    project.write_pairs(ROWS)
    return project


def run(project: Project, *views: dict[str, Any], code: int = 0, **changes: Any) -> str:
    """Of gemma alone; keyword arguments replace its keys, or top-level ones that ``project.config`` has."""
    gemma = {**project.config()["models"][0], "prompt_template": TEMPLATE, "views": [*views] or None}
    top = {key: changes.pop(key) for key in (*project.config(), "time_limit", "on_bad_row") if key in changes}
    config = project.config(
        **{"models": [{**gemma, **changes}], "submission": None, "defaults": {"max_length": 128}, **top}
    )
    project.write_config(config)
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == code, done.stdout + done.stderr
    return " ".join((done.stdout + done.stderr).split())


def values(project: Project, name: str = "gemma") -> _Values:
    header, rows = project.read(f"runs/first/predictions/{name}.csv")
    assert header == ["id", *LABELS]
    assert [row[0] for row in rows] == project.ids
    return project.values(f"runs/first/predictions/{name}.csv")


def by_hand(project: Project, texts: list[Any]) -> _Values:
    """Plain transformers, row by row, in the order of the config's labels."""
    result = reference(project.models / "gemma", texts, 128)
    return result[:, [GEMMA_LABELS.index(label) for label in LABELS]]


def cells(project: Project) -> list[tuple[str, str]]:
    return list(zip(project.texts[:ROWS], project.texts[ROWS:], strict=True))


def computed(project: Project) -> int:
    """Rows that the last run's workers have computed, once for each view."""
    return int(sum(worker["counters"]["rows"] for worker in project.run_json()["members"][0]["workers"]))


def test_the_mean_over_views_is_that_of_plain_transformers_and_only_what_is_new_is_computed(
    pairs: Project,
) -> None:
    run(pairs)
    assert computed(pairs) == ROWS
    plain = by_hand(pairs, [f"one {a} other {b}" for a, b in cells(pairs)])
    np.testing.assert_allclose(values(pairs), plain, atol=2e-5)
    before = (pairs.folder / "runs/first/predictions/gemma.csv").read_bytes()

    run(pairs, AS_IS, SWAPPED)
    assert computed(pairs) == ROWS, "what there was without views is the view that changes nothing"
    swapped = by_hand(pairs, [f"one {b} other {a}" for a, b in cells(pairs)])[:, [1, 0, 2]]
    assert np.abs(swapped - plain).max() > 1e-3
    np.testing.assert_allclose(values(pairs, "gemma@swapped"), swapped, atol=2e-5)
    np.testing.assert_allclose(values(pairs), (plain + swapped) / 2, atol=2e-5)

    short = {"name": "short", "prompt_template": SHORT, "weight": 2.0}
    run(pairs, AS_IS, SWAPPED, short)
    assert computed(pairs) == ROWS
    expected = (plain + swapped + 2 * by_hand(pairs, [a for a, _ in cells(pairs)])) / 4
    np.testing.assert_allclose(values(pairs), expected, atol=2e-5)

    output = run(pairs, {**AS_IS, "weight": 3.0}, SWAPPED)
    assert "changed since" not in output
    assert computed(pairs) == 0
    np.testing.assert_allclose(values(pairs), (3 * plain + swapped) / 4, atol=2e-5)
    (member,) = pairs.run_json()["members"]
    views = {name: (view["weight"], view["rows"]) for name, view in member["views"].items()}
    assert views == {"as_is": (3.0, ROWS), "swapped": (1.0, ROWS)}

    run(pairs, AS_IS, {"name": "swapped", "swap": {"columns": ["b", "a"]}})
    assert computed(pairs) == ROWS, "the labels no longer change places"

    run(pairs)
    assert computed(pairs) == 0
    assert (pairs.folder / "runs/first/predictions/gemma.csv").read_bytes() == before


@pytest.mark.long
def test_columns_as_they_stand_json_and_two_replicas(pairs: Project) -> None:
    """A pair of texts, whose answer to a swap is the pair the other way round; and lists that a template reads."""
    run(pairs, AS_IS, SWAPPED, prompt_template=None, text_column=["a", "b"], replicas=2)
    expected = by_hand(pairs, cells(pairs)) + by_hand(pairs, [(b, a) for a, b in cells(pairs)])[:, [1, 0, 2]]
    np.testing.assert_allclose(values(pairs), expected / 2, atol=2e-5)

    header, rows = pairs.read("test.csv")
    pairs.write_csv("test.csv", header, [[row[0], f'["{row[1]}"]', row[2], row[3]] for row in rows])
    both = "{{ a | fromjson | join(' ') }}"
    outcome = run(pairs, AS_IS, SWAPPED, prompt_template=both, code=2)
    assert "column 'b': broken JSON in" in outcome, "the view that swaps reads what is in b as a list"


@pytest.mark.long
def test_a_function_gets_its_frame_with_the_columns_swapped(pairs: Project) -> None:
    (pairs.folder / "lengths.py").write_text(
        "import numpy as np\n"
        "def predict(frame, context):\n"
        "    scores = np.stack([frame['a'].str.len(), frame['b'].str.len(), 0 * frame['a'].str.len() + 9], 1)\n"
        "    return scores / scores.sum(1, keepdims=True)\n"
    )
    member = {"name": "gemma", "task_type": "python", "predict": "lengths.py:predict", "columns": ["a", "b"]}
    views = [AS_IS, {"name": "swapped", "swap": {"columns": ["a", "b"]}}]
    pairs.write_config(pairs.config(models=[{**member, "views": views}], submission=None, defaults=None))
    done = pairs.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    scores = np.array([[len(a), len(b), 9] for a, b in cells(pairs)], dtype=np.float64)
    scores /= scores.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(values(pairs), (scores + scores[:, [1, 0, 2]]) / 2, atol=1e-12)


def test_mistakes_are_named_with_their_keys(pairs: Project) -> None:
    def problems(*views: dict[str, Any], **changes: Any) -> str:
        return run(pairs, *views, code=2, **changes)

    def swap(*columns: str, labels: Any = None) -> dict[str, Any]:
        return {"name": "s", "swap": {"columns": list(columns), "labels": labels}}

    messages = problems(AS_IS, {"name": "AS_IS", "prompt_template": SHORT})
    assert "models[0].views[1].name (line" in messages
    assert "the same as views[0].name" in messages
    assert "one view must have a weight above 0" in problems({**AS_IS, "weight": 0})
    assert "a list of views" in problems(views=[])
    assert "swap.columns (line" in (messages := problems(swap("a", "a", labels=["tie", "tie"])))
    assert "swap.labels (line" in messages
    assert messages.count("the same twice; name two to swap") == 2
    assert "the labels, not" in problems(swap("a", "b", labels=["tie", "ti"]))
    assert "list of two columns" in problems(swap("a"))
    assert "no text column 'c', which models[0].views[0].swap reads" in problems(swap("a", "c"))
    messages = problems(swap("id", "label"))
    assert "views[0].swap.columns: the member reads neither of them; it reads a, b" in messages
    messages = problems({"name": "s", "prompt_template": "{{ a | nothing }}"})
    assert "models[0].views[0].prompt_template: " in messages
    messages = problems({"name": "s", "prompt_template": "{{ a }}"}, truncation={"fields": {"b": {}}})
    assert "models[0].views[0]: truncation.fields.b: prompt_template does not read" in messages
    pairs.write_csv("mate.csv", ["id", *LABELS], [[row_id, "0.2", "0.3", "0.5"] for row_id in pairs.ids])
    mate = {"name": "mate", "task_type": "csv", "path": "mate.csv", "views": [AS_IS]}
    pairs.write_config(pairs.config(models=[mate], submission=None))
    assert "no key of task_type csv" in pairs.ensemble("validate", "config.yaml").stderr


def test_validate_shows_where_prompts_of_views_differ(pairs: Project) -> None:
    before = "Which of these two answers is better? " * 10  # 380 characters
    views = [{"name": name, "prompt_template": f"{before}{{{{ {name} }}}}"} for name in "ab"]
    again = {"name": "again", "prompt_template": f"{before}{{{{ a | trim }}}}"}
    gemma = {**pairs.config()["models"][0], "views": [*views, again]}
    pairs.write_csv("test.csv", ["id", "a", "b", "label"], [["1", "left", "right", LABELS[0]]])
    pairs.write_config(pairs.config(models=[gemma], submission=None))
    done = pairs.ensemble("validate", "config.yaml")
    text = " ".join(done.stdout.split())
    assert f"gemma (view a): the first 160 characters of its first prompt: {before[:150]}" in text, (
        done.stderr
    )
    differs = "... answers is better? right (in the first view: ... answers is better? left)"
    assert f"gemma (view b): its first prompt differs after 380 characters: {differs}" in text
    assert "gemma (view again): its first prompt is the same as in the first view" in text


@pytest.mark.long
def test_a_cascade_goes_by_the_mean_and_computes_its_rows_in_each_view(pairs: Project) -> None:
    """And when more rows are asked for, only these are computed."""

    def go(share: float) -> tuple[_Values, list[str], dict[str, Any]]:
        config = pairs.config(submission=None, defaults={"max_length": 128, "prompt_template": TEMPLATE})
        config["models"] = [{**model, "views": [AS_IS, SWAPPED]} for model in config["models"]]
        config["models"][1]["when"] = {"share": share}
        pairs.write_config(config)
        done = pairs.ensemble("run", "config.yaml")
        assert done.returncode == 0, done.stderr
        _, rows = pairs.read("runs/first/predictions/llama.csv")
        actual = pairs.values("runs/first/predictions/llama.csv")
        return actual, [row[0] for row in rows], pairs.run_json()["members"][1]

    for share, new in ((0.3, 0.3), (0.7, 0.4)):
        result, ids, member = go(share)
        ordered = np.sort(values(pairs), axis=1)
        unsure = np.argsort(ordered[:, -1] - ordered[:, -2], kind="stable")[: round(share * ROWS)]
        assert ids == [pairs.ids[row] for row in sorted(unsure)]
        assert sum(worker["counters"]["rows"] for worker in member["workers"]) == 2 * round(new * ROWS)
        texts = [cells(pairs)[row] for row in sorted(unsure)]
        folder = pairs.models / "llama"
        plain = reference(folder, [f"one {a} other {b}" for a, b in texts], 128)
        swapped = reference(folder, [f"one {b} other {a}" for a, b in texts], 128)[:, [1, 0, 2]]
        np.testing.assert_allclose(result, (plain + swapped) / 2, atol=2e-5)


@pytest.mark.long
@pytest.mark.fault(18)
def test_a_complete_member_of_a_cascade_that_is_to_have_more_rows_in_each_view(pairs: Project) -> None:
    """Others go by it as well, whose mean is of more rows then."""
    (pairs.folder / "lengths.py").write_text(
        "import numpy as np\n"
        "def predict(frame, context):\n"
        "    a, b = frame['a'].str.len(), frame['b'].str.len()\n"
        "    scores = np.stack([2 * a + context.kwargs['more'], b + 3, 0 * a + 9], 1)\n"
        "    return scores / scores.sum(1, keepdims=True)\n"
    )
    member = {"task_type": "python", "predict": "lengths.py:predict", "columns": ["a", "b"]}
    models: list[dict[str, Any]] = [
        {**member, "name": name, "views": [AS_IS, SWAPPED], "kwargs": {"more": 40 * number}}
        for number, name in enumerate(("one", "two", "three"))
    ]

    def go(output_dir: str, share: float, *views: dict[str, Any]) -> list[bytes]:
        models[1]["when"], models[2]["when"] = {"share": share}, {"share": 0.5}
        models[1]["views"] = [*views] or [AS_IS, SWAPPED]
        config = pairs.config(models=models, submission=None, defaults=None, output_dir=output_dir)
        pairs.write_config({**config, "report": False})
        done = pairs.ensemble("run", "config.yaml")
        assert done.returncode == 0, done.stdout + done.stderr
        folder = pairs.folder / output_dir  # the last one may keep rows that are not asked for any more
        return [(folder / name).read_bytes() for name in ("ensemble.csv", "predictions/two.csv")]

    go("runs/first", 0.3, AS_IS)
    expected = go("runs/other", 0.8)
    assert go("runs/first", 0.8) == expected, "the first view had less rows, and was complete"
    few = go("runs/few", 0.3)
    go("runs/first", 0.8, AS_IS)
    (pairs.folder / "runs/first/predictions/two@swapped.csv").unlink()
    assert go("runs/first", 0.3) == few, "the first view has rows that are not asked for"
    assert go("runs/first", 0.8) == expected, "others go by its mean, which is of more rows then"


@pytest.mark.long
def test_a_language_model_reads_each_view_by_its_own_prompt(pairs: Project) -> None:
    folder = make_language_model(pairs.folder / "language model", "llama", pad=None)
    tokens = {"winner_a": "plants", "winner_b": "food", "tie": "animal"}
    judge = {
        "name": "gemma",
        "task_type": "causal_lm",
        "model_name_or_path": str(folder),
        "prompt_template": "{{ a }} or {{ b }} ",
        "label_tokens": tokens,
        "views": [SWAPPED, {"name": "short", "prompt_template": "{{ b }} ", "swap": SWAP}],
    }
    pairs.write_config(pairs.config(models=[judge], submission=None, defaults={"max_length": 128}))
    done = pairs.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    texts = [tokens[label] for label in LABELS]
    swapped, _ = label_reference(folder, [f"{b} or {a} " for a, b in cells(pairs)], texts, 128)
    short, _ = label_reference(folder, [f"{a} " for a, _ in cells(pairs)], texts, 128)
    np.testing.assert_allclose(values(pairs), ((swapped + short) / 2)[:, [1, 0, 2]], atol=2e-5)


def margins(values: _Values) -> _Values:
    ordered = np.sort(values, axis=1)
    return np.asarray(ordered[:, -1] - ordered[:, -2])


def part(project: Project, name: str) -> dict[str, list[float]]:
    """The rows of a view that may lack some, by id."""
    _, rows = project.read(f"runs/first/predictions/{name}.csv")
    assert [row[0] for row in rows] == [
        row_id for row_id in project.ids if row_id in {row[0] for row in rows}
    ]
    return {row[0]: [float(cell) for cell in row[1:]] for row in rows}


@pytest.mark.long
def test_a_view_for_the_closest_calls_of_the_views_before_it(pairs: Project) -> None:
    """The model is loaded once, and what another rule asks for is computed, nothing else."""
    plain = by_hand(pairs, [f"one {a} other {b}" for a, b in cells(pairs)])
    swapped = by_hand(pairs, [f"one {b} other {a}" for a, b in cells(pairs)])[:, [1, 0, 2]]
    limits = np.quantile(margins(plain), [0.3, 0.6])
    computed_before = 0
    for limit in limits.tolist():
        output = run(pairs, AS_IS, {**SWAPPED, "weight": 3.0, "when": {"margin_below": limit}})
        selected = margins(plain) < limit
        rows = int(selected.sum())
        expected = np.where(selected[:, None], (plain + 3 * swapped) / 4, plain)
        np.testing.assert_allclose(values(pairs), expected, atol=2e-5)
        result = part(pairs, "gemma@swapped")
        assert list(result) == [pairs.ids[row] for row in np.flatnonzero(selected)]
        np.testing.assert_allclose(list(result.values()), swapped[selected], atol=2e-5)
        (member,) = pairs.run_json()["members"]
        assert [worker["counters"]["rows"] for worker in member["workers"]] == [
            (0 if computed_before else ROWS) + rows - computed_before
        ]
        swapped_view = member["views"]["swapped"]
        assert swapped_view["cascade"]["rows"] == swapped_view["rows"] == rows
        assert f"view swapped: `when` selected {rows} of 40 rows" in output
        computed_before = rows
    before = (pairs.folder / "runs/first/predictions/gemma.csv").read_bytes()
    run(pairs, AS_IS, {**SWAPPED, "weight": 3.0, "when": {"margin_below": float(limits[0])}})
    assert pairs.run_json()["members"][0]["counters"]["rows"] == 0
    selected = margins(plain) < limits[0]
    np.testing.assert_allclose(
        values(pairs), np.where(selected[:, None], (plain + 3 * swapped) / 4, plain), atol=2e-5
    )
    run(pairs, AS_IS, {**SWAPPED, "weight": 3.0, "when": {"margin_below": float(limits[1])}})
    assert (pairs.folder / "runs/first/predictions/gemma.csv").read_bytes() == before
    run(pairs, AS_IS, {**SWAPPED, "weight": 3.0})
    (member,) = pairs.run_json()["members"]
    assert member["counters"]["rows"] == ROWS - computed_before
    config = yaml.safe_load((pairs.folder / "config.yaml").read_text(encoding="utf-8"))
    config["models"][0]["views"][1]["when"] = {"share": 0.5}
    pairs.write_config(config)
    now = load(pairs.folder / "config.yaml").config
    assert changed_members(now, ["gemma"], pairs.folder / "runs/first") == {}, "a selection is no setting"
    np.testing.assert_allclose(values(pairs), (plain + 3 * swapped) / 4, atol=2e-5)


def between(numbers: _Values, count: int) -> float:
    """A limit below which there are so many of the numbers, and none near it."""
    ordered = np.sort(numbers)
    return float(ordered[count - 1 : count + 1].mean())


def both_ways(project: Project, name: str) -> tuple[_Values, _Values]:
    """What a model gives for the rows as they are and swapped, by plain transformers."""
    order = [(GEMMA_LABELS if name == "gemma" else LABELS).index(label) for label in LABELS]
    results = [
        reference(project.models / name, [f"one {x} other {y}" for x, y in pairs_of_texts], 128)[:, order]
        for pairs_of_texts in (cells(project), [(b, a) for a, b in cells(project)])
    ]
    return results[0], results[1][:, [1, 0, 2]]


def run_two(project: Project, *whens: dict[str, Any], **changes: Any) -> str:
    """gemma and llama with weights 0.6 and 0.4, each of whose second views has ``when``."""
    config = project.config(submission=None, defaults={"max_length": 128, "prompt_template": TEMPLATE})
    for model, when in zip(config["models"], whens, strict=False):
        model["views"] = [AS_IS, {**SWAPPED, "when": when}]
    project.write_config({**config, **changes})
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    return " ".join(done.stdout.split())


def demand_swapped(project: Project, name: str, selected: npt.NDArray[np.bool_]) -> _Values:
    """Rows of the member are the mean of both views where these are selected, otherwise of the first; return it."""
    as_is, swapped = both_ways(project, name)
    expected = np.where(selected[:, None], (as_is + swapped) / 2, as_is)
    assert list(part(project, f"{name}@swapped")) == [project.ids[row] for row in np.flatnonzero(selected)]
    np.testing.assert_allclose(values(project, name), expected, atol=2e-5)
    return expected


@pytest.mark.long
def test_members_before_it_decide_as_well(pairs: Project) -> None:
    """By the mean of their views, where they have these, and of the member's own ones."""
    as_is, _ = both_ways(pairs, "llama")
    limit = between(margins(both_ways(pairs, "gemma")[0]), 12)
    selected = margins(both_ways(pairs, "gemma")[0]) < limit
    gemma = np.where(selected[:, None], sum(both_ways(pairs, "gemma")) / 2, both_ways(pairs, "gemma")[0])
    together = margins(0.6 * gemma + 0.4 * as_is)
    run_two(pairs, {"margin_below": limit}, {"margin_below": between(together, 15)})
    demand_swapped(pairs, "gemma", selected)
    demand_swapped(pairs, "llama", together < between(together, 15))
    before = pairs.folder.joinpath("runs/first/ensemble.csv").read_bytes()
    run_two(pairs, {"margin_below": limit}, {"margin_below": between(together, 15)})
    assert [member["counters"]["rows"] for member in pairs.run_json()["members"]] == [0, 0]
    assert pairs.folder.joinpath("runs/first/ensemble.csv").read_bytes() == before


@pytest.mark.long
def test_rows_that_depend_on_the_time_decide_nothing(pairs: Project) -> None:
    """With time for all: llama goes by gemma's first view, whatever gemma has of its second one by then."""
    gemma, llama = both_ways(pairs, "gemma")[0], both_ways(pairs, "llama")[0]
    together = margins(0.6 * gemma + 0.4 * llama)
    limit = between(together, 15)
    changes = {"time_limit": "3h"}
    message = run_two(pairs, {"share": "as_time_allows"}, {"margin_below": limit}, **changes)
    demand_swapped(pairs, "gemma", np.ones(ROWS, dtype=np.bool_))
    demand_swapped(pairs, "llama", together < limit)
    assert "gemma: view swapped: there was time for 40 of 40 rows" in message
    assert "llama: view swapped: `when` selected 15 of 40 rows (37.5 %)" in message
    message = " ".join(pairs.ensemble("status", "runs/first").stdout.split())
    assert "80" in message
    plan = " ".join(pairs.ensemble("plan", "config.yaml").stdout.split())
    assert "view swapped runs on as many rows as there is time for" in plan
    assert "38% of the rows, by the predictions of 40 rows in runs/first" in plan
    done = pairs.ensemble("rehearse", "config.yaml", "--sample-rows", "20")
    assert done.returncode == 0, done.stdout + done.stderr
    rehearsed = " ".join(done.stdout.split())
    assert (
        "gemma@swapped: `when` is expected to select 100 % of the rows (as far as time_limit allows"
        in rehearsed
    )
    assert "llama@swapped: `when` is expected" in rehearsed


@pytest.mark.parametrize(
    ("views", "changes", "message"),
    [
        (
            [{**AS_IS, "when": {"share": 0.5}}, SWAPPED],
            {},
            "models[0].views[0].when (line 16): needs a view before this one, or a member",
        ),
        (
            [{**AS_IS, "weight": 0}, {**SWAPPED, "when": {"share": 0.5}}],
            {},
            "models[0].views[1].when (line",
        ),
        (
            [AS_IS, {**SWAPPED, "when": {"share": "as_time_allows"}}],
            {},
            "share: as_time_allows needs time_limit; set it, or a share such as 0.3",
        ),
        (
            [
                AS_IS,
                {**SWAPPED, "when": {"share": "as_time_allows"}},
                {"name": "c", "prompt_template": SHORT},
            ],
            {"time_limit": "1h"},
            "comes after a view with share: as_time_allows; list that view last",
        ),
        (
            [AS_IS, {**SWAPPED, "when": {"margin_below": "as_time_allows"}}],
            {"time_limit": "1h"},
            "one of {margin_below: m}",
        ),
        (
            [AS_IS, {**SWAPPED, "when": {"entropy_above": 1.1}}],
            {},
            "models[0].views[1].when.entropy_above: no row",
        ),
        (
            [AS_IS, {**SWAPPED, "when": {"margin_below": 0.3}}],
            {"problem_type": "regression"},
            "models[0].views[1].when: gemma gives raw values (regression), and a margin is one of probabilities",
        ),
    ],
)
def test_views_whose_rules_decide_nothing(
    pairs: Project, views: list[dict[str, Any]], changes: dict[str, Any], message: str
) -> None:
    assert message in run(pairs, *views, code=2, **changes)


@pytest.mark.long
def test_a_member_all_of_whose_views_depend_on_the_time_decides_nothing(pairs: Project) -> None:
    """With time for all: the last member goes by the first one alone."""
    gemma = by_hand(pairs, [f"one {a} other {b}" for a, b in cells(pairs)])
    limit = between(margins(gemma), 12)
    config = pairs.config(submission=None, defaults={"max_length": 128, "prompt_template": TEMPLATE})
    first, second = config["models"]
    timed = {"share": "as_time_allows"}
    second["views"] = [{**AS_IS, "when": timed}, {**SWAPPED, "when": timed}]
    when = {"margin_below": limit}
    last = {**first, "name": "last", "prompt_template": "{{ a }} {{ b }}", "when": when}
    config["models"] = [first, second, last]
    pairs.write_config({**config, "time_limit": "3h"})
    for _ in range(2):  # the second run expects a share by the predictions of the first
        done = pairs.ensemble("run", "config.yaml")
        assert done.returncode == 0, done.stdout + done.stderr
    demand_swapped(pairs, "llama", np.ones(ROWS, dtype=np.bool_))
    selected = [pairs.ids[row] for row in np.flatnonzero(margins(gemma) < limit)]
    assert list(part(pairs, "last")) == selected
