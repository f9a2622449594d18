"""Members that are trained on out-of-fold predictions of others, by real commands that remember what they saw."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ensemble.pipeline.run_report import RunReport
from ensemble.pipeline.training_dir import TrainingDir
from ensemble.training.records import TrainingReport, read_record
from tests.project import Project
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("warm")

_Values = npt.NDArray[np.float64]
LABELS = ["no", "yes"]

# A training remembers the ids of its rows; a row that a model has seen gets 0.99, which no other row has.
SCRIPT = """
import csv, json, os, sys, time
from pathlib import Path

def predict(frame, context):
    import numpy as np
    while (Path(__file__).parent / "mode-predict").exists():
        time.sleep(0.05)
    model = json.loads((Path(context.model) / "model.json").read_text())
    with (Path(__file__).parent / "predicted.txt").open("a") as file:
        parts = Path(context.model).parts[-2:]
        file.writelines("/".join((*parts, str(row))) + chr(10) for row in frame.index)
    names = model["reads"]
    values = frame[names].to_numpy(dtype=float).sum(axis=1) * model["scale"] % 0.9
    seen = frame.index.astype(str).isin(model["seen"])
    yes = np.where(seen, 0.99, values)
    return np.stack([1 - yes, yes], axis=1)

if __name__ == "__main__":
    train, out, scale = sys.argv[1:]
    here, out = Path(__file__).parent, Path(out)
    with open(train) as file:
        rows = list(csv.DictReader(file))
    name, part = out.parent.name, out.name
    with (here / "calls.txt").open("a") as file:
        file.write(f"{name}/{part}" + chr(10))
    mode = here / f"mode-{name}"
    if mode.exists() and mode.read_text() == "fail":
        sys.exit(3)
    while mode.exists() and mode.read_text() == "wait":
        time.sleep(0.05)
    reads = [column for column in rows[0] if column.endswith("/yes")] or ["size"]
    model = {"scale": float(scale), "reads": reads, "seen": [row["id"] for row in rows]}
    (out / "model.json").write_text(json.dumps(model))
