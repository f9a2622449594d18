"""Whatever a CSV file holds: the cells that Python's csv module finds, or sentences that say what to fix."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ensemble.data.csv_file import read_text_csv
from ensemble.data.table import InputTable, read_table
from tests.properties import cells
from tests.properties.reading import given_to_workers, needs, outcome
from tests.sampling import tries


def by_csv_module(content: bytes, limit: int | None = None) -> tuple[list[str], cells.Records] | None:
    """Header and rows, or None for what is to be refused."""

    def records(text: str) -> cells.Records:
        return [record for record in csv.reader(io.StringIO(text, newline="")) if record]

    text = content.decode("utf-8-sig", "surrogateescape")
    result = records(text)
    if not result:
        return None
    is_open = len(records(text + "\nx")) == len(result)
    header, *rows = result
    if is_open and (limit is None or len(rows) <= limit):
        return None
    rows = rows[:limit]
    is_ragged = any(len(row) != len(header) for row in rows)
    is_utf8 = not any(
        "\ud800" <= character <= "\udfff" for row in [header, *rows] for cell in row for character in cell
    )
    return None if is_ragged or not is_utf8 or len(set(header)) < len(header) else (header, rows)


@tries(500)
@given(content=cells.csv_like, limit=st.none() | st.integers(1, 4))
@example(content=b'a,b\n1,5" p\n2,"open\n3,x', limit=None)  # two quotes, and yet one is open
@example(content=b'a\n1,"\xff\n2,3', limit=None)  # a row with too many cells that is not UTF-8 either
@example(content=b'""', limit=None)
@example(content=b'a,"b\n1,2\n', limit=None)
@example(content=b'a\n1\n"2\n3\n', limit=2)
@example(content=b'a\n"', limit=1)
def test_any_bytes_as_csv(folder: Path, content: bytes, limit: int | None) -> None:
    table = outcome(folder / "x.csv", content, lambda path: read_text_csv(path, limit=limit))
    expected = by_csv_module(content, limit)
    if expected is None:
        assert isinstance(table, tuple), table
    else:
        assert not isinstance(table, tuple), table
        header, rows = expected
        assert table.column_names == header
        assert [list(row.values()) for row in table.to_pylist()] == rows


# pyarrow reads blocks of this size, in which a line end, a quote or a character may be cut.
BLOCK_BYTES = 1 << 19
csv.field_size_limit(BLOCK_BYTES * 4)


@tries(25)
@given(
    table=cells.tables(),
    before_end=st.integers(-8, 64),
    character=st.sampled_from(["x", "é", "\n", '"']),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
)
@example(table=(["id", "text"], [["\r\n", ""]]), before_end=10, character="x", end="\n")  # \r ends the block
def test_cells_that_stand_across_two_blocks(
    folder: Path, table: tuple[list[str], cells.Records], before_end: int, character: str, end: str
) -> None:
    header, rows = table
    written = io.StringIO(newline="")
    csv.writer(written, quoting=csv.QUOTE_ALL, lineterminator=end).writerows([header, *rows])
    # A header of its own and a row that makes up the block, then all that was drawn.
    above = [f"h{index}" for index in range(len(header))]
    commas = "," * (len(header) - 1)
    cell, cell_bytes = character.replace('"', '""'), len(character.replace('"', '""').encode())
    size = (BLOCK_BYTES - len(",".join(above)) - len(commas) - 4 - before_end) // cell_bytes
    content = f'{",".join(above)}\n"{cell * size}"{commas}\n{written.getvalue()}'.encode()
    result = outcome(folder / "x.csv", content, read_text_csv)
    expected = [[character * size] + [""] * len(commas), header, *rows]
    assert not isinstance(result, tuple), result
    assert [list(row.values()) for row in result.to_pylist()] == expected
    assert by_csv_module(content) == (above, expected)


@pytest.mark.long
@pytest.mark.parametrize("ids", [["001"], ["001", "001"]])
@pytest.mark.parametrize(
    ("columns", "width"), [(6_000, 90), pytest.param(100_000, 0, marks=pytest.mark.long)]
)
def test_a_header_that_is_longer_than_a_block(folder: Path, columns: int, width: int, ids: list[str]) -> None:
    names = [f"c{index}" for index in range(columns)]
    last = names[-1]
    names[9:-1] = [f"{name}{'-' * width}" for name in names[9:-1]]
    header = ",".join(["id", *names])
    assert len(header) > BLOCK_BYTES
    rows = "".join(f"{row_id}{',x' * columns}\n" for row_id in ids)
    content = f"{header}\n{rows}".encode()
    table = outcome(folder / "x.csv", content, lambda path: read_table(path, needs(last)))
    missing = outcome(folder / "x.csv", content, lambda path: read_table(path, needs(f"{last} ", "d1")))
    twice = outcome(
        folder / "x.csv", content.replace(b"c7,", b"c8,", 1), lambda path: read_table(path, needs("c8"))
    )
    if len(ids) == 1:
        assert isinstance(table, InputTable), table
        assert given_to_workers(table, folder) == [{last: "x"}]
    else:
        assert isinstance(table, tuple)
    assert isinstance(missing, tuple)
    assert f"no text column '{last} '" in missing[0]
    assert isinstance(twice, tuple)
    assert "the header names 'c8' more than once" in twice[0]
