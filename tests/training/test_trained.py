"""Trained members as ordinary members: what they become, and who predicts which row."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ensemble.common.errors import ConfigError, DataError
from ensemble.data.trained_rows import IN_ALL_FOLDS, NEW, TrainedRows, folds_of, write_trained_rows
from ensemble.pipeline.trained_members import missing_parts, with_trained
from ensemble.pipeline.training_dir import Part
from tests.project import LABELS, Project
from tests.training import folds
from tests.training.folds import ROWS, SWAP, by_hand, config, finish, loaded, test_rows

pytest.importorskip("peft")
pytestmark = [
    pytest.mark.usefixtures("warm"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # peft on transformers 5
]
_Values = npt.NDArray[np.float64]


def test_folds_become_views(trained: Project, adapters: Path) -> None:
    keys = config(trained, weight=0.7, calibration={"temperature": 1.5})
    folder = finish(keys, adapters)
    made = with_trained(loaded(keys))
    (member,) = made.config.models
    assert [view.name for view in member.all_views] == ["fold-0", "fold-1", "fold-2"]
    names = [view.changes["adapter_name_or_path"] for view in member.all_views]
    assert names == [str(folder.checkpoint("lora", Part(fold))) for fold in range(3)]
    assert member.model_dump()["model_name_or_path"] == str(adapters / "base")
    assert member.training is None
    assert member.weight == 0.7
    assert member.calibration is not None
    assert made.trained["lora"].by_fold is member
    assert with_trained(made) == made


def test_the_members_own_views_are_multiplied(trained: Project, adapters: Path) -> None:
    views = [{"name": "plain"}, {"name": "swapped", "swap": SWAP, "weight": 0.5, "when": {"share": 0.5}}]
    keys = config(trained, views=views, train={"command": folds.COMMAND, "predict_with": "refit"})
    finish(keys, adapters)
    made = with_trained(loaded(keys))
    (member,) = made.config.models
    assert [view.name for view in member.all_views] == ["plain", "swapped"]
    by_fold = made.trained["lora"].by_fold.all_views
    assert [view.name for view in by_fold[4:]] == ["swapped", *(f"swapped-fold-{fold}" for fold in range(3))]
    assert {view.weight for view in by_fold[4:]} == {0.5}
    assert all(view.swap is not None and view.when == {"share": 0.5} for view in by_fold[4:])
    assert by_fold[4].changes == {}
    assert [made.trained["lora"].folds[view.name] for view in by_fold] == [None, 0, 1, 2] * 2


def test_a_mean_and_a_refit_are_one_model(trained: Project, adapters: Path) -> None:
    keys = config(trained, "average")
    folder = finish(keys, adapters)
    (member,) = with_trained(loaded(keys)).config.models
    average = member.model_dump()["adapters"]["average"]
    assert average == tuple(str(folder.checkpoint("lora", Part(fold))) for fold in range(3))
    assert member.all_views == ()
    (member,) = with_trained(loaded(config(trained, "refit"))).config.models
    assert member.model_dump()["adapter_name_or_path"] == str(folder.checkpoint("lora", Part(None)))
    by_fold = with_trained(loaded(config(trained, "refit"))).trained["lora"].by_fold
    assert [view.name for view in by_fold.all_views] == ["refit", "fold-0", "fold-1", "fold-2"]


@pytest.mark.parametrize("base", ["model_name_or_path", "base_model"])
def test_the_members_own_base_counts(trained: Project, adapters: Path, base: str) -> None:
    shutil.copytree(adapters / "base", trained.folder / "own")
    keys = config(trained)
    if base == "base_model":
        keys["models"][0]["train"] = {"base_model": "own", "method": "lora"}
    else:
        keys["models"][0]["model_name_or_path"] = "own"
    finish(keys, adapters)
    (member,) = with_trained(loaded(keys)).config.models
    assert member.model_dump()["model_name_or_path"] == "own"


def test_what_is_not_trained_is_named(trained: Project, adapters: Path) -> None:
    keys = config(trained, "refit")
    with pytest.raises(ConfigError) as error:
        with_trained(loaded({**keys, "training": {**keys["training"], "folds": {"n_splits": 3}}}))
    assert error.value.problems == (
        "lora: not trained yet: fold 0, fold 1, fold 2, all rows; run `ensemble train CONFIG` first",
    )
    folder = finish(keys, adapters, parts=[Part(0), Part(1), Part(2)])
    folder.seal("lora", Part(1)).unlink()
    assert missing_parts(loaded(keys), loaded(keys).config.models[0]) == [Part(1), Part(None)]
    (member,) = with_trained(loaded(keys), may_lack=True).config.models
    assert member.training is not None
    with pytest.raises(ConfigError, match="lora: not trained yet: fold 1, all rows; run `ensemble train"):
        with_trained(loaded(keys))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"merge_adapter": True}, "merge_adapter: a merged adapter cannot give way to those of other views"),
        ({"torch_compile": True}, "torch_compile: compiled code keeps one adapter"),
    ],
)
def test_keys_that_folds_exclude(
    trained: Project, adapters: Path, changes: dict[str, Any], problem: str
) -> None:
    keys = config(trained, **changes)
    finish(keys, adapters)
    with pytest.raises(ConfigError, match=problem):
        with_trained(loaded(keys))


def test_an_adapter_beside_those_of_the_training_is_refused(trained: Project) -> None:
    with pytest.raises(ConfigError, match=r"adapter_name_or_path.*the training makes the member's adapters"):
        loaded(config(trained, adapter_name_or_path="other"))


@pytest.mark.parametrize("name", [Part(0).name, Part(12).name, f"plain-{Part(0).name}", "Fold-3", "a-fold-0"])
def test_a_view_with_the_name_of_a_folds_model_is_refused(trained: Project, name: str) -> None:
    """Whatever the number of folds, which a column may tell, and whatever predicts new rows."""
    views = [{"name": "plain"}, {"name": name, "swap": SWAP}]
    with pytest.raises(ConfigError) as error:
        loaded(config(trained, views=views))
    (problem,) = error.value.problems
    assert "models[0].views[1].name: with train, names that end in fold-<number> are the folds'" in problem
    without = config(trained, views=views, model_name_or_path="base")
    del without["models"][0]["train"], without["training"]
    assert loaded(without).config.models[0].all_views[1].name == name


def test_views_with_names_like_those_of_folds(trained: Project) -> None:
    views = [{"name": "fold0"}, {"name": "fold-0-swapped", "swap": SWAP}, {"name": "refolded-1"}]
    assert len(loaded(config(trained, views=views)).config.models[0].all_views) == 3


def test_a_mean_of_whole_checkpoints(trained: Project, adapters: Path) -> None:
    """One model of them for new rows, and each of them for those that it has not seen."""
    keys = config(trained, "average")
    folder = finish(keys, adapters)
    folds = [folder.checkpoint("lora", Part(fold)) for fold in range(3)]
    for fold in folds:
        (fold / "adapter_config.json").unlink()
    made = with_trained(loaded(keys))
    (member,) = made.config.models
    assert member.model_dump()["checkpoints"] == {"average": tuple(map(str, folds))}
    assert member.all_views == ()
    views = made.trained["lora"].by_fold.all_views
    assert [view.name for view in views] == ["average", "fold-0", "fold-1", "fold-2"]
    assert views[0].changes == {}
    assert [view.changes["model_name_or_path"] for view in views[1:]] == [str(fold) for fold in folds]
    assert {view.changes["checkpoints"] for view in views[1:]} == {None}


def test_a_mean_of_checkpoints_and_adapters_is_refused(trained: Project, adapters: Path) -> None:
    keys = config(trained, "average")
    folder = finish(keys, adapters)
    (folder.checkpoint("lora", Part(1)) / "adapter_config.json").unlink()
    with pytest.raises(
        ConfigError, match="predict_with: the folds differ in more than weights; choose folds"
    ):
        with_trained(loaded(keys))


def test_rows_are_known_by_what_the_member_reads(tmp_path: Path) -> None:
    digests = np.arange(20, dtype=np.uint64).reshape(10, 2)
    digests[7] = digests[1]  # the same text in two folds
    digests[9] = digests[2]  # and in a further table
    of_rows = np.array([0, 0, 1, 1, 2, 2, 0, 2, 1, IN_ALL_FOLDS])
    path = tmp_path / "rows.bin"
    write_trained_rows(path, TrainedRows(digests, of_rows))
    np.testing.assert_array_equal(folds_of(path, digests[:9]), of_rows[:9])
    other = np.array([[91, 92]], dtype=np.uint64)
    asked = np.concatenate([digests[[5, 1, 2, 3]], other, digests[[9]]])
    np.testing.assert_array_equal(
        folds_of(path, asked), [2, IN_ALL_FOLDS, IN_ALL_FOLDS, 1, NEW, IN_ALL_FOLDS]
    )
    path.write_bytes(b"PK")
    with pytest.raises(DataError, match=r"rows.bin: cannot be read .*train the member again"):
        folds_of(path, digests)


def trained_run(project: Project, keys: dict[str, Any], *arguments: str, code: int = 0) -> str:
    project.write_config(keys)
    done = project.ensemble("run", "config.yaml", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return " ".join((done.stdout + done.stderr).split())


def values(project: Project, name: str = "lora") -> _Values:
    header, rows = project.read(f"runs/first/predictions/{name}.csv")
    assert header == ["id", *LABELS]
    return np.array([[float(cell) for cell in row[1:]] for row in rows])


def computed(project: Project) -> int:
    return int(sum(worker["counters"]["rows"] for worker in project.run_json()["members"][0]["workers"]))


def expected(project: Project, adapters: Path, is_swapped: bool = False) -> _Values:
    """What test.csv is to get: rows of the training table from the fold that holds them out, others the mean."""
    of_folds = [by_hand(project, adapters, f"fold-{fold}", is_swapped) for fold in range(3)]
    mean = np.mean(of_folds, axis=0)
    rows = [mean[row] for row in range(len(mean))]
    rows[5], rows[3] = of_folds[1][5], of_folds[2][3]
    return np.array(test_rows(rows))


def test_a_table_of_new_rows_and_rows_that_were_trained_on(trained: Project, adapters: Path) -> None:
    keys = {**config(trained), "report": True}
    finish(keys, adapters, extra=[4])
    output = trained_run(trained, keys)
    assert (
        "lora: 2 of 8 rows were trained on; the model of the fold that has not seen a row predicts it"
        in output
    )
    assert "lora: 1 of 8 rows" in output
    np.testing.assert_allclose(values(trained), expected(trained, adapters), atol=2e-5)
    assert computed(trained) == 6 * 3 + 2
    rows = {"fold-0": 6, "fold-1": 7, "fold-2": 7}
    views = trained.run_json()["members"][0]["views"]
    assert {name: view["rows"] for name, view in views.items()} == rows
    again = trained_run(trained, keys)
    assert trained.run_json()["members"][0]["views"] == views
    assert "lora: done by" in again
    assert "20 reused" in again.replace("|", " ")
    assert computed(trained) == 6 * 3 + 2, "the report keeps the workers of the first run"
    assert ROWS == 18
