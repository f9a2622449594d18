"""The command line: quick answers, exit codes, and one clear sentence for everything that is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
import yaml

from ensemble.cli.app import app
from tests.checkpoints import reference
from tests.project import LABELS, Project, python_path
from tests.sampling import one_in

pytestmark = pytest.mark.usefixtures("warm")

Change = Callable[[Project, dict[str, Any]], None]


def set_key(*path: str | int, value: Any) -> Change:
    def change(project: Project, config: dict[str, Any]) -> None:
        place: Any = config
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


def edit_table(change: Callable[[list[str], list[list[str]]], None]) -> Change:
    def edit(project: Project, config: dict[str, Any]) -> None:
        header, rows = project.read("test.csv")
        change(header, rows)
        project.write_csv("test.csv", header, rows)

    return edit


def write_bytes(name: str, data: bytes) -> Change:
    def change(project: Project, config: dict[str, Any]) -> None:
        (project.folder / name).write_bytes(data)

    return change


def rename(header: list[str], old: str, new: str) -> None:
    header[header.index(old)] = new


def drop_a_sample_row(project: Project, config: dict[str, Any]) -> None:
    header, rows = project.read("sample.csv")
    project.write_csv("sample.csv", header, [*rows[1:], ["9999", "0", "0", "1"]])


def broken_json(project: Project, config: dict[str, Any]) -> None:
    rows = [[str(index), '["fine"]', "tie"] for index in range(50)]
    rows[41][1] = '["cut'
    project.write_csv("test.csv", ["id", "turns", "label"], rows)
    config["defaults"] = {"prompt_template": "{{ turns | fromjson | join(' ') }}"}
    config.pop("submission")


def no_weight(project: Project, config: dict[str, Any]) -> None:
    for model in config["models"]:
        model["weight"] = 0


def somebodys_files(project: Project, config: dict[str, Any]) -> None:
    (project.folder / "logs").mkdir()
    (project.folder / "logs" / "mine.log").write_text("precious")
    config["output_dir"] = "."


def a_file_in_the_way(project: Project, config: dict[str, Any]) -> None:
    (project.folder / "runs").write_text("a file")


def an_empty_folder(project: Project, config: dict[str, Any]) -> None:
    (project.folder / "empty").mkdir()
    config["models"][0]["model_name_or_path"] = "empty"


# What is done to a good project, and what the one message must say.
WRONG: dict[str, tuple[Change, list[str]]] = {
    "no such table": (set_key("data", "path", value="tset.csv"), ["tset.csv", "test.csv"]),
    "empty table": (edit_table(lambda header, rows: rows.clear()), ["test.csv", "empty"]),
    "empty file": (write_bytes("test.csv", b""), ["test.csv", "empty"]),
    "no id column": (edit_table(lambda header, rows: rename(header, "id", "Id")), ["'id'", "'Id'"]),
    "no text column": (edit_table(lambda header, rows: rename(header, "text", "txt")), ["'text'", "'txt'"]),
    "no label column": (set_key("data", "label_column", value="labell"), ["'labell'", "'label'"]),
    "duplicate ids": (edit_table(lambda header, rows: rows.append(rows[3])), ["id", "301"]),
    "empty ids": (edit_table(lambda header, rows: rows[6].__setitem__(0, "")), ["row 7", "id"]),
    "not UTF-8": (write_bytes("test.csv", b"id,text,label\n1,caf\xe9,tie\n"), ["UTF-8", "row 1"]),
    "broken JSON": (broken_json, ["turns", "row 42 (id '41')"]),
    "unknown label": (
        edit_table(lambda header, rows: rows[2].__setitem__(2, "winer_a")),
        ["winer_a", "row 3"],
    ),
    "repeated label": (set_key("labels", value=[*LABELS, "tie"]), ["labels[3]", "the same as labels[2]"]),
    "negative weight": (set_key("models", 0, "weight", value=-1), ["models[0].weight", "-1"]),
    "weights all zero": (no_weight, ["weight"]),
    "no config.json": (an_empty_folder, ["models[0]", "empty", "config.json"]),
    "no such model": (set_key("models", 1, "model_name_or_path", value="./nope"), ["models[1]", "nope"]),
    "too many GPUs": (
        set_key("models", 0, "num_gpus", value=1),
        ["models[0].num_gpus", "0 GPUs"],
    ),
    "sample of other ids": (drop_a_sample_row, ["sample.csv", "9999"]),
    "output in a file": (a_file_in_the_way, ["output_dir", "runs"]),
    "unknown key": (set_key("models", 0, "max_lenght", value=5), ["models[0].max_lenght", "max_length"]),
    "template of no column": (
        set_key("defaults", value={"prompt_template": "{{ txt }}"}),
        ["txt", "text"],
    ),
    "template that reaches out": (
        set_key("defaults", value={"prompt_template": "{{ text.__class__.__mro__ }}"}),
        ["models[0].prompt_template", "__class__"],
    ),
    "raw values with probabilities": (
        set_key("models", 0, "problem_type", value="regression"),
        ["gemma", "raw values", "or set problem_type"],
    ),
    "a key in the wrong place": (
        set_key("models", 0, "model_kwargs", value={"dtype": "float16"}),
        ["models[0].model_kwargs.dtype"],
    ),
    "submission over the table": (
        set_key("submission", "path", value="test.csv"),
        ["submission.path", "test.csv"],
    ),
    "submission over a folder": (set_key("submission", "path", value="."), ["submission.path", "directory"]),
    "output over somebody's files": (somebodys_files, ["output_dir", "logs", "no run has made"]),
    "name too long": (set_key("output_dir", value="x" * 300), ["File name too long"]),
    "other label names": (set_key("labels", value=["a", "b", "c"]), ["label"]),
}


@pytest.mark.parametrize("case", one_in(3, WRONG))
def test_what_is_wrong_is_said_before_any_model_loads(case: str, project: Project) -> None:
    change, words = WRONG[case]
    config = project.config()
    change(project, config)
    project.write_config(config)
    before = {path: path.stat().st_mtime_ns for path in project.folder.rglob("*")}
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 2, done.stdout + done.stderr
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert "error:" in done.stderr
    assert {path: path.stat().st_mtime_ns for path in project.folder.rglob("*")} == before, (
        "nothing is written"
    )
    checked = project.ensemble("validate", "config.yaml")
    assert (checked.returncode, checked.stderr) == (2, done.stderr)


def test_all_problems_come_at_once(project: Project) -> None:
    config = project.config()
    config["models"][0]["model_name_or_path"] = "./nope"
    config["models"][1]["num_gpus"] = 2
    config["output_dir"] = "test.csv/out"
    config["submission"]["sample"] = "none.csv"
    project.write_csv("test.csv", ["id", "text", "label"], [["1", "x", "tie"], ["1", "y", "tye"]])
    project.write_config(config)
    errors = project.ensemble("validate", "config.yaml").stderr
    for words in ("./nope", "models[1].num_gpus", "output_dir", "none.csv", "tye", "row 2"):
        assert words in errors, errors


@pytest.mark.long
def test_a_column_per_label_scores_like_one_column_of_labels(project: Project) -> None:
    """As a competition's train.csv has them, whose ids are not those of the sample submission."""
    one_hot = [["0", "1"][label == truth] for truth in project.truth for label in LABELS]
    rows = zip(
        project.ids, project.texts, project.truth, *(one_hot[start::3] for start in range(3)), strict=True
    )
    project.write_csv(
        "test.csv", ["id", "text", "label", *LABELS], [[f"t{row[0]}", *row[1:]] for row in rows]
    )
    item = project.config(models=project.config()["models"][1:])
    project.write_config(item)
    refused = project.ensemble("validate", "config.yaml")
    assert refused.returncode == 2
    assert "sample.csv: lacks 300 ids" in refused.stderr
    assert "--set submission=null" in refused.stderr
    options = ["--set", "submission=null", "--limit", "40", "-q"]
    assert project.ensemble("run", "config.yaml", *options).returncode == 0
    expected = project.run_json()["scores"]
    project.write_config(item | {"data": {"path": "test.csv", "label_columns": LABELS}})
    done = project.ensemble("run", "config.yaml", *options)
    assert done.returncode == 0, done.stderr
    assert project.run_json()["scores"] == expected
    assert expected["llama"]["log_loss"] > 0


