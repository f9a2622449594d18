"""Predictions from files and from run directories: joined by id, or refused in one sentence."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ensemble.analysis.predictions import read_files, read_run, run_settings
from ensemble.common.errors import ConfigError, DataError
from ensemble.pipeline.prediction_files import named_files
from ensemble.pipeline.run_report import RunReport
from tests.project import LABELS, Project

A: dict[str, list[Any]] = {"id": ["007", "1e5", " x"], "neg": [0.7, 0.2, 0.5], "pos": [0.3, 0.8, 0.5]}
B: dict[str, list[Any]] = {"pos": [0.6, 0.1, 0.4], "neg": [0.4, 0.9, 0.6], "id": [" x", "007", "1e5"]}
TRUTH: dict[str, list[Any]] = {"id": ["1e5", "more", " x", "007"], "label": ["neg", "pos", "pos", "neg"]}


def write(folder: Path, **files: Any) -> list[Path]:
    paths = []
    for name, columns in files.items():
        paths.append(folder / f"{name}.csv")
        pd.DataFrame(columns).to_csv(paths[-1], index=False)
    return paths


def problems(paths: Sequence[Path], **asked: Any) -> list[str]:
    with pytest.raises(DataError) as caught:
        read_files(paths, **asked)
    assert caught.value.exit_code == 2
    return [problem.replace(f"{paths[0].parent}/", "") for problem in caught.value.problems]


def test_files_are_joined_by_id_in_the_order_of_the_first(tmp_path: Path) -> None:
    a, b, truth = write(tmp_path, **{"a.v2": A, "b": B, "truth": TRUTH})
    read = read_files([a, b], labels=truth)
    assert read.ids.to_pylist() == A["id"]
    assert read.labels == ("neg", "pos")
    assert list(read.members) == ["a.v2", "b"]
    assert read.members["a.v2"].tolist() == [[0.7, 0.3], [0.2, 0.8], [0.5, 0.5]]
    assert read.members["b"].tolist() == [[0.9, 0.1], [0.6, 0.4], [0.4, 0.6]]
    assert read.activations == {"a.v2": "softmax", "b": "softmax"}
    assert read.truth is not None
    assert read.truth.dtype == np.int64
    assert read.truth.tolist() == [0, 0, 1]
    assert read.remarks == (f"1 row of {truth} left out, of ids without predictions",)


def test_files_in_the_formats_of_tables(tmp_path: Path) -> None:
    (a,) = write(tmp_path, a=A)
    pd.DataFrame(B).to_parquet(tmp_path / "b.parquet", index=False)
    pd.DataFrame(A).to_json(tmp_path / "c.v2.jsonl", orient="records", lines=True)
    read = read_files([a, tmp_path / "b.parquet", tmp_path / "c.v2.jsonl"])
    assert {name: values.tolist() for name, values in read.members.items()} == {
        "a": [[0.7, 0.3], [0.2, 0.8], [0.5, 0.5]],
        "b": [[0.9, 0.1], [0.6, 0.4], [0.4, 0.6]],
        "c.v2": [[0.7, 0.3], [0.2, 0.8], [0.5, 0.5]],
    }


def test_a_truth_in_columns(tmp_path: Path) -> None:
    soft = {"id": A["id"], "pos": [0.1, 1.0, 0.5], "neg": [0.9, 0.0, 0.5]}
    one_hot = {"id": A["id"], "pos": [False, True, True], "neg": [True, False, False]}
    a, soft_truth, hot_truth = write(tmp_path, a=A, soft=soft, hot=one_hot)
    read = read_files([a], labels=soft_truth)
    assert read.truth is not None
    assert read.truth.tolist() == [[0.9, 0.1], [0.0, 1.0], [0.5, 0.5]]
    read = read_files([a], labels=hot_truth)
    assert read.truth is not None
    assert read.truth.dtype == np.int64
    assert read.truth.tolist() == [0, 1, 1]
    with pytest.raises(
        DataError, match=r"no label column 'winner'.*leave --label-column out to take the labels'"
    ):
        read_files([a], labels=hot_truth, label_column="winner")


def test_labels_that_are_not_exclusive_and_regression(tmp_path: Path) -> None:
    several = {"id": ["1", "2"], "rude": [0.9, 0.2], "loud": [0.8, 0.1]}
    number = {"id": ["1", "2"], "score": [3.5, -1.0]}
    chance = {"id": ["1", "2"], "target": [0.5, 1.0]}
    truth = {"id": ["2", "1"], "rude": [0, 1], "loud": [1, 1], "score": [-2.0, 4.0], "label": [0, 1]}
    paths = write(tmp_path, several=several, number=number, chance=chance, truth=truth)
    read = read_files(paths[:1], labels=paths[3], activation="sigmoid")
    assert (read.activation, read.truth is not None and read.truth.tolist()) == ("sigmoid", [[1, 1], [0, 1]])
    read = read_files(paths[1:2], labels=paths[3], label_column="score")
    assert (read.activation, read.truth is not None and read.truth.tolist()) == ("none", [[4.0], [-2.0]])
    read = read_files(paths[2:3], labels=paths[3])
    assert (read.activation, read.truth is not None and read.truth.tolist()) == ("sigmoid", [[1.0], [0.0]])


def test_files_as_people_have_them(tmp_path: Path) -> None:
    """Compressed, tab-separated, with another name for the ids; the truth stands beside the predictions."""
    (tmp_path / "a.csv.gz").write_bytes(
        gzip.compress(pd.DataFrame(A | {"label": ["neg"] * 3}).to_csv(index=False).encode())
    )
    pd.DataFrame(B).rename(columns={"id": "key"})[["key", "pos", "neg"]].to_csv(
        tmp_path / "b.tsv", index=False, sep="\t"
    )
    read = read_files([tmp_path / "a.csv.gz", tmp_path / "b.tsv"], labels=tmp_path / "a.csv.gz")
    assert list(read.members) == ["a", "b"]
    assert read.members["b"][:, 0].tolist() == [0.9, 0.6, 0.4]
    assert read.truth is not None
    assert read.truth.tolist() == [0, 0, 0]


def test_members_with_some_of_the_rows(tmp_path: Path) -> None:
    some = {name: cells[:1] for name, cells in A.items()}
    a, b = write(tmp_path, a=A, b=some)
    values = read_files([a, b], may_lack_rows=True).members["b"]
    assert values[0].tolist() == [0.7, 0.3]
    assert np.isnan(values[1:]).all()
    assert problems([a, b]) == [
        f"b.csv: 2 ids of {a} missing ('1e5', ' x'); give the same rows in each file".replace(
            f"{tmp_path}/", ""
        )
    ]
    # Whichever comes first.
    (messages,) = problems([b, a])
    assert messages.startswith("a.csv: 2 ids not in ")
    assert messages.endswith("b.csv ('1e5', ' x'); give the same rows in each file")
    read = read_files([b, a], may_lack_rows=True)
    assert read.ids.to_pylist() == A["id"]
    assert np.flatnonzero(np.isnan(read.members["b"][:, 0])).tolist() == [1, 2]
    assert read.members["a"].tolist() == [[0.7, 0.3], [0.2, 0.8], [0.5, 0.5]]


def test_rows_of_nan_are_those_of_members_that_may_lack_rows(tmp_path: Path) -> None:
    hollow = {"id": A["id"], "neg": [0.7, np.nan, 0.5], "pos": [0.3, np.nan, 0.5]}
    (tmp_path / "b.csv").write_text(pd.DataFrame(hollow).to_csv(index=False, na_rep="nan"))
    (a,), b = write(tmp_path, a=A), tmp_path / "b.csv"
    (messages,) = problems([a, b])
    assert re.match(r"b\.csv: 1 row .* finite .* 1e5", messages)
    assert np.isnan(read_files([a, b], may_lack_rows=True).members["b"][1]).all()


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet"])
def test_a_row_of_empty_cells_is_one_that_a_member_lacks(tmp_path: Path, ending: str) -> None:
    hollow = pd.DataFrame({"id": A["id"], "neg": [0.7, np.nan, 0.5], "pos": [0.3, np.nan, 0.5]})
    (a,), b = write(tmp_path, a=A), tmp_path / f"b.{ending}"
    if ending == "parquet":
        hollow.to_parquet(b)
    elif ending == "jsonl":
        hollow.to_json(b, orient="records", lines=True)
    else:
        hollow.to_csv(b, index=False, sep="\t" if ending == "tsv" else ",")
    (message,) = problems([a, b])
    assert message.startswith(f"b.{ending}: row 2: ")
    members = read_files([a, b], may_lack_rows=True).members
    np.testing.assert_array_equal(members["b"], [[0.7, 0.3], [np.nan, np.nan], [0.5, 0.5]])
    # A row that is empty in part is a mistake.
    (tmp_path / "c.csv").write_text("id,neg,pos\n007,0.7,0.3\n1e5,,1\n x,0.5,0.5\n")
    with pytest.raises(DataError, match=r"c\.csv: row 2: nothing in column"):
        read_files([a, tmp_path / "c.csv"], may_lack_rows=True)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({**A, "id": ["007", "1e5", "y"]}, r"1 id of a\.csv missing \(' x'\)"),
        ({**A, "id": ["u", "v", "w"]}, r"3 ids of a\.csv missing .* others \('u', 'v', 'w'\)"),
        ({**A, "id": ["007", "007", " x"]}, r"1 id more .*'007'"),
        (
            {"id": A["id"], "neg": A["neg"], "tie": A["pos"]},
            r"has other label columns .* 'pos', only b\.csv has 'tie'",
        ),
        ({**A, "neg": [0.7, 0.3, 0.5]}, r"1 row .* sum to 1, .* 1e5"),
        ({**A, "neg": [0.7, "", 0.5]}, "row 2: nothing in column 'neg' is no number"),
        ({"id": [], "neg": [], "pos": []}, "has no rows below its header"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, other: dict[str, list[Any]], message: str) -> None:
    messages = problems(write(tmp_path, a=A, b=other))
    assert len(messages) <= 2
    assert re.match(rf"b\.csv: {message}", messages[0])


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        (
            {"id": A["id"], "label": ["neg", "tie", "pos"]},
            "row 2 (id '1e5'): 'tie'",
        ),
        ({"id": A["id"][:2], "label": ["neg", "pos"]}, "1 id of the predictions missing (' x')"),
        ({"id": A["id"], "lable": ["neg", "pos", "pos"]}, "no label column 'label' (did you mean 'lable'?)"),
        (
            {"id": A["id"], "neg": [1, 0, 1], "pos": [1, 0, 0]},
            "2 rows whose values",
        ),
        ({"id": ["007"] * 3, "label": ["neg"] * 3}, "more than once"),
    ],
)
def test_a_truth_that_does_not_fit(tmp_path: Path, truth: dict[str, list[Any]], message: str) -> None:
    a, labels = write(tmp_path, a=A, truth=truth)
    (messages,) = problems([a], labels=labels)
    assert messages.startswith("truth.csv: ")
    assert message in messages


def test_columns_that_are_no_labels_by_name_and_value_are_left_out_and_named(tmp_path: Path) -> None:
    (a,) = write(tmp_path, a={**A, "fold": [0, 3, 1], "target": [0, 1, 1]})
    read = read_files([a])
    assert read.labels == ("neg", "pos")
    assert read.members["a"].tolist() == [[0.7, 0.3], [0.2, 0.8], [0.5, 0.5]]
    assert read.remarks == ("columns left out, as no labels: 'fold', 'target'; --label takes any column",)
    chosen = read_files([a], columns=["pos", "neg", "pos"])  # twice is once
    assert (chosen.labels, chosen.remarks) == (("pos", "neg"), ())
    assert chosen.members["a"].tolist() == [[*row] for row in zip(A["pos"], A["neg"], strict=True)]
    write(tmp_path, a={**A, "fold": [0, 0, 0]})  # the first fold alone, whose rows sum to 1 all the same
    assert read_files([a]).labels == ("neg", "pos")
    write(tmp_path, a={**A, "row": [0, 1, 0]})
    (refused,) = problems([a])
    cells = "do not sum to 1, the first is id 1e5 ('neg' is 0.2, 'pos' is 0.8, 'row' is 1); "
    assert f"{cells}correct the file, or name the columns of the labels with --label" in refused
    # Labels, by their values: whole numbers that rows need for their sum, or shares.
    write(tmp_path, a={"id": A["id"], "neg": [1, 0, 0], "target": [0, 1, 1]})
    assert read_files([a]).labels == ("neg", "target")
    write(tmp_path, a={"id": A["id"], "toxic": [1, 0, 0], "target": [1, 0.5, 1]})
    assert read_files([a], activation="sigmoid").labels == ("toxic", "target")


def test_two_files_of_one_name(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, oof=A)
    item, two = tmp_path / "one/oof.csv", tmp_path / "two/oof.csv"
    with pytest.raises(ConfigError, match=r"two/oof\.csv: has the same .*one/oof\.csv; name it yourself"):
        read_files([item, two])
    assert list(read_files([item, f"again={two}"]).members) == ["oof", "again"]


@pytest.mark.parametrize("name", ["a.v2.csv", "a.v2.CSV", "a.v2.Tsv", "a.v2.csv.gz", "a.v2.CSV.GZ"])
def test_a_member_is_named_as_its_file_without_the_ending(name: str) -> None:
    assert named_files([f"oof/{name}"]) == {"a.v2": Path(f"oof/{name}")}


def test_the_column_of_the_ids_is_not_that_of_the_labels(tmp_path: Path) -> None:
    named = {"label": ["neg", "neg", "pos"], "key": A["id"]}
    fold = {"fold": ["1", "1", "2"], "key": A["id"], "label": named["label"]}
    a, truth, folds = write(tmp_path, a=A, truth=named, folds=fold)
    read = read_files([a], labels=truth)
    assert read.truth is not None
    assert read.truth.tolist() == [0, 0, 1]
    (message,) = problems([a], labels=folds)
    assert "more than once" in message
    assert message.endswith("(its ids are those of column 'fold'; --id-column names another)")
    beside = {"label": named["label"], "key": A["id"], "neg": A["neg"], "pos": A["pos"]}
    twice = {"fold": ["1", "1", "2"], "neg": A["neg"], "pos": A["pos"]}
    both, wrong = write(tmp_path, both=beside, wrong=twice)
    assert read_files([both]).ids.to_pylist() == A["id"]
    (message,) = problems([wrong])
    assert message.endswith("(in column 'fold'; --id-column names another)")


@pytest.mark.usefixtures("warm")
def test_a_run_as_it_stands(project: Project) -> None:
    project.write_table(40)
    project.write_config(project.config())
    assert project.ensemble("run", "config.yaml", "--set", "limit=30").returncode == 0
    run_dir = project.folder / "runs/first"
    read = read_run(run_dir)
    assert read.remarks == ()
    assert read.ids.to_pylist() == project.ids[:30]
    assert read.labels == tuple(LABELS)
    assert read.truth is not None
    assert [LABELS[number] for number in read.truth] == project.truth[:30]
    assert list(read.members) == ["gemma", "llama"]
    assert read.ensemble is not None
    np.testing.assert_allclose(read.ensemble, 0.6 * read.members["gemma"] + 0.4 * read.members["llama"])
    assert run_settings(RunReport.read(run_dir / "run.json"))["limit"] == 30

    # A member of which only some rows are there, one that is not there, and a table that has gone.
    path = run_dir / "predictions/llama.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], *lines[5:7]]))
    path.with_suffix(".json").unlink()  # else it is known to be another file
    (run_dir / "predictions/gemma.csv").unlink()
    with pytest.raises(DataError, match=r"llama\.csv: has 2 rows, and run\.json says 30; remove the file"):
        read_run(run_dir)
    document = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps(document | {"merged_rows": {"llama": 2}}))
    (project.folder / "test.csv").unlink()
    moved = project.folder / "elsewhere"
    shutil.move(run_dir, moved)
    read = read_run(moved)
    assert list(read.members) == ["llama"]
    assert np.flatnonzero(~np.isnan(read.members["llama"][:, 0])).tolist() == [4, 5]
    assert read.activations == {"llama": "softmax"}
    assert read.truth is None
    left_out, no_truth = read.remarks
    assert "no complete predictions of gemma" in left_out
    assert no_truth.startswith("no truth: ")
    assert "test.csv, is not there any more" in no_truth
    assert read_run(moved, with_truth=False).remarks == (left_out,)
    document = json.loads((moved / "run.json").read_text())
    (moved / "run.json").write_text(json.dumps(document | {"members": []}))
    with pytest.raises(DataError, match="no member's predictions are complete"):
        read_run(moved)


@pytest.mark.long
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("activation", ["sigmoid", "none"])
def test_what_the_values_of_a_run_are_is_what_its_config_said(activation: str, project: Project) -> None:
    """Two sigmoid labels may sum to 1, and numbers of a regression lie between 0 and 1."""
    columns = {"rude": [0.9, 0.2], "kind": [0.1, 0.8] if activation == "sigmoid" else [0.2, 0.3]}
    pd.DataFrame({"id": ["1", "2"], **columns}).to_csv(project.folder / "a.csv", index=False)
    member = {"name": "a", "task_type": "csv", "path": "a.csv", "activation": activation}
    config = {"data": {"path": "a.csv"}, "labels": [*columns], "models": [member], "output_dir": "run"}
    project.write_config(config)
    assert project.ensemble("run", "config.yaml", "-q").returncode == 0
    assert read_run(project.folder / "run").activations == {"a": activation}


@pytest.mark.long
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(("cell", "message"), [("inf", "no finite number"), ("1.5", "values below 0.*")])
def test_a_file_of_a_run_that_was_changed(cell: str, message: str, project: Project) -> None:
    pd.DataFrame(A).to_csv(project.folder / "a.csv", index=False)
    config = {"data": {"path": "a.csv"}, "labels": ["neg", "pos"], "output_dir": "run"}
    project.write_config(config | {"models": [{"name": "a", "task_type": "csv", "path": "a.csv"}]})
    assert project.ensemble("run", "config.yaml", "-q").returncode == 0
    path = project.folder / "run/predictions/a.csv"
    path.write_text(path.read_text().replace("0.7", cell))
    with pytest.raises(DataError, match=r"predictions/a\.csv: is not the file"):
        read_run(project.folder / "run")
    path.with_suffix(".json").unlink()  # nothing says what the run wrote
    first = rf"the first is id 007 \('neg' is {cell}\); remove"
    with pytest.raises(DataError, match=rf"predictions/a\.csv: 1 row with {message}, {first}"):
        read_run(project.folder / "run")
