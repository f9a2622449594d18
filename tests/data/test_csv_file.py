"""CSV in and out, compared with the csv module and pandas."""

from __future__ import annotations

import bz2
import csv
import gzip
import lzma
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ensemble.common.errors import DataError
from ensemble.data.csv_file import read_csv, read_header, read_text_csv, write_csv
from ensemble.data.formats import read_contents
from ensemble.data.input_file import Wanted

AWKWARD = [
    *(
        "001",
        "1e5",
        "nan",
        "NULL",
        "TRUE",
        "-0",
        "=1+1",
        "@x",
        "'",
        "é\U0001f600",
        "\u00a0nbsp",
        "a;b",
        "\\",
        "a\\",
    ),
    *(" x", "x ", "\t", "a b", 'a"b', '"', '""', '"quoted"', "a,b", ",", "a\nb", "\n", "a\r\nb", "a\rb", ""),
]


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def problem(path: Path, columns: list[str] | None = None, limit: int | None = None) -> str:
    with pytest.raises(DataError) as caught:
        read_text_csv(path, columns, limit)
    assert all(str(path) in sentence for sentence in caught.value.problems)
    return str(caught.value)


@pytest.mark.parametrize("others", [1, 0])
def test_round_trip_of_awkward_cells_is_exact(tmp_path: Path, others: int) -> None:
    path = tmp_path / "odd 'name', \"here\".csv"
    columns = [pa.array(AWKWARD), *[pa.array(AWKWARD[::-1])] * others]
    header = ['i"d, x', "text"][: 1 + others]
    write_csv(path, header, [columns])
    assert read_text_csv(path).to_pydict() == dict(zip(header, [AWKWARD, AWKWARD[::-1]], strict=False))
    with path.open(newline="", encoding="utf-8") as stream:
        assert list(csv.reader(stream)) == [
            header,
            *map(list, zip(*(c.to_pylist() for c in columns), strict=True)),
        ]
    frame = pd.read_csv(path, dtype=str, keep_default_na=False, skip_blank_lines=False)
    # pandas takes a quoted \r for a line end of its own making, so only its count is compared here.
    assert len(frame) == len(AWKWARD)


