"""Whatever JSON lines and Parquet hold: what json and pyarrow find in it, or sentences that say what to fix."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import example, given, reject
from hypothesis import strategies as st
from pyarrow import parquet

from ensemble.data.table import InputTable, read_table
from tests.properties import cells
from tests.properties.reading import from_json, given_to_workers, needs, outcome
from tests.sampling import tries


def by_json(content: bytes) -> list[dict[str, Any]] | None:
    """The object in each line, or None for what is to be refused."""
    lines = [line.strip() for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n")]
    try:
        results = [from_json(line, is_line=True) for line in lines if line]
    except (ValueError, RecursionError):
        return None
    return results if results and all(isinstance(item, dict) for item in results) else None


def without_halves(value: object) -> object:
    """Half of a pair has no UTF-8, and no tokenizer takes it."""
    return re.sub("[\ud800-\udfff]", "\ufffd", value) if isinstance(value, str) else value


def column_as_json_has_it(objects: Sequence[dict[str, Any]], name: str) -> list[object]:
    return [without_halves(item.get(name)) for item in objects]


@tries(250)
@given(content=cells.json_like)
@example(content=b'{"id": ' + b"9" * 5000 + b', "text": "a"}')
@example(content=b'{"id": "\\ud800", "text": "a"}')
def test_any_bytes_as_json_lines(folder: Path, content: bytes) -> None:
    table = outcome(folder / "x.jsonl", content, lambda path: read_table(path, needs("text")))
    objects = by_json(content)
    if isinstance(table, InputTable):
        assert objects is not None
        results = [row["text"] for row in given_to_workers(table, folder)]
        assert repr(results) == repr(column_as_json_has_it(objects, "text"))
    elif objects is not None:
        row_ids = [item.get("id") for item in objects]
        spelled = {row_id if isinstance(row_id, str) else json.dumps(row_id) for row_id in row_ids}
        are_ids = all(map(can_be_an_id, row_ids)) and len(spelled) == len(row_ids)
        assert not are_ids or not any("text" in item for item in objects), table


def can_be_an_id(value: object) -> bool:
    return value not in (None, "") and not isinstance(value, list | dict)


@tries(100)
@given(data=st.data())
def test_json_lines_keep_values_and_the_spelling_of_ids(folder: Path, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    row_ids = data.draw(
        st.lists(
            cells.ids | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
            min_size=count,
            max_size=count,
        )
    )
    columns = data.draw(st.lists(cells.names, max_size=3, unique=True))
    objects = [
        {"id": row_id, **{name: data.draw(cells.json_values) for name in columns}} for row_id in row_ids
    ]
    content = data.draw(cells.as_jsonl(objects))
    table = outcome(folder / "x.jsonl", content, lambda path: read_table(path, needs(*columns)))
    spelled = [
        without_halves(row_id) if isinstance(row_id, str) else json.dumps(row_id) for row_id in row_ids
    ]
    if len(set(spelled)) < len(spelled):
        assert isinstance(table, tuple)
        return
    assert isinstance(table, InputTable), table
    assert table.ids.to_pylist() == spelled
    rows = given_to_workers(table, folder)
    assert len(table.digest(columns)) > 0
    for name in columns:
        assert repr([row[name] for row in rows]) == repr(column_as_json_has_it(objects, name))
        assert repr([row[name] for row in table.head(count)]) == repr([row[name] for row in rows])


ROW_IDS = ["001", "1e5", "nan"]
NESTED_VIEWS = pa.array([["a"], None, ["b"]], pa.list_(pa.string_view()))
CODED = pa.array(["a", "b", "a"]).dictionary_encode()


@tries(120)
@given(column=cells.arrow_columns(len(ROW_IDS)), name=cells.names, group_rows=st.sampled_from([1, 10]))
@example(column=pa.array([1_000, 1, None]).view(pa.timestamp("ns")), name="a", group_rows=1)
@example(column=pa.array([10**12, None, 0]).view(pa.timestamp("s")), name="a", group_rows=10)
@example(column=pa.array([1, 2, 3]).view(pa.timestamp("us", "Mars/Olympus")), name="a", group_rows=10)
@example(column=pa.array([b"a", None, b"\xff"], pa.binary_view()), name="a.b", group_rows=10)
@example(column=NESTED_VIEWS, name="a", group_rows=1)
@example(column=pa.StructArray.from_arrays([CODED], names=["k"]), name="a", group_rows=1)
@example(column=pa.StructArray.from_arrays([CODED, CODED], names=["k", "k"]), name="a", group_rows=1)
def test_any_type_that_parquet_has(folder: Path, column: pa.Array, name: str, group_rows: int) -> None:
    stream = io.BytesIO()
    try:
        parquet.write_table(pa.table({"id": ROW_IDS, name: column}), stream, row_group_size=group_rows)
    except pa.ArrowException:  # nobody gets such a column into a file
        reject()
    table = outcome(folder / "x.parquet", stream.getvalue(), lambda path: read_table(path, needs(name)))
    try:
        read = parquet.read_table(stream).select([name])
        read.validate(full=True)
        expected = read.to_pylist()
    except (ArithmeticError, LookupError, ValueError):  # no values that Python has, or no such zone
        assert isinstance(table, tuple), table
        return
    assert isinstance(table, InputTable), table
    assert table.ids.to_pylist() == ROW_IDS
    assert repr(given_to_workers(table, folder)) == repr(expected)
    assert repr(table.head(6)) == repr(expected)
    assert len(table.text_lengths([name])) == table.rows
    assert len(table.digest([name])) > 0
