"""Digests of rows: the same for the same cells however they are stored, another for any other cells."""

from __future__ import annotations

import datetime
import decimal
import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from ensemble.data.digests import row_digests, truth_sha256, with_another
from ensemble.data.input_file import JSON_MARK
from ensemble.data.table import InputTable, read_table
from tests.data.test_table import needs, write_rows

DAY = datetime.date(2024, 2, 29)
# No two of them are the same to a member that reads them.
COLUMNS: dict[str, pa.Array] = {
    "text": pa.array(["ab", "c", "é"]),
    "other boundaries": pa.array(["a", "bc", "é"]),
    "other order": pa.array(["c", "ab", "é"]),
    "fewer": pa.array(["ab", "c"]),
    "a null": pa.array(["ab", None, "é"]),
    "an empty text": pa.array(["ab", "", "é"]),
    "a null elsewhere": pa.array([None, "ab", "é"]),
    "empty": pa.array(["", "", ""]),
    "nulls": pa.array([None, None, None], pa.string()),
    "digits": pa.array(["1", "2", "3"]),
    "numbers": pa.array([1, 2, 3]),
    "numbers with a null": pa.array([1, None, 3]),
    "numbers with a zero": pa.array([1, 0, 3]),
    "floats": pa.array([1.0, 2.0, 3.0]),
    "not a number": pa.array([1.0, float("nan"), 3.0]),
    "booleans": pa.array([True, False, True, True, False, True, False, False, True, True]),
    "other booleans": pa.array([True, False, True, True, False, True, False, False, True, False]),
    "dates": pa.array([DAY, DAY, None]),
    "times": pa.array([datetime.datetime(2024, 1, 1), None], pa.timestamp("us", "UTC")),
    "bytes": pa.array([b"ab", b"c", b"\xff"]),
    "few bytes": pa.array([b"ab", b"cd"], pa.binary(2)),
    "decimals": pa.array([decimal.Decimal("1.5"), None], pa.decimal128(5, 2)),
    "lists": pa.array([["a", "b"], [], ["c"]]),
    "lists cut elsewhere": pa.array([["a"], ["b"], ["c"]]),
    "a null list": pa.array([["a", "b"], None, ["c"]]),
    "a null in a list": pa.array([["a", None], [], ["c"]]),
    "lists of lists": pa.array([[["a"], []], [], [["b", "c"]]]),
    "other lists of lists": pa.array([[["a"]], [], [["b"], ["c"]]]),
    "structs": pa.array([{"x": 1, "y": "a"}, {"x": None, "y": ""}]),
    "a null struct": pa.array([{"x": 1, "y": "a"}, None]),
    "a null struct elsewhere": pa.array([None, {"x": 1, "y": "a"}]),
    "a struct of nulls": pa.array([{"x": 1, "y": "a"}, {"x": None, "y": None}]),
    "other names": pa.array([{"z": 1, "y": "a"}, {"z": None, "y": ""}]),
    "structs in lists": pa.array([[{"x": 1}], [{"x": 2}, None]]),
    "maps": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
    "other maps": pa.array([[("a", 2)], []], pa.map_(pa.string(), pa.int64())),
}


def digest(*chunks: pa.Array, json: bool = False) -> str:
    kind = chunks[0].type
    field = pa.field("column", kind, metadata=JSON_MARK if json else None)
    table = pa.table([pa.chunked_array(chunks, kind)], schema=pa.schema([field]))
    return row_digests(table, ["column"]).tobytes().hex()


def layouts(array: pa.Array) -> Iterator[list[pa.Array]]:
    """The same cells in other chunks and buffers."""
    for cut in range(len(array) + 1):
        yield [array.slice(0, cut), array.slice(cut)]
    yield [array.slice(row, 1) for row in range(len(array))]
    yield [array, array.slice(0, 0)]
    around = pa.concat_arrays([array, array, array])  # buffers that begin and end with other cells
    yield [around.slice(len(array), len(array))]
    yield [array.take(pa.array(range(len(array))))]


@pytest.mark.parametrize("name", COLUMNS)
def test_the_layout_does_not_matter(name: str) -> None:
    array = COLUMNS[name]
    for chunks in layouts(array):
        assert pa.chunked_array(chunks, array.type).to_pylist().__repr__() == array.to_pylist().__repr__()
        assert digest(*chunks) == digest(array)


def test_every_other_content_has_another_digest() -> None:
    digests = {name: digest(array) for name, array in COLUMNS.items()}
    for combination, other in itertools.combinations(digests, 2):
        assert digests[combination] != digests[other], (combination, other)


