"""What members are trained on: labels, extra tables, soft labels, digests, and the files that trainings get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ensemble.data.published_table import PublishedTable
from ensemble.data.table import TableNeeds, read_table
from ensemble.data.trained_rows import IN_ALL_FOLDS, read_trained_rows, write_trained_rows
from ensemble.pipeline.load import load
from ensemble.training.data import TrainingData, read_training_data
from tests.training.tables import BUILT_IN, BY_COMMAND, LABELS, config, frame, problems, read

FORMATS = ["train.csv", "train.tsv", "train.csv.gz", "train.parquet", "train.jsonl", "train.jsonl.gz"]
REGRESSION = {**BUILT_IN, "problem_type": "regression"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(frame(), tmp_path / "train.csv")
    return tmp_path


def write(table: pd.DataFrame, path: Path) -> Path:
    if path.suffix == ".parquet":
        table.to_parquet(path, index=False)
    elif ".jsonl" in path.name:
        table.to_json(path, orient="records", lines=True, force_ascii=False)
    else:
        table.to_csv(path, index=False, sep="\t" if ".tsv" in path.name else ",")
    return path


def as_pandas_reads(path: Path, suffix: str) -> pd.DataFrame:
    """A file with all cells as text, empty ones as ""."""
    compression: Any = "gzip" if suffix.endswith(".gz") else None
    if suffix == ".parquet":
        return pd.read_parquet(path)
    if suffix.startswith(".jsonl"):
        return pd.read_json(path, lines=True, dtype=False, compression=compression)
    separator = "\t" if suffix.startswith(".tsv") else ","
    return pd.read_csv(path, dtype=str, keep_default_na=False, sep=separator, compression=compression)


def probabilities(ids: list[str], path: Path, seed: int = 0) -> pd.DataFrame:
    """The CSV of a teacher, in another order than the table, with rows that the table lacks."""
    values = np.random.default_rng(seed).dirichlet(np.ones(3), len(ids) + 5)
    table = pd.DataFrame(values, columns=LABELS)
    table.insert(0, "id", [*ids, *(f"other {number}" for number in range(5))])
    table.sample(frac=1, random_state=seed).to_csv(path, index=False)
    return table.set_index("id")


@pytest.mark.parametrize("name", FORMATS)
def test_a_commands_file_is_the_table_without_the_held_out_rows(tmp_path: Path, name: str) -> None:
    table = frame()
    source = write(table, tmp_path / name)
    data = read(tmp_path, BY_COMMAND, data={"path": str(source)}, folds={"n_splits": 3})
    assert data.suffix == name.removeprefix("train")
    for fold in (0, 2, None):
        path = tmp_path / f"part-{fold}{data.suffix}"
        data.write_for_command(path, data.rows_of(fold))
        written = as_pandas_reads(path, data.suffix)
        rows = np.arange(len(table)) if fold is None else np.flatnonzero(data.folds != fold)
        expected = table.iloc[rows].reset_index(drop=True)
        pd.testing.assert_frame_equal(written, expected, check_dtype=False)
        if fold is not None:
            assert not set(written["id"]) & set(table["id"].iloc[np.flatnonzero(data.folds == fold)])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("extra_name", ["extra.csv", "extra.parquet", "extra.jsonl"])
def test_extra_rows_follow_with_the_columns_that_both_tables_have(
    tmp_path: Path, name: str, extra_name: str
) -> None:
    table, more = frame(), frame(8, seed=1, first=500)
    source = write(table, tmp_path / name)
    columns = more.rename(columns={"label": "answer"}).drop(columns=["group", "fold"]).assign(other="x")
    extra = write(columns, tmp_path / extra_name)
    data = read(
        tmp_path,
        BY_COMMAND,
        data={"path": str(source)},
        folds={"n_splits": 3},
        extra=[{"path": str(extra), "label_column": "answer", "weight": 0.25}],
    )
    path = tmp_path / f"part{data.suffix}"
    data.write_for_command(path, data.rows_of(1))
    written = as_pandas_reads(path, data.suffix)
    assert list(written) == [*table, "weight"]
    own, others = written.iloc[:-8], written.iloc[-8:].reset_index(drop=True)
    expected = table.iloc[np.flatnonzero(data.folds[: len(table)] != 1)].reset_index(drop=True)
    pd.testing.assert_frame_equal(own.drop(columns="weight"), expected, check_dtype=False)
    for column in ("id", "text", "label", "note"):
        assert others[column].tolist() == more[column].tolist(), column
    assert others["group"].replace("", None).isna().all()
    assert own["weight"].astype(float).tolist() == [1.0] * len(own)
    assert others["weight"].astype(float).tolist() == [0.25] * 8


def test_weights_and_one_hot_targets_of_extra_tables(folder: Path) -> None:
    more, third = frame(9, seed=1, first=500), frame(4, seed=2, first=700)
    write(more, folder / "more.csv")
    columns = pd.get_dummies(third["label"]).reindex(columns=LABELS, fill_value=False).astype(float)
    columns = columns.rename(columns={"neg": "p_neg"})
    write(pd.concat([third, columns], axis=1), folder / "third.parquet")
    by_column = {"p_neg": "neg", "pos": "pos", "tie": "tie"}
    data = read(
        folder,
        extra=[
            {"path": str(folder / "more.csv"), "weight": 0.5},
            {"path": str(folder / "third.parquet"), "label_columns": by_column},
        ],
    )
    table = pd.concat([frame(), more, third])
    assert data.main.table.rows == 60
    assert data.table.rows == 73
    assert data.main.activation == "softmax"
    expected = (table["label"].to_numpy()[:, None] == np.array(LABELS)).astype(float)
    assert data.targets.tolist() == expected.tolist()
    assert data.weights.tolist() == [1.0] * 60 + [0.5] * 9 + [1.0] * 4
    assert data.table.texts("text").to_pylist() == table["text"].tolist()


def test_soft_labels_of_another_run_are_joined_by_id(folder: Path) -> None:
    more = frame(9, seed=1, first=500)
    write(more.drop(columns="label"), folder / "more.csv")
    teacher = probabilities(frame()["id"].tolist(), folder / "teacher.csv", seed=1)
    pseudo = probabilities(more["id"].tolist(), folder / "pseudo.csv", seed=2)
    extra = [{"path": str(folder / "more.csv"), "labels": str(folder / "pseudo.csv")}]
    hard = read(folder, BY_COMMAND, folds={"n_splits": 3})
    data = read(folder, BY_COMMAND, folds={"n_splits": 3}, extra=extra, labels=str(folder / "teacher.csv"))
    expected = np.concatenate([teacher.loc[frame()["id"]].to_numpy(), pseudo.loc[more["id"]].to_numpy()])
    np.testing.assert_allclose(data.targets, expected, rtol=0, atol=1e-12)
    assert data.folds.tolist() == [*hard.folds.tolist(), *([IN_ALL_FOLDS] * 9)]  # by the true labels
    path = folder / "part.csv"
    data.write_for_command(path, data.rows_of(0))
    written = pd.read_csv(path, dtype={"id": str, "label": str})
    assert list(written) == [*frame(), "prob_neg", "prob_pos", "prob_tie"]
    rows = data.rows_of(0)
    np.testing.assert_allclose(written[["prob_neg", "prob_pos", "prob_tie"]], expected[rows], rtol=1e-12)
    own = rows[rows < 60]
    assert written["label"].tolist()[: len(own)] == frame()["label"].iloc[own].tolist()
    assert written["label"].iloc[len(own) :].isna().all()

    # With no true labels at all.
    write(frame().drop(columns="label"), folder / "train.csv")
    data = read(
        folder, data={"label_column": None}, folds={"n_splits": 3}, labels=str(folder / "teacher.csv")
    )
    assert sorted(np.bincount(data.folds)) == [20, 20, 20]
    np.testing.assert_allclose(data.targets, expected[:60], rtol=0, atol=1e-12)

    # Soft labels of the extra rows alone, beside hard ones.
    write(frame(), folder / "train.csv")
    data = read(folder, BY_COMMAND, extra=extra)
    data.write_for_command(path, data.rows_of(None))
    written = pd.read_csv(path, dtype=str)
    assert written["label"].tolist()[:60] == frame()["label"].tolist()
    assert written["prob_neg"].astype(float).tolist() == data.targets[:, 0].tolist()


def test_labels_that_problem_type_decides(folder: Path) -> None:
    numbers = pd.DataFrame(np.random.default_rng(0).normal(size=(60, 3)), columns=LABELS)
    write(pd.concat([frame(), numbers], axis=1), folder / "train.csv")
    columns: dict[str, Any] = {"data": {"label_column": None, "label_columns": LABELS}}
    (text,) = problems(folder, **columns)
    assert "60 rows whose values" in text
    assert text.endswith(
        "; set problem_type: multi_label_classification if several labels can be true at once, or regression for "
        "numbers"
    )
    data = read(folder, REGRESSION, **columns)
    assert data.main.activation == "none"
    np.testing.assert_allclose(data.targets, numbers, rtol=1e-12)
    several = {**BUILT_IN, "problem_type": "multi_label_classification"}
    (text,) = problems(folder, several, **columns)
    assert "without a number from 0 to 1 for each label" in text
    (text,) = problems(folder, several, {**REGRESSION, "name": "n"}, **columns)
    assert text == "models: 'm', 'n' are trained together; give them the same problem_type or activation"


def test_the_built_in_way_gets_the_table_and_the_rows_of_a_part(folder: Path) -> None:
    write(frame(9, seed=1, first=500), folder / "more.csv")
    data = read(
        folder, folds={"n_splits": 3, "group_column": "group"}, extra=[{"path": str(folder / "more.csv")}]
    )
    data.table.publish(folder / "table.arrow")
    published = PublishedTable(folder / "table.arrow")
    assert published.columns == ("text",)
    data.write_for_trainer(folder / "rows.npz", data.rows_of(1))
    with np.load(folder / "rows.npz") as arrays:
        rows, targets, weights, groups = (arrays[name] for name in ("rows", "targets", "weights", "groups"))
    table = pd.concat([frame(), frame(9, seed=1, first=500)])
    assert [row["text"] for row in published.take(rows)] == table["text"].iloc[rows].tolist()
    assert rows.dtype == np.int64
    assert [LABELS[label] for label in targets.argmax(axis=1)] == table["label"].iloc[rows].tolist()
    assert weights.tolist() == [1.0] * len(rows)
    own = rows < 60
    assert pd.Series(groups[own]).groupby(table["group"].iloc[rows[own]].to_numpy()).nunique().max() == 1
    assert len(set(groups)) == table["group"].iloc[rows].nunique()


def digests(data: TrainingData) -> tuple[dict[str, str], dict[str, str]]:
    return data.digests("m", 0), data.digests("c", 0)


def test_a_digest_changes_with_what_is_learned_alone(folder: Path) -> None:
    write(frame(9, seed=1, first=500), folder / "more.csv")
    table, models = frame(), (BUILT_IN, BY_COMMAND)
    changes: dict[str, Any] = {"folds": {"n_splits": 3}, "extra": [{"path": str(folder / "more.csv")}]}
    data = read(folder, *models, **changes)
    before = digests(data)
    assert digests(read(folder, *models, **changes)) == before
    assert len({tuple(data.digests("m", fold).values()) for fold in (0, 1, 2, None)}) == 4
    row, held_out = int(data.rows_of(0)[3]), int(np.flatnonzero(data.folds == 0)[2])

    def after(where: int, column: str, value: str) -> tuple[dict[str, str], dict[str, str]]:
        other = table.copy()
        other.loc[where, column] = value
        write(other, folder / "train.csv")
        return digests(read(folder, *models, **changes))

    read_cell, note, unseen = after(row, "text", "x"), after(row, "note", "x"), after(held_out, "text", "x")
    assert read_cell[0] != before[0]
    assert note[0] == before[0]
    assert unseen[0] == before[0]
    of_command = [tuple(state[1].values()) for state in (read_cell, note, unseen, before)]
    assert len({*of_command}) == 4, "a command may read any cell"
    write(table, folder / "train.csv")
    more = frame(9, seed=1, first=500)
    more.loc[4, "label"] = next(label for label in LABELS if label != more.loc[4, "label"])
    write(more, folder / "more.csv")
    assert all(new != old for new, old in zip(digests(read(folder, *models, **changes)), before, strict=True))
    write(frame(9, seed=1, first=500), folder / "more.csv")
    lighter = {**changes, "extra": [{"path": str(folder / "more.csv"), "weight": 0.5}]}
    assert all(new != old for new, old in zip(digests(read(folder, *models, **lighter)), before, strict=True))
    without = digests(read(folder, *models, folds={"n_splits": 3}))
    assert all(new != old for new, old in zip(without, before, strict=True))
    probabilities(table["id"].tolist(), folder / "teacher.csv")
    soft = digests(read(folder, *models, **changes, labels=str(folder / "teacher.csv")))
    assert all(new != old for new, old in zip(soft, before, strict=True))


def test_labels_and_folds_of_rows_that_are_held_out_change_no_other_folds_digest(folder: Path) -> None:
    table = frame().assign(part=lambda rows: np.arange(len(rows)) % 3)
    changes: dict[str, Any] = {"folds": {"column": "part"}}
    write(table, folder / "train.csv")
    before = read(folder, BUILT_IN, **changes)
    other = table.copy()
    other.loc[0, "label"] = next(label for label in LABELS if label != table.loc[0, "label"])  # of fold 0
    other.loc[1, "part"] = 2
    write(other, folder / "train.csv")
    after = read(folder, BUILT_IN, **changes)
    assert after.digests("m", 0) == before.digests("m", 0)
    for fold in (1, 2):
        assert after.digests("m", fold) != before.digests("m", fold)


def test_the_rows_that_a_member_has_seen_are_found_again_in_another_table(folder: Path) -> None:
    more = frame(9, seed=1, first=500)
    write(more, folder / "more.csv")
    member = {
        **{"name": "m", "train": BUILT_IN["train"], "prompt_template": "{{ text }} {{ note }}"},
        "views": [{"name": "both"}, {"name": "short", "prompt_template": "{{ note }}"}],
    }
    data = read(folder, member, folds={"n_splits": 3}, extra=[{"path": str(folder / "more.csv")}])
    write_trained_rows(folder / "rows.bin", data.trained_rows("m"))
    seen = read_trained_rows(folder / "rows.bin")
    assert seen.folds.tolist() == data.folds.tolist()
    assert set(seen.folds[:60]) == {0, 1, 2}
    assert set(seen.folds[60:]) == {IN_ALL_FOLDS}
    by_digest = {tuple(digest): fold for digest, fold in zip(seen.digests.tolist(), seen.folds, strict=True)}
    # A table to predict: other ids, another order, some rows that are new.
    other = pd.concat([more.iloc[:2], frame().iloc[[7, 3]], frame(2, seed=9, first=900)]).assign(id=range(6))
    write(other, folder / "test.csv")
    needs = TableNeeds("id", None, tuple(LABELS), ("text", "note"), (), ("text", "note"), None)
    table = read_table(folder / "test.csv", needs)
    expected = [IN_ALL_FOLDS, IN_ALL_FOLDS, data.folds[7], data.folds[3], None, None]
    rows = table.row_digests(("note", "text")).tolist()
    assert [by_digest.get(tuple(digest)) for digest in rows] == expected


def test_texts_that_stand_twice_are_counted_and_named(folder: Path) -> None:
    table = frame()
    assert not read(folder, folds={"column": "fold"}).remarks
    table.loc[[21, 30], "text"] = table.loc[20, "text"]  # in three folds
    table.loc[[40, 44], "text"] = "in one fold alone"
    table.loc[[20, 21, 30, 40], "label"] = "neg"
    table.loc[44, "label"] = "pos"
    write(table, folder / "train.csv")
    more = frame(9, seed=1, first=500)
    more.loc[[0, 1], "text"] = table.loc[50, "text"]
    more.loc[[0, 1], "label"] = table.loc[50, "label"]
    write(more, folder / "more.csv")
    remarks = read(folder, folds={"column": "fold"}, extra=[{"path": str(folder / "more.csv")}]).remarks
    assert len(remarks) == 3
    where = str(folder / "train.csv")
    assert remarks[0].startswith(
        f"{where}: 3 rows (id '0020', '0021', '0030') whose text also stands in another fold"
    )
    assert "training.folds.group_column" in remarks[0]
    assert remarks[1].startswith(
        f"{where}: 1 row (id '0050') whose text also stands in a table of training.extra"
    )
    assert remarks[2].startswith(f"{where}: 2 rows (id '0040', '0044') whose text has another label")


@pytest.mark.parametrize("name", FORMATS)
def test_rows_without_a_label_are_in_no_fold_and_no_commands_file(tmp_path: Path, name: str) -> None:
    table, more = frame(), frame(9, seed=1, first=500)
    for rows in (table, more):
        rows.loc[[3, 5], "label"] = ""
    source, extra = write(table, tmp_path / name), write(more, tmp_path / f"more-{name}")
    keys = {"path": str(source), "skip_unlabelled": True}
    data = read(tmp_path, BY_COMMAND, data=keys, folds={"n_splits": 3}, extra=[{"path": str(extra)}])
    labelled = table.drop(index=[3, 5]).reset_index(drop=True)
    assert data.main.table.ids.to_pylist() == labelled["id"].tolist()
    path = tmp_path / f"part{data.suffix}"
    data.write_for_command(path, data.rows_of(1))
    written = as_pandas_reads(path, data.suffix)
    own = labelled[data.folds[: len(labelled)] != 1]
    expected = pd.concat([own, more.drop(index=[3, 5])])
    assert (
        written[["id", "text", "label"]].to_numpy().tolist()
        == expected[["id", "text", "label"]].to_numpy().tolist()
    )
    assert all("2 rows without" in text for text in data.remarks[:2])


def test_wrong_labels_are_refused_in_a_sentence(folder: Path) -> None:
    table = frame()
    table.loc[[3, 4], "label"] = ""
    write(table, folder / "train.csv")
    more = frame(9, seed=1, first=500)
    more.loc[2, "label"] = "negg"
    write(more, folder / "more.csv")
    texts = problems(folder, extra=[{"path": str(folder / "more.csv")}])
    assert "row 4 (id '0003'): has no label" in texts[0]
    assert texts[1].startswith(
        f"training.extra[0] (line 17): {folder / 'more.csv'}: label column 'label': 1 row"
    )
    assert "'negg' (did you mean 'neg'?)" in texts[1]
    by_column = {"path": str(folder / "more.csv"), "label_columns": {"n": "neg", "p": "poss", "t": "tie"}}
    (text,) = problems(folder, extra=[by_column])
    assert text.startswith("training.extra[0].label_columns.p (line")
    assert "must be one of the labels" in text
    write(frame(), folder / "train.csv")
    write(more.drop(columns=["label", "text"]), folder / "more.csv")
    texts = problems(folder, extra=[{"path": str(folder / "more.csv")}])
    assert len(texts) == 2
    assert "no text column 'text', which models[0] (m) reads" in texts[0]
    assert "no label column 'label'" in texts[1]
    assert "--set" not in texts[1]


def test_wrong_soft_labels_are_refused_in_a_sentence(folder: Path) -> None:
    path = folder / "teacher.csv"
    probabilities(frame()["id"].tolist(), path)
    whole = pd.read_csv(path, dtype={"id": str})
    whole[~whole["id"].isin(["0004", "0017"])].to_csv(path, index=False)
    (text,) = problems(folder, labels=str(path))
    table = folder / "train.csv"
    assert text == f"{path}: 2 ids of {table} missing ('0004', '0017'); give the values of every row"
    whole.assign(tie=0.9).to_csv(path, index=False)
    (text,) = problems(folder, labels=str(path))
    assert text.startswith(f"{path}: 60 rows with values")
    assert "sum to 1" in text
    whole.drop(columns="tie").to_csv(path, index=False)
    (text,) = problems(folder, labels=str(path))
    assert "the label 'tie'" in text
    (text,) = problems(folder, labels=str(folder / "none.csv"))
    assert "no such file" in text
    more = {"path": str(table)}
    text = problems(folder, data={"label_column": None}, labels=str(path), extra=[more])[-1]
    assert "its labels are not named; give label_column, label_columns or labels" in text


def test_a_column_that_a_commands_file_would_have_twice_is_refused(folder: Path) -> None:
    write(frame().assign(weight=1, prob_neg=0), folder / "train.csv")
    write(frame(9, seed=1, first=500), folder / "more.csv")
    extra = [{"path": str(folder / "more.csv"), "weight": 0.5}]
    (text,) = problems(folder, BY_COMMAND, extra=extra)
    assert text.startswith(
        f"{folder / 'train.csv'}: has 'weight', where the files for train.command have weights"
    )
    read(folder, BUILT_IN, extra=extra)
    read(folder, BY_COMMAND)


def test_extra_cells_of_another_type_are_refused_in_a_sentence(tmp_path: Path) -> None:
    write(frame().assign(text=range(60)), tmp_path / "train.parquet")
    write(frame(9, seed=1, first=500), tmp_path / "more.csv")
    changes: dict[str, Any] = {
        "data": {"path": str(tmp_path / "train.parquet")},
        "extra": [{"path": str(tmp_path / "more.csv")}],
    }
    (text,) = problems(tmp_path, **changes)
    assert text.startswith(f"{tmp_path / 'more.csv'}: column 'text' holds cells")


def test_all_rows_are_read_whatever_the_runs_limit_and_nothing_is_written(folder: Path) -> None:
    loaded = load(config(folder, BY_COMMAND), ["limit=5"])
    files = sorted(folder.iterdir())
    data = read_training_data(loaded)
    assert data.main.table.rows == 60
    assert list(data.file_states) == [str(folder / "train.csv")]
    assert sorted(folder.iterdir()) == files
