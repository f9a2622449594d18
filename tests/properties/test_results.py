"""Whatever the ids: what is written of them is read back as it was, by us and by the csv module."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from hypothesis import example, given
from hypothesis import strategies as st

from ensemble.data.csv_file import write_csv
from ensemble.data.submission import read_sample
from tests.merging.reading import read_checked
from tests.properties import cells
from tests.sampling import tries

numbers = st.floats(0, 1) | st.floats(allow_nan=False, allow_infinity=False)
columns = st.lists(cells.names, min_size=2, max_size=4, unique=True)


def by_csv_module(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.reader(stream))


def write_predictions(path: Path, header: Sequence[str], ids: Sequence[str], values: np.ndarray) -> None:
    write_csv(
        path, header, [[pa.array(ids), *(pa.array(values[:, index]) for index in range(values.shape[1]))]]
    )


@tries(100)
@given(header=columns, ids=st.lists(cells.ids, min_size=1, max_size=8, unique=True), data=st.data())
@example(header=["\ufeffid", "a"], ids=["1"], data=None)
@example(header=["sep=,", "a"], ids=["1"], data=None)
def test_predictions_come_back(
    folder: Path, header: list[str], ids: list[str], data: st.DataObject | None
) -> None:
    shape = (len(ids), len(header) - 1)
    drawn = (
        np.zeros(shape)
        if data is None
        else data.draw(st.lists(numbers, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    )
    values = np.reshape(drawn, shape)
    path = folder / "predictions.csv"
    write_predictions(path, header, ids, values)
    assert [row[0] for row in by_csv_module(path)] == [header[0], *ids]
    assert by_csv_module(path)[0] == header
    assert [[float(cell) for cell in row[1:]] for row in by_csv_module(path)[1:]] == values.tolist()
    order = list(range(len(ids))) if data is None else data.draw(st.permutations(range(len(ids))))
    result = read_checked(path, header[0], header[1:], [ids[index] for index in order])
    assert result.tolist() == values[order].tolist()


# Blocks of this size are read, larger ones where an id asks for them.
BLOCK_BYTES = 1 << 18


@tries(8)
@given(
    ids=st.lists(cells.ids, min_size=1, max_size=4, unique=True),
    before_end=st.integers(0, 40),
    first=st.sampled_from(["x", "é", "\n", '"', ","]),
)
@example(ids=["a\r\nb"], before_end=3, first="x")  # \r ends the block
@example(ids=["a"], before_end=-2 * BLOCK_BYTES, first="x")  # an id of 0.8 MB
def test_predictions_that_stand_across_two_blocks_come_back(
    folder: Path, ids: list[str], before_end: int, first: str
) -> None:
    bytes_each = len(first.replace('"', '""').encode())
    long_id = first * ((BLOCK_BYTES - len("id,p\n,0.5\n") - before_end) // bytes_each)
    every = [long_id, *ids]
    path = folder / "long.csv"
    values = np.full((len(every), 1), 0.5)
    write_predictions(path, ["id", "p"], every, values)
    assert read_checked(path, "id", ["p"], every).tolist() == values.tolist()


@tries(60)
@given(
    header=columns,
    ids=st.lists(cells.ids, min_size=1, max_size=6, unique=True),
    extra=st.lists(cells.ids, max_size=2, unique=True),
    data=st.data(),
)
def test_a_submission_is_the_sample_with_other_numbers(
    folder: Path, header: list[str], ids: list[str], extra: list[str], data: st.DataObject
) -> None:
    id_column, *labels = header
    extra = [name for name in extra if name not in ids]
    sample_ids = data.draw(st.permutations([*ids, *extra]))
    sample_header = data.draw(st.permutations(header))
    path, target = folder / "sample.csv", folder / "submission.csv"
    path.write_bytes(
        data.draw(
            cells.as_csv(
                [
                    sample_header,
                    *(
                        [row_id if name == id_column else "0.1" for name in sample_header]
                        for row_id in sample_ids
                    ),
                ]
            )
        )
    )
    sample = read_sample(path, id_column, labels, {})
    table_ids = pa.chunked_array([pa.array(ids)])
    assert sample.problems(table_ids, limited=True) == ()
    assert bool(sample.problems(table_ids, limited=False)) == bool(extra)
    values = np.random.default_rng(0).random((len(ids), len(labels)))
    sample.write(target, table_ids, values)
    found_header, *result = by_csv_module(target)
    assert found_header == sample_header
    assert [row[sample_header.index(id_column)] for row in result] == [
        name for name in sample_ids if name in ids
    ]
    for row in result:
        expected = values[ids.index(row[sample_header.index(id_column)])]
        assert [float(row[sample_header.index(label)]) for label in labels] == expected.tolist()


@tries(80)
@given(drawn=st.lists(cells.text_cells | numbers.map(repr), min_size=1, max_size=5))
def test_what_is_a_number_in_a_sample(folder: Path, drawn: list[str]) -> None:
    path = folder / "values.csv"
    write_csv(path, ["id", "a"], [[pa.array([f"{index}" for index in range(len(drawn))]), pa.array(drawn)]])
    sample = read_sample(path, "id", ["a"], {})
    expected = [number(cell) for cell in drawn]
    problems = sample.value_problems()
    if all(value is not None for value in expected):
        assert problems == ()
        assert sample.values(sample.ids).tolist() == [[value] for value in expected]
    else:
        assert f"{expected.count(None)} cell" in problems[0]
        assert f"in row {expected.index(None) + 1}: " in problems[0]


def number(cell: str) -> float | None:
    """The finite number in plain digits, with blanks around it or not; None for anything else."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if np.isfinite(value) and cell.isascii() and "_" not in cell else None
