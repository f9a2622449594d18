"""Ids that come more than once, and where ids stand among those of a table."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble.common.errors import DataError
from ensemble.data.ids import all_ids, match_ids, places_among, repeated_ids


def chunked(ids: list[str | None], size: int = 100) -> pa.ChunkedArray:
    chunks = [pa.array(ids[start : start + size], pa.string()) for start in range(0, len(ids), size)]
    return pa.chunked_array(chunks, pa.string())


@given(st.lists(st.one_of(st.none(), st.text(max_size=3)), max_size=30), st.integers(1, 5))
def test_ids_that_come_twice_are_found(ids: list[str | None], size: int) -> None:
    result = repeated_ids(chunked(ids, size)).to_pylist()
    assert len(result) == len({*result})
    assert {*result} == {name for name in ids if ids.count(name) > 1}


@given(
    st.lists(st.sampled_from("abcdef"), max_size=8),
    st.lists(st.sampled_from("abcdef"), max_size=6, unique=True),
    st.booleans(),
)
def test_places_are_those_of_lists(ids: list[str], table: list[str], is_large: bool) -> None:
    table_ids = chunked([*table], 2)
    if is_large:
        table_ids = table_ids.cast(pa.large_string())
    result = places_among(chunked([*ids], 3), table_ids)
    assert result.tolist() == [table.index(name) if name in table else -1 for name in ids]


def test_ids_of_several_files() -> None:
    files = [chunked(["b", "a"]), chunked(["a", "c"]), chunked(["d", "b"]).cast(pa.large_string())]
    assert all_ids(files).to_pylist() == ["b", "a", "c", "d"]


def test_what_does_not_match_is_named() -> None:
    def problems(ids: list[str], **changes: bool | str) -> list[str]:
        with pytest.raises(DataError) as caught:
            match_ids(Path("f.csv"), chunked([*ids]), chunked(["1", "2", "3"]), **changes)  # type: ignore[arg-type]
        return list(caught.value.problems)

    assert problems(["1", "1", "4"], table="t.csv", advice="give the same rows") == [
        "f.csv: 1 id more than once ('1'); keep one row for each id",
        "f.csv: 2 ids of t.csv missing ('2', '3'); give the same rows",
        "f.csv: 1 id not in t.csv ('4'); give the same rows",
    ]
    assert problems(["1.0", "2.0"], may_have_others=True) == [
        "f.csv: 3 ids of the table missing ('1', '2', '3'), as its ids are others ('1.0', '2.0'); write them in "
        "the same way, or name the column of the ids"
    ]
    assert problems(["4"], may_lack=True) == ["f.csv: 1 id not in the table ('4')"]
    places = match_ids(Path("f.csv"), chunked(["3", "4"]), chunked(["3"]), may_have_others=True)
    assert places.tolist() == [0, -1]
