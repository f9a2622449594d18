"""What reading a table gives, looked at: its cells as workers get them, or sentences that read like sentences."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st
from pyarrow import parquet

from ensemble.common.errors import DataError
from ensemble.data.published_table import PublishedTable
from ensemble.data.table import InputTable, TableNeeds
from tests.properties import cells

# Twenty names of 60 characters, escaped.
LONGEST_SENTENCE = 6_000
T = TypeVar("T")


def needs(*columns: str, **changes: Any) -> TableNeeds:
    asked: dict[str, Any] = {
        "id_column": "id",
        "label_column": None,
        "labels": ("a", "b"),
        "columns": columns,
        "json_columns": (),
        "text_columns": (),
        "limit": None,
    }
    return TableNeeds(**{**asked, **changes})


def outcome(path: Path, content: bytes, read: Callable[[Path], T]) -> T | tuple[str, ...]:
    """What reading gives: a table, or sentences that read like sentences."""
    path.write_bytes(content)
    try:
        return read(path)
    except DataError as error:
        refused = error
    assert refused.exit_code == 2
    assert refused.problems
    assert_sentences(refused.problems, path)
    return refused.problems


def assert_sentences(problems: Sequence[str], path: Path) -> None:
    for problem in problems:
        assert problem.isprintable(), problem
        assert len(problem) <= LONGEST_SENTENCE, problem
        assert problem.startswith(f"{path}: "), problem
        assert re.search(r"Traceback|[a-z]Error|object at 0x|<class|\bpandas\b", problem) is None, problem


def given_to_workers(table: InputTable, folder: Path) -> list[dict[str, object]]:
    table.publish(folder / "table.arrow")
    return PublishedTable(folder / "table.arrow").take(np.arange(table.rows))


def as_parquet(header: Sequence[str], rows: cells.Records) -> bytes:
    stream = io.BytesIO()
    columns = [pa.array([row[index] for row in rows], pa.string()) for index in range(len(header))]
    parquet.write_table(pa.Table.from_arrays(columns, names=list(header)), stream)
    return stream.getvalue()


@st.composite
def files(draw: st.DrawFn, header: Sequence[str], rows: cells.Records) -> tuple[str, bytes]:
    """The name and the content of a file with these cells, in any of the formats."""
    suffix = draw(st.sampled_from([".csv", ".TSV", ".jsonl", ".json", ".parquet"]))
    if suffix == ".parquet":
        return f"x{suffix}", as_parquet(header, rows)
    if suffix in {".jsonl", ".json"}:
        content = draw(cells.as_jsonl([dict(zip(header, row, strict=True)) for row in rows]))
    else:
        content = draw(cells.as_csv([header, *rows], "\t" if suffix == ".TSV" else ","))
    packed = draw(st.booleans())
    return (f"x{suffix}.gz", gzip.compress(content, mtime=0)) if packed else (f"x{suffix}", content)


def from_json(text: bytes, is_line: bool = False) -> Any:
    """The value, as json reads it; NaN and Infinity are no JSON, and a line has no key twice."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    def distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
        if is_line and len({name for name, _ in pairs}) < len(pairs):
            raise ValueError(pairs)
        return dict(pairs)

    return json.loads(text.decode(), parse_constant=refuse, object_pairs_hook=distinct)