@pytest.mark.long
def test_files_of_members_are_listed_in_the_order_of_the_config(project: Project) -> None:
    """Also those that need no worker, whose predictions are written first."""
    project.write_csv("other.csv", ["id", *LABELS], [[name, "0.2", "0.3", "0.5"] for name in project.ids])
    models = [*project.config()["models"], {"name": "other", "task_type": "csv", "path": "other.csv"}]
    project.write_config(project.config(models=models))
    done = project.ensemble("run", "config.yaml", "--limit", "20")
    assert done.returncode == 0, done.stderr
    files = [
        line.partition(": ")[0] for line in done.stdout.splitlines() if line.startswith("predictions of")
    ]
    names = [model["name"] for model in models]
    assert files == [f"predictions of {name}" for name in names]
    assert [*project.run_json()["files"]][: len(names)] == files


def test_no_such_config(project: Project) -> None:
    done = project.ensemble("run", "nope.yaml")
    assert done.returncode == 2
    assert "nope.yaml" in done.stderr
    (project.folder / "valid.yaml").write_text("models: []")
    done = project.ensemble("validate", "valid.yml")
    assert done.returncode == 2
    assert done.stderr == "error: valid.yml: no such file (did you mean 'valid.yaml'?)\n"


def test_a_url_in_place_of_a_table_is_said_to_be_one(project: Project) -> None:
    for url in (
        "https://example.org/data/test.csv",
        "ftp://example.org/test",
        "https://example.org/test.csv?raw=1",
    ):
        config = project.config()
        config["data"]["path"] = url
        project.write_config(config)
        done = project.ensemble("validate", "config.yaml")
        assert done.returncode == 2
        assert f"{url}: is a URL; download the file first, then name it here" in done.stderr
        assert "no such file" not in done.stderr


