"""``validate`` goes on behind a wrong key: it also names the files of the other keys that are missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ensemble import api
from ensemble.common.errors import EnsembleError
from tests.project import Project


def problems(project: Project, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.chdir(project.folder)
    project.write_config(config)
    with pytest.raises(EnsembleError) as caught:
        api.validate("config.yaml")
    assert caught.value.exit_code == 2
    return caught.value.problems


def models(project: Project, **gemma: object) -> list[dict[str, Any]]:
    """A member whose keys are changed, a missing folder and a missing file."""
    return [
        {"name": "gemma", "model_name_or_path": str(project.models / "gemma"), **gemma},
        {"name": "lost", "model_name_or_path": "/nowhere/lost"},
        {"name": "mate", "task_type": "csv", "path": "mate.csv"},
    ]


def test_a_wrong_key_of_a_member_hides_no_missing_file(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = project.config(
        models=models(project, wieght=0.5),
        data={"path": "none.csv", "id_column": "id"},
        submission={"sample": "no_sample.csv"},
        limti=3,
    )
    first, second, *rest = problems(project, config, monkeypatch)
    assert {text.partition(" ")[0] for text in (first, second)} == {"limti", "models[0].wieght"}
    assert [text.partition(": ")[0] for text in rest] == [
        "models[1] (lost)",
        "models[2] (mate)",
        "none.csv",
        "submission",
    ]
    assert all("no such" in text for text in rest)


def test_the_only_member_is_wrong_and_the_table_is_missing(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = project.config(
        models=models(project, max_length="long")[:1], data={"path": "none.csv"}, submission=None
    )
    found = problems(project, config, monkeypatch)
    assert ["max_length" in text for text in found] == [True, False]
    assert found[1].startswith("none.csv: no such file")


def test_a_sample_for_other_rows_is_named_beside_a_wrong_key(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write_csv("other.csv", ["id", "tie", "winner_a", "winner_b"], [["nobody", "0.3", "0.3", "0.4"]])
    found = problems(project, project.config(limti=3, submission={"sample": "other.csv"}), monkeypatch)
    assert len(found) > 1
    assert found[1].startswith("other.csv: 1 id not in the input table")


def test_nothing_is_read_where_labels_or_addresses_are_not_known(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = project.config(limti=3, data={"path": "none.csv"}, submission=None)
    for changes in (
        {"labels": ["a", "a"]},
        {"data": {"path": "s3://bucket/none.csv"}},
        {"data": {"pth": "t"}},
    ):
        found = problems(project, {**wrong, **changes}, monkeypatch)
        assert not any("no such" in text for text in found), found
    assert not Path("runs").exists()


def test_a_secret_in_a_path_is_not_told(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "s3cr3t-of-this-test")
    config = project.config(limti=3, data={"path": "s3cr3t-of-this-test.csv"}, submission=None)
    found = problems(project, config, monkeypatch)
    assert found[1].startswith("***.csv: no such file")
