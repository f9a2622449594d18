"""Tables that are too large for memory: what is kept in files without a name is what would be in memory."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble.common import large_arrays
from ensemble.common.errors import DataError, WriteError
from ensemble.common.shards import gather_shards
from ensemble.data import ids as ids_module
from ensemble.data import input_file
from ensemble.data.ids import repeated_ids
from ensemble.data.table import InputTable, TableNeeds, read_table

ROWS = 1000
TEXTS = [f"text {number} " + "é" * (number % 7) for number in range(ROWS)]


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """All that may be large is; returns the folder that takes it."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setattr(input_file, "HELD_BYTES", 1000)
    monkeypatch.setattr(input_file, "_MAPPED_ROWS", 100)
    monkeypatch.setattr(large_arrays, "MAPPED_BYTES", 1)
    monkeypatch.setattr(ids_module, "_ARROW_ROWS", 1)
    return folder


def read(path: Path) -> InputTable:
    return read_table(path, TableNeeds("id", "label", ("a", "b"), ("text", "number"), (), ("text",), None))


def write(folder: Path, form: str, ids: list[int]) -> Path:
    labels, numbers = ["a", "b"] * (ROWS // 2), [None, 1.5] * (ROWS // 2)
    table = pa.table({"id": ids, "text": TEXTS, "number": numbers, "label": labels})
    path = folder / f"table.{form}"
    if form == "parquet":
        pq.write_table(table, path, row_group_size=64)
    else:
        lines = [f"{i},{t},{n or ''},{b}" for i, t, n, b in zip(ids, TEXTS, numbers, labels, strict=True)]
        path.write_text("\n".join(["id,text,number,label", *lines]), encoding="utf-8")
    return path


def facts(table: InputTable, folder: Path) -> tuple[object, ...]:
    table.publish(folder / "table.arrow", with_ids=True)
    published = pa.ipc.open_file(folder / "table.arrow").read_all()
    assert table.truth is not None
    return (
        table.ids.to_pylist(),
        table.truth.tolist(),
        table.null_texts,
        table.text_lengths(["text", "number"]).tolist(),
        table.digest(["text", "number"]),
        table.row_digests(["text", "number"]).tolist(),
        published.to_pylist(),
    )


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_a_table_in_files_is_the_table(
    tmp_path: Path, form: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, form, [*range(ROWS)])
    expected = facts(read(path), tmp_path)
    folder = request.getfixturevalue("small_memory")
    made = list[int]()
    mapped = input_file._mapped_table

    def noted(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
        made.append(1)
        return mapped(batches, schema)

    monkeypatch.setattr(input_file, "_mapped_table", noted)
    assert facts(read(path), tmp_path) == expected
    assert made
    assert not [*folder.iterdir()], "files have no name"


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_repeated_ids_are_told_as_ever(tmp_path: Path, form: str, request: pytest.FixtureRequest) -> None:
    path = write(tmp_path, form, [*range(ROWS - 3), 7, 7, 9])
    with pytest.raises(DataError) as expected:
        read(path)
    request.getfixturevalue("small_memory")
    with pytest.raises(DataError) as found:
        read(path)
    assert found.value.problems == expected.value.problems
    assert "2 ids more than once" in found.value.problems[0]


@given(st.lists(st.one_of(st.none(), st.text(max_size=3)), min_size=1, max_size=30), st.integers(1, 5))
def test_ids_that_are_there_twice_are_found(ids: list[str | None], piece: int) -> None:
    chunks = [pa.array(ids[start : start + piece], pa.string()) for start in range(0, len(ids), piece)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ids_module, "_ARROW_ROWS", 0)
        found = repeated_ids(pa.chunked_array(chunks, pa.string())).to_pylist()
    twice = [one for one in ids if ids.count(one) > 1]
    # A null counts as the empty text, which is told apart later.
    assert [one for one in found if one] == [one for one in twice if one]
    assert set(twice) - {None, ""} <= set(found)


def test_no_room_for_the_files_is_an_error_that_says_where(tmp_path: Path, small_memory: Path) -> None:
    path = write(tmp_path, "parquet", [*range(ROWS)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(WriteError, match="TMPDIR") as found:
            read(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(small_memory) in str(found.value)


def test_no_folder_for_the_files_is_an_error_and_none_for_arrays(
    tmp_path: Path, small_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "parquet", [*range(ROWS)])
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: [str(tmp_path / "not there")])
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(WriteError, match=r"any folder for temporary files .*set TMPDIR"):
        read(path)
    assert large_arrays.large_array((3, 2), np.float64).flags.owndata


def test_long_texts_are_mapped_piece_by_piece(small_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them in one piece would be more than a column of strings holds."""
    monkeypatch.setattr(input_file, "_MAPPED_BYTES", 700)
    monkeypatch.setattr(ids_module, "_BYTES", 700)
    batches = [pa.record_batch({"text": [str(number) * 300, "x"]}) for number in range(10)]
    held = input_file.held_table(batches)
    assert held.to_batches() != batches
    assert held.equals(pa.Table.from_batches(batches))
    assert 3 < held.column("text").num_chunks < 10
    whole = pa.chunked_array([held.column("text").combine_chunks()])
    assert max(len(piece) for piece in ids_module._pieces(whole)) < 20
    assert sorted(repeated_ids(held.column("text")).to_pylist()) == ["x"] * 10


def test_values_in_a_file_are_the_values(small_memory: Path) -> None:
    shards = [
        pa.table({"row": [5, 1], "p0": [0.5, 0.25], "p1": [0.5, 0.75]}),
        pa.table({"row": [1, 0], "p0": [1.0, 0.0], "p1": [0.0, 1.0]}),
    ]
    nan = float("nan")
    expected = [[0.0, 1.0], [1.0, 0.0], [nan, nan], [nan, nan], [nan, nan], [0.5, 0.5]]
    np.testing.assert_array_equal(gather_shards(shards, 6, 2), expected)
    assert gather_shards([], 0, 2).shape == (0, 2)


def test_an_array_stays_in_memory_where_the_disk_is_full(
    small_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_arrays, "free_bytes", lambda path: 0)
    assert large_arrays.large_array((3, 2), np.float64, "F").flags.owndata
    monkeypatch.setattr(large_arrays, "free_bytes", lambda path: 1 << 60)
    assert not large_arrays.large_array((3, 2), np.float64, "F").flags.owndata