def test_quotes_only_where_needed(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    write_csv(path, ["id", "a,b"], [[pa.array(["x y", "a,b", None]), pa.array([0.5, 1e-7, None])]])
    assert path.read_bytes() == b'id,"a,b"\nx y,0.5\n"a,b",1e-7\n,\n'


def test_floats_survive(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = np.concatenate(
        [rng.random(10_000), 10.0 ** rng.uniform(-300, 300, 1_000), [0.0, 1.0, 5e-324, 1 / 3]]
    )
    path = tmp_path / "out.csv"
    write_csv(path, ["p", "n"], [[pa.array(values), pa.chunked_array([pa.array(range(len(values)))])]])
    with path.open(newline="") as stream:
        rows = list(csv.reader(stream))[1:]
    assert [float(row[0]) for row in rows] == values.tolist()
    assert [int(row[1]) for row in rows] == list(range(len(values)))
    # As many digits as Python's own shortest form.
    for row, value in zip(rows, values.tolist(), strict=True):
        assert len(digits(row[0])) == len(digits(repr(value)))


def digits(number: str) -> str:
    return number.split("e")[0].replace(".", "").strip("0")


def test_writes_many_batches_chunks_slices_and_types(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    rows = 70_000
    ids = pa.array([f"id {i}" for i in range(rows + 7)]).slice(7)
    chunked = pa.chunked_array([ids.slice(0, 10), ids.slice(10, 60_000), ids.slice(60_010)])
    flags = pa.array(["yes", "no"] * (rows // 2)).dictionary_encode()
    write_csv(path, ["a", "b", "c"], [[chunked, ids.cast(pa.large_string()), flags]])
    frame = pd.read_csv(path, dtype=str)
    assert frame["a"].tolist() == frame["b"].tolist() == ids.to_pylist()
    assert frame["c"].tolist() == flags.to_pylist()


def test_an_empty_table_is_a_header(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    write_csv(path, ["id", "x"], [[pa.array([], pa.string()), pa.array([], pa.float64())]])
    assert path.read_bytes() == b"id,x\n"
    assert read_text_csv(path).to_pydict() == {"id": [], "x": []}


def test_columns_must_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Length of names"):
        write_csv(tmp_path / "x.csv", ["a"], [[pa.array(["1"]), pa.array(["2"])]])
    with pytest.raises(ValueError, match="length"):
        write_csv(tmp_path / "x.csv", ["a", "b"], [[pa.array(["1"]), pa.array(["2", "3"])]])


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_line_ends_and_byte_order_mark(tmp_path: Path, end: str, mark: str) -> None:
    path = written(tmp_path / "x.csv", mark + f'id,t{end}1,"a\nb"{end}{end}2,"c\r\nd"{end}3,{end}')
    assert read_header(path) == ("id", "t")
    assert read_text_csv(path).to_pydict() == {"id": ["1", "2", "3"], "t": ["a\nb", "c\r\nd", ""]}


def test_tabs_gzip_and_case_of_the_extension(tmp_path: Path) -> None:
    cells = {"id": ["1"], "t": ["a,b"]}
    assert read_text_csv(written(tmp_path / "x.tsv", "id\tt\n1\ta,b\n")).to_pydict() == cells
    assert (
        read_text_csv(written(tmp_path / "x.TSV.GZ", gzip.compress(b"id\tt\n1\ta,b\n"))).to_pydict() == cells
    )
    parts = gzip.compress(b"id,t\n") + gzip.compress(b'1,"a,b"\n')
    assert read_text_csv(written(tmp_path / "x.csv.gz", parts)).to_pydict() == cells


def test_selects_columns_in_the_order_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", "a,b,c\n1,2,3\n")
    assert list(read_text_csv(path, ["c", "a"]).to_pydict().items()) == [("c", ["3"]), ("a", ["1"])]


def test_limit_stops_early(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", b"id,t\n" + b"1,some text\n" * 2_000_000 + b'broken\n\xff,"\n')
    os.truncate(path, 1 << 30)  # a hole, which takes no room
    before = _bytes_read()
    assert read_text_csv(path, limit=5).num_rows == 5
    assert _bytes_read() - before < 1 << 28, "what is read ahead, and no more"


def _bytes_read() -> int:
    """What this process has had from files so far, by Linux's count (proc(5))."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_limit_ignores_what_is_wrong_after_it(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", b'id,t\n1,a\n2,b\nbroken\n4,"')
    assert read_text_csv(path, limit=2)["t"].to_pylist() == ["a", "b"]
    assert "row 3" in problem(path, limit=3)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    written(tmp_path / "train.csv", "id\n1\n")
    assert "did you mean 'train.csv'?" in problem(tmp_path / "trian.csv")
    assert "there is no folder" in problem(tmp_path / "nope" / "x.csv")
    assert "is a directory" in problem(tmp_path)
    os.mkfifo(tmp_path / "pipe.csv")
    assert "is not a regular file" in problem(tmp_path / "pipe.csv")
    assert "the file is empty" in problem(written(tmp_path / "a.csv", ""))
    assert "only blank lines" in problem(written(tmp_path / "b.csv", "\n\r\n\n"))
    assert "is UTF-16" in problem(written(tmp_path / "c.csv", "id,t\n1,x\n".encode("utf-16")))
    whole = gzip.compress(b"id,t\n" + b"1,2\n" * 1000)
    for name, data in {
        "d.csv.gz": whole[:-9],
        "e.csv.gz": b"id,t\n",
        "f.csv.gz": whole[:30] + b"\0" * 30,
    }.items():
        assert "not a whole gzip file" in problem(written(tmp_path / name, data))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "id;t\n1;2\n", "its columns are separated by semicolons; write it with commas"),
        (
            "a.csv",
            "id;t\n1;2,5\n2;x, y, z\n",
            "its columns are separated by semicolons; write it with commas",
        ),
        ("a.csv", "id\tt\n1\t2\n", "its columns are separated by tabs; name it .tsv"),
        ("a.tsv", "id,t\n1,2\n", "its columns are separated by commas; name it .csv"),
        ("a.csv", "sep=;\nid;t\n1;2\n", "its first line is Excel's 'sep=;' and no header; remove that line"),
        ("a.csv", "sep=,\nid,t\n1,2\n", "its first line is Excel's 'sep=' and no header; remove that line"),
        (
            "a.csv",
            gzip.compress(b"id,t\n1,2\n", mtime=0),
            "is compressed with gzip, which its name does not say",
        ),
        (
            "a.csv.gz",
            gzip.compress(gzip.compress(b"id,t\n1,2\n", mtime=0), mtime=0),
            "is compressed with gzip, which its name",
        ),
        ("a.csv", bz2.compress(b"id,t\n1,2\n"), "is compressed; unpack it first"),
        ("a.csv", lzma.compress(b"id,t\n1,2\n"), "is compressed; unpack it first"),
        ("a.csv", "\ufeff\ufeffid,t\n1,2\n", "differs in U+FEFF ZERO WIDTH NO-BREAK SPACE"),
        (
            "a.csv",
            "id\xa0,t\n1,2\n",
            "'id\\xa0' only looks the same: it differs in U+00A0 NO-BREAK SPACE; rename",
        ),
        ("a.csv", "id ,t\n1,2\n", "'id ' only looks the same: it differs in spaces; rename one"),
    ],
)
def test_what_is_odd_about_a_file_is_said(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    assert message in problem(written(tmp_path / name, content), ["id"])


def test_names_of_two_columns_are_refused_where_they_are_read(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", "a,id,,t,,a\n1,2,3,4,5,6\n")
    assert read_text_csv(path, ["id", "t"]).to_pylist() == [{"id": "2", "t": "4"}]
    assert read_csv(path, Wanted("no", None, (), None)).rows == 1
    assert "the header names 'a' more than once" in problem(path, ["id", "a"])
    assert "the header names '' more than once" in problem(path, ["id", ""])
    pq.write_table(
        pa.Table.from_arrays([[1], [2], [3]], names=["a", "id", "a"]), path.with_suffix(".parquet")
    )
    read = read_contents(path.with_suffix(".parquet"), Wanted("id", None, (), None))
    assert read.ids is not None
    assert read.ids.to_pylist() == ["2"]
    with pytest.raises(DataError, match="the header names 'a' more than once"):
        read_contents(path.with_suffix(".parquet"), Wanted("id", None, ("a",), None))


@pytest.mark.parametrize("mark", [",", "\t"])
def test_a_quote_that_swallows_lines_is_noted(tmp_path: Path, mark: str) -> None:
    path = tmp_path / ("x.csv" if mark == "," else "x.tsv")
    lines = ["id,text,label", '1,"a letter:\n\nDear Ann,\nthanks, Bob",x']
    lines += ['2,"he said,x', "3,yes,x", '4,"no",x', '5,"one ""two"",x', '6,fine",x']
    written(path, "".join(f"{line}\n" for line in lines).replace(",", mark))
    contents = read_csv(path, Wanted("id", None, ("text",), None))
    with path.open(newline="") as stream:
        texts = [row["text"] for row in csv.DictReader(stream, delimiter=mark)]
    assert contents.columns["text"].to_pylist() == texts
    assert contents.remarks == (
        f"{path}: column 'text': row 2 is the first of 2 cells with line ends followed by the separator; if these "
        "lines are rows of their own, a stray quote joins them: double or remove it",
    )


def test_header_problems(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    assert "names 'id' more than once" in problem(written(path, "id,t,id\n1,2,3\n"))
    assert "header is not UTF-8" in problem(written(path, "id,tést\n1,2\n".encode("latin-1")))
    message = problem(written(path, "Id,txt\n1,2\n"), ["id", "text", "zzz"])
    assert message.count("the columns are 'Id', 'txt'") == 3
    assert "'id' (did you mean 'Id'?)" in message
    assert "'text' (did you mean 'txt'?)" in message


def test_ragged_rows_are_counted_and_named(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", 'id,t\n1,a\n\n2\n"3\n",b,c\n4,d\n' + "5\n" * 10)
    message = problem(path)
    assert "12 broken rows; row 2 has 1 cell instead of 2: '2'; row 3 has 3 cells" in message


def test_cells_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    rows = b"".join(b"%d,fine,ok\n" % row for row in range(50_000))
    path = written(tmp_path / "x.csv", b"id,t,u\n" + rows + b"x,abc\xe9,\xff\ny,\xe9,ok\n")
    assert "column 't': the cell in row 50,001 is not in UTF-8; convert the file" in problem(path)
    # A column that nobody reads may hold what it likes.
    assert read_text_csv(path, ["id"]).num_rows == 50_002


def test_a_column_that_is_not_read_may_hold_other_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b"id,a,note\nx,0.5,caf\xe9\ny,0.2,z\n")
    wanted = Wanted(id_column="id", label_column=None, columns=("a",), limit=None, numbers=("a",))
    assert read_csv(path, wanted).columns.to_pydict() == {"a": [0.5, 0.2]}
    path.write_bytes(b"id,a,note\nx\xe9,0.5,cafe\ny,0.2,z\n")
    with pytest.raises(DataError, match=r"column 'id': the cell in row 1 is not in UTF-8"):
        read_csv(path, wanted)


def test_a_quote_that_never_closes(tmp_path: Path) -> None:
    start = "id,t\n" + '1,"two\nlines"\n' * 100
    message = problem(written(tmp_path / "x.csv", start + '2,"open\n' + "3,x\n" * 500_000))
    assert "a quote opens in row 101 and never closes; check the quotes in x.csv" in message
    # A file that was cut short inside of a quote also lacks the cells that follow.
    assert "opens in row 1 and never closes" in problem(written(tmp_path / "z.csv", 'id,t,u\n1,"cut'))
    path = written(tmp_path / "y.csv", start + '2,5" pipe\n')
    assert read_text_csv(path)["t"][-1].as_py() == '5" pipe'


@pytest.mark.long
def test_a_header_longer_than_a_block_and_no_row(tmp_path: Path) -> None:
    names = [f"column {number}" for number in range(60_000)]
    path = written(tmp_path / "x.csv", ",".join(names) + "\n")
    assert read_text_csv(path, ["column 7"]).to_pydict() == {"column 7": []}
