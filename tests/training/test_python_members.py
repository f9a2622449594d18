"""Python members that a command trains, against scikit-learn by hand; and those whose model is there already."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression

from ensemble.common.errors import ConfigError
from ensemble.pipeline.load import load
from ensemble.pipeline.training_dir import Part, TrainingDir
from ensemble.training.command import check_trainings, preview_trainings
from tests.project import LABELS, Project
from tests.training.test_jobs import is_alive
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("warm")
FOLDS, TRAIN, NEW = 2, 60, 9
COLUMNS = ["x", "y"]

# What people write: one file that learns as a program, and predicts as a member.
SCRIPT = """
import os, pathlib, sys, time
import joblib, pandas as pd
from sklearn.linear_model import LogisticRegression

def setup(context):
    return joblib.load(context.model / "model.joblib")

def predict(frame, context):
    values = context.state.predict_proba(frame[["x", "y"]].astype(float))
    return pd.DataFrame(values, index=frame.index, columns=context.state.classes_)

if __name__ == "__main__":
    train, fold, out, strength = sys.argv[1:]
    here = pathlib.Path(__file__).parent
    with (here / "calls.txt").open("a") as file:
        file.write(f"{pathlib.Path(out).parent.name} {fold}\\n")
    if (here / f"waits-{fold}").exists():
        (here / "waiting").write_text(str(os.getpid()))
        time.sleep(600)
    table = pd.read_csv(train)
    if not (here / "empty").exists():
        model = LogisticRegression(C=float(strength)).fit(table[["x", "y"]], table["label"])
        joblib.dump(model, pathlib.Path(out) / "model.joblib")
