"""The worker's view of a published table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ensemble.data.json_cells import python_rows
from ensemble.data.published_table import PublishedTable
from ensemble.data.table import TableNeeds, read_table


def publish(source: Path, target: Path, *columns: str) -> Path:
    read_table(source, TableNeeds("id", None, (), columns, (), (), None)).publish(target)
    return target


def test_takes_any_rows_in_any_order_over_many_batches(tmp_path: Path) -> None:
    rows = 100_000
    texts = [None if i % 7 == 0 else f"é {i}" for i in range(rows)]
    table = pa.table({"id": np.arange(rows), "text": texts, "turns": [[str(i), None] for i in range(rows)]})
    pq.write_table(table, tmp_path / "x.parquet")
    view = PublishedTable(publish(tmp_path / "x.parquet", tmp_path / "a b'.arrow", "text", "turns"))
    assert view.rows == rows
    assert view.columns == ("text", "turns")
    rng = np.random.default_rng(0)
    for indices in (
        rng.integers(0, rows, 1_000),
        np.arange(rows)[::-1][:40_000],
        np.array([5, 5, 0, rows - 1]),
    ):
        expected = [{"text": texts[i], "turns": [str(i), None]} for i in indices.tolist()]
        assert view.take(indices) == expected
    assert view.take(np.array([], dtype=np.int64)) == []
    assert view.take(np.array([3], dtype=np.int32)) == [{"text": "é 3", "turns": ["3", None]}]


def test_ids_stand_beside_the_columns_where_they_are_asked_for(tmp_path: Path) -> None:
    rows = 70_000
    cells = pa.array([None, *range(1, rows)], pa.int64())
    pq.write_table(pa.table({"key": [f"é{i}" for i in range(rows)], "id": cells}), tmp_path / "x.parquet")
    table = read_table(tmp_path / "x.parquet", TableNeeds("key", None, (), ("id",), (), (), None))
    table.publish(tmp_path / "t.arrow", with_ids=True)
    view = PublishedTable(tmp_path / "t.arrow")
    assert (view.columns, view.rows, view.has_nulls) == (("id",), rows, {"id": True})
    numbers = np.array([66_000, 0, 1, 66_000])
    assert view.ids(numbers) == ["é66000", "é0", "é1", "é66000"]
    assert view.take(numbers) == [{"id": 66_000}, {"id": None}, {"id": 1}, {"id": 66_000}]
    with pytest.raises(IndexError):
        view.ids(np.array([rows]))


def test_json_values_come_back_as_they_were(tmp_path: Path) -> None:
    values: list[Any] = ["text", 1, 2.5, True, None, ["a", None], {"k": ["é", "\ud83d"]}, "", "[1"]
    source = tmp_path / "x.jsonl"
    source.write_text("".join(json.dumps({"id": i, "v": v, "s": "5"}) + "\n" for i, v in enumerate(values)))
    view = PublishedTable(publish(source, tmp_path / "t.arrow", "v", "s"))
    taken = view.take(np.arange(len(values))[::-1])
    assert taken == [{"v": value, "s": "5"} for value in values[::-1]]
    assert [type(row["v"]) for row in taken] == [type(value) for value in values[::-1]]
    first, second = view.take(np.array([5, 5]))
    assert first["v"] is not second["v"]


def test_json_columns_are_found_by_their_mark() -> None:
    marked = pa.field("a", pa.string(), metadata={b"ensemble": b"json"})
    cells, schema = [["[1]", None]] * 2, pa.schema([marked, pa.field("b", pa.string())])
    rows = python_rows(pa.record_batch(cells, schema))
    assert rows == [{"a": [1], "b": "[1]"}, {"a": None, "b": None}]


def test_a_table_without_columns(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("id,t\n1,a\n2,b\n")
    view = PublishedTable(publish(tmp_path / "x.csv", tmp_path / "t.arrow"))
    assert view.rows == 2
    assert view.take(np.array([1, 0])) == [{}, {}]


@pytest.mark.parametrize("indices", [[-1], [0, 2], [10**12]])
def test_rows_outside_of_the_table(tmp_path: Path, indices: list[int]) -> None:
    (tmp_path / "x.csv").write_text("id,t\n1,a\n2,b\n")
    view = PublishedTable(publish(tmp_path / "x.csv", tmp_path / "t.arrow", "t"))
    with pytest.raises(IndexError, match="of a table of 2 rows"):
        view.take(np.array(indices))


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nothing"):
        PublishedTable(tmp_path / "nothing.arrow")
    (tmp_path / "text.arrow").write_text("id,t\n1,a\n")
    with pytest.raises(pa.ArrowInvalid):
        PublishedTable(tmp_path / "text.arrow")


def test_taking_a_few_rows_copies_only_those(tmp_path: Path) -> None:
    batch = pa.record_batch({"t": ["x" * 1_000] * 20_000})
    batch = batch.replace_schema_metadata({"ensemble.rows": "60000"})
    path = tmp_path / "big.arrow"
    with pa.ipc.new_file(path, batch.schema) as writer:
        for _ in range(3):
            writer.write_batch(batch)
    assert path.stat().st_size > 60_000_000
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    try:
        taken = PublishedTable(path).take(np.arange(0, 60_000, 600))
    finally:
        pa.set_memory_pool(before)
    assert taken == [{"t": "x" * 1_000}] * 100
    assert pool.max_memory() < 1_000_000
