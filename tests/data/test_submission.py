"""The sample submission: compared with the table, then filled in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ensemble.common.errors import DataError
from ensemble.data.submission import Sample, read_sample

LABELS = ("a", "b")


def sample_of(tmp_path: Path, text: str, labels: Sequence[str] = LABELS, **columns_map: str) -> Sample:
    path = tmp_path / "sample submission.csv"
    path.write_text(text, newline="")
    return read_sample(path, "id", labels, columns_map)


def ids(*names: str) -> pa.ChunkedArray:
    return pa.chunked_array([names[:1], names[1:]], pa.string())


def test_a_sample_without_its_id_column(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no id column 'id' .*; the columns are 'ID', 'a'"):
        sample_of(tmp_path, "ID,a\n1,0\n")


def test_a_sample_that_fits(tmp_path: Path) -> None:
    sample = sample_of(tmp_path, "id,winner_a,b\n2,0,0\n1,0,0\n", winner_a="a")
    assert sample.problems(ids("1", "2"), False) == ()
    large = ids("1", "2").cast(pa.large_string())
    assert sample.problems(large, False) == ()


def test_labels_without_a_column_are_named_unless_one_of_two_is_asked_for(tmp_path: Path) -> None:
    sample = sample_of(tmp_path, "id,a,c\n1,0,0\n", ("a", "b", "c", "d"))
    assert sample.problems(ids("1"), False) == ()
    message = f"{sample.path}: has no column for 'b', 'd', whose probabilities are not submitted"
    assert sample.remarks == (message,)
    assert sample_of(tmp_path, "id,b\n1,0\n").remarks == ()
    assert sample_of(tmp_path, "id,x,y,z\n1,0,0,0\n", ("a", "b", "c"), x="a", y="b", z="c").remarks == ()


def test_every_problem_at_once(tmp_path: Path) -> None:
    text = "id,A,x,b\n1,,,\n1,,,\n" + "".join(f"s{i},,,\n" for i in range(9))
    sample = sample_of(tmp_path, text, x="c", winner="b")
    messages = sample.problems(ids("1", "t1", "t2"), False)
    assert all(sentence.startswith(f"{sample.path}: ") for sentence in messages)
    assert [sentence.removeprefix(f"{sample.path}: ") for sentence in messages] == [
        "column 'A' is not a label (did you mean 'a'?); map it to one of 'a', 'b', or for the label itself "
        "to {answer: label}, for 0 and 1 to {answer: {above: {'b': 0.5}}}",
        "column 'x' is mapped to 'c', which is not a label; map it to one of 'a', 'b', or for the label itself to "
        "{answer: label}, for 0 and 1 to {answer: {above: {'b': 0.5}}}",
        "has no column 'winner', though it is mapped to a label",
        "1 id more than once: '1'",
        "9 ids not in the input table: 's0', 's1', 's2', ...",
        "lacks 2 ids of the input table: 't1', 't2'; for a table that is not to be submitted, such as train.csv, "
        "write no submission: --set submission=null, or remove the key",
    ]


def test_a_sample_of_ids_alone(tmp_path: Path) -> None:
    (messages,) = sample_of(tmp_path, "id\n1\n").problems(ids("1"), False)
    assert "has no column besides 'id'" in messages


def test_a_trial_on_the_first_rows_may_lack_ids_and_not_have_others(tmp_path: Path) -> None:
    sample = sample_of(tmp_path, "id,a\n1,0\n2,0\n3,0\n")
    assert sample.problems(ids("3", "1"), True) == ()
    (messages,) = sample.problems(ids("3", "9"), True)
    assert "lacks 1 id of the input table: '9'" in messages


def test_one_column_of_two_labels(tmp_path: Path) -> None:
    sample = sample_of(tmp_path, "id,target\nx,0\ny,0\n", target="b")
    values = np.array([[0.75, 0.25], [0.5, 0.5]])
    sample.write(tmp_path / "out.csv", ids("y", "x"), values)
    assert (tmp_path / "out.csv").read_text() == "id,target\nx,0.5\ny,0.25\n"


def test_a_trial_writes_the_rows_it_has(tmp_path: Path) -> None:
    sample = sample_of(tmp_path, "id,a\n1,0\n2,0\n3,0\n")
    values = np.array([[0.25, 0.75], [1.0, 0.0]])
    predicted = ids("3", "1").cast(pa.large_string())
    sample.write(tmp_path / "out.csv", predicted, values)
    assert (tmp_path / "out.csv").read_text() == "id,a\n1,1\n3,0.25\n"


def values_of(tmp_path: Path, text: str, wanted: pa.ChunkedArray, **columns_map: str) -> list[list[float]]:
    sample = sample_of(tmp_path, text, **columns_map)
    assert sample.value_problems() == ()
    values = sample.values(wanted)
    assert values.dtype == np.float64
    return [[float(value) for value in row] for row in values]


def test_the_samples_own_values_in_the_tables_order(tmp_path: Path) -> None:
    text = 'b,id,winner\n0.25,010,0.75\n1e-3," x", .5 \n+1,nan,-0\n'
    assert values_of(tmp_path, text, ids("nan", "010"), winner="a") == [[0.0, 1.0], [0.75, 0.25]]
    large = ids(" x", "nan").cast(pa.large_string())
    assert values_of(tmp_path, text, large, winner="a") == [[0.5, 0.001], [0.0, 1.0]]


def test_labels_without_a_column_share_what_the_others_leave(tmp_path: Path) -> None:
    assert values_of(tmp_path, "id,target\nx,0.25\ny,7\n", ids("x", "y"), target="b") == [
        [0.75, 0.25],
        [0.0, 7.0],
    ]
    sample = sample_of(tmp_path, "id,b\nx,0.5\n", ("a", "b", "c"))
    assert sample.values(ids("x")).tolist() == [[0.25, 0.5, 0.25]]


def test_cells_of_the_sample_that_are_no_numbers(tmp_path: Path) -> None:
    text = "id,a,b\n1,0.5,0.5\n2,half,nan\n3,,inf\n4,1_0,1e999\n5,0x1,٣\n"
    sample = sample_of(tmp_path, text)
    path = sample.path
    advice = "fix the file, or choose fill: uniform or prior"
    expected = (
        f"{path}: column 'a': 4 cells without a finite number, the first in row 2: 'half'; {advice}",
        f"{path}: column 'b': 4 cells without a finite number, the first in row 2: 'nan'; {advice}",
    )
    assert sample.value_problems() == expected
    with pytest.raises(DataError) as caught:
        sample.values(ids("1"))
    assert caught.value.problems == expected
    assert sample_of(tmp_path, text, ("c",)).value_problems() == (), "only columns of labels count"


def test_a_sample_that_lost_an_id_since_it_was_checked(tmp_path: Path) -> None:
    sample = sample_of(tmp_path, "id,a,b\n1,0,1\n2,1,0\n")
    sample.path.write_text("id,a,b\n2,1,0\n3,1,0\n")
    with pytest.raises(DataError, match=r"1 id of .* '1'"):
        sample.values(ids("2", "1"))
    assert sample.values(ids("2")).tolist() == [[1.0, 0.0]]
