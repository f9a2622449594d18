"""The input table: real files in every format, compared with what pandas and the json module read."""

from __future__ import annotations

import csv
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ensemble.common.errors import DataError
from ensemble.data.table import InputTable, TableNeeds, read_table

ODD_IDS = ["001", "1e5", "nan", " x", "NULL", "TRUE", 'q"q', "a,b", "l\nl", "é"]


def needs(**changes: Any) -> TableNeeds:
    values: dict[str, Any] = {
        "id_column": "id",
        "label_column": None,
        "labels": ("a", "b"),
        "columns": ("text",),
        "json_columns": (),
        "text_columns": (),
        "limit": None,
    }
    return TableNeeds(**(values | changes))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """The same rows as CSV, JSON lines or Parquet, by the extension."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return path


def problems(path: Path, asked: TableNeeds | None = None) -> tuple[str, ...]:
    with pytest.raises(DataError) as caught:
        read_table(path, asked or needs())
    assert caught.value.exit_code == 2
    assert all(sentence.startswith(f"{path}: ") for sentence in caught.value.problems)
    return caught.value.problems


def published(table: InputTable, path: Path) -> pa.Table:
    table.publish(path)
    with pa.ipc.open_file(path) as reader:
        return reader.read_all()


FORMATS = pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])


@FORMATS
def test_reads_the_same_from_every_format(tmp_path: Path, suffix: str) -> None:
    rows = [
        {"id": name, "text": f"text {i}\n\U0001f600", "unused": "x", "label": "ab"[i % 2]}
        for i, name in enumerate(ODD_IDS)
    ]
    path = write_rows(tmp_path / f"a table{suffix}", rows)
    table = read_table(path, needs(label_column="label", text_columns=("text",)))
    assert table.rows == 10
    assert table.ids.to_pylist() == ODD_IDS
    assert table.truth is not None
    assert table.truth.tolist() == [0, 1] * 5
    assert table.truth.dtype == np.int64
    assert table.null_texts == {"text": 0}
    assert table.head(2) == [{"text": row["text"]} for row in rows[:2]]
    assert table.text_lengths(["text"]).tolist() == [len(row["text"].encode()) for row in rows]
    assert published(table, tmp_path / "t.arrow").to_pylist() == [{"text": row["text"]} for row in rows]


@FORMATS
def test_a_column_per_label(tmp_path: Path, suffix: str) -> None:
    rows = [
        {"id": "x", "text": "t", "yes": 1, "no": False, "maybe": 0.0},
        {"id": "y", "text": "u", "yes": 0, "no": True, "maybe": 0.0},
        {"id": "z", "text": "v", "yes": 0, "no": False, "maybe": 0.99},
    ]
    soft = [*rows[:2], {**rows[2], "no": True, "yes": 3, "maybe": 0.25}]
    path = write_rows(tmp_path / f"x{suffix}", rows)
    asked = needs(labels=("no", "maybe", "yes"), label_columns=("no", "maybe", "yes"))
    table = read_table(path, asked)
    assert table.truth is not None
    assert table.truth.tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0]], "scaled to sum to 1"
    assert published(table, tmp_path / "t.arrow").column_names == ["text"], "nothing that workers need"
    (off,) = problems(write_rows(path, soft), asked)
    assert (
        "label columns 'no', 'maybe', 'yes': 1 row whose values are not probabilities that sum to 1; row 3 (id 'z')"
        in off
    )
    (missing,) = problems(path, needs(label_columns=("no", "mabe")))
    assert "no label column 'mabe' (did you mean 'maybe'?)" in missing


@FORMATS
@pytest.mark.parametrize(
    ("labels", "cells"),
    [
        (("1", "0"), [1, 0, None, 1]),
        (("1.0", "0.0"), [1, 0, None, 1]),
        (("true", "false"), [True, False, None, True]),
        (("True", "False"), [True, False, None, True]),
    ],
)
def test_labels_are_known_as_pandas_spells_them_beside_a_missing_value(
    tmp_path: Path, suffix: str, labels: tuple[str, str], cells: list[object]
) -> None:
    path = tmp_path / f"x{suffix}"
    frame = pd.DataFrame({"id": list("wxyz"), "text": list("tuvw"), "label": cells}).dropna()
    if suffix == ".parquet":
        frame.to_parquet(path)
    elif suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_csv(path, index=False)
    table = read_table(path, needs(label_column="label", labels=labels))
    assert table.truth is not None
    assert table.truth.tolist() == [0, 1, 0]
    if suffix == ".csv" and labels[0] in ("1", "true"):
        written = {"1": "'1.0' is '1', '0.0' is '0'", "true": "'True' is 'true', 'False' is 'false'"}
        where = f"{path}: label column 'label': spelled as pandas does after a missing value"
        assert table.remarks == [f"{where}: {written[labels[0]]}"]


def test_a_label_that_two_spellings_could_mean_stays_unknown(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("id,text,label\nx,t,1.00\ny,t,1\nz,t,01.0\n")
    (wrong,) = problems(path, needs(label_column="label", labels=("1", "1.0")))
    assert "known label; row 1 (id 'x'): '1.00'" in wrong


@FORMATS
def test_rows_without_a_label_are_left_out_where_the_config_says_so(tmp_path: Path, suffix: str) -> None:
    rows: list[dict[str, Any]] = [
        {"id": f"i{n}", "text": f"t{n}" if n else "", "label": "ab"[n % 2]} for n in range(6)
    ]
    for number in (0, 3):
        rows[number]["label"] = None if suffix != ".csv" else ""
    path = write_rows(tmp_path / f"x{suffix}", rows)
    asked = needs(label_column="label")
    (refused,) = problems(path, asked)
    assert "row 1 (id 'i0'): has no label" in refused
    assert refused.endswith(
        "skip_unlabelled: true beside label_column in a config leaves out rows without a label"
    )
    table = read_table(path, needs(label_column="label", skip_unlabelled=True))
    assert table.ids.to_pylist() == ["i1", "i2", "i4", "i5"]
    assert table.truth is not None
    assert table.truth.tolist() == [1, 0, 0, 1]
    assert [row["text"] for row in table.head(9)] == ["t1", "t2", "t4", "t5"]
    assert table.null_texts == {"text": 0}, "the empty text is in a row that is left out"
    assert table.file_rows is not None
    assert table.file_rows.tolist() == [1, 2, 4, 5]
    assert table.remarks == [f"{path}: 2 rows without a label left out, as data.skip_unlabelled says"]
    (wrong,) = problems(
        write_rows(path, [*rows, {"id": "i6", "text": "t", "label": "c"}]),
        needs(label_column="label", skip_unlabelled=True),
    )
    assert "row 7 (id 'i6'): 'c'" in wrong


def test_rows_without_any_label_column_are_left_out(tmp_path: Path) -> None:
    path, asked = tmp_path / "x.csv", needs(label_columns=("a", "b"), skip_unlabelled=True)
    path.write_text("id,text,a,b\n1,t,0.5,0.5\n2,t,,\n3,t,1,0\n")
    table = read_table(path, asked)
    assert table.truth is not None
    assert table.truth.tolist() == [[0.5, 0.5], [1, 0]]
    path.write_text("id,text,a,b\n1,t,,\n2,t,0.5,\n")
    (wrong,) = problems(path, asked)
    assert "1 row whose" in wrong
    assert "row 2 (id '2')" in wrong
    path.write_text("id,text,a,b\n1,t,,\n")
    (nothing,) = problems(path, asked)
    assert nothing == f"{path}: no row has a label in 'a', 'b'; name another column"


def test_label_columns_that_hold_no_probabilities(tmp_path: Path) -> None:
    path, asked = tmp_path / "x.csv", needs(label_columns=("a", "b"))
    path.write_text(
        "id,text,a,b\n1,t,0.5,0.5\n2,t,1.5,-0.5\n3,t,,1\n4,t,x,1\n5,t,inf,0\n6,t,0,0\n7,t,.505,.5\n"
    )
    (wrong,) = problems(path, asked)
    assert "row 2 (id '2'): '1.5', '-0.5'; row 3" in wrong
    write_rows(path.with_suffix(".jsonl"), [{"id": "1", "text": "t", "a": [1], "b": 0}])
    assert "1 row whose" in problems(path.with_suffix(".jsonl"), asked)[0]
    write_rows(path.with_suffix(".parquet"), [{"id": "1", "text": "t", "a": [1], "b": 0}])
    assert "label column 'a' holds list<" in problems(path.with_suffix(".parquet"), asked)[0]


@FORMATS
def test_limit_keeps_the_first_rows_and_checks_only_them(tmp_path: Path, suffix: str) -> None:
    rows = [{"id": str(i if i < 20_000 else 0), "text": f"t{i}"} for i in range(30_000)]
    path = write_rows(tmp_path / f"x{suffix}", rows)
    for limit in (1, 9_000, 20_000):
        table = read_table(path, needs(limit=limit))
        assert table.ids.to_pylist() == [row["id"] for row in rows[:limit]]
        assert table.head(10**6)[-1] == {"text": rows[limit - 1]["text"]}
    assert read_table(write_rows(path, rows[:5]), needs(limit=100)).rows == 5


@FORMATS
def test_every_problem_at_once(tmp_path: Path, suffix: str) -> None:
    rows = [
        {"id": "x", "prompt": '["ok"]', "label": "a"},
        {"id": "y", "prompt": '["broken" ', "label": "A"},
        {"id": "x", "prompt": "", "label": ""},
        {"id": "", "prompt": "[NaN]", "label": "b"},
    ]
    path = write_rows(tmp_path / f"x{suffix}", rows)
    asked = needs(label_column="label", columns=("prompt", "respons"), json_columns=("prompt", "respons"))
    missing, blank, repeated, labels, broken = problems(path, asked)
    assert "no text column 'respons'; the columns are 'id', 'prompt', 'label'" in missing
    assert "id column 'id': 1 row without an id" in blank
    assert "once: 'x' in row 1, 3; ids must be unique" in repeated
    assert (
        "2 rows without a known label; row 2 (id 'y'): 'A' (did you mean 'a'?); row 3 (id 'x'): has no"
        in labels
    )
    assert "column 'prompt': broken JSON in 2 rows; row 2 (id 'y'): not valid JSON" in broken
    assert "row 4 (id ''): not valid JSON (NaN is not a JSON number): '[NaN]'" in broken


@FORMATS
def test_missing_id_and_label_columns(tmp_path: Path, suffix: str) -> None:
    path = write_rows(tmp_path / f"x{suffix}", [{"Id": "1", "text": "[", "winer": "a"}])
    ids, label, broken = sorted(
        problems(path, needs(label_column="winner", json_columns=("text",))),
        key=lambda text: ("no id" not in text, "no label" not in text),
    )
    assert "no id column 'id' " in ids
    assert "no label column 'winner' (did you mean 'winer'?)" in label
    assert "broken JSON in 1 row" in broken


@FORMATS
def test_many_repeated_ids_are_counted(tmp_path: Path, suffix: str) -> None:
    rows = [{"id": str(i % 9_000), "text": "x"} for i in range(40_000)]
    (messages,) = problems(write_rows(tmp_path / f"x{suffix}", rows))
    assert (
        "9,000 ids more than once: '0' in row 1, 9,001, 18,001, ...; '1' in row 2, 9,002, 18,002, ...; "
        in messages
    )


@FORMATS
def test_null_ids(tmp_path: Path, suffix: str) -> None:
    rows = [{"id": name, "text": "x"} for name in ("1", None, None)]
    (messages,) = problems(write_rows(tmp_path / f"x{suffix}", rows))
    assert "2 rows without an id, first: row 2, 3" in messages


@FORMATS
def test_json_columns_count_their_nulls(tmp_path: Path, suffix: str) -> None:
    cells = ['["a"]', '["null"]', "[]", "", '["a", null]', '[{"k": null}]', "null", '{"k": 1}']
    rows = [{"id": str(i), "text": cell} for i, cell in enumerate(cells)]
    table = read_table(write_rows(tmp_path / f"x{suffix}", rows), needs(json_columns=("text",)))
    assert table.null_texts == {"text": 5}
    assert read_table(tmp_path / f"x{suffix}", needs()).null_texts == {"text": 1}


@FORMATS
def test_empty_tables(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.table({"id": pa.array([], pa.string()), "text": pa.array([], pa.string())}), path)
    else:
        path.write_text("\n" if suffix == ".jsonl" else "id,text\n")
    assert "empty table" in problems(path)[0]
    path.write_bytes(b"")
    assert "the file is empty" in problems(path)[0]
    path.unlink()
    assert "no such file" in problems(path)[0]


def test_unknown_extensions_name_the_known_ones(tmp_path: Path) -> None:
    for name, kind in {"x.xlsx": ".xlsx", "x.parquet.gz": ".parquet.gz", "x": "without extension"}.items():
        (tmp_path / name).write_text("x")
        (messages,) = problems(tmp_path / name)
        assert kind in messages
        assert ".csv, .tsv" in messages


def test_no_column_at_all_still_knows_its_rows(tmp_path: Path) -> None:
    for suffix in (".csv", ".jsonl", ".parquet"):
        path = write_rows(tmp_path / f"x{suffix}", [{"id": "1"}, {"id": "2"}])
        table = read_table(path, needs(columns=()))
        assert table.head(5) == [{}, {}]
        table.publish(tmp_path / "t.arrow")
        with pa.ipc.open_file(tmp_path / "t.arrow") as reader:
            assert reader.schema.metadata[b"ensemble.rows"] == b"2"


def test_id_and_label_may_be_read_as_text_too(tmp_path: Path) -> None:
    for suffix in (".csv", ".jsonl", ".parquet"):
        path = write_rows(tmp_path / f"x{suffix}", [{"id": "1", "label": "b"}])
        asked = needs(label_column="label", columns=("label", "id"), text_columns=("id",))
        assert read_table(path, asked).head(1) == [{"label": "b", "id": "1"}]


# ---- CSV


def test_csv_agrees_with_pandas(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    alphabet = list('ab ,"\n\u00e9\U0001f600;\t1')
    texts = ["".join(rng.choice(alphabet, rng.integers(1, 60))) + "." for _ in range(5_000)]
    path = write_rows(
        tmp_path / "x.csv", [{"text": text, "n": str(i), "id": f"{i:07d}"} for i, text in enumerate(texts)]
    )
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    table = read_table(path, needs(columns=("text", "n")))
    assert table.ids.to_pylist() == frame["id"].tolist()
    assert published(table, tmp_path / "t.arrow")["text"].to_pylist() == frame["text"].tolist() == texts
    lengths = (frame["text"] + frame["n"]).map(lambda text: len(text.encode()))
    assert table.text_lengths(["text", "n"]).tolist() == lengths.tolist()


def test_published_batches_and_chunks(tmp_path: Path) -> None:
    rows = 200_000
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"id": np.arange(rows), "text": np.arange(rows) * 3}), path)
    table = read_table(path, needs())
    table.publish(tmp_path / "t.arrow")
    with pa.ipc.open_file(tmp_path / "t.arrow") as reader:
        sizes = [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]
        assert reader.schema.names == ["text"]
    assert max(sizes) <= 65_536
    assert sum(sizes) == rows


# ---- JSON lines


def test_jsonl_keeps_native_values_and_the_spelling_of_ids(tmp_path: Path) -> None:
    lines = [
        '{"id": 1.50, "text": "plain", "mixed": "1", "turns": ["a", null], "label": 1}',
        "",
        '{"id": 12345678901234567890123, "text": null, "mixed": 2, "turns": {"k": 1.5}, "label": 0}',
        '{"id": "x", "turns": "\\ud83d", "mixed": true, "label": "1"}',
    ]
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress("\ufeff".encode() + "\r\n".join(lines).encode()))
    table = read_table(
        path, needs(columns=("text", "mixed", "turns"), label_column="label", labels=("0", "1"))
    )
    assert table.ids.to_pylist() == ["1.50", "12345678901234567890123", "x"]
    assert table.truth is not None
    assert table.truth.tolist() == [1, 0, 1]
    assert table.head(3) == [
        {"text": "plain", "mixed": "1", "turns": ["a", None]},
        {"text": None, "mixed": 2, "turns": {"k": 1.5}},
        {"text": None, "mixed": True, "turns": "\ufffd"},
    ]
    assert table.null_texts == {"text": 2, "mixed": 0, "turns": 0}
    schema = published(table, tmp_path / "t.arrow").schema
    assert [(field.metadata or {}).get(b"ensemble") for field in schema] == [None, b"json", b"json"]
    assert table.text_lengths(["text"]).tolist() == [5, 0, 0]


def test_jsonl_column_that_turns_nested_late(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": i, "text": f"é{i}"} for i in range(9_000)]
    rows.append({"id": 9_000, "text": ["\ud83d"]})
    path = write_rows(tmp_path / "x.jsonl", rows)
    table = read_table(path, needs())
    assert table.head(30_000) == [{"text": row["text"]} for row in rows]
    (messages,) = problems(path, needs(text_columns=("text",)))
    assert "column 'text' holds lists or objects in 1 row, first row 9,001 (id '9000')" in messages
    (messages,) = problems(path, needs(json_columns=("text",)))
    assert "broken JSON in 9,000 rows; row 1 (id '0')" in messages


def test_jsonl_numbers_can_be_text(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"id": 1, "text": 7}\n{"id": 2, "text": "["}\n')
    assert read_table(path, needs(text_columns=("text",))).head(2) == [{"text": 7}, {"text": "["}]


def test_jsonl_broken_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.ndjson"
    good = b'{"id": 1, "text": "x"}\n'
    path.write_bytes(good + b"\n" + b'{"id": 2,\n' + b"[1]\n" + b'{"id": "\xff"}\n' + b'{"id": NaN}\n' + good)
    (messages,) = problems(path)
    assert "4 broken lines; line 3: " in messages
    assert "line 4: an object was expected, not '[1]'; line 5: not UTF-8 at byte 9" in messages
    path.write_bytes(
        good + b'{"id": 2, "text": "a", "text": "b"}\n' + b'{"id": 3, "text": [{"n": 1, "n": 1}]}\n'
    )
    (messages,) = problems(path)
    assert (
        "2 broken lines; line 2: the key 'text' comes more than once; line 3: the key 'n' comes" in messages
    )
    path = tmp_path / "x.json"
    path.write_text('[{"id": 1},\n{"id": 2}]\n')
    assert "one JSON array; write one object per line" in problems(path)[0]


def test_jsonl_ids_that_are_no_ids(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"id": 1, "text": ""}\n{"id": [2], "text": ""}\n{"id": "\\ud83d", "text": ""}\n')
    (messages,) = problems(path)
    assert "column 'id': row 2 is neither text nor a number: [2]" in messages


# ---- Parquet


def text_view() -> pa.DataType:
    """The type of views of texts, where this release of pyarrow writes it into a Parquet file."""
    try:
        pq.write_table(pa.table({"view": pa.array(["x"], pa.string_view())}), pa.BufferOutputStream())
    except pa.ArrowNotImplementedError:
        return pa.string()
    return pa.string_view()


def test_parquet_types(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    turns = [["a", None], None, ["é", "b"]]
    table = pa.table(
        {
            "id": pa.array([1, 2**63, 3], pa.uint64()),
            "text": pa.array(["é", None, ""]).dictionary_encode(),
            "view": pa.array(["x", "y", None], text_view()),
            "turns": turns,
            "n": [1.5, None, 2.0],
            "a.b": ["p", "q", "r"],
            "nested": [{"k": 1}, {"k": 2}, None],
            "label": pa.array(["b", "a", "b"]).dictionary_encode(),
        }
    )
    pq.write_table(table, path, row_group_size=2)
    columns = ("a.b", "view", "turns", "n", "text", "nested")
    asked = needs(columns=columns, label_column="label", json_columns=("turns",), text_columns=("text", "n"))
    read = read_table(path, asked)
    assert read.ids.to_pylist() == ["1", "9223372036854775808", "3"]
    assert read.truth is not None
    assert read.truth.tolist() == [1, 0, 1]
    assert read.head(3) == table.select(columns).to_pylist()
    assert read.null_texts == {"text": 2, "view": 1, "turns": 2, "n": 1, "a.b": 0, "nested": 1}
    assert read.text_lengths(["text"]).tolist() == [2, 0, 0]
    assert read.text_lengths(["n", "turns"]).tolist() == [
        3 + len('["a", null]'),
        0,
        1 + len('["é", "b"]') + 1,
    ]
    assert published(read, tmp_path / "t.arrow").to_pylist() == table.select(columns).to_pylist()


def test_null_turns_are_not_called_empty_texts(tmp_path: Path) -> None:
    rows = [{"id": str(row), "text": "a", "turns": '["a", null]' if row < 40 else "[]"} for row in range(43)]
    path = write_rows(tmp_path / "x.csv", [*rows, {"id": "43", "text": "", "turns": '["a"]'}])
    table = read_table(path, needs(columns=("text", "turns"), json_columns=("turns",)))
    assert table.null_texts == {"text": 1, "turns": 43}
    assert table.remarks == [
        "1 empty cell in 'text'",
        "3 empty cells in 'turns'",
        "40 rows with null turns in 'turns', read as empty texts",
    ]


def test_parquet_from_pandas(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"id": [3, 1, 2], "text": ["a", None, "c"], "label": pd.Categorical(["a", "b", "a"])}
    )
    frame.to_parquet(tmp_path / "x.parquet")
    table = read_table(tmp_path / "x.parquet", needs(label_column="label", text_columns=("text",)))
    assert table.ids.to_pylist() == ["3", "1", "2"]
    assert table.null_texts == {"text": 1}
    assert published(table, tmp_path / "t.arrow").schema.metadata == {b"ensemble.rows": b"3"}


def test_parquet_types_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    columns = {"id": [1.0, 2.0], "text": [["a"], ["b"]], "raw": [b"x", b"y"], "label": [["a"], ["b"]]}
    pq.write_table(pa.table(columns), path)
    ids, label, nested, raw = problems(
        path, needs(columns=("text", "raw"), text_columns=("text", "raw"), label_column="label")
    )
    assert (
        "id column 'id' is of type double, which cannot be an id; write the file again with that column cast"
        in ids
    )
    assert "label column 'label' is of type list" in label
    assert "column 'text' holds list<" in nested
    assert "read it in a prompt_template" in nested
    assert "column 'raw' holds bytes" in raw


def test_parquet_that_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_text("id,text\n1,2\n" * 10)
    assert "cannot be read as Parquet" in problems(path)[0]
    pq.write_table(pa.table({"id": list(range(1000)), "text": [str(i) * 50 for i in range(1000)]}), path)
    path.write_bytes(path.read_bytes()[:-50])
    assert "cannot be read as Parquet" in problems(path)[0]
    offsets = pa.array([0, 1, 2], pa.int32()).buffers()[1]
    bad = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"a\xff")])
    pq.write_table(pa.table({"id": ["1", "2"], "text": bad}), path)
    assert "column 'text' is broken near row 1 (" in problems(path)[0]


# ---- cost


@pytest.mark.long
def test_a_million_rows_stay_small(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    line = (
        "{0:09d},some words of text number {0} that go on for a little while longer,{1},and other words {0}\n"
    )
    with path.open("w") as stream:
        stream.write("id,text,label,other\n")
        for start in range(0, 1_000_000, 10_000):
            stream.write("".join(line.format(row, "ab"[row % 2]) for row in range(start, start + 10_000)))
    code = (
        "import sys; from pathlib import Path; from ensemble.data.table import TableNeeds, read_table\n"
        "asked = TableNeeds('id', 'label', ('a', 'b'), ('text', 'other'), (), ('text',), None)\n"
        "table = read_table(Path(sys.argv[1]), asked)\n"
        "table.text_lengths(['text', 'other'])\n"
        "table.publish(Path(sys.argv[2]))\n"
        # Not ru_maxrss, which a process inherits from the one that started it.
        "status = Path('/proc/self/status').read_text()\n"
        "print(table.rows, int(status.split('VmHWM:')[1].split()[0]) // 1024)"
    )
    command = [sys.executable, "-c", code, str(path), str(tmp_path / "t.arrow")]
    variables = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"}  # as of ``python -m ensemble``
    rows, peak_mib = map(int, subprocess.check_output(command, text=True, env=variables).split())
    assert rows == 1_000_000
    assert peak_mib < 350


def test_imports_neither_pandas_nor_parquet(tmp_path: Path) -> None:
    code = (
        "import sys, ensemble.data.table, ensemble.data.template;"
        "print(sorted({'pandas', 'torch', 'pyarrow.parquet', 'pyarrow.dataset'} & sys.modules.keys()))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
