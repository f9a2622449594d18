"""``run`` of a config whose members are trained: missing folds are trained first, and one deadline is for all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ensemble.cli.progress import QuietDisplay
from ensemble.common.clock import boot_seconds
from ensemble.common.digests import folder_digests
from ensemble.common.errors import ConfigError
from ensemble.config import LoadedConfig
from ensemble.data.trained_rows import TrainedRows, write_trained_rows
from ensemble.pipeline.load import load
from ensemble.pipeline.training_dir import Part
from ensemble.training.command import made_of, preview_trainings, trained_for_run
from ensemble.training.command import trained as trained_by
from ensemble.training.records import PartRecord, Seal, write_record
from tests.checkpoints import make_base, reference
from tests.faults.forked.client import server_variables
from tests.project import LABELS, ROOT, Project, python_path
from tests.training.test_jobs import Trained


@pytest.fixture
def trained(project: Project, monkeypatch: pytest.MonkeyPatch) -> Trained:
    """Two members with two folds each, trained on a table of its own."""
    monkeypatch.chdir(project.folder)
    made = Trained(project.folder, project.models)
    made.write_table(rows=24, seed=5)
    (made.folder / "test.csv").rename(made.folder / "train.csv")
    made.write_table(rows=12)
    set_up(made)
    return made


def set_up(trained: Trained, **changes: Any) -> None:
    trained.set_up(["a", "b"], folds=2)
    config = yaml.safe_load((trained.folder / "config.yaml").read_text(encoding="utf-8"))
    config["data"] = {"path": "test.csv"}
    config["training"] |= {"data": {"path": "train.csv", "label_column": "label"}}
    trained.write_config({**config, **changes})


def rows_of(trained: Trained, name: str) -> np.ndarray:
    """The values of a file of all rows of the table to predict, in its order."""
    header, rows = trained.read(name)
    assert header == ["id", *LABELS]
    assert [row[0] for row in rows] == trained.ids
    return np.array([[float(cell) for cell in row[1:]] for row in rows])


def check_submission(trained: Trained) -> np.ndarray:
    """The submission's values, of all rows of its sample."""
    header, rows = trained.read("out/submission.csv")
    assert header == ["id", "tie", "winner_a", "winner_b"]
    assert [row[0] for row in rows] == sorted(trained.ids)
    values = np.array([[float(cell) for cell in row[1:]] for row in rows])
    np.testing.assert_allclose(values.sum(axis=1), 1.0, atol=1e-6)
    return values


def remove(trained: Trained, member: str, part: Part) -> None:
    trained.files.seal(member, part).unlink()
    shutil.rmtree(trained.files.checkpoint(member, part))


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.long
def test_what_lacks_is_trained_first_and_weights_apply(trained: Trained) -> None:
    done = trained.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    assert sorted(trained.folds_called()) == ["0", "0", "1", "1"]
    expected = reference(trained.models / "llama", trained.texts, max_length=128)
    # The folds' checkpoints are copies of one, so that their mean is it.
    np.testing.assert_allclose(rows_of(trained, "runs/first/predictions/a.csv"), expected, atol=2e-5)
    check_submission(trained)
    # From the beginning: predictions, not trainings.
    done = trained.ensemble("run", "config.yaml", "--fresh")
    assert done.returncode == 0, done.stderr
    assert "earlier run" not in done.stdout
    assert len(trained.calls()) == 4

    # Weights are fitted to the out-of-fold predictions; a member that then fails is left out, and they stay good.
    assert trained.train().returncode == 0
    assert len(trained.calls()) == 4
    oof = [f"runs/first/oof/{name}.csv" for name in "ab"]
    done = trained.ensemble("fit", *oof, "--labels", "train.csv", "--calibration", "none")
    assert done.returncode == 0, done.stderr
    remove(trained, "b", Part(1))
    trained.mode("b-1", "exit")
    files = ("config.yaml", "weights.yaml")
    done = trained.ensemble("run", *files)
    assert done.returncode == 1
    assert "member b failed: fold 1: " in flat(done.stderr)
    done = trained.ensemble("run", *files, "--set=on_member_failure=continue")
    assert done.returncode == 0, done.stderr
    assert "merged without b: member b failed: " in done.stdout
    np.testing.assert_allclose(rows_of(trained, "runs/first/ensemble.csv"), expected, atol=2e-5)
    trained.mode("b-1", "")
    done = trained.ensemble("run", *files)
    assert done.returncode == 0, done.stderr
    assert len(trained.calls()) == 7, "two that failed, and one that did not"
    assert rows_of(trained, "runs/first/predictions/b.csv").shape == (12, 3)


@pytest.mark.fault(47)
def test_no_time_to_train_any_member(trained: Trained) -> None:
    for training in ("a-0", "a-1", "b-0", "b-1"):
        trained.mode(training, "wait")  # no machine is fast enough
    done = trained.ensemble("run", "config.yaml", "--set", "time_limit=1s")
    assert done.returncode == 4
    for member in "ab":
        assert f"{member} is left out: there was no time to train fold 0, fold 1" in flat(done.stdout)
    assert (check_submission(trained) == 1 / 3).all()


@pytest.mark.long
@pytest.mark.fault(47)
def test_the_limit_is_for_train_alone_too(trained: Trained) -> None:
    trained.mode("b-1", "wait")
    done = trained.train("--set", "time_limit=1s")
    assert done.returncode == 4, done.stderr
    assert "stopped at time_limit, before all trainings were done; the same command resumes" in flat(
        done.stderr
    )
    assert not trained.files.oof("a").exists()