def test_what_lies_below_a_null_does_not_matter() -> None:
    text, numbers = pa.array(["ab", "xx", "c"]), pa.array([1, 7, 3])
    valid = pa.array([True, False, True]).buffers()[1]
    hidden_text = pa.Array.from_buffers(pa.string(), 3, [valid, *text.buffers()[1:]], null_count=1)
    hidden_number = pa.Array.from_buffers(pa.int64(), 3, [valid, numbers.buffers()[1]], null_count=1)
    assert digest(hidden_text) == digest(pa.array(["ab", None, "c"]))
    assert digest(hidden_number) == digest(pa.array([1, None, 3]))


def test_large_strings_are_strings_and_json_text_is_not() -> None:
    text = pa.array(["5", None, ""])
    assert digest(text.cast(pa.large_string())) == digest(text)
    assert digest(text, json=True) != digest(text)


def test_more_rows_than_are_hashed_at_a_time() -> None:
    cells = [None if row % 7 == 3 else "x" * (row % 5) for row in range(200_000)]
    array = pa.array(cells)
    assert digest(array) == digest(array.slice(0, 70_000), array.slice(70_000))
    cells[199_999] = "y"
    assert digest(pa.array(cells)) != digest(array)


def read(path: Path, *columns: str) -> InputTable:
    return read_table(path, needs(columns=columns))


ROWS: list[dict[str, Any]] = [
    {"id": f"{row:03d}", "text": f"text {row}", "more": f"{row}", "unread": f"{row}"} for row in range(40)
]


def test_files_of_every_format_give_the_same_digest(tmp_path: Path) -> None:
    digests = {
        read(write_rows(tmp_path / f"t{suffix}", ROWS), "text", "more").digest(["text", "more"])
        for suffix in (".csv", ".jsonl", ".parquet")
    }
    assert len(digests) == 1


@pytest.mark.parametrize(("column", "counts"), [("id", True), ("text", True), ("unread", False)])
def test_ids_and_the_columns_that_are_read_count(tmp_path: Path, column: str, counts: bool) -> None:
    before = read(write_rows(tmp_path / "t.csv", ROWS), "text").digest(["text"])
    changed = [*ROWS[:-1], {**ROWS[-1], column: "changed"}]
    after = read(write_rows(tmp_path / "t.csv", changed), "text").digest(["text"])
    assert (before != after) is counts


def test_order_of_rows_and_of_columns_counts(tmp_path: Path) -> None:
    table = read(write_rows(tmp_path / "t.csv", ROWS), "text", "more")
    turned = read(write_rows(tmp_path / "turned.csv", ROWS[::-1]), "text", "more")
    results = [table.digest(["text", "more"]), table.digest(["more", "text"]), table.digest(["text"])]
    results += [table.digest([]), turned.digest(["text", "more"])]
    assert len(set(results)) == len(results)


def test_a_digest_outlives_the_columns_and_no_other_can_be_had(tmp_path: Path) -> None:
    table = read(write_rows(tmp_path / "t.csv", ROWS), "text", "more")
    before = table.digest(["text"])
    table.forget_columns()
    assert table.digest(["text"]) == before
    with pytest.raises(AssertionError):
        table.digest(["text", "more"])


def test_the_sha256_of_labelled_rows_is_that_of_plain_lines() -> None:
    """By any order of the rows and of the labels, and whether the truth is a label or a column for each."""
    message = hashlib.sha256("10\tneg\n9\tpos\né\tneg\n".encode()).hexdigest()
    ids = pa.chunked_array([["9", "é"], ["10"]])
    assert truth_sha256(ids, ("neg", "pos"), np.array([1, 0, 0])) == message
    assert truth_sha256(ids.take([2, 0, 1]), ("pos", "neg"), np.array([1, 0, 1])) == message
    assert truth_sha256(ids, ("neg", "pos"), np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])) == message
    assert truth_sha256(ids, ("neg", "pos"), np.array([1, 1, 0])) != message
    soft = hashlib.sha256(b"a\tneg=0.25\tpos=0.75\nb\tneg\tpos\nc\t\n").hexdigest()
    truth = np.array([[0.75, 0.25], [1.0, 1.0], [0.0, 0.0]])
    assert truth_sha256(pa.chunked_array([["a", "b", "c"]]), ("pos", "neg"), truth) == soft


def test_rows_with_another_value_elsewhere() -> None:
    rng = np.random.default_rng(0)
    digests = rng.integers(0, 4, (200, 2)).astype(np.uint64) + np.uint64(2**63)
    values = rng.integers(0, 2, 200)
    texts = ["-".join(map(str, row)) for row in digests.tolist()]
    expected = pd.Series(values).groupby(texts).transform("nunique") > 1
    assert with_another(digests, values).tolist() == expected.tolist()
    assert with_another(digests[:0], values[:0]).tolist() == []
    assert with_another(digests[:1], values[:1]).tolist() == [False]
