"""Gathering, aligning and scoring, against hand computation, pandas and torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from ensemble.common.errors import DataError, MergeError
from ensemble.common.shards import gather_shards
from ensemble.merging.scoring import Resamples, Scoring
from tests.labelled import labelled
from tests.merging.reading import read_checked

LABELS = ["a", "b", "c"]
AWKWARD_IDS = ["001", "1e5", "nan", " x", "=1+1", 'say "hi"', "a,b", "two\nlines", "ü", "NULL"]


def write(path: Path, ids: list[str], values: np.ndarray, labels: list[str] = LABELS) -> Path:
    frame = pd.DataFrame(values, columns=labels)
    frame.insert(0, "id", ids)
    frame.to_csv(path, index=False)
    return path


def probabilities(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet([1, 1, 1], rows)


def read(path: Path, ids: list[str]) -> np.ndarray:
    return read_checked(path, "id", LABELS, ids)


@pytest.mark.fault(11)
def test_rows_are_joined_by_id_and_columns_by_name(tmp_path: Path) -> None:
    values = probabilities(10, 0)
    shuffled = [3, 1, 9, 0, 2, 4, 8, 7, 6, 5]
    path = write(
        tmp_path / "m.csv",
        [AWKWARD_IDS[i] for i in shuffled],
        values[shuffled][:, [2, 0, 1]],
        ["c", "a", "b"],
    )
    np.testing.assert_array_equal(read(path, AWKWARD_IDS), values)
    np.testing.assert_array_equal(read(write(path, AWKWARD_IDS, values), AWKWARD_IDS), values)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["1", "2"], "missing .'3'."),
        (["1", "2", "3", "4"], "not in the table .'4'."),
        (["1", "2", "2", "3"], "more than once .'2'."),
        (["1", "02", "3"], "(?s)missing .'2'.*not in the table .'02'."),
    ],
)
@pytest.mark.fault(11)
def test_ids_that_do_not_fit(ids: list[str], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.csv", ids, probabilities(len(ids), 0))
    with pytest.raises(DataError, match=message):
        read(path, ["1", "2", "3"])


@pytest.mark.fault(10, 11)
def test_columns_and_values_that_do_not_fit(tmp_path: Path) -> None:
    path = write(tmp_path / "m.csv", ["1"], probabilities(1, 0), ["a", "b", "d"])
    with pytest.raises(DataError, match="no column of the label 'c'; the columns are 'id', 'a', 'b', 'd'"):
        read(path, ["1"])
    path.write_text("id,a,b,c\n1,0.5,nan,0.5\n")
    with pytest.raises(MergeError, match=r"no finite number, .* id 1"):
        read(path, ["1"])
    path.write_text("id,a,b,c\n1,0.5,x,0.5\n")
    with pytest.raises(DataError, match="row 1: 'x' in column 'b'"):
        read(path, ["1"])


def test_parts_are_gathered_into_the_tables_order() -> None:
    values = probabilities(7, 1)
    parts = []
    for rows in ([4, 0, 5], [1, 3, 2], [], [0, 2]):  # two runs may have cut differently
        columns = {f"p{label}": values[rows, label] for label in range(3)}
        parts.append(pa.table({"row": np.array(rows, dtype=np.int64), **columns}))
    gathered = gather_shards(parts, 7, 3)
    np.testing.assert_array_equal(gathered[:6], values[:6])
    assert np.isnan(gathered[6]).all(), "no part has it"


def test_scores_equal_torchs() -> None:
    import torch

    values, truth = probabilities(500, 3), np.random.default_rng(4).integers(0, 3, 500)
    values[0] = [1, 0, 0]
    truth[0] = 1  # a confident miss: clipped, not infinite
    scoring = Scoring(labelled(truth), Resamples(500))
    for start in range(0, 500, 200):
        scoring.add(start, values[start : start + 200])
    got = scoring.score()
    assert got is not None
    clipped = torch.from_numpy(np.clip(values, np.finfo(float).eps, 1))
    expected = torch.nn.functional.nll_loss(clipped.log(), torch.from_numpy(truth))
    assert got.log_loss == pytest.approx(expected.item(), rel=1e-12)
    assert got.accuracy == np.mean([row.argmax() == label for row, label in zip(values, truth, strict=True)])
