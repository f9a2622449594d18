"""Tables that nobody would want to read: strategies for cells, and for files of bytes that are nearly tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
from hypothesis import strategies as st

Records = list[list[str]]

# Text that some reader takes for a number, a null, a formula, a line end, or nothing.
AWKWARD: Final = [
    *("001", "1e5", "1E400", "nan", "NaN", "NULL", "null", "None", "N/A", "TRUE", "false", "inf"),
    *("-0", "+1", "0x1f", "1_000", "1,5", "=1+1", "@x", "'", "''", " x", "x ", " ", "\t", "\u00a0"),
    *("\u200b", "\ufeff", "\ufeffid", '"', '""', 'a"b', '"a"', '","', ",", ";", "|", "\\", "\\N"),
    *("a\\", "\n", "\r", "\r\n", "a\nb", "\n\n", "a\r\nb", "\x00", "a\x00b", "\x1a", "\x7f", "\x85"),
    *("\u2028", "é", "e\u0301", "\U0001f600", "\U0010ffff", "#", "sep=,", "{{ x }}", "${X}"),
    *("[1, null]", '{"a": "b"}', "<s>", "9" * 400, "2024-01-31", "1:30", "../x", "x" * 3000, ""),
]
text_cells = st.sampled_from(AWKWARD) | st.text(st.characters(codec="utf-8"), max_size=12)
ids = text_cells.filter(bool)
names = text_cells.filter(lambda name: name.strip() and name not in {"id", "text"})


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], Records]:
    """A header with ``id`` and ``text`` in it, and rows."""
    header = draw(st.permutations(["id", "text", *draw(st.lists(names, max_size=2, unique=True))]))
    row_ids = draw(st.lists(ids, min_size=1, max_size=8, unique=True))
    rows = [[row_id if name == "id" else draw(text_cells) for name in header] for row_id in row_ids]
    return header, rows


@st.composite
def as_csv(draw: st.DrawFn, records: Sequence[Sequence[str]], delimiter: str = ",") -> bytes:
    """Records in one of the ways in which programs write them, another for each line."""
    lines = []
    for record in records:
        lines.append(draw(st.sampled_from(["", "", "", "\n", "\r\n", "\r\r"])))
        has_quotes = draw(st.booleans())
        # Nothing at all would be a blank line, which readers skip; a mark at the start would be the file's.
        has_quotes |= list(record) == [""] or record[0].startswith("\ufeff")
        lines.append(delimiter.join(_csv_cell(cell, delimiter, has_quotes) for cell in record))
        lines.append(draw(st.sampled_from(["\n", "\r\n", "\r"])))
    if draw(st.booleans()):
        del lines[-1]
    return draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + "".join(lines).encode()


def _csv_cell(cell: str, delimiter: str, has_quotes: bool) -> str:
    must = any(mark in cell for mark in (delimiter, "\r", "\n")) or cell.startswith('"')
    doubled = cell.replace('"', '""')
    return f'"{doubled}"' if must or has_quotes else cell


csv_like = st.lists(
    st.sampled_from(
        [b",", b",", b'"', b'"', b"\n", b"\n", b"\r", b"\r\n", b'""', b" ", b"a", b"id", b"1", b"\t"]
    )
    | st.sampled_from(
        [b"\xef\xbb\xbf", b"\xff", b"\xc3\xa9", b"\xc3", b"\xed\xa0\x80", b"\x00", b"\\", b"'", b";"]
    ),
    max_size=24,
).map(b"".join)
# Numbers that JSON's readers treat each in their own way, and text that is no text in UTF-8.
_JSON_SCALARS: Final[list[Any]] = [
    *(None, True, False, 0, -1, 2**53 + 1, 2**64, 10**400, -0.0, 1.5, 1e300, 5e-324, "", "\ud800"),
    *("a\udfffb", "\x00"),
]
json_values = st.recursive(
    st.sampled_from(_JSON_SCALARS) | text_cells,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text_cells, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def as_jsonl(draw: st.DrawFn, objects: Sequence[dict[str, Any]]) -> bytes:
    """Objects as JSON lines, in one of the ways in which programs write them, another for each line."""
    lines = []
    for item in objects:
        separators = draw(st.sampled_from([(", ", ": "), (",", ":"), (" , ", "\t:\r")]))
        # A lone half of a pair has no UTF-8.
        ascii_only = draw(st.booleans()) or not _is_text(item)
        lines.append(json.dumps(item, ensure_ascii=ascii_only, separators=separators))
        lines.append(draw(st.sampled_from(["\n", "\r\n", "\n\n", " \n", "\n\t\n"])))
    text = "".join(lines)
    if draw(st.booleans()):
        text = text.rstrip("\n")
    return draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + text.encode()


def _is_text(item: object) -> bool:
    try:
        json.dumps(item, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


# Times in the unit's own integers: most are no dates that Python has.
_TIMES: Final = [
    *(pa.timestamp("s"), pa.timestamp("ms"), pa.timestamp("us", "UTC"), pa.timestamp("us", "+05:30")),
    *(pa.timestamp("ns"), pa.timestamp("us", "Mars/Olympus"), pa.time64("us"), pa.time64("ns")),
    *(pa.duration("ns"),),
    *(pa.duration("s"), pa.date64()),
]
_INTEGERS: Final = [0, 1, -1, 999, 1_000, 86_400_000, 10**12, 10**15 + 1, -(10**14), 2**62, -(2**62), None]
_KINDS: Final[list[tuple[pa.DataType, st.SearchStrategy[Any]]]] = [
    *((kind, text_cells) for kind in (pa.string(), pa.large_string(), pa.string_view())),
    *((kind, st.binary(max_size=4)) for kind in (pa.binary(), pa.large_binary(), pa.binary_view())),
    *((kind, st.integers(0, 100)) for kind in (pa.int8(), pa.uint64(), pa.date32())),
    *((kind, st.floats(width=32)) for kind in (pa.float32(), pa.float64())),
    (pa.null(), st.none()),
    (pa.bool_(), st.booleans()),
    (pa.decimal128(10, 2), st.decimals(-1000, 1000, places=2)),
    (pa.dictionary(pa.int32(), pa.string()), text_cells),
    (pa.list_(pa.string()), st.lists(text_cells | st.none(), max_size=3)),
    (pa.large_list(pa.string_view()), st.lists(text_cells, max_size=3)),
    (pa.list_(pa.timestamp("ns")), st.lists(st.sampled_from(_INTEGERS), max_size=3)),
    (
        pa.struct([("a b", pa.list_(pa.int64())), ("", pa.string())]),
        st.fixed_dictionaries({"a b": st.lists(st.integers(0, 9), max_size=2), "": text_cells}),
    ),
    (pa.map_(pa.string(), pa.int64()), st.lists(st.tuples(text_cells, st.integers(0, 9)), max_size=3)),
]


@st.composite
def arrow_columns(draw: st.DrawFn, rows: int) -> pa.Array:
    """A column of any type that Parquet has, shape (rows,), with nulls."""
    if draw(st.booleans()):
        numbers = draw(st.lists(st.sampled_from(_INTEGERS), min_size=rows, max_size=rows))
        return pa.array(numbers, pa.int64()).view(draw(st.sampled_from(_TIMES)))
    kind, values = draw(st.sampled_from(_KINDS))
    array = pa.array(draw(st.lists(st.none() | values, min_size=rows, max_size=rows)), kind)
    if draw(st.booleans()):
        return array
    return pa.StructArray.from_arrays([array, array], names=draw(st.sampled_from([["k", "l"], ["k", "k"]])))


json_like = st.lists(
    st.sampled_from(
        [b'{"id": ', b'"id"', b'"text"', b": ", b"{", b"}", b"[", b"]", b", ", b'"', b"\n", b"\r\n"]
    )
    | st.sampled_from(
        [b"null", b"NaN", b"-Infinity", b"1e999", b"-0", b"01", b"1.50", b"9" * 5000, b"true", b" "]
    )
    | st.sampled_from(
        [b'"\\ud800"', b'"\\u0000"', b'"a"', b"\xff", b"\xef\xbb\xbf", b"\x00", b"\\", b"'", b"/*"]
    )
    | st.sampled_from([b'{"id": "1", "text": "a"}', b'{"id": 7, "text": [1]}', b"[" * 3000, b'{"a":' * 3000]),
    max_size=14,
).map(b"".join)