def test_validate_says_what_it_found(project: Project) -> None:
    project.write_config(project.config())
    done = project.ensemble("validate", "config.yaml")
    assert done.returncode == 0, done.stderr
    assert "300 rows" in done.stdout
    assert "gemma: Gemma2ForSequenceClassification" in done.stdout
    assert "empty cells in 'text'" in done.stdout
    assert not (project.folder / "runs").exists()


@pytest.mark.long
def test_overrides_reach_the_run(project: Project) -> None:
    config = project.config(output_dir="${WHERE}/x", submission=None)
    config["defaults"]["tokenizer_kwargs"] = {"token": "${MY_TOKEN}"}
    project.write_config(config)
    options = ["--set", "models.llama.weight=0", "--set", "models[0].name=first", "--limit", "5"]
    done = project.ensemble(
        "run", "config.yaml", *options, environment={"WHERE": "elsewhere", "MY_TOKEN": "hf_s3cret"}
    )
    assert done.returncode == 0, done.stderr
    report = project.run_json("elsewhere/x")
    assert [member["name"] for member in report["members"]] == ["first", "llama"]
    assert project.read("elsewhere/x/ensemble.csv")[1] == project.read("elsewhere/x/predictions/first.csv")[1]
    assert report["overrides"] == [options[1], options[3], "limit=5"]
    assert "s3cret" not in done.stdout + done.stderr
    for path in project.folder.rglob("*"):
        assert path.is_dir() or b"s3cret" not in path.read_bytes(), (
            f"a secret from the environment stands in {path}"
        )
    assert report["config"] == (project.folder / "config.yaml").read_text()
    kept = yaml.safe_load((project.folder / "elsewhere/x/config.yaml").read_text())
    models = [config["models"][0] | {"name": "first"}, config["models"][1] | {"weight": 0}]
    assert kept == config | {"models": models, "limit": 5}

    # Weights and calibrations of a file of their own invalidate nothing, and are in the one file that is kept.
    fitted = {"weight": 3, "calibration": {"temperature": 2.0}}
    over = {"models": [{"name": "llama", **fitted}, {"name": "gemma", "weight": 0}]}
    project.write_config(over, "weights.yaml")
    environment = {"WHERE": "elsewhere", "MY_TOKEN": "hf_s3cret"}
    done = project.ensemble("run", "config.yaml", "weights.yaml", *options[2:], environment=environment)
    assert done.returncode == 0, done.stderr
    report = project.run_json("elsewhere/x")
    assert [(member["chunks"], member["weight"]) for member in report["members"]] == [(0, 0), (0, 3)]
    llama, merged = (
        np.array([row[1:] for row in project.read(f"elsewhere/x/{name}.csv")[1]], dtype=float)
        for name in ("predictions/llama", "ensemble")
    )
    np.testing.assert_allclose(merged, np.sqrt(llama) / np.sqrt(llama).sum(axis=1, keepdims=True))
    assert report["config_files"] == ["config.yaml", "weights.yaml"]
    kept = yaml.safe_load((project.folder / "elsewhere/x/config.yaml").read_text())
    models = [config["models"][0] | {"name": "first", "weight": 0}, config["models"][1] | fitted]
    assert kept == config | {"models": models, "limit": 5} == yaml.safe_load(report["config"])

    done = project.ensemble("validate", "config.yaml", "weights.yaml", "none.yaml", "nothing.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: none.yaml: no such file\nerror: nothing.yaml: no such file\n"


@pytest.mark.parametrize("kind", one_in(2, ["parquet", "jsonl"]))
def test_other_kinds_of_tables(kind: str, project: Project) -> None:
    import pandas as pd

    frame = pd.read_csv(project.folder / "test.csv", dtype=str, keep_default_na=False)
    path = project.folder / f"test.{kind}"
    if kind == "parquet":
        frame.to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in frame.to_dict("records")))
    config = project.config(models=project.config()["models"][1:], submission=None)
    config["data"]["path"] = path.name
    project.write_config(config)
    done = project.ensemble("run", "config.yaml", "--limit", "40", "-q")
    assert done.returncode == 0, done.stderr
    rows = project.read("runs/first/ensemble.csv")[1]
    assert [row[0] for row in rows] == project.ids[:40]
    expected = reference(project.models / "llama", project.texts[:40], max_length=128)
    got = np.array([[float(cell) for cell in row[1:]] for row in rows])
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_every_option_is_described() -> None:
    group = typer.main.get_group(app)
    assert len(group.commands) > 10
    for name, command in group.commands.items():
        assert command.help, name
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{name}: {parameter.name}"