"""


class Learning(Project):
    """A project with a script that trains and predicts, in a folder whose name has a space."""

    @property
    def script(self) -> Path:
        return self.folder / "my scripts/stage.py"

    @property
    def files(self) -> TrainingDir:
        return TrainingDir(self.folder / "runs/first")

    def set_up(self) -> None:
        self.script.parent.mkdir()
        self.script.write_text(SCRIPT, encoding="utf-8")
        random = np.random.default_rng(0)
        table = pd.DataFrame(random.integers(-900, 900, (TRAIN + NEW, 2)) / 1000, columns=COLUMNS)
        number = ((table["x"] > 0) + (table["y"] > 0)).to_numpy() + random.integers(0, 2, TRAIN + NEW)
        table["label"] = np.array(LABELS)[number % len(LABELS)]
        table.insert(0, "id", [f"r{(7 * row) % 101:03d}" for row in range(TRAIN + NEW)])
        table[:TRAIN].to_csv(self.folder / "train.csv", index=False)
        table[TRAIN:].drop(columns="label").to_csv(self.folder / "new.csv", index=False)

    def member(self, name: str = "gbm", strength: float = 1.0, **changes: Any) -> dict[str, Any]:
        command = [sys.executable, str(self.script), "{train}", "{fold}", "{out}", str(strength)]
        member = {"name": name, "task_type": "python", "predict": f"{self.script}:predict", "setup": "setup"}
        return {**member, "columns": COLUMNS, "train": {"command": command}, **changes}

    def configure(self, *members: dict[str, Any], **changes: Any) -> None:
        keys: dict[str, Any] = {
            "data": {"path": "new.csv"},
            "models": list(members) or [self.member()],
            "training": {
                "data": {"path": "train.csv", "label_column": "label"},
                "folds": {"n_splits": FOLDS},
            },
            "defaults": None,
            "submission": None,
        }
        self.write_config(self.config(**{**keys, **changes}))

    def calls(self) -> list[str]:
        return (self.script.parent / "calls.txt").read_text(encoding="utf-8").splitlines()

    def learned(self, fold: int | None, strength: float = 1.0) -> LogisticRegression:
        """Plain scikit-learn on the rows outside a fold, or on all."""
        table = pd.read_csv(self.folder / "train.csv")
        folds = pd.read_csv(self.files.folds, index_col="id")["fold"].loc[table["id"]].to_numpy()
        table = table[folds != (-1 if fold is None else fold)]
        return LogisticRegression(C=strength).fit(table[COLUMNS], table["label"])

    def out_of_fold(self, strength: float = 1.0) -> npt.NDArray[np.float64]:
        """The rows of the training table, each by the model that has not seen it."""
        table = pd.read_csv(self.folder / "train.csv")
        folds = pd.read_csv(self.files.folds, index_col="id")["fold"].loc[table["id"]].to_numpy()
        values = np.empty((TRAIN, len(LABELS)))
        for fold in range(FOLDS):
            values[folds == fold] = probabilities(self.learned(fold, strength), table[folds == fold])
        return values

    def mean_of_folds(self, strength: float = 1.0) -> npt.NDArray[np.float64]:
        new = pd.read_csv(self.folder / "new.csv")
        of_folds = [probabilities(self.learned(fold, strength), new) for fold in range(FOLDS)]
        return np.asarray(np.mean(of_folds, axis=0))


def probabilities(model: LogisticRegression, table: pd.DataFrame) -> npt.NDArray[np.float64]:
    """In the order of the config's labels, which is not the alphabet's."""
    values = model.predict_proba(table[COLUMNS])
    return np.asarray(values[:, [[*model.classes_].index(label) for label in LABELS]])


@pytest.fixture
def learning(project: Project) -> Learning:
    made = Learning(project.folder, project.models)
    made.set_up()
    made.configure()
    return made


def equal(values: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]) -> None:
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-12)


def test_its_out_of_fold_rows_are_those_of_plain_scikit_learn(
    learning: Learning, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(learning.folder)
    done = learning.ensemble("train", "config.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert learning.calls() == ["gbm 0", "gbm 1"]
    equal(learning.values("runs/first/oof/gbm.csv"), learning.out_of_fold())
    # A changed script is another model, and is named.
    learning.script.write_text(f"{SCRIPT}# edited\n", encoding="utf-8")
    _, (sentence,) = preview_trainings(load([Path("config.yaml")]))
    why = f"the script {learning.script} changed since it was trained"
    assert sentence == f"gbm: would be trained anew: fold 0, fold 1: {why}"


@pytest.mark.long
def test_a_run_trains_what_is_missing_for_two_members_of_one_script(learning: Learning) -> None:
    learning.configure(learning.member(), learning.member("weak", 0.01, weight=3.0))
    (learning.script.parent / "empty").touch()
    done = learning.ensemble("run", "config.yaml")
    assert done.returncode == 1, done.stdout + done.stderr
    text = (
        "fold 0: its command ended well, but left no file in runs/first/training/models/gbm/fold-0.unfinished"
    )
    assert f"member gbm failed: {text}; save the model there ({{out}})" in " ".join(done.stderr.split())
    (learning.script.parent / "empty").unlink()
    done = learning.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = learning.mean_of_folds(), learning.mean_of_folds(0.01)
    assert np.abs(first - second).max() > 0.05
    equal(learning.values("runs/first/predictions/gbm.csv"), first)
    equal(learning.values("runs/first/predictions/weak.csv"), second)
    equal(learning.values("runs/first/ensemble.csv"), (first + 3 * second) / 4)
    assert learning.run_json()["members"][0]["counters"]["rows"] == NEW * FOLDS


@pytest.mark.long
@pytest.mark.parametrize("command", ["train", "run"])
def test_a_killed_command_goes_on_with_the_folds_that_lack(learning: Learning, command: str) -> None:
    waits, waiting = (learning.script.parent / name for name in ("waits-1", "waiting"))
    waits.touch()
    running = learning.start(command, "config.yaml")
    wait_until(lambda: waiting.exists() and waiting.read_text(), "the training of fold 1")
    process = int(waiting.read_text())
    running.send_signal(signal.SIGKILL)
    running.communicate()
    wait_until(lambda: not is_alive(process), "the end of its script")
    waits.unlink()
    done = learning.ensemble(command, "config.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gbm: trained already: fold 0" in done.stdout
    assert learning.calls() == ["gbm 0", "gbm 1", "gbm 1"]
    name, expected = {
        "train": ("oof", learning.out_of_fold),
        "run": ("predictions", learning.mean_of_folds),
    }[command]
    equal(learning.values(f"runs/first/{name}/gbm.csv"), expected())


@pytest.mark.long
def test_a_model_of_all_rows_predicts_new_ones(learning: Learning) -> None:
    member = learning.member()
    learning.configure({**member, "train": {**member["train"], "predict_with": "refit"}})
    rows = [*learning.read("new.csv")[1], learning.read("train.csv")[1][4][:3]]
    learning.write_csv("new.csv", ["id", *COLUMNS], rows)
    done = learning.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert learning.calls()[-1] == "gbm -1"
    values = learning.values("runs/first/predictions/gbm.csv")
    equal(values[:NEW], probabilities(learning.learned(None), pd.read_csv(learning.folder / "new.csv")[:NEW]))
    equal(values[NEW:], learning.out_of_fold()[4:5])


def test_a_model_that_is_there_and_one_of_a_view(learning: Learning) -> None:
    table, new = (pd.read_csv(learning.folder / name) for name in ("train.csv", "new.csv"))
    models = [LogisticRegression(C=c).fit(table[COLUMNS], table["label"]) for c in (1.0, 9.0, 0.1)]
    first, second, third = (probabilities(model, new) for model in models)
    for name, model in zip("ab", models, strict=False):
        (learning.folder / "models" / name).mkdir(parents=True)
        joblib.dump(model, learning.folder / "models" / name / "model.joblib")
    views = [{"name": "own"}, {"name": "other", "model": "models/b", "weight": 3.0}]
    learning.configure(learning.member(train=None, model="models/a", views=views), training=None)
    done = learning.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    equal(learning.values("runs/first/predictions/gbm.csv"), (first + 3 * second) / 4)
    equal(learning.values("runs/first/predictions/gbm@other.csv"), second)
    # Only what another model predicts is computed again.
    joblib.dump(models[2], learning.folder / "models/b/model.joblib")
    done = learning.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert learning.run_json()["members"][0]["counters"]["rows"] == NEW
    equal(learning.values("runs/first/predictions/gbm.csv"), (first + 3 * third) / 4)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train": {"base_model": "b", "method": "lora"}}, "a python member is trained by train.command"),
        ({"train": {"method": "lora"}}, "give one of command and base_model"),
        ({"predict_with": "average"}, "average is of adapters or checkpoints; choose folds or refit"),
        ({"method": "lora"}, "is for training from a base_model; the command decides it here"),
        ({"model": "models/a"}, "with train the training makes the member's models; drop this"),
        (
            {"views": [{"name": "a", "model": "models/a"}]},
            "views[0].model (line 25): with train the training makes the member's models; drop this",
        ),
    ],
)
def test_keys_that_do_not_go_with_its_training(
    learning: Learning, changes: dict[str, Any], sentence: str
) -> None:
    member = learning.member()
    if changes.keys() <= {"predict_with", "method"}:
        changes = {"train": {**member["train"], **changes}}
    learning.configure({**member, **changes})
    with pytest.raises(ConfigError) as refused:
        load([learning.folder / "config.yaml"])
    (problem,) = refused.value.problems
    assert sentence in problem


def test_what_its_files_lack_is_told_before_the_training(
    learning: Learning, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(learning.folder)
    learning.configure(learning.member(setup="prepare", depends_on=["nowhere.txt"]))
    with pytest.raises(ConfigError) as refused:
        check_trainings(load([Path("config.yaml")]))
    assert [text.partition(":")[0] for text in refused.value.problems] == [
        "models[0].depends_on",
        "models[0].setup",
    ]


def test_it_learns_what_its_activation_says(learning: Learning, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any numbers, as a regression; a member that learns something else is not trained beside it."""
    monkeypatch.chdir(learning.folder)
    learning.configure(learning.member(), learning.member("other", activation="sigmoid"))
    done = learning.ensemble("train", "config.yaml")
    assert done.returncode == 2
    sentence = "models: 'gbm', 'other' are trained together; give them the same problem_type or activation"
    assert sentence in " ".join(done.stderr.split())


@pytest.mark.long
def test_a_training_that_somebody_has_replaced_is_made_again(learning: Learning) -> None:
    done = learning.ensemble("train", "config.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    (learning.files.checkpoint("gbm", Part(1)) / "model.joblib").write_bytes(os.urandom(8))
    done = learning.ensemble("train", "config.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fold-1 are not those that its training has left" in " ".join(done.stdout.split())
    equal(learning.values("runs/first/oof/gbm.csv"), learning.out_of_fold())
