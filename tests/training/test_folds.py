"""Folds: as scikit-learn divides rows, or as a column says, kept on disk; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.model_selection import KFold, StratifiedGroupKFold, StratifiedKFold

from tests.training.tables import BUILT_IN, BY_COMMAND, LABELS, frame, problems, read


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    frame().to_csv(tmp_path / "train.csv", index=False)
    return tmp_path


def expected(splitter: Any, table: pd.DataFrame, groups: Any = None) -> list[int]:
    folds = np.full(len(table), -1)
    for fold, (_, held_out) in enumerate(splitter.split(table, table["label"], groups)):
        folds[held_out] = fold
    return folds.tolist()


@pytest.mark.parametrize("seed", [0, 7])
def test_stratified_as_scikit_learn_does(folder: Path, seed: int) -> None:
    data = read(folder, folds={"n_splits": 4, "seed": seed})
    assert data.splits == 4
    assert data.folds.tolist() == expected(StratifiedKFold(4, shuffle=True, random_state=seed), frame())


def test_groups_stay_together_as_in_scikit_learn(folder: Path) -> None:
    table = frame()
    data = read(folder, folds={"n_splits": 3, "group_column": "group", "seed": 5})
    splitter = StratifiedGroupKFold(3, shuffle=True, random_state=5)
    assert data.folds.tolist() == expected(splitter, table, table["group"])


def test_five_folds_by_default_of_the_runs_own_table(folder: Path) -> None:
    frame().to_csv(folder / "test.csv", index=False)
    data = read(folder, data={"path": str(folder / "test.csv")})
    assert data.splits == 5
    assert data.folds.tolist() == expected(StratifiedKFold(5, shuffle=True, random_state=0), frame())


def test_one_label_in_columns_is_stratified_and_others_are_shuffled(folder: Path) -> None:
    table = frame()
    columns = pd.get_dummies(table["label"])[LABELS].astype(int)
    pd.concat([table.drop(columns="label"), columns], axis=1).to_csv(folder / "train.csv", index=False)
    data = read(folder, data={"label_column": None, "label_columns": LABELS}, folds={"n_splits": 3})
    assert data.folds.tolist() == expected(StratifiedKFold(3, shuffle=True, random_state=0), table)
    assert data.targets.tolist() == columns.to_numpy().tolist()

    columns["tie"] = 1  # several labels at once
    pd.concat([table, columns], axis=1).to_csv(folder / "train.csv", index=False)
    several = {**BUILT_IN, "problem_type": "multi_label_classification"}
    changes: dict[str, Any] = {"data": {"label_column": None, "label_columns": LABELS}}
    data = read(folder, several, folds={"n_splits": 3}, **changes)
    assert data.folds.tolist() == expected(KFold(3, shuffle=True, random_state=0), table)
    folds = {"n_splits": 3, "group_column": "group"}
    data = read(folder, several, folds=folds, **changes)
    other = read(folder, several, folds={**folds, "seed": 1}, **changes)
    for numbers in (data.folds, other.folds):
        assert pd.Series(numbers).groupby(table["group"]).nunique().max() == 1
        assert sorted(np.bincount(numbers)) == [20, 20, 20]
    assert data.folds.tolist() != other.folds.tolist()


def test_a_columns_numbers_are_sorted_as_numbers(folder: Path) -> None:
    data = read(folder, folds={"column": "fold"})
    by_value = {"-1": 0, "2.5": 1, "9": 2, "10": 3}
    assert data.splits == 4
    assert data.folds.tolist() == [by_value[fold] for fold in frame()["fold"]]
    table = frame().replace({"fold": {"9": "a", "10": "b", "2.5": "b", "-1": "c"}})
    table.to_csv(folder / "train.csv", index=False)
    assert read(folder, folds={"column": "fold"}).folds[:4].tolist() == [1, 0, 1, 2]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "folds", [{"n_splits": 4}, {"n_splits": 3, "group_column": "group"}, {"column": "fold"}]
)
def test_every_row_is_held_out_once_and_never_trained_on_then(
    tmp_path: Path, seed: int, folds: dict[str, Any]
) -> None:
    rng = np.random.default_rng(seed)
    table = frame(int(rng.integers(60, 200)), seed)
    table.to_csv(tmp_path / "train.csv", index=False)
    extra = frame(30, 100 + seed)
    extra.to_csv(tmp_path / "extra.csv", index=False)
    seeds = {} if "column" in folds else {"seed": seed}
    data = read(
        tmp_path, folds={**folds, **seeds}, extra=[{"path": str(tmp_path / "extra.csv"), "weight": 0.5}]
    )
    held_out = [np.flatnonzero(data.folds == fold) for fold in range(data.splits)]
    held_out_rows = np.concatenate(held_out)
    assert sorted(held_out_rows[held_out_rows < len(table)]) == list(range(len(table)))
    groups = pd.concat([table, extra])["group"]
    for fold, rows in enumerate(held_out):
        trained = data.rows_of(fold)
        assert not set(rows) & set(trained)
        assert sorted([*rows, *trained]) == list(range(len(table) + len(extra)))
        if "group_column" in folds:
            assert not set(groups.iloc[rows]) & set(groups.iloc[trained])
    assert data.rows_of(None).tolist() == list(range(len(table) + len(extra)))


def test_the_fold_of_each_row_is_written_by_its_id(folder: Path) -> None:
    data = read(folder, folds={"n_splits": 3})
    data.write_folds(folder / "folds.csv")
    written = pd.read_csv(folder / "folds.csv", dtype=str)
    assert written["id"].tolist() == frame()["id"].tolist()
    assert written["fold"].astype(int).tolist() == data.folds.tolist()


def test_what_cannot_be_divided_is_refused_in_a_sentence(folder: Path) -> None:
    counts = frame()["label"].value_counts()
    few = int(counts["tie"])
    (text,) = problems(folder, folds={"n_splits": few + 1})
    assert text.startswith(
        f"training.folds.n_splits: {few + 1}, but {folder / 'train.csv'} has fewer rows of 'tie' ({few})"
    )
    (text,) = problems(folder, folds={"n_splits": 61}, data={"label_column": "label"})
    assert "has 60 rows; choose as many folds at most" in text
    table = frame()
    table["group"] = np.where(table["id"] < "0030", "g", "h")
    table.to_csv(folder / "train.csv", index=False)
    (text,) = problems(folder, folds={"n_splits": 3, "group_column": "group"})
    assert "has 2 groups in 'group'; choose as many folds at most" in text


def test_folds_and_extra_tables_are_refused_together(folder: Path) -> None:
    frame(9, first=500).assign(label="tye").to_csv(folder / "more.csv", index=False)
    texts = problems(folder, folds={"n_splits": 61}, extra=[{"path": str(folder / "more.csv")}])
    assert [text.partition(" ")[0] for text in texts] == ["training.folds.n_splits:", "training.extra[0]"]


def test_wrong_fold_and_group_columns_are_refused_in_a_sentence(folder: Path) -> None:
    (text,) = problems(folder, folds={"column": "folds"})
    assert "'folds' (did you mean 'fold'?)" in text
    assert read(folder, folds={"column": "fold", "group_column": "fold"}).splits == 4
    (text,) = problems(folder, folds={"column": "fold", "group_column": "label"})
    assert "divides 3 groups of 'label' ('neg', 'pos', 'tie')" in text
    table = frame()
    table.loc[[3, 5], "fold"] = ""
    table.loc[[8], "group"] = ""
    table.to_csv(folder / "train.csv", index=False)
    texts = problems(folder, folds={"column": "fold", "group_column": "group"})
    assert [text.partition(":")[0] for text in texts] == [
        "training.folds.column",
        "training.folds.group_column",
    ]
    assert "is empty in 2 rows, first: row 4 (id '0003')" in texts[0]
    frame().assign(fold="1").to_csv(folder / "train.csv", index=False)
    (text,) = problems(folder, folds={"column": "fold"})
    assert "holds '1'" in text
    frame(1100).assign(fold=range(1100)).to_csv(folder / "train.csv", index=False)
    (text,) = problems(folder, folds={"column": "fold"})
    assert "holds 1,100 values" in text


def test_a_label_that_a_fold_cannot_learn_is_refused(folder: Path) -> None:
    table = frame()
    table["fold"] = np.where(table["label"] == "tie", "1", "0")
    table.to_csv(folder / "train.csv", index=False)
    texts = problems(folder, folds={"column": "fold"})
    assert [text.partition("'")[2].partition("'")[0] for text in texts] == ["neg", "pos", "tie"]
    assert "held out in 1 fold (1)" in texts[2]
    # Rows of an extra table are in all training parts.
    frame(30, 9).to_csv(folder / "extra.csv", index=False)
    read(folder, folds={"column": "fold"}, extra=[{"path": str(folder / "extra.csv")}])

    table[table["label"] != "tie"].to_csv(folder / "train.csv", index=False)
    (text,) = problems(folder, folds={"n_splits": 3})
    assert "no row has the label 'tie'" in text


@pytest.mark.parametrize("command", [False, True], ids=["built in", "command"])
def test_extra_rows_are_left_out_of_the_fold_that_holds_their_group_out(folder: Path, command: bool) -> None:
    table, copies = frame(), frame(24, seed=1, first=500)
    others = frame(6, seed=2, first=700).assign(group=["new", "new", "", "", "g1", "7.0"])
    table.loc[[7, 19, 31, 43, 55], "group"] = "7"  # as a file of numbers has it
    others.to_csv(folder / "others.csv", index=False)
    table.to_csv(folder / "train.csv", index=False)
    copies.to_parquet(folder / "copies.parquet", index=False)
    frame(5, seed=3, first=800).drop(columns="group").to_csv(folder / "ungrouped.csv", index=False)
    names = ("copies.parquet", "others.csv", "ungrouped.csv")
    data = read(
        folder,
        BY_COMMAND if command else BUILT_IN,
        folds={"n_splits": 4, "group_column": "group"},
        extra=[{"path": str(folder / name)} for name in names],
    )
    cells = np.array([*table["group"], *copies["group"], *others["group"], *[""] * 5])
    cells[cells == "7.0"] = "7"
    splitter = StratifiedGroupKFold(4, shuffle=True, random_state=0)
    for fold, (_, held_out) in enumerate(splitter.split(table, table["label"], table["group"])):
        is_held_out = np.isin(cells, table["group"].iloc[held_out].unique())
        rows = data.rows_of(fold)
        assert rows.tolist() == np.flatnonzero(~is_held_out).tolist()
        data.write_for_command(folder / "part.csv", rows)
        data.write_for_trainer(folder / "part.npz", rows)
        written = pd.read_csv(folder / "part.csv", dtype=str)
        assert written["id"].tolist() == data.table.ids.take(rows).to_pylist()
        with np.load(folder / "part.npz") as arrays:
            groups = arrays["groups"]
        pairs = {(group, cells[row] or row) for group, row in zip(groups, rows, strict=True)}
        assert len(pairs) == len({group for group, _ in pairs}) == len({cell for _, cell in pairs})
    assert len(data.rows_of(None)) == len(cells), "a model of all rows learns all of them"
    counted = [
        remark for remark in data.remarks if "left out of the fold that holds their group out" in remark
    ]
    assert len(counted) == 2
    assert counted[0].startswith(f"{folder / 'copies.parquet'}: 22 rows (id '0500', ")
    assert counted[1].startswith(f"{folder / 'others.csv'}: 2 rows (id '0704', '0705')")
    assert data.remarks[0].startswith(
        f"{folder / 'ungrouped.csv'}: has no column 'group' (training.folds.group_"
    )


def test_a_copy_in_its_own_fold_is_no_text_that_all_models_have_learned(folder: Path) -> None:
    table = frame()
    table.to_csv(folder / "train.csv", index=False)
    table.iloc[:9].assign(id=[f"copy {row}" for row in range(9)]).to_csv(folder / "copies.csv", index=False)
    extra = [{"path": str(folder / "copies.csv")}]
    data = read(folder, folds={"n_splits": 3, "group_column": "group"}, extra=extra)
    assert len(data.remarks) == 1, data.remarks
    assert "9 rows (id 'copy 0'" in data.remarks[0]
    assert len(read(folder, folds={"n_splits": 3}, extra=extra).remarks) == 1
    assert "so that all models have learned it" in read(folder, folds={"n_splits": 3}, extra=extra).remarks[0]