@pytest.mark.fresh
def test_options_are_described_where_python_drops_docstrings(project: Project) -> None:
    usual, stripped = (
        project.ensemble("fit", "--help", environment={"PYTHONOPTIMIZE": level}) for level in ("", "2")
    )
    assert stripped.returncode == 0, stripped.stderr
    assert stripped.stdout == usual.stdout


@pytest.mark.long  # Python compiles all of torch and transformers for it
def test_a_run_where_python_drops_docstrings(project: Project) -> None:
    project.write_table(5)
    project.write_config(project.config(submission=None))
    done = project.ensemble("run", "config.yaml", environment={"PYTHONOPTIMIZE": "2"})
    assert done.returncode == 0, done.stderr


@pytest.mark.fresh
def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    command = 'mkdir gone && cd gone && rmdir ../gone && exec "$0" -m ensemble --version'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (
        2,
        "error: the working directory is gone; change to one that is there\n",
    )


def test_version_and_help(project: Project) -> None:
    from ensemble import __version__

    assert project.ensemble("--version").stdout.strip() == f"ensemble {__version__}"
    done = project.ensemble("--help")
    assert done.returncode == 0
    assert "validate" in done.stdout
    narrow = project.ensemble("--help", environment={"COLUMNS": "80"})
    commands = narrow.stdout.partition("Commands:")[2].splitlines()
    assert len(commands) > 10
    assert not [line for line in commands if "..." in line], "a summary that is cut off"
    assert project.ensemble("run", "--help").returncode == 0
    assert project.ensemble("rnu").returncode == 2
    assert not list(Path(project.folder).glob("runs"))
