"""Rows of a table's file in its own format, read back by pandas and the json module."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ensemble.common.errors import DataError
from ensemble.data.file_rows import FileRows, as_in
from ensemble.data.formats import copy_rows
from ensemble.data.input_file import JSON_MARK

AWKWARD = ["007", "1e5", "nan", " x", "", 'q"q', "a,b", "t\tt", "l\nl", "c\rc", "é", "\ufeffbom"]
TEXT, LISTS = pa.field("c", pa.string()), pa.field("c", pa.list_(pa.int64()))
JSON = TEXT.with_metadata(JSON_MARK)
ROWS = np.array([0, 3, 5, 6, 7, 8, 9, 10, 11])


def cells(path: Path, separator: str) -> list[list[str]]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", newline="", encoding="utf-8") as stream:
        return list(csv.reader(stream, delimiter=separator))


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.csv.gz", "t.tsv.gz"])
def test_cells_of_text_files_stay_as_they_are(tmp_path: Path, name: str) -> None:
    source, path = tmp_path / name, tmp_path / f"copy-{name}"
    separator = "\t" if ".tsv" in name else ","
    opened = gzip.open if name.endswith(".gz") else open
    with opened(source, "wt", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, delimiter=separator)
        writer.writerow(["id", "a,b", "t\tt"])
        writer.writerows([[f"i{number}", cell, cell] for number, cell in enumerate(AWKWARD)])
    before = cells(source, separator)
    copy_rows(source, FileRows(ROWS), path)
    assert cells(path, separator) == [before[0], *(before[1 + row] for row in ROWS)]
    content = path.read_bytes()
    copy_rows(source, FileRows(ROWS), path)
    assert path.read_bytes() == content  # a .gz file has no time in it

    others = pa.table({"t\tt": pa.array([1.5, None]), "id": ["x", "y"]})
    added = {"weight": np.array([1.0] * len(ROWS) + [0.25, 0.25])}
    copy_rows(source, FileRows(ROWS, [(Path("other"), others)], added), path)
    after = cells(path, separator)
    assert after[0] == [*before[0], "weight"]
    assert after[-2:] == [["x", "", "1.5", "0.25"], ["y", "", "", "0.25"]]
    assert [row[:3] for row in after[1:-2]] == [before[1 + row] for row in ROWS]


def test_parquet_keeps_types_and_pandas_index(tmp_path: Path) -> None:
    source, path = tmp_path / "t.parquet", tmp_path / "copy.parquet"
    table = pd.DataFrame(
        {
            "id": np.arange(8),
            "kind": pd.Categorical(list("aabbccaa")),
            "turns": [[{"role": "user", "n": n}] for n in range(8)],
            "when": pd.to_datetime(["2026-01-01"] * 8),
            "number": [0.5, None] * 4,
        },
        index=[f"i{number}" for number in range(8)],
    )
    table.to_parquet(source)
    copy_rows(source, FileRows(np.array([1, 2, 6])), path)
    pd.testing.assert_frame_equal(pd.read_parquet(path), table.iloc[[1, 2, 6]])
    assert pq.read_schema(path) == pq.read_schema(source)

    others = pa.table({"id": ["17", "18"], "kind": ["z", "a"], "number": ["2", ""]})
    added = {"weight": np.array([1, 1, 0.5, 0.5])}
    copy_rows(source, FileRows(np.array([0, 7]), [(Path("other.csv"), others)], added), path)
    copied = pd.read_parquet(path)
    assert copied["id"].tolist() == [0, 7, 17, 18]
    assert copied["kind"].tolist() == ["a", "a", "z", "a"]
    assert copied["number"].isna().tolist() == [False, True, False, True]
    assert copied["turns"].isna().tolist() == [False, False, True, True]
    assert copied["weight"].tolist() == [1, 1, 0.5, 0.5]
    wrong = pa.table({"id": ["x"]})
    with pytest.raises(DataError) as caught:
        copy_rows(source, FileRows(np.array([0]), [(Path("other.csv"), wrong)]), path)
    (text,) = caught.value.problems
    assert text.startswith("other.csv: column 'id' holds cells that are not of type int64")


@pytest.mark.parametrize("name", ["t.jsonl", "t.json.gz"])
def test_lines_of_json_stay_as_they_are(tmp_path: Path, name: str) -> None:
    source, path = tmp_path / name, tmp_path / f"copy-{name}"
    lines = [
        '{"id": "007", "n": 1.50, "deep": {"b": [1e5]}}',
        ' {"id":"é","n":3} ',
        '{"n": 2, "id": "\\u00e9x"}',
    ]
    opened = gzip.open if name.endswith(".gz") else open
    with opened(source, "wt", encoding="utf-8-sig") as stream:
        stream.write("\n\n".join(lines))
    copy_rows(source, FileRows(np.array([0, 1])), path)

    def read() -> list[str]:
        with opened(path, "rt", encoding="utf-8") as stream:
            return list(stream.read().splitlines())

    assert read() == [lines[0], lines[1].strip()]
    others = pa.table({"id": ["12", "x"], "n": ["4", "five"]})
    added = {"prob_é": np.array([0.5, 1, 0.25])}
    copy_rows(source, FileRows(np.array([2]), [(Path("other.csv"), others)], added), path)
    records = [json.loads(line) for line in read()]
    assert records == [
        {"n": 2, "id": "éx", "prob_é": 0.5},
        {"id": "12", "n": 4, "prob_é": 1.0},
        {"id": "x", "n": "five", "prob_é": 0.25},
    ]


@pytest.mark.parametrize(
    ("cells_before", "source", "target", "after"),
    [
        (['"a"', "[1]", None], JSON, TEXT, ["a", "[1]", None]),
        (["a", "[1]", "NaN"], TEXT, JSON, ['"a"', "[1]", '"NaN"']),
        (["[1, 2]", None], JSON, LISTS, [[1, 2], None]),
        ([[1], None], LISTS, TEXT, ["[1]", None]),
        ([1, 2], pa.field("c", pa.int8()), pa.field("c", pa.int64()), [1, 2]),
        (["x", ""], TEXT, pa.field("c", pa.large_string()), ["x", ""]),
    ],
)
def test_cells_take_the_type_of_another_file(
    cells_before: list[Any], source: pa.Field, target: pa.Field, after: list[Any]
) -> None:
    column = pa.chunked_array(
        [pa.array(cells_before[:1], source.type), pa.array(cells_before[1:], source.type)]
    )
    converted = as_in(Path("f"), column, source, target)
    assert converted.to_pylist() == after
    assert converted.type == target.type