@pytest.mark.fault(47)
@pytest.mark.long
def test_a_member_that_lacks_a_training_at_the_limit_is_left_out(trained: Trained) -> None:
    trained.mode("b-1", "wait")
    done = trained.ensemble("run", "config.yaml", "--set", "time_limit=20s")
    assert done.returncode == 4
    assert "b is left out:" in flat(done.stdout)
    check_submission(trained)
    assert not trained.files.checkpoint("b", Part(1)).exists()
    again = ("--set", "time_limit=20s", "--set", "on_member_failure=continue")
    done = trained.ensemble("run", "config.yaml", *again)
    assert done.returncode == 4, done.stderr
    assert "merged without b: member b left out:" in flat(done.stdout)
    check_submission(trained)
    trained.mode("b-1", "")
    done = trained.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    assert trained.folds_called().count("0") == 2, "what has ended is kept"
    assert rows_of(trained, "runs/first/predictions/b.csv").shape == (12, 3)


def steps_saved(trained: Trained) -> list[int]:
    saves = trained.files.unfinished("a", Part(0)).glob("saves/*/save-*")
    return [int(path.name.partition("-")[2]) for path in saves]


@pytest.mark.fault(34, 47)
@pytest.mark.long
def test_each_repetition_trains_further(trained: Trained, fork_server: str, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama")
    arguments = {"num_train_epochs": 20_000}
    set_up(
        trained, models=[{"name": "a", "train": {"base_model": str(base), "training_arguments": arguments}}]
    )
    reached = []
    for _ in range(2):
        # Forked, the processes take none of the time.
        limit = ("--set", "time_limit=25s")
        done = trained.ensemble("run", "config.yaml", *limit, environment=server_variables(fork_server))
        assert done.returncode == 4
        assert "to train fold 0, fold 1" in flat(done.stdout)
        check_submission(trained)
        reached += steps_saved(trained)
    assert len(reached) == 2
    assert 0 < reached[0] < reached[1]


class Listening(QuietDisplay):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def ready(loaded: LoadedConfig, display: QuietDisplay) -> LoadedConfig:
    """What a run goes on with once its members are trained."""
    with trained_for_run(loaded, display, boot_seconds(), owns_process=False) as (config, _):
        return config


@pytest.mark.long
def test_models_without_the_script_and_the_table_that_they_learned(trained: Trained) -> None:
    """As on Kaggle, where the models alone were uploaded."""
    config = Path("config.yaml")
    with trained_by(load([config]), QuietDisplay(), boot_seconds(), owns_process=False) as (report, _):
        pass
    assert report.status == "complete", report
    (trained.scripts / "train.py").unlink()
    with trained_by(load([config]), QuietDisplay(), boot_seconds(), owns_process=False) as (report, _):
        pass
    assert {part.status for member in report.members for part in member.parts} == {"done"}
    Path("train.csv").unlink()
    shutil.rmtree(trained.files.root / "data")
    display = Listening()
    loaded = ready(load([config]), display)
    sentence = "train.csv is gone: the members are taken as they were trained"
    assert display.said == [sentence]
    assert [view.name for view in loaded.config.models[0].counted_views] == ["fold-0", "fold-1"]
    assert not loaded.untrained
    assert preview_trainings(load([config]))[1] == [sentence]
    # What a change would need is not there.
    with pytest.raises(ConfigError) as caught:
        ready(load([config], ["seed=7"]), display)
    assert caught.value.problems[0].startswith(
        "a: must be trained anew, and train.csv is gone: fold 0, fold 1: seed changed"
    )
    file = trained.files.checkpoint("b", Part(1)) / "config.json"
    file.write_text(file.read_text(encoding="utf-8") + " ", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        ready(load([config]), display)
    (problem,) = caught.value.problems
    assert problem.startswith("b: must be trained anew, and train.csv is gone: fold 1: the files")
    remove(trained, "a", Part(0))
    done = trained.ensemble("run", "config.yaml")
    assert done.returncode == 2
    assert "train.csv: no such file" in done.stderr


def test_models_without_the_base_that_they_learned_from(trained: Trained, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(trained.models / "llama", base)
    set_up(trained, models=[{"name": "a", "train": {"base_model": str(base)}}])
    config = Path("config.yaml")
    loaded = load([config])
    digests_of_model = {**made_of(loaded.config, loaded.config.models[0]), "the training table": "y"}
    for fold in range(2):
        folder = trained.files.checkpoint("a", Part(fold))
        shutil.copytree(trained.models / "llama", folder)
        files = folder_digests(folder)
        seal = Seal(digests_of_model, PartRecord(fold, "done", 1, 1.0, ("cpu",)), files)
        write_record(trained.files.seal("a", Part(fold)), seal)
    rows = TrainedRows(np.zeros((2, 2), np.uint64), np.arange(2))
    write_trained_rows(trained.files.trained_rows("a"), rows)
    shutil.rmtree(base)
    display = Listening()
    config_of_run = ready(loaded, display).config
    (note,) = display.said
    assert note.startswith(f"the base model {base} is gone")
    assert config_of_run.models[0].name == "a"
    assert not config_of_run.trained_members
    remove(trained, "a", Part(1))
    with pytest.raises(ConfigError, match="no such folder"):
        ready(loaded, display)


@pytest.mark.long
def test_the_parent_of_trainings_stays_free_of_torch(trained: Trained) -> None:
    code = (
        "import sys, ensemble\n"
        "ensemble.validate('train.yaml')\n"
        "ensemble.train('train.yaml', fold=0, quiet=True)\n"
        "print([name for name in ('torch', 'transformers', 'peft', 'accelerate') if name in sys.modules])"
    )
    (trained.folder / "config.yaml").rename(trained.folder / "train.yaml")
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=trained.folder,
        env={**os.environ, "PYTHONPATH": python_path(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("[]"), done.stdout
    assert trained.folds_called() == ["0", "0"]
