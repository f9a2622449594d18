"""``--json``: one strict JSON object on standard output, nothing else.  ``--verbose``: the log on the terminal."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from typing import Any, NoReturn

import pytest
import yaml

from tests.project import Project

pytestmark = pytest.mark.usefixtures("warm")


def refuse(text: str) -> NoReturn:
    raise AssertionError(f"{text} is not JSON")


def asked(project: Project, *arguments: str, code: int = 0) -> dict[str, Any]:
    done = project.ensemble(*arguments, "--json")
    assert done.returncode == code, done.stderr
    assert bool(done.stderr) == bool(code)
    document: dict[str, Any] = json.loads(done.stdout, parse_constant=refuse)
    assert bool(document["problems"]) == bool(code)
    return document


def test_json_of_validate_and_plan(project: Project) -> None:
    project.write_config(project.config())
    checked, planned = asked(project, "validate", "config.yaml"), asked(project, "plan", "config.yaml")
    for document in (checked, planned):
        assert document["rows"] == 300
        assert document["table"] == str(project.folder / "test.csv")
        assert document["output_dir"] == str(project.folder / "runs/first")
        assert [(member["name"], member["weight"]) for member in document["members"]] == [
            ("gemma", 0.6),
            ("llama", 0.4),
        ]
        assert any("empty cell" in text for text in document["warnings"])
    assert all(member["peak_bytes"] > member["weight_bytes"] > 0 for member in planned["members"])
    assert planned["seconds"] is None, "not known before a run"
    assert not (project.folder / "runs").exists()
    python = shlex.quote(sys.executable)
    command = f"{python} -m ensemble plan config.yaml --json | {python} -m json.tool"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=project.folder, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_problems_as_json_with_exit_code_2(project: Project) -> None:
    project.write_config(project.config(limti=3, fill="what"))
    for command in ("validate", "plan"):
        document = asked(project, command, "config.yaml", code=2)
        assert any(text.startswith("limti (line ") for text in document["problems"])
        assert len(document["problems"]) == 2
    project.write_config(project.config(data={"path": "none.csv", "id_column": "id"}))
    assert "no such file" in asked(project, "validate", "config.yaml", code=2)["problems"][0]
    assert "run.json" in asked(project, "status", "nowhere", code=2)["problems"][0]
    models = [{**model, "num_gpus": 64} for model in project.config()["models"]]
    project.write_config(project.config(models=models))
    planned = asked(project, "plan", "config.yaml", code=2)
    assert [member["problems"] for member in planned["members"]] == [
        [problem] for problem in planned["problems"]
    ]
    assert "num_gpus" in planned["problems"][0]


@pytest.mark.long
def test_json_of_status_and_the_log_on_the_terminal(project: Project) -> None:
    project.write_config(project.config(limit=40))
    done = project.ensemble("run", "config.yaml", "--verbose")
    assert done.returncode == 0, done.stderr
    log = (project.folder / "runs/first/logs/run.log").read_text().splitlines()
    assert len(log) > 5
    for line in log:
        assert line in done.stdout or " runs as process " in line
    assert "log: runs/first/logs/run.log" in done.stdout.splitlines(), "the summary names it"
    status = asked(project, "status", "runs/first")
    assert (status["state"], status["rows"], status["holder"]) == ("complete", 40, None)
    assert [(member["name"], member["state"], member["rows_done"]) for member in status["members"]] == [
        ("gemma", "done", 40),
        ("llama", "done", 40),
    ]
    assert status["scores"]["ensemble"]["log_loss"] > 0
    assert status["files"]["log"].endswith("runs/first/logs/run.log")
    report = json.loads((project.folder / "runs/first/run.json").read_text())
    (project.folder / "runs/first/run.json").write_text(json.dumps({**report, "status": "running"}))
    assert asked(project, "status", "runs/first")["state"] == "killed"
    quiet = project.ensemble("run", "config.yaml", "--fresh")
    assert " INFO " not in quiet.stdout


def test_json_of_init(project: Project) -> None:
    (project.folder / "models").symlink_to(project.models)
    made = asked(project, "init", "test.csv", "models/gemma", "models/llama")
    assert made["config"] == str(project.folder / "config.yaml")
    written = yaml.safe_load((project.folder / "config.yaml").read_text(encoding="utf-8"))
    guesses = {guess["key"]: guess for guess in made["guesses"]}
    assert guesses["max_length"]["value"] == written["defaults"]["max_length"]
    assert guesses["max_length"]["reason"].startswith("the longest row has about ")
    assert any("empty cell" in text for text in made["warnings"])
    assert made["next"] == [
        "ensemble plan config.yaml",
        "ensemble run --limit 100 config.yaml",
        "ensemble run config.yaml",
    ]
    again = project.ensemble("init", "test.csv", "models/gemma", "--json")
    assert again.returncode == 2
    assert "config.yaml" in json.loads(again.stdout)["problems"][0]


def test_json_of_a_first_config_that_is_not_valid_yet(project: Project) -> None:
    (project.folder / "models").symlink_to(project.models)
    sample = project.write_csv("other.csv", ["id", "winner_a"], [["nobody", "0.5"]])
    made = asked(
        project, "init", "test.csv", "models/gemma", "--sample", sample.name, "-o", "a b.yaml", code=2
    )
    assert (project.folder / "a b.yaml").is_file()
    assert made["config"] == str(project.folder / "a b.yaml")
    assert made["next"] == ["ensemble validate 'a b.yaml'"]
    assert {"key", "value", "reason"} == {*made["guesses"][0]}
    plain = project.ensemble("init", "test.csv", "models/gemma", "--sample", sample.name, "--force")
    assert plain.returncode == 2
