"""Members with ``when``: real runs, and what they compute of which rows."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from ensemble.analysis.predictions import read_run
from tests.project import LABELS, Project

pytestmark = pytest.mark.usefixtures("warm")

_Values = npt.NDArray[np.float64]


def cascade(project: Project, when: dict[str, float], **changes: Any) -> dict[str, Any]:
    """gemma, then llama only where ``when`` says so; weights 0.6 and 0.4."""
    config = project.config(**changes)
    config["models"][1]["when"] = when
    return config


def run(project: Project, config: dict[str, Any], *options: str, code: int = 0) -> str:
    project.write_config(config)
    done = project.ensemble("run", "config.yaml", *options)
    assert done.returncode == code, done.stdout + done.stderr
    return " ".join(done.stdout.split())


def predictions(project: Project, name: str) -> dict[str, list[float]]:
    _, rows = project.read(name)
    return {row[0]: [float(cell) for cell in row[1:]] for row in rows}


def in_order(project: Project, result: dict[str, list[float]]) -> _Values:
    """[rows, labels], NaN where there is no row."""
    assert [row_id for row_id in project.ids if row_id in result] == list(result), "in the table's order"
    return np.array([result.get(row_id, [np.nan] * 3) for row_id in project.ids])


def demand_interval(result: dict[str, float], differences: _Values) -> None:
    """A mean of rows with a bootstrap interval, about as wide as the normal one."""
    assert result["value"] == pytest.approx(differences.mean(), abs=1e-5)
    width = 3.92 * differences.std(ddof=1) / len(differences) ** 0.5
    assert result["low"] <= result["value"] <= result["high"]
    assert result["high"] - result["low"] == pytest.approx(width, rel=0.25)


def margins(values: _Values) -> _Values:
    ordered = np.sort(values, axis=1)
    return np.asarray(ordered[:, -1] - ordered[:, -2])


@pytest.fixture(scope="module")
def plain(warm: None, tmp_path_factory: pytest.TempPathFactory, tiny_models: Path) -> tuple[_Values, _Values]:
    """What gemma and llama give for all 300 rows of the usual table, without ``when``."""
    project = Project(tmp_path_factory.mktemp("plain"), tiny_models)
    project.write_table()
    run(project, project.config(output_dir="runs/plain"))
    gemma, llama = (
        in_order(project, predictions(project, f"runs/plain/predictions/{name}.csv"))
        for name in ("gemma", "llama")
    )
    return gemma, llama


def check(
    project: Project,
    plain: tuple[_Values, _Values],
    wanted: npt.NDArray[np.bool_],
    folder: str = "runs/first",
) -> None:
    """llama has these rows, with the values of a plain run, and only they count."""
    gemma, llama = plain
    result = in_order(project, predictions(project, f"{folder}/predictions/llama.csv"))
    np.testing.assert_array_equal(~np.isnan(result[:, 0]), wanted)
    np.testing.assert_allclose(result[wanted], llama[wanted], atol=1e-5)
    merged = in_order(project, predictions(project, f"{folder}/ensemble.csv"))
    expected = np.where(wanted[:, None], 0.6 * gemma + 0.4 * llama, gemma)
    np.testing.assert_allclose(merged, expected, atol=1e-5)


def test_a_member_computes_only_the_rows_of_which_the_one_before_is_unsure(
    project: Project, plain: tuple[_Values, _Values]
) -> None:
    gemma, _ = plain
    number = float(np.median(margins(gemma)))
    printed = run(project, cascade(project, {"margin_below": number}))
    wanted = margins(gemma) < number
    assert 100 < wanted.sum() < 200
    check(project, plain, wanted)
    member = project.run_json()["members"][1]
    assert member["counters"]["rows"] == wanted.sum(), printed
    # The same again computes nothing, and a share of all rows only what is missing.
    before = (project.folder / "runs/first/ensemble.csv").read_bytes()
    run(project, cascade(project, {"margin_below": number}))
    assert (project.folder / "runs/first/ensemble.csv").read_bytes() == before
    assert project.run_json()["members"][1]["counters"]["rows"] == 0


@pytest.mark.long
def test_the_least_certain_share_and_what_it_gained(project: Project, plain: tuple[_Values, _Values]) -> None:
    gemma, llama = plain
    config = cascade(project, {"share": 0.07})
    project.write_config(config)
    planned = " ".join(project.ensemble("plan", "config.yaml").stdout.split())
    assert "7 % of the rows of which the members before it are least certain" in planned
    printed = run(project, config)
    wanted = np.zeros(300, dtype=bool)
    wanted[np.argsort(margins(gemma), kind="stable")[:21]] = True
    check(project, plain, wanted)
    report = project.run_json()
    (_, member) = report["members"]
    assert (member["cascade"]["rows"], member["cascade"]["is_selected"]) == (21, True)
    truth = np.array([LABELS.index(label) for label in project.truth])[wanted]

    def losses(values: _Values) -> _Values:
        return np.asarray(-np.log(values[wanted][np.arange(21), truth]))

    difference = losses(0.6 * gemma + 0.4 * llama) - losses(gemma)
    result = report["comparisons"]["llama"]
    assert result["rows"] == 21
    assert result["log_loss_without"] == pytest.approx(losses(gemma).mean(), abs=1e-5)
    demand_interval(result["difference"], difference)
    over_all = np.concatenate([difference, np.zeros(279)])
    demand_interval(result["difference_over_all"], over_all)
    assert "llama: `when` selected 21 of 300 rows (7.0 %); on 21 rows" in printed
    # A method that takes two passes, without another look at any model.
    run(project, config | {"ensemble": {"method": "rank_mean"}})
    report = project.run_json()
    (_, member) = report["members"]
    assert (member["counters"]["rows"], member["cascade"]["rows"]) == (0, 21)
    assert report["comparisons"] == {}, "ranks are no probabilities"


@pytest.mark.long
def test_what_a_member_gained_of_labels_that_do_not_exclude_each_other(project: Project) -> None:
    """By the formulas; the truth holds probabilities, too."""
    random = np.random.default_rng(5)
    truth = random.integers(0, 2, (80, 3)).astype(float)
    truth[:10] = random.random((10, 3))
    first, second = (np.clip(truth + random.normal(size=(80, 3)) / 3, 0.01, 0.99) for _ in range(2))
    ids = [f"r{row}" for row in range(80)]
    for name, values in (("table", truth), ("first", first), ("second", second)):
        cells = [[row_id, *map(repr, row)] for row_id, row in zip(ids, values.tolist(), strict=True)]
        project.write_csv(f"{name}.csv", ["id", *LABELS], cells)
    members = [
        {"name": name, "task_type": "csv", "path": f"{name}.csv", "activation": "sigmoid", "weight": weight}
        for name, weight in (("first", 3), ("second", 1))
    ]
    printed = run(
        project,
        {
            "data": {"path": "table.csv", "label_columns": LABELS},
            "labels": LABELS,
            "models": [members[0], members[1] | {"when": {"share": 0.25}}],
            "output_dir": "out",
        },
    )
    wanted = np.argsort(np.abs(2 * first - 1).min(axis=1), kind="stable")[:20]

    def losses(values: _Values) -> _Values:
        each = truth * np.log(values) + (1 - truth) * np.log(1 - values)
        return np.asarray(-each[wanted].mean(axis=1))

    whole, alone = losses(0.75 * first + 0.25 * second), losses(first)
    (report,) = project.run_json("out")["comparisons"].values()
    assert (report["rows"], report["accuracy"], report["accuracy_without"]) == (20, None, None)
    assert report["log_loss"] == pytest.approx(whole.mean(), abs=1e-12)
    assert report["log_loss_without"] == pytest.approx(alone.mean(), abs=1e-12)
    demand_interval(report["difference"], whole - alone)
    demand_interval(report["difference_over_all"], np.concatenate([whole - alone, np.zeros(60)]))
    assert f"log loss is {whole.mean():.4f} with it and {alone.mean():.4f} without it" in printed
    assert "accuracy" not in printed


@pytest.mark.long
def test_another_rule_keeps_what_is_computed_and_merges_what_it_asks_for(
    project: Project, plain: tuple[_Values, _Values]
) -> None:
    gemma, _ = plain
    order = np.argsort(margins(gemma), kind="stable")
    merged: dict[float, bytes] = {}
    for share, rows in ((0.5, 150), (0.2, 0), (0.6, 30), (0.5, 0)):
        run(project, cascade(project, {"share": share}))
        assert project.run_json()["members"][1]["counters"]["rows"] == rows, share
        wanted = np.zeros(300, dtype=bool)
        wanted[order[: round(300 * share)]] = True
        _, values_read = project.read("runs/first/predictions/llama.csv")
        assert len(values_read) == (180 if share == 0.6 or 0.6 in merged else 150), "what is there stays"
        content = (project.folder / "runs/first/ensemble.csv").read_bytes()
        assert merged.setdefault(share, content) == content
    # Without when it needs all rows, and takes those that it has; another name does, too.
    config = project.config()
    run(project, config)
    assert project.run_json()["members"][1]["counters"]["rows"] == 120
    check(project, plain, np.ones(300, dtype=bool))


@pytest.mark.long
def test_one_after_the_other(project: Project, plain: tuple[_Values, _Values]) -> None:
    """The second of two sees the mean with the first where that has the row."""
    gemma, llama = plain
    config = cascade(project, {"share": 0.3})
    again = {"name": "again", "model_name_or_path": str(project.models / "gemma"), "weight": 1.0}
    config["models"].append(again | {"when": {"entropy_above": 0.7}})
    run(project, config)
    first = np.zeros(300, dtype=bool)
    first[np.argsort(margins(gemma), kind="stable")[:90]] = True
    mean = np.where(first[:, None], 0.6 * gemma + 0.4 * llama, gemma)
    entropy = -(mean * np.log(mean)).sum(axis=1)
    second = entropy > 0.7
    assert 0 < (first & second).sum() < second.sum() < 300
    check_rows(project, "llama", first)
    check_rows(project, "again", second)
    merged = in_order(project, predictions(project, "runs/first/ensemble.csv"))
    expected = np.where(
        second[:, None],
        (mean * np.where(first, 1.0, 0.6)[:, None] + gemma) / (np.where(first, 1.0, 0.6)[:, None] + 1.0),
        mean,
    )
    np.testing.assert_allclose(merged, expected, atol=1e-5)


def check_rows(project: Project, name: str, wanted: npt.NDArray[np.bool_]) -> None:
    result = in_order(project, predictions(project, f"runs/first/predictions/{name}.csv"))
    np.testing.assert_array_equal(~np.isnan(result[:, 0]), wanted)


@pytest.mark.long
def test_members_that_were_made_elsewhere(project: Project, plain: tuple[_Values, _Values]) -> None:
    """A csv member decides at once, and one with ``when`` counts for those rows alone."""
    gemma, _ = plain
    number = float(np.median(margins(gemma)))
    wanted = margins(gemma) < number
    run(project, project.config(output_dir="runs/plain"))
    given = {
        name: {"name": name, "task_type": "csv", "path": f"runs/plain/predictions/{name}.csv"}
        for name in ("gemma", "llama")
    }
    config = cascade(project, {"margin_below": number})
    csv_decides, csv_is_limited = copy.deepcopy(config), copy.deepcopy(config)
    csv_decides["models"][0] = given["gemma"] | {"weight": 0.6}
    csv_is_limited["models"][1] = given["llama"] | {"weight": 0.4, "when": {"margin_below": number}}
    project.write_config(csv_decides)
    planned = " ".join(project.ensemble("plan", "config.yaml").stdout.split())
    share = f"{wanted.mean():.0%} of the rows, by the predictions of 300 rows in runs/first"
    assert f"the mean of the members before it has a margin below {number:g}: {share}" in planned
    merged = []
    for name, item in (("a", csv_decides), ("b", csv_is_limited)):
        run(project, item | {"output_dir": f"runs/{name}", "submission": None})
        merged.append(in_order(project, predictions(project, f"runs/{name}/ensemble.csv")))
        (_, member) = project.run_json(f"runs/{name}")["members"]
        assert member["cascade"]["rows"] == wanted.sum()
    check(project, plain, wanted, "runs/a")
    np.testing.assert_allclose(merged[1], merged[0], atol=1e-5)


@pytest.mark.long
def test_rehearse_takes_the_share_from_its_sample(project: Project) -> None:
    project.write_table()
    project.write_config(cascade(project, {"margin_below": 0.2}))
    done = project.ensemble("rehearse", "config.yaml", "--sample-rows", "40")
    printed = " ".join(done.stdout.split())
    assert done.returncode == 0, done.stderr
    assert "llama: `when` is expected" in printed
    assert "% of the rows (by the predictions" in printed
    assert "runs only on rows where the mean" in " ".join(
        project.ensemble("validate", "config.yaml").stdout.split()
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda models: models[0].update(when={"share": 0.4}),
            "models[0].when (line 13): needs a member with a weight above 0 listed before this one",
        ),
        (
            lambda models: models[0].update(weight=0),
            "needs a member with a weight above 0 listed before this one",
        ),
        (
            lambda models: models[1].update(when={"share": 1.5}),
            "when (line 16): must be one of",
        ),
        (lambda models: models[1].update(when={"share": 0.1, "margin_below": 1}), "{share: s} with s"),
        (lambda models: models[1].update(when={"margin": 0.1}), "one of {margin_below: m}"),
        (
            lambda models: models[1].update(when={"entropy_above": 1.1}),
            "models[1].when.entropy_above: no row of 3 labels has an entropy above 1.099 nats",
        ),
        (
            lambda models: [model.update(problem_type="regression") for model in models],
            "models[1].when: gemma gives raw values (regression)",
        ),
    ],
)
def test_rules_that_decide_nothing(project: Project, change: Callable[[Any], object], message: str) -> None:
    project.write_table(10)
    config = cascade(project, {"share": 0.4})
    change(config["models"])
    project.write_config(config)
    done = project.ensemble("validate", "config.yaml")
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


@pytest.mark.long
def test_a_rule_that_selects_no_row(project: Project) -> None:
    project.write_table(60)
    config = cascade(project, {"margin_below": 1e-9})
    for _ in range(2):
        assert "llama: `when` selected 0 of 60 rows (0.0 %)" in run(project, config)
        (_, member) = project.run_json()["members"]
        assert (member["status"], member["counters"]["rows"], member["cascade"]["rows"]) == ("complete", 0, 0)
        assert project.read("runs/first/predictions/llama.csv") == (["id", *LABELS], [])
        ensemble, gemma = (
            predictions(project, f"runs/first/{name}.csv") for name in ("ensemble", "predictions/gemma")
        )
        np.testing.assert_allclose([*ensemble.values()], [*gemma.values()], atol=1e-12)
    for command in (["report", "runs/first"], ["compare", "runs/first", "runs/first/predictions/gemma.csv"]):
        done = project.ensemble(*command)
        assert done.returncode == 0, command[0] + done.stdout + done.stderr
    page = (project.folder / "runs/first/report.html").read_text()
    assert 'class="problem"' not in page
    # Rows that another rule asks for are computed all the same.
    run(project, cascade(project, {"share": 0.5}))
    assert len(predictions(project, "runs/first/predictions/llama.csv")) == 30


@pytest.mark.long
def test_what_was_not_merged_is_nowhere_taken_for_the_members(project: Project) -> None:
    """Rows that an earlier rule asked for, and rows of a file that the rule does not."""
    project.write_table(60)
    run(project, cascade(project, {"share": 0.5}))
    run(project, cascade(project, {"share": 0.2}))
    assert len(predictions(project, "runs/first/predictions/llama.csv")) == 30
    read = read_run(project.folder / "runs/first")
    assert read.ensemble is not None
    given = ~np.isnan(read.members["llama"][:, 0])
    assert given.sum() == 12
    expected = np.where(
        given[:, None],
        0.6 * read.members["gemma"] + 0.4 * np.nan_to_num(read.members["llama"]),
        read.members["gemma"],
    )
    np.testing.assert_allclose(read.ensemble, expected, atol=1e-12)
    config = cascade(project, {"share": 0.2}, output_dir="runs/given")
    whole = project.folder / "llama.csv"
    run(project, project.config(output_dir="runs/whole"))
    whole.write_bytes((project.folder / "runs/whole/predictions/llama.csv").read_bytes())
    config["models"][1] = {
        "name": "llama",
        "task_type": "csv",
        "path": str(whole),
        "weight": 0.4,
        "when": {"share": 0.2},
    }
    run(project, config)
    of_file = read_run(project.folder / "runs/given")
    np.testing.assert_array_equal(~np.isnan(of_file.members["llama"][:, 0]), given)
    # Without the rule all of them count again.
    run(
        project,
        project.config(
            output_dir="runs/given", models=[config["models"][0], {**config["models"][1], "when": None}]
        ),
    )
    assert not np.isnan(read_run(project.folder / "runs/given").members["llama"]).any()


@pytest.mark.long
def test_members_without_a_weight_hold_nobody_up(project: Project) -> None:
    """One that is listed before and cannot be computed at all."""
    project.write_table(60)
    broken = project.folder / "broken"
    shutil.copytree(project.models / "gemma", broken)
    weights = load_file(broken / "model.safetensors")
    save_file(
        {name: np.full_like(weight, np.nan) for name, weight in weights.items()}, broken / "model.safetensors"
    )
    config = cascade(project, {"share": 0.3}, submission=None)
    config["models"].insert(1, {"name": "zero", "model_name_or_path": str(broken), "weight": 0})
    project.write_config(config)
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 1
    result = {member["name"]: member for member in project.run_json()["members"]}
    assert (result["zero"]["status"], result["llama"]["status"]) == ("failed", "complete")
    assert (result["llama"]["rows"], result["llama"]["cascade"]["rows"]) == (18, 18)
