"""What a member with ``inputs`` is trained on: out-of-fold predictions of others, joined by id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ensemble.config.schema import MemberConfig
from ensemble.data.row_files import FileCells
from ensemble.pipeline.load import load
from ensemble.pipeline.trained_members import RowKey, keys_of_rows
from ensemble.pipeline.training_dir import Part, TrainingDir
from ensemble.training.command import _trainings
from ensemble.training.data import read_training_data
from tests.training.tables import BUILT_IN, COMMAND, LABELS, config, frame, problems, read

GIVEN: dict[str, Any] = {"name": "qwen", "task_type": "csv", "path": "qwen.csv"}
READER: dict[str, Any] = {
    "name": "gbm",
    "task_type": "python",
    "predict": "stage2.py:predict",
    "inputs": ["qwen"],
    "columns": ["text"],
    "train": {"command": COMMAND},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    frame().to_csv(tmp_path / "train.csv", index=False)
    return tmp_path


def give(folder: Path, rows: int = 60, seed: int = 0, name: str = "qwen") -> pd.DataFrame:
    """Write the out-of-fold predictions of a member that is not trained, in another order than the table."""
    values = np.random.default_rng(seed).dirichlet(np.ones(len(LABELS)), rows)
    table = pd.DataFrame(values, columns=LABELS)
    table.insert(0, "id", frame(rows)["id"])
    (folder / "runs/oof").mkdir(parents=True, exist_ok=True)
    table.sample(frac=1, random_state=1).to_csv(folder / f"runs/oof/{name}.csv", index=False)
    return table.set_index("id")


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_a_readers_file_has_the_predictions_of_its_rows(tmp_path: Path, suffix: str) -> None:
    source = tmp_path / f"train.{suffix}"
    if suffix == "parquet":
        frame().to_parquet(source, index=False)
    elif suffix == "jsonl":
        frame().to_json(source, orient="records", lines=True)
    else:
        frame().to_csv(source, index=False)
    given = give(tmp_path, rows=70)  # rows that the table lacks are left out
    data = read(tmp_path, GIVEN, BUILT_IN, READER, data={"path": str(source)}, folds={"n_splits": 3})
    for fold in (0, 1, 2, None):
        rows = data.rows_of(fold)
        data.write_for_command(tmp_path / f"part.{suffix}", rows, "gbm")
        data.write_for_command(tmp_path / f"other.{suffix}", rows)
        reads = {"csv": pd.read_csv, "parquet": pd.read_parquet, "jsonl": pd.read_json}
        options: dict[str, Any] = {"jsonl": {"lines": True, "precise_float": True}}.get(suffix, {})
        options |= {"dtype": {"id": str}} if suffix != "parquet" else {}
        written = reads[suffix](tmp_path / f"part.{suffix}", **options).set_index("id")
        assert list(written)[-3:] == [f"qwen/{label}" for label in LABELS]
        assert written.index.tolist() == frame()["id"].iloc[rows].tolist()
        expected = given.loc[written.index].to_numpy()
        np.testing.assert_allclose(written.to_numpy()[:, -3:].astype(float), expected, rtol=0, atol=1e-15)
        assert list(reads[suffix](tmp_path / f"other.{suffix}", **options).set_index("id")) == [
            *frame().columns[1:]
        ]


def test_a_training_depends_on_the_predictions_of_its_part_alone(folder: Path) -> None:
    given = give(folder)
    data = read(folder, GIVEN, BUILT_IN, READER, folds={"n_splits": 3})
    name = "the predictions of qwen"
    assert name not in data.digests("m", 0)
    before = [data.digests("gbm", fold) for fold in (0, 1, 2)]
    held_out = frame()["id"].iloc[np.flatnonzero(data.folds == 1)[0]]
    given.loc[held_out, LABELS] = [0.2, 0.3, 0.5]
    given.to_csv(folder / "runs/oof/qwen.csv")
    after = [
        read(folder, GIVEN, BUILT_IN, READER, folds={"n_splits": 3}).digests("gbm", f) for f in (0, 1, 2)
    ]
    changed = [[key for key in old if old[key] != new[key]] for old, new in zip(before, after, strict=True)]
    assert changed == [[name], [], [name]]


def test_a_reader_has_a_file_of_its_own_for_each_part(folder: Path) -> None:
    give(folder)
    loaded = load(config(folder, GIVEN, {**BUILT_IN, "train": {"command": COMMAND}}, READER))
    files, data = TrainingDir(loaded.config.output_dir), read_training_data(loaded)
    by_member = {training.model.name: training.command for training in _trainings(loaded.config, files, data)}
    assert str(files.root / "data") in str(by_member["m"])
    assert str(files.train_file(Part(4), ".csv", loaded.config.models[2]).absolute()) in by_member["gbm"]
    assert "models/gbm/fold-4.rows.csv" in str(by_member["gbm"])


def test_what_is_refused(folder: Path) -> None:
    (text,) = problems(folder, GIVEN, READER)
    assert text.endswith(
        "runs/oof/qwen.csv: no such file; gbm learns from qwen (inputs), which has no train: put DIR/predictions/"
        f"qwen.csv there after `ensemble run CONFIG --set data.path={folder}/train.csv --set output_dir=DIR`, "
        "where CONFIG has qwen alone, with a model that has not seen these rows"
    )
    given = give(folder)
    path = folder / "runs/oof/qwen.csv"
    given.iloc[3:].to_csv(path)
    (text,) = problems(folder, GIVEN, READER)
    assert "qwen.csv" in text
    assert "'0000', '0001'" in text
    given.rename(index=lambda name: f"other {name}").to_csv(path)  # as many rows, of another table
    (text,) = problems(folder, GIVEN, READER)
    assert "qwen.csv" in text
    assert "'0000', '0001'" in text
    wrong = given.copy()
    wrong.iloc[7, 1] = np.nan
    wrong.to_csv(path)
    (text,) = problems(folder, GIVEN, READER)
    assert "no number" in text
    assert "row 8" in text
    give(folder)
    frame(9, seed=1, first=500).to_csv(folder / "more.csv", index=False)
    (text,) = problems(folder, GIVEN, READER, extra=[{"path": str(folder / "more.csv")}])
    assert text.startswith("training.extra: there are no out-of-fold predictions of its rows")
    read(folder, GIVEN, {**READER, "inputs": None}, extra=[{"path": str(folder / "more.csv")}])
    frame().assign(**{"qwen/pos": 1}).to_csv(folder / "train.csv", index=False)
    (text,) = problems(folder, GIVEN, READER)
    assert "has 'qwen/pos', where the files for train.command have weights or probabilities" in text


def test_a_row_is_known_by_what_a_member_and_its_inputs_read() -> None:
    class Reader(MemberConfig):
        task_type: str = "reader"
        inputs: tuple[str, ...] = ()

        @property
        def input_names(self) -> tuple[str, ...]:
            return self.inputs

    def member(name: str, *inputs: str) -> Reader:
        return Reader.model_construct(name=name, inputs=inputs)

    members = [member("a"), member("pixels"), member("given"), member("b", "a"), member("c", "b", "given")]
    members += [member("d", "pixels"), member("e", "a", "b")]
    columns = {"a": ("text",), "pixels": ("image",), "given": ("text",), "b": ("size", "text"), "c": ()}
    columns |= {"d": (), "e": ()}
    cells = FileCells("image", "image_column", None)
    keys = keys_of_rows(members, {"a", "pixels", "b", "c", "d", "e"}, columns, {"pixels": cells})
    assert keys == {
        "a": RowKey(("text",), None, False),
        "pixels": RowKey(("image",), cells, False),
        "b": RowKey(("size", "text"), None, False),
        "c": RowKey(("size", "text"), None, True),
        "d": RowKey(("image",), None, True),
        "e": RowKey(("text", "size"), None, False),
    }
