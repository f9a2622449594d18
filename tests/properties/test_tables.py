"""Whatever a table's cells hold, and in whatever format: its very cells, or sentences that say what to fix."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ensemble.data.file_rows import FileRows
from ensemble.data.formats import copy_rows
from ensemble.data.table import InputTable, read_table
from tests.properties import cells
from tests.properties.reading import as_parquet, files, given_to_workers, needs, outcome
from tests.sampling import tries


@tries(120)
@given(data=st.data())
def test_what_is_right_is_read_cell_for_cell(folder: Path, data: st.DataObject) -> None:
    header, rows = data.draw(cells.tables())
    name, content = data.draw(files(header, rows))
    asked = data.draw(st.permutations(header))
    table = outcome(folder / name, content, lambda path: read_table(path, needs(*asked)))
    assert isinstance(table, InputTable), table
    by_name = [dict(zip(header, row, strict=True)) for row in rows]
    assert table.ids.to_pylist() == [row["id"] for row in by_name]
    assert given_to_workers(table, folder) == by_name
    assert table.head(2) == by_name[:2]
    lengths = [sum(len(row[column].encode()) for column in asked) for row in by_name]
    assert table.text_lengths(asked).tolist() == lengths
    assert table.null_texts == {column: [row[column] for row in by_name].count("") for column in asked}


@tries(120)
@given(data=st.data())
def test_rows_that_are_copied_keep_every_cell(folder: Path, data: st.DataObject) -> None:
    header, rows = data.draw(cells.tables())
    name, content = data.draw(files(header, rows))
    (folder / name).write_bytes(content)
    numbers = sorted(data.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1)))
    others = [[f"other row {number}", data.draw(cells.text_cells)] for number in range(2)]
    table = pa.table(dict(zip(["id", "text"], zip(*others, strict=True), strict=True)))
    for following in ([], [(Path("other.csv"), table)]):
        copy_rows(folder / name, FileRows(np.array(numbers), following), folder / f"copy-{name}")
        copied = read_table(folder / f"copy-{name}", needs(*header))
        result = given_to_workers(copied, folder)
        assert result[: len(numbers)] == [dict(zip(header, rows[row], strict=True)) for row in numbers]
    assert [[row["id"], row["text"]] for row in result[len(numbers) :]] == others


@st.composite
def edits(draw: st.DrawFn) -> list[tuple[int, int, bytes]]:
    """Where, how much is taken away, what is put there; most of it near the end, where Parquet keeps its types."""
    place = st.integers(0, 400) | st.integers(-400, -1)
    return draw(st.lists(st.tuples(place, st.integers(0, 4), st.binary(max_size=4)), min_size=1, max_size=3))


@cache
def whole_files() -> dict[str, bytes]:
    rows = [[f"{index:03}", "some text" * index] for index in range(20)]
    text = "".join(f"{row[0]},{row[1]}\n" for row in rows).encode()
    lines = "".join(json.dumps({"id": row[0], "text": row[1]}) + "\n" for row in rows).encode()
    return {
        "x.csv.gz": gzip.compress(b"id,text\n" + text, mtime=0),
        "x.jsonl": lines,
        "x.jsonl.gz": gzip.compress(lines, mtime=0),
        "x.parquet": as_parquet(["id", "text"], rows),
    }


@tries(120)
@given(name=st.sampled_from(["x.csv.gz", "x.jsonl", "x.jsonl.gz", "x.parquet", "x.parquet"]), edits=edits())
@example(name="x.parquet", edits=[(-400, 400, b"")])
@example(name="x.parquet", edits=[(40, 3, b"\xff\xff\xff")])  # of which pyarrow speaks in two lines
def test_a_damaged_file(folder: Path, name: str, edits: list[tuple[int, int, bytes]]) -> None:
    content = whole_files()[name]
    for at, taken, put in edits:
        start = at % len(content)
        content = content[:start] + put + content[start + taken :] or b"P"
    table = outcome(folder / name, content, lambda path: read_table(path, needs("text")))
    if isinstance(table, InputTable):
        assert len(given_to_workers(table, folder)) == table.rows == len(table.ids)


def test_a_damaged_name_in_parquet(folder: Path) -> None:
    content = whole_files()["x.parquet"].replace(b"text", b"te\xffx")
    table = outcome(folder / "x.parquet", content, lambda path: read_table(path, needs("text")))
    assert isinstance(table, tuple)
    assert "read as Parquet" in table[0]


@pytest.mark.long
@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_cells_of_ten_megabytes(folder: Path, suffix: str) -> None:
    rows = [["x" * 10_000_000, '"\r\n' * 2_500_000], ["001", ""]]
    content = {
        ".csv": lambda: 'id,text\n{},"{}"\n001,\n'.format(rows[0][0], rows[0][1].replace('"', '""')).encode(),
        ".jsonl": lambda: "\n".join(json.dumps({"id": row[0], "text": row[1]}) for row in rows).encode(),
        ".parquet": lambda: as_parquet(["id", "text"], rows),
    }[suffix]()
    table = outcome(folder / f"x{suffix}", content, lambda path: read_table(path, needs("text")))
    assert isinstance(table, InputTable), table
    assert table.ids.to_pylist() == [rows[0][0], "001"]
    assert given_to_workers(table, folder) == [{"text": rows[0][1]}, {"text": ""}]
    twice = outcome(
        folder / f"x{suffix}",
        content.replace(b"001", rows[0][0].encode()),
        lambda path: read_table(path, needs("text")),
    )
    assert isinstance(twice, tuple) or suffix == ".parquet"
