"""Members that are trained already: adapters of a tiny base in the places of a training's results."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ensemble.config import LoadedConfig, mapping_config
from ensemble.data.table import InputTable, TableNeeds, read_table
from ensemble.data.trained_rows import TrainedRows, write_trained_rows
from ensemble.pipeline.load import load
from ensemble.pipeline.training_dir import Part, TrainingDir
from ensemble.training.command import _trainings
from ensemble.training.data import read_training_data
from ensemble.training.records import PartRecord, Seal
from ensemble.training.seal import seal_training
from tests.checkpoints import adapter_reference, make_adapter, make_base, make_texts
from tests.project import GEMMA_LABELS, LABELS, Project

ROWS, NEW, FOLDS = 18, 6, 3
# The fold of each row of train.csv; rows of a group are neighbours.
FOLD_OF_ROW = np.array([0, 0, 1, 2, 2, 1, 1, 0, 0, 2, 2, 1, 1, 0, 0, 2, 2, 1])
OF_HEAD = {"LABEL_0": "tie", "LABEL_1": "winner_a", "LABEL_2": "winner_b"}
TEMPLATE = "one {{ a }} other {{ b }}"
SWAP = {"columns": ["a", "b"], "labels": ["winner_a", "winner_b"]}
COMMAND = ["python", "train.py", "{train}", "{out}"]
_Values = npt.NDArray[np.float64]


def make_adapters(folder: Path) -> Path:
    """A base, and an adapter for each fold and one for all rows; each gives other probabilities."""
    base = make_base(folder / "base", "llama")
    for seed, part in enumerate((*map(Part, range(FOLDS)), Part(None))):
        make_adapter(folder / part.name, base, len(LABELS), seed=seed, r=2)
    return folder


def write_tables(project: Project) -> None:
    """``train.csv`` with labels; ``test.csv`` with new rows and two of the training table's, in another order."""
    texts = make_texts(2 * (ROWS + NEW), seed=3)
    project.texts = [text or "nothing" for text in texts]
    count = ROWS + NEW
    project.ids = [f"{(7 * row) % 101:03d}" for row in range(count)]
    rows = [
        [project.ids[row], project.texts[row], project.texts[count + row], LABELS[row % 3]]
        for row in range(count)
    ]
    with_folds = [[*row, fold] for row, fold in zip(rows[:ROWS], FOLD_OF_ROW.tolist(), strict=True)]
    project.write_csv("train.csv", ["id", "a", "b", "label", "fold"], with_folds)
    project.write_csv("test.csv", ["id", "a", "b"], [row[:3] for row in test_rows(rows)])


def test_rows(rows: Sequence[Any]) -> list[Any]:
    """Of all rows, those of test.csv: new ones, and of the training table number 5 (fold 1) and 3 (fold 2)."""
    return [*rows[ROWS : ROWS + 2], rows[5], *rows[ROWS + 2 : ROWS + NEW], rows[3]]


test_rows.__test__ = False  # type: ignore[attr-defined]


def config(project: Project, predict_with: str = "folds", **member: Any) -> dict[str, Any]:
    lora = {
        "name": "lora",
        "prompt_template": TEMPLATE,
        "label_map": OF_HEAD,
        "max_length": 128,
        "train": {"command": COMMAND, "predict_with": predict_with},
        **member,
    }
    training = {"data": {"path": "train.csv", "label_column": "label"}, "folds": {"column": "fold"}}
    return project.config(
        data={"path": "test.csv"}, models=[lora], defaults=None, submission=None, training=training
    )


def loaded(keys: dict[str, Any]) -> LoadedConfig:
    return load([mapping_config(keys)])


def read(name: str) -> InputTable:
    """A table with the columns that the member reads."""
    return read_table(Path(name), TableNeeds("id", None, tuple(LABELS), ("a", "b"), (), (), None))


def finish(
    keys: dict[str, Any], adapters: Path, extra: Sequence[int] = (), parts: Sequence[Part] | None = None
) -> TrainingDir:
    """Put a training's results where they belong; the ``extra`` rows of test.csv were in each training part."""
    given = loaded(keys)
    folder, model = TrainingDir(given.config.output_dir), given.config.models[0]
    data = read_training_data(given)
    made_of = next(_trainings(given.config, folder, data)).made_of
    for part in (*map(Part, range(FOLDS)), Part(None)) if parts is None else parts:
        shutil.copytree(adapters / part.name, folder.unfinished(model.name, part))
        record = PartRecord(part.fold, "done", 1, 1.0, ("cpu",))
        seal = Seal({**made_of, **data.digests(model.name, part.fold)}, record)
        seal_training(folder, given.config, model, part, seal)
    digests = read("train.csv").row_digests(("a", "b"))
    more = read("test.csv").row_digests(("a", "b"))[list(extra)]
    folds = np.concatenate([FOLD_OF_ROW, np.full(len(more), -1)])
    rows = folder.trained_rows(model.name)
    rows.parent.mkdir(parents=True, exist_ok=True)
    write_trained_rows(rows, TrainedRows(np.concatenate([digests, more]), folds))
    return folder


def by_hand(project: Project, adapters: Path, part: str, is_swapped: bool = False) -> _Values:
    """Plain transformers and peft: what an adapter says of all rows, those of train.csv and the new ones."""
    count = ROWS + NEW
    first, second = project.texts[:count], project.texts[count:]
    if is_swapped:
        first, second = second, first
    texts = [f"one {a} other {b}" for a, b in zip(first, second, strict=True)]
    values = adapter_reference(adapters / "base", adapters / part, texts, len(LABELS), max_length=128)
    values = values[:, [GEMMA_LABELS.index(label) for label in LABELS]]
    return values[:, [1, 0, 2]] if is_swapped else values