"""


class Stages(Project):
    """Two members, and one that reads them, all trained by commands."""

    @property
    def files(self) -> TrainingDir:
        return TrainingDir(self.folder / "runs/first")

    def member(self, name: str, scale: float, **changes: Any) -> dict[str, Any]:
        command = [sys.executable, "my model.py", "{train}", "{out}", str(scale)]
        keys: dict[str, Any] = {
            "name": name,
            "task_type": "python",
            "predict": "${CONFIG_DIR}/my model.py:predict",
        }
        keys |= {} if "inputs" in changes else {"columns": ["size"]}
        return {**keys, "train": {"command": command, "num_gpus": 0}, **changes}

    def set_up(self, *models: dict[str, Any], scale: float = 0.3, **changes: Any) -> None:
        (self.folder / "my model.py").write_text(SCRIPT, encoding="utf-8")
        members = [self.member("a", scale), self.member("b", 0.7), self.member("c", 0.9, inputs=["a", "b"])]
        training = {"data": {"path": "train.csv", "label_column": "label"}, "folds": {"n_splits": 2}}
        config: dict[str, Any] = {
            "data": {"path": "test.csv"},
            "labels": LABELS,
            "models": list(models) or members,
        }
        config |= {"training": training, "output_dir": "runs/first", "report": False, **changes}
        self.write_config(config)

    def write_rows(self, rows: int = 12) -> None:
        header = ["id", "size", "label"]
        table = [[f"r{n}", str(3 * n % 11 + 0.5 * n), LABELS[n % 2]] for n in range(rows)]
        self.write_csv("train.csv", header, table)
        self.write_csv("training rows.csv", header, table)
        self.write_csv("test.csv", header[:2], [[f"t{n}", str(n)] for n in range(4)])

    def calls(self) -> list[str]:
        file = self.folder / "calls.txt"
        return file.read_text().split() if file.exists() else []

    def oof(self, name: str) -> dict[str, list[float]]:
        return self.numbers(f"runs/first/oof/{name}.csv")

    def numbers(self, name: str) -> dict[str, list[float]]:
        return {row[0]: [float(cell) for cell in row[1:]] for row in self.read(name)[1]}

    def done(self, *arguments: str, code: int = 0) -> str:
        done = self.ensemble(*arguments)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def stages(tmp_path: Path) -> Stages:
    folder = tmp_path / "my stages"
    folder.mkdir()
    made = Stages(folder, folder)
    made.write_rows()
    made.set_up()
    return made


def check_second_stage(stages: Stages) -> None:
    """The reader's rows have what the inputs' models predicted that have not seen the row; so do its own."""
    oof = {name: stages.oof(name) for name in ("a", "b", "c")}
    fold_of = {row[0]: int(row[1]) for row in stages.read("runs/first/training/folds.csv")[1]}
    for values in oof.values():
        assert len(values) == len(fold_of)
        assert not any(0.99 in of_row for of_row in values.values()), (
            "no model predicted a row that it has seen"
        )
    for fold in (0, 1):
        path = stages.files.root / f"models/c/fold-{fold}.rows.csv"
        with path.open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert {row["id"] for row in rows} == {name for name, other in fold_of.items() if other != fold}
        for row in rows:
            for name in ("a", "b"):
                assert [float(row[f"{name}/{label}"]) for label in LABELS] == oof[name][row["id"]]
    for row_id, (_, yes) in oof["c"].items():
        assert yes == pytest.approx((oof["a"][row_id][1] + oof["b"][row_id][1]) * 0.9 % 0.9, abs=1e-12)


def check_equal(values: dict[str, list[float]], others: dict[str, list[float]]) -> None:
    assert values.keys() == others.keys()
    for name, of_row in values.items():
        assert of_row == pytest.approx(others[name], abs=1e-12)


def check_run_of_all(stages: Stages) -> None:
    """The out-of-fold run has every member, and its ensemble is their mean; no row was computed twice."""
    report = RunReport.read(stages.files.oof_run / "run.json")
    assert [member.name for member in report.members] == ["a", "b", "c"]
    assert report.status == "complete"
    mean = stages.numbers("runs/first/training/oof/ensemble.csv")
    oof = [stages.oof(name) for name in ("a", "b", "c")]
    check_equal(mean, {row: np.mean([of[row] for of in oof], axis=0).tolist() for row in mean})
    computed = (stages.folder / "predicted.txt").read_text().split()
    assert sorted(computed) == sorted(set(computed))


def test_the_second_stage_follows_on_out_of_fold_predictions(stages: Stages) -> None:
    said = stages.done("train", "config.yaml")
    check_run_of_all(stages)
    assert "out-of-fold predictions, to learn from: a, b" in said
    assert "6 trainings done" in said
    calls = stages.calls()
    assert len(calls) == 6
    assert {call.partition("/")[0] for call in calls[:4]} == {"a", "b"}
    check_second_stage(stages)


@pytest.mark.long
def test_what_follows_from_a_change_is_made_again(stages: Stages) -> None:
    checked = " ".join(stages.done("validate", "config.yaml").split())
    assert "c: not trained yet, weight 1, 2 trainings to do (fold 0, fold 1), by its command" in checked
    assert "on the CPU, after a, b" in checked
    stages.done("train", "config.yaml")
    # New rows are predicted by the mean of the folds' models, on the mean predictions of the inputs.
    stages.done("run", "config.yaml")
    assert len(stages.calls()) == 6
    check_run_of_all(stages)
    run = {name: stages.numbers(f"runs/first/predictions/{name}.csv") for name in ("a", "b", "c")}
    for row_id, (_, yes) in run["c"].items():
        expected = (run["a"][row_id][1] + run["b"][row_id][1]) * 0.9 % 0.9
        assert yes == pytest.approx(expected, abs=1e-9)
    for inputs in ("[b, a]", "[a]"):
        planned = " ".join(
            stages.done("validate", "config.yaml", "--set", f"models.c.inputs={inputs}").split()
        )
        assert "c: would be trained anew: fold 0, fold 1: inputs changed since it was trained" in planned
    # Another first stage: what follows from it is trained anew, and says why; nothing else is.
    stages.set_up(scale=0.4)
    planned = " ".join(stages.done("validate", "config.yaml").split())
    assert "c: would be trained anew: fold 0, fold 1: the predictions of a change" in planned
    said = stages.done("run", "config.yaml")
    assert "c: trained anew: fold 0, fold 1: the predictions of a changed since it was trained" in said
    names = [f"{name}/fold-{fold}.unfinished" for name in ("a", "c") for fold in (0, 1)]
    assert sorted(stages.calls()[6:]) == names
    stages.done("train", "config.yaml")
    assert len(stages.calls()) == 10
    check_second_stage(stages)
    # A run over the training table has the out-of-fold predictions.
    stages.done("run", "config.yaml", "--set", "data.path=train.csv")
    check_equal(stages.numbers("runs/first/predictions/c.csv"), stages.oof("c"))
    # All anew.
    stages.done("train", "config.yaml", "--fresh")
    assert len(stages.calls()) == 16
    check_second_stage(stages)


@pytest.mark.long
@pytest.mark.fresh
@pytest.mark.parametrize("where", ["first stage", "predictions", "second stage"])
def test_a_killed_command_goes_on(stages: Stages, where: str) -> None:
    mode = {"first stage": "mode-b", "predictions": "mode-predict", "second stage": "mode-c"}[where]
    begun = {"first stage": "b/", "predictions": "b/fold-1", "second stage": "c/"}[where]
    waiting = stages.folder / mode
    waiting.write_text("wait")
    oof_run = stages.files.inputs_run / "run.json"

    def is_there() -> bool:
        has_begun = any(call.startswith(begun) for call in stages.calls())
        return has_begun and (where != "predictions" or oof_run.exists())

    with stages.start("train", "config.yaml") as process:
        try:
            wait_until(is_there, where)
        finally:
            process.send_signal(signal.SIGKILL)
    waiting.unlink()
    done = [path.parent.name for path in stages.files.root.glob("models/*/fold-?.json")]
    assert len(done) >= {"first stage": 2, "predictions": 4, "second stage": 4}[where]
    stages.done("train", "config.yaml")
    for name in set(done):
        assert sum(call.startswith(f"{name}/") for call in stages.calls()) == 2, "no training is done twice"
    check_second_stage(stages)


@pytest.mark.long
def test_a_failed_input(stages: Stages) -> None:
    (stages.folder / "mode-a").write_text("fail")
    stages.set_up(retries=0)
    said = stages.done("train", "config.yaml", code=1)
    assert "member a failed: " in said
    assert "member c failed: it reads the predictions of a, which failed" in said
    assert not any(call.startswith("c/") for call in stages.calls())
    report = read_record(stages.files.records, TrainingReport)
    assert report is not None
    assert report.status == "failed"
    assert [bool(member.failure) for member in report.members] == [True, False, True]
    # A run without it.
    stages.set_up(retries=0, on_member_failure="continue")
    said = stages.done("run", "config.yaml")
    assert "c is left out: it reads the predictions of a, which failed" in said
    (stages.folder / "mode-a").unlink()
    stages.done("train", "config.yaml")
    check_second_stage(stages)


@pytest.mark.long
def test_one_fold_alone(stages: Stages) -> None:
    said = stages.done("train", "config.yaml", "--fold", "1")
    assert "a lacks fold 0; b lacks fold 0; c lacks fold 0, fold 1" in said
    assert stages.calls() == ["a/fold-1.unfinished", "b/fold-1.unfinished"]
    stages.set_up(scale=0.4)
    planned = " ".join(stages.done("validate", "config.yaml").split())
    assert "a: would be trained anew: fold 1" in planned
    assert "c: would be trained anew" not in planned, "it was never trained"
    stages.set_up()
    stages.done("train", "config.yaml", "--fold", "0")
    assert stages.calls()[2:] == ["a/fold-0.unfinished", "b/fold-0.unfinished", "c/fold-0.unfinished"]
    stages.done("train", "config.yaml")
    assert len(stages.calls()) == 6
    check_second_stage(stages)


@pytest.mark.long
def test_time_is_up_before_the_second_stage(stages: Stages) -> None:
    (stages.folder / "mode-b").write_text("wait")
    stages.set_up(time_limit=6.0)
    said = stages.done("train", "config.yaml", code=4)
    assert "stopped at time_limit, before all trainings were done" in said
    (stages.folder / "mode-b").unlink()
    stages.set_up(time_limit=300.0)
    stages.done("train", "config.yaml")
    assert stages.calls().count("a/fold-0.unfinished") == 1
    check_second_stage(stages)


@pytest.mark.long
def test_an_input_that_is_not_trained(stages: Stages) -> None:
    given = stages.member("a", 0.3, model="given")
    del given["train"]
    (stages.folder / "given").mkdir()
    (stages.folder / "given/model.json").write_text(json.dumps({"scale": 0.3, "reads": ["size"], "seen": []}))
    # Two stages behind it.
    reader = stages.member("c", 0.9, inputs=["a", "b"])
    last = stages.member("d", 0.5, inputs=["a", "c"], columns=["size"])
    models = [given, stages.member("b", 0.7), reader, last]
    stages.set_up(*models)
    said = " ".join(stages.done("train", "config.yaml", code=2).split())
    assert "runs/first/oof/a.csv: no such file; d learns from a (inputs), which has no train:" in said
    command = "ensemble run CONFIG --set data.path=train.csv --set output_dir=DIR"
    assert command in said
    quoted = " ".join(
        stages.done("train", "config.yaml", "--set", "training.data.path=training rows.csv", code=2).split()
    )
    assert "--set 'data.path=training rows.csv' --set" in quoted
    alone = {"data": {"path": "test.csv"}, "labels": LABELS, "models": [given], "output_dir": "x"}
    stages.write_config({**alone, "report": False}, "alone.yaml")
    stages.done(*command.replace("CONFIG", "alone.yaml").split()[1:])
    (stages.folder / "runs/first/oof").mkdir(parents=True)
    shutil.copy(stages.folder / "DIR/predictions/a.csv", stages.folder / "runs/first/oof/a.csv")
    before = (stages.folder / "runs/first/oof/a.csv").read_bytes()
    said = stages.done("train", "config.yaml")
    check_second_stage(stages)
    assert (stages.folder / "runs/first/oof/a.csv").read_bytes() == before
    oof = {name: stages.oof(name) for name in ("a", "c", "d")}
    for row_id, (_, yes) in oof["d"].items():
        assert yes == pytest.approx((oof["a"][row_id][1] + oof["c"][row_id][1]) * 0.5 % 0.9, abs=1e-12)
    stages.done("run", "config.yaml")
    stages.done("run", "config.yaml", "--set", "data.path=train.csv")
    check_equal(stages.numbers("runs/first/predictions/d.csv"), oof["d"])
    # Without the file, and without the training table, the members are as they were trained.
    (stages.folder / "runs/first/oof/a.csv").unlink()
    assert "oof/a.csv is gone: the members are taken as they were trained" in stages.done(
        "run", "config.yaml"
    )
    assert len(stages.calls()) == 6
