"""Out-of-fold predictions: each row by a model that has seen neither it nor its group, and runs that take them."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ensemble.cli.progress import QuietDisplay
from ensemble.common.clock import boot_seconds
from ensemble.common.errors import ConfigError, DataError
from ensemble.pipeline.run_report import RunReport
from ensemble.pipeline.training_dir import Part, TrainingDir
from ensemble.training.command import predict_held_out
from tests.checkpoints import make_checkpoint, prime, reference
from tests.project import LABELS, Project
from tests.training import folds
from tests.training.folds import (
    FOLD_OF_ROW,
    FOLDS,
    ROWS,
    SWAP,
    by_hand,
    config,
    finish,
    loaded,
)
from tests.training.test_trained import computed, expected, trained_run, values

pytest.importorskip("peft")
pytestmark = [
    pytest.mark.usefixtures("warm"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # peft on transformers 5
]


class Listening(QuietDisplay):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def predict(keys: dict[str, Any]) -> tuple[RunReport, str]:
    display = Listening()
    report = predict_held_out(loaded(keys), display, boot_seconds(), owns_process=False)
    return report, "\n".join(display.said)


def rows_of(project: Project, name: str = "runs/first/oof/lora.csv") -> np.ndarray:
    header, rows = project.read(name)
    assert header == ["id", *LABELS]
    assert [row[0] for row in rows] == project.ids[:ROWS]
    return np.array([[float(cell) for cell in row[1:]] for row in rows])


def test_each_row_is_predicted_by_a_model_that_has_seen_neither_it_nor_its_group(
    trained: Project, adapters: Path
) -> None:
    keys = config(trained, "refit")
    finish(keys, adapters)
    report, message = predict(keys)
    assert report.status == "complete"
    assert "trained on" not in message, "of course they were"
    assert report.members[0].counters.rows == ROWS
    oof = rows_of(trained)
    # Each fold's adapter has a handwriting of its own: who wrote the row?
    of_folds = np.array([by_hand(trained, adapters, f"fold-{fold}")[:ROWS] for fold in range(FOLDS)])
    distances = np.abs(of_folds - oof).max(axis=2)
    np.testing.assert_array_equal(distances.argmin(axis=0), FOLD_OF_ROW)
    assert distances.min(axis=0).max() < 2e-5
    assert np.sort(distances, axis=0)[1].min() > 1e-3
    written = (trained.folder / "runs/first/training/oof/predictions/lora.csv").read_bytes()
    assert (trained.folder / "runs/first/oof/lora.csv").read_bytes() == written

    report, message = predict(keys)
    assert "lora: done by" in message
    assert report.members[0].counters.rows == 0

    # The numbers of an ordinary run with that one adapter.
    alone = {"name": "lora", "prompt_template": folds.TEMPLATE, "label_map": folds.OF_HEAD, "max_length": 128}
    alone |= {"model_name_or_path": str(adapters / "base"), "adapter_name_or_path": str(adapters / "fold-1")}
    plain = trained.config(
        data={"path": "train.csv"}, models=[alone], defaults=None, submission=None, output_dir="runs/alone"
    )
    trained_run(trained, plain)
    by_run = rows_of(trained, "runs/alone/predictions/lora.csv")
    is_held_out = FOLD_OF_ROW == 1
    np.testing.assert_allclose(oof[is_held_out], by_run[is_held_out], atol=1e-6)

    # A run over a table with rows of the training table takes them from there.
    message = trained_run(trained, config(trained))
    assert "lora@fold-1: 1 of 8 rows taken over from" in message
    assert "lora@fold-2: 1 of 8 rows taken over from" in message
    assert computed(trained) == 6 * FOLDS
    np.testing.assert_allclose(values(trained), expected(trained, adapters), atol=2e-5)
    # A run over the training table has nothing to compute.
    data = {"path": "train.csv", "label_column": "label"}
    trained_run(trained, {**config(trained), "data": data})
    assert computed(trained) == 0
    assert rows_of(trained, "runs/first/predictions/lora.csv").tolist() == oof.tolist()


@pytest.mark.long
def test_views_of_the_member_have_their_part_in_it_and_fit_takes_it(trained: Project, adapters: Path) -> None:
    views = [{"name": "plain"}, {"name": "swapped", "swap": SWAP, "weight": 0.5, "when": {"share": 0.5}}]
    keys = config(trained, views=views)
    finish(keys, adapters)
    second = dict(keys["models"][0], name="second")
    del second["views"]
    keys |= {"models": [{**keys["models"][0], "weight": 0.0}, second], "report": True}
    shutil.copytree(
        trained.folder / "runs/first/training/models/lora",
        trained.folder / "runs/first/training/models/second",
    )
    report, _ = predict(keys)
    assert report.members[0].counters.rows == 2 * ROWS
    plain = [by_hand(trained, adapters, f"fold-{fold}")[:ROWS] for fold in range(FOLDS)]
    swapped = [by_hand(trained, adapters, f"fold-{fold}", is_swapped=True)[:ROWS] for fold in range(FOLDS)]
    rows = range(ROWS)
    mean = [(plain[FOLD_OF_ROW[row]][row] + 0.5 * swapped[FOLD_OF_ROW[row]][row]) / 1.5 for row in rows]
    np.testing.assert_allclose(rows_of(trained), mean, atol=2e-5)
    alone = [plain[FOLD_OF_ROW[row]][row] for row in rows]
    np.testing.assert_allclose(rows_of(trained, "runs/first/oof/second.csv"), alone, atol=2e-5)

    files = ["runs/first/oof/lora.csv", "runs/first/oof/second.csv"]
    done = trained.ensemble("fit", *files, "--labels", "train.csv", "--folds", "3", "-o", "weights.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "{name: second, weight:" in (trained.folder / "weights.yaml").read_text()
    trained.write_config(keys)
    done = trained.ensemble("run", "config.yaml", "weights.yaml")
    assert done.returncode == 0, done.stdout + done.stderr

    # A run over the training table has these numbers, too, and is fitted by its config.
    data = {"path": "train.csv", "label_column": "label"}
    del keys["models"][0]["weight"], keys["models"][0]["views"][1]["when"]
    trained_run(trained, {**keys, "data": data})
    assert computed(trained) == 0
    np.testing.assert_allclose(rows_of(trained, "runs/first/predictions/lora.csv"), mean, atol=2e-5)
    done = trained.ensemble("fit", "config.yaml", "--folds", "3", "-o", "again.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (trained.folder / "runs/first/training/oof/report.html").stat().st_size > 10_000


@pytest.mark.long
@pytest.mark.parametrize("predict_with", ["average", "refit"])
def test_one_model_predicts_new_rows_and_the_folds_what_they_hold_out(
    trained: Project, adapters: Path, predict_with: str
) -> None:
    keys = config(trained, predict_with)
    finish(keys, adapters, extra=[4])
    mixed = trained_run(trained, keys)
    assert "lora: 1 of 8 rows was trained on in every fold; all of its models have seen them" in mixed
    assert computed(trained) == 8
    result, by_folds = values(trained), expected(trained, adapters)
    np.testing.assert_allclose(result[[2, 7]], by_folds[[2, 7]], atol=2e-5)
    single: dict[str, Any] = {
        "adapters": {"average": [str(adapters / f"fold-{fold}") for fold in range(FOLDS)]}
    }
    if predict_with == "refit":
        single = {"adapter_name_or_path": str(adapters / "all")}
        of_all = by_hand(trained, adapters, "all")
        others = [row for row in range(8) if row not in (2, 7)]
        np.testing.assert_allclose(result[others], np.array(folds.test_rows([*of_all]))[others], atol=2e-5)
    # Without rows that it was trained on it is that one model, with its fingerprint.
    header, rows = trained.read("test.csv")
    trained.write_csv("test.csv", header, [rows[row] for row in (0, 1, 3, 4)])
    trained_run(trained, keys)
    report = trained.run_json()["members"][0]
    assert report["views"] == {}
    alone = {"name": "lora", "prompt_template": folds.TEMPLATE, "label_map": folds.OF_HEAD, "max_length": 128}
    alone |= {"model_name_or_path": str(adapters / "base"), **single}
    trained_run(trained, {**keys, "models": [alone], "training": None, "output_dir": "runs/alone"})
    assert trained.run_json("runs/alone")["members"][0]["fingerprint"] == report["fingerprint"]


@pytest.mark.long
@pytest.mark.fresh
def test_a_killed_run_goes_on(trained: Project, adapters: Path) -> None:
    keys = config(trained, batch_size=1)
    finish(keys, adapters)
    trained.write_config(keys)
    code = (
        "from pathlib import Path; from ensemble.pipeline.load import load; import sys\n"
        "from ensemble.cli.progress import QuietDisplay; from ensemble.common.clock import boot_seconds\n"
        "from ensemble.training.command import predict_held_out\n"
        "predict_held_out(load(Path('config.yaml')), QuietDisplay(), boot_seconds())"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=trained.folder)
    work = trained.folder / "runs/first/training/oof/work"
    while not [*work.glob("*/*.csv")]:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (trained.folder / "runs/first/oof").exists()
    report, message = predict(keys)
    assert "kept from an earlier run" in message
    assert report.members[0].counters.rows < ROWS
    first = (trained.folder / "runs/first/oof/lora.csv").read_bytes()
    shutil.rmtree(trained.folder / "runs/first/oof")
    shutil.rmtree(trained.folder / "runs/first/training/oof")
    half_written = trained.folder / f"runs/first/oof/.lora.csv.tmp-{process.pid}-abababab"
    half_written.parent.mkdir()
    half_written.touch()
    predict(keys)
    assert (trained.folder / "runs/first/oof/lora.csv").read_bytes() == first
    assert not half_written.exists()


@pytest.mark.long
def test_time_is_up(trained: Project, adapters: Path) -> None:
    keys = config(trained)
    finish(keys, adapters)
    report, _ = predict({**keys, "time_limit": 0.01})
    assert report.status == "time_limit"
    assert not (trained.folder / "runs/first/oof").exists()
    report, _ = predict({**keys, "time_limit": 300.0})
    assert report.status == "complete"
    of_folds = [by_hand(trained, adapters, f"fold-{fold}") for fold in range(FOLDS)]
    np.testing.assert_allclose(
        rows_of(trained), [of_folds[FOLD_OF_ROW[row]][row] for row in range(ROWS)], atol=2e-5
    )


def test_a_table_that_has_changed_since_and_a_fold_that_lacks(trained: Project, adapters: Path) -> None:
    keys = config(trained)
    folder: TrainingDir = finish(keys, adapters)
    header, rows = trained.read("train.csv")
    rows[4][1] += " more"
    trained.write_csv("train.csv", header, rows)
    with pytest.raises(
        DataError, match=r"train.csv: 1 row of it lora was not trained on; run `ensemble train"
    ):
        predict(keys)
    shutil.rmtree(folder.checkpoint("lora", Part(1)))
    with pytest.raises(ConfigError, match="not trained yet: fold 1; run"):
        predict(keys)


@pytest.mark.long
@pytest.mark.parametrize("predict_with", ["folds", "refit"])
def test_whole_checkpoints(trained: Project, adapters: Path, tmp_path: Path, predict_with: str) -> None:
    for seed, part in enumerate((*map(Part, range(FOLDS)), Part(None))):
        prime(make_checkpoint(tmp_path / part.name, "llama", LABELS, seed=seed))
    keys = config(trained, predict_with, label_map={})
    finish(keys, tmp_path)
    report, _ = predict(keys)
    assert report.members[0].counters.rows == ROWS
    count = ROWS + folds.NEW
    pairs = zip(trained.texts[:count], trained.texts[count:], strict=True)
    texts = [f"one {a} other {b}" for a, b in pairs]
    of_folds = [reference(tmp_path / f"fold-{fold}", texts, 128) for fold in range(FOLDS)]
    by_row = [of_folds[FOLD_OF_ROW[row]][row] for row in range(ROWS)]
    np.testing.assert_allclose(rows_of(trained), by_row, atol=2e-5)

    trained_run(trained, keys)
    new = np.mean(of_folds, axis=0)
    if predict_with == "refit":
        new = reference(tmp_path / "all", texts, 128)
    rows = [new[row] for row in range(count)]
    rows[5], rows[3] = by_row[5], by_row[3]
    np.testing.assert_allclose(values(trained), np.array(folds.test_rows(rows)), atol=2e-5)
    assert computed(trained) == folds.NEW * (FOLDS if predict_with == "folds" else 1)


@pytest.mark.long
def test_trials_and_forecasts_of_a_trained_member(trained: Project, adapters: Path) -> None:
    keys = {**config(trained, "refit"), "data": {"path": "train.csv"}}
    finish(keys, adapters)
    predict(keys)
    trained.write_config(keys)
    validated = trained.ensemble("validate", "config.yaml")
    assert validated.returncode == 0, validated.stdout + validated.stderr
    assert "lora: 18 of 18 rows were trained on" in " ".join(validated.stdout.split())
    planned = trained.ensemble("plan", "config.yaml")
    assert planned.returncode == 0, planned.stdout + planned.stderr
    rehearsed = trained.ensemble("rehearse", "config.yaml", "--sample-rows", "6")
    assert rehearsed.returncode == 0, rehearsed.stdout + rehearsed.stderr
    assert "taken over" not in rehearsed.stdout, "a trial measures"
    tuned = trained.ensemble("tune", "config.yaml", "--rows", "6")
    # 1: of so few rows it may find no speed that it trusts.
    assert tuned.returncode in (0, 1), tuned.stdout + tuned.stderr
    assert "6 rows" in tuned.stdout
    assert "the reference" in tuned.stdout
