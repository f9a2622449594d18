"""Members with ``when``: real runs, and what they compute of which rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.project import Project

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


def in_order(project: Project, found: dict[str, list[float]]) -> _Values:
    """[rows, labels], NaN where there is no row."""
    assert [row_id for row_id in project.ids if row_id in found] == list(found), "in the table's order"
    return np.array([found.get(row_id, [np.nan] * 3) for row_id in project.ids])


def margins(values: _Values) -> _Values:
    ordered = np.sort(values, axis=1)
    return np.asarray(ordered[:, -1] - ordered[:, -2])


@pytest.fixture
def plain(project: Project) -> tuple[_Values, _Values]:
    """What gemma and llama give for all 300 rows of the table, without ``when``."""
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
    found = in_order(project, predictions(project, f"{folder}/predictions/llama.csv"))
    np.testing.assert_array_equal(~np.isnan(found[:, 0]), wanted)
    np.testing.assert_allclose(found[wanted], llama[wanted], atol=1e-5)
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
    assert member["rows"] == wanted.sum(), printed
    # The same again computes nothing, and a share of all rows only what is missing.
    before = (project.folder / "runs/first/ensemble.csv").read_bytes()
    run(project, cascade(project, {"margin_below": number}))
    assert (project.folder / "runs/first/ensemble.csv").read_bytes() == before
    assert project.run_json()["members"][1]["rows"] == 0
