"""Members' files and parts merged block by block, against pandas and against the mean of whole arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pytest

from ensemble.common.errors import DataError, MergeError
from ensemble.common.protocol import Activation
from ensemble.config import EnsembleConfig
from ensemble.data.csv_file import write_csv
from ensemble.data.predictions_csv import read_predictions
from ensemble.merging.blocks import MergedMember, RowCheck, merge_blocks
from ensemble.merging.methods import merge_method
from ensemble.merging.methods.base import Block, Members, MergeMethod, block_spans
from ensemble.merging.post_process import PostProcess
from ensemble.merging.scoring import Resamples, Scoring
from tests.labelled import labelled

LABELS = ["a", "b", "c"]
ROWS = 70_000  # three blocks, the last of which is short
WEIGHTS = [0.5, 2.0, 1.25]
NAN = float("nan")
TEXT_BYTES = np.arange(ROWS, dtype=np.int64)
Values = npt.NDArray[np.float64]


def values_of(member: int) -> Values:
    return np.asfortranarray(np.random.default_rng(member).dirichlet(np.ones(3), ROWS))


@pytest.fixture(scope="module")
def ids() -> list[str]:
    odd = ["001", "1e5", "nan", " x", "=1+1", 'say "hi"', "a,b", "ü", "NULL", "1"]
    return [*odd, *(f"row {row}" for row in range(ROWS - len(odd)))]


def write(path: Path, ids: Sequence[str], values: Values, order: Sequence[int] | None = None) -> Path:
    rows = np.arange(len(ids)) if order is None else np.asarray(order)
    columns = [pa.array(column[rows]) for column in values.T]
    write_csv(path, ["id", *LABELS], [[pa.array(ids).take(pa.array(rows)), *columns]])
    return path


def members_of(count: int) -> Members:
    activations: list[Activation] = ["softmax"] * count
    return Members(tuple(f"m{number}" for number in range(count)), tuple(activations), tuple(LABELS))


def merge(
    sources: Sequence[Values | Path], ids: Sequence[str], method: MergeMethod | None = None
) -> tuple[Values, list[int]]:
    """The merged rows, and how many rows each member gave."""
    table_ids = pa.chunked_array([pa.array(ids[:50_000]), pa.array(ids[50_000:])])
    members: list[MergedMember] = []
    arrays = [
        read_predictions(source, "id", LABELS).join(table_ids)[0] if isinstance(source, Path) else source
        for source in sources
    ]

    for number, values in enumerate(arrays):
        is_file = isinstance(sources[number], Path)
        check = RowCheck(f"member {number}", "softmax", table_ids, may_lack_rows=not is_file)
        members.append(MergedMember(f"m{number}", WEIGHTS[number], values, check, None))
    method = method or merge_method(EnsembleConfig(), members_of(len(sources)))
    whole = np.full((ROWS, len(LABELS)), NAN)
    for start, values in merge_blocks(method, members, table_ids, TEXT_BYTES, PostProcess()):
        whole[start : start + len(values)] = values
    return whole, [member.check.reached for member in members]


def test_files_are_merged_as_pandas_does_it(ids: list[str], tmp_path: Path) -> None:
    shuffled = np.random.default_rng(9).permutation(ROWS)
    late = np.r_[np.arange(60_000), np.arange(ROWS - 1, 59_999, -1)]  # in order in the first block only
    paths = [
        write(tmp_path / f"{number}.csv", ids, values_of(number), order)
        for number, order in enumerate([None, shuffled, late])
    ]
    merged, reached = merge(paths, ids)
    total = pd.DataFrame({"id": ids})
    for number, path in enumerate(paths):
        frame = pd.read_csv(path, dtype={"id": str}, keep_default_na=False)
        frame = frame.rename(columns={label: f"{label}{number}" for label in LABELS})
        total = total.merge(frame, on="id", validate="one_to_one")
    shares = np.array(WEIGHTS) / sum(WEIGHTS)
    expected = [sum(share * total[f"{label}{n}"] for n, share in enumerate(shares)) for label in LABELS]
    np.testing.assert_allclose(merged, np.column_stack(expected), rtol=1e-14)
    assert reached == [ROWS] * 3
    whole = np.zeros((ROWS, len(LABELS)))
    for number, share in enumerate(shares):
        whole += values_of(number) * share
    assert merged.tobytes() == whole.tobytes()


def test_rows_that_members_did_not_reach(ids: list[str], tmp_path: Path) -> None:
    partial = [values_of(1), values_of(2)]
    partial[0][10_000:50_000] = NAN
    partial[1][:] = NAN
    sources: list[Values | Path] = [write(tmp_path / "0.csv", ids, values_of(0))]
    sources += partial
    merged, reached = merge(sources, ids)
    expected = np.ma.average(
        np.ma.masked_invalid(np.stack([values_of(0), *partial])), axis=0, weights=WEIGHTS
    )
    np.testing.assert_allclose(merged, np.asarray(expected), rtol=1e-12)
    assert reached == [ROWS, ROWS - 40_000, 0]


class RankMean(MergeMethod):
    """The mean of each value's place among its member's values of that label, which only the whole table tells."""

    needs_first_pass = True

    def __init__(self, settings: EnsembleConfig, members: Members) -> None:
        super().__init__(settings, members)
        self.seen: list[Values] = []
        self.ids: list[str] = []

    def look(self, block: Block) -> None:
        assert block.start == len(self.ids)
        assert not self.ids or block.start > 0
        self.ids += block.ids.to_pylist()
        self.seen.append(block.probabilities.copy())
        np.testing.assert_array_equal(block.text_bytes, TEXT_BYTES[block.start : len(self.ids)])

    def merge(self, block: Block, weights: Values) -> Values:
        order = np.sort(np.concatenate(self.seen, axis=1), axis=1)
        ranks = np.empty_like(block.probabilities)
        for member, label in np.ndindex(len(weights), len(LABELS)):
            ranks[member, :, label] = order[member, :, label].searchsorted(
                block.probabilities[member, :, label]
            )
        return np.asarray(np.average(ranks, axis=0, weights=weights.ravel()))


@pytest.mark.long
def test_a_method_that_needs_the_whole_table_reads_it_twice(ids: list[str], tmp_path: Path) -> None:
    shuffled = np.random.default_rng(9).permutation(ROWS)
    sources: list[Values | Path] = [
        write(tmp_path / "in order.csv", ids, values_of(0)),
        write(tmp_path / "in another.csv", ids, values_of(1), shuffled.tolist()),
        values_of(2),
    ]
    method = RankMean(EnsembleConfig(), members_of(3))
    merged, reached = merge(sources, ids, method)
    ranks = [pd.DataFrame(values_of(number)).rank().to_numpy() - 1 for number in range(3)]
    np.testing.assert_allclose(merged, np.average(ranks, axis=0, weights=WEIGHTS), rtol=1e-12)
    assert method.ids == ids
    assert reached == [ROWS] * 3


def test_what_does_not_fit_is_found_in_the_first_pass(ids: list[str], tmp_path: Path) -> None:
    outside = values_of(1)
    outside[[5, 69_999], 0] += 2
    sources: list[Values | Path] = [write(tmp_path / "1.csv", ids, outside)]
    with pytest.raises(MergeError, match="member 0: 2 rows with values"):
        merge(sources, ids, RankMean(EnsembleConfig(), members_of(1)))


def broken_files(ids: list[str], folder: Path) -> Iterator[tuple[Path, str]]:
    values = values_of(1)
    less = write(folder / "less.csv", ids[:-1], values[:-1])
    yield less, r"less.csv: 1 id of the table missing .'row 69989'."
    more = write(folder / "more.csv", [*ids, "other"], np.vstack([values, values[:1]]))
    yield more, r"more.csv: 1 id not in the table .'other'."
    twice = write(folder / "twice.csv", [*ids[:-1], ids[60_000]], values)
    yield twice, r"(?s)1 id more than once .'row 59990'.*1 id of the table missing .'row 69989'."
    text = write(folder / "text.csv", ids, values)
    text.write_text(text.read_text().rpartition(",")[0] + ",x\n")
    yield text, "text.csv: row 70,000: 'x' in column 'c' is no number"
    gap = write(folder / "gap.csv", ids, values)
    gap.write_text(gap.read_text().rpartition(",")[0] + ",\n")
    yield gap, "gap.csv: row 70,000: nothing in column 'c' is no number"
    outside = values.copy()
    outside[[5, 40_000, 69_999], 0] += 2
    path = write(folder / "outside.csv", ids, outside)
    yield path, 'member 1: 3 rows with values below 0 or above 1, the first is id say "hi"'


@pytest.mark.long
@pytest.mark.fault(10, 11)
def test_what_does_not_fit_is_found_wherever_it_stands(ids: list[str], tmp_path: Path) -> None:
    good = write(tmp_path / "good.csv", ids, values_of(0))
    for path, message in broken_files(ids, tmp_path):
        with pytest.raises((DataError, MergeError), match=message):
            merge([good, path], ids)


def test_files_that_lack_rows(ids: list[str], tmp_path: Path) -> None:
    table_ids = pa.chunked_array([pa.array(ids[:50_000]), pa.array(ids[50_000:])])
    chosen = {
        "most": np.flatnonzero(np.random.default_rng(3).random(ROWS) < 0.9),
        "few": np.array([69_999, 40_000]),
        "block": np.arange(32_768, 65_536),
        "none": np.array([], dtype=np.int64),
        "all": np.arange(ROWS),
    }
    values = values_of(5)
    for name, rows in chosen.items():
        path = tmp_path / f"{name}.csv"
        columns = [pa.array(column[rows]) for column in values.T]
        write_csv(path, ["id", *LABELS], [[pa.array(ids).take(pa.array(rows)), *columns]])
        expected = np.full_like(values, NAN)
        expected[rows] = values[rows]
        joined, left_out = read_predictions(path, "id", LABELS).join(table_ids, may_lack=True)
        np.testing.assert_array_equal(joined, expected, err_msg=name)
        assert left_out == 0


def test_what_a_file_that_may_lack_rows_must_not_hold(ids: list[str], tmp_path: Path) -> None:
    values = values_of(1)
    table_ids = pa.chunked_array([pa.array(ids)])

    def refused(path: Path) -> str:
        with pytest.raises(DataError) as caught:
            read_predictions(path, "id", LABELS, may_lack=True).join(table_ids, may_lack=True)
        return str(caught.value)

    twice = write(tmp_path / "twice.csv", ids, values, [1, 2, 2, 3])
    assert "more than once ('nan')" in refused(twice)
    other = write(tmp_path / "other.csv", [*ids, "other"], np.vstack([values, values[:1]]), [3, ROWS])
    assert "1 id not in" in refused(other)


def test_blocks_follow_each_other() -> None:
    for rows, labels in [(1, 1), (ROWS, 3), (ROWS, 1000), (1000, 10_000)]:
        spans = block_spans(rows, labels)
        assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
        assert spans[-1][1] == rows
        assert all(0 < stop - start <= 32_768 for start, stop in spans)


def test_scores_of_members_that_have_every_row() -> None:
    values, truth = values_of(0), np.random.default_rng(1).integers(0, 3, ROWS)
    ids = pa.chunked_array([pa.array([str(row) for row in range(ROWS)])])
    scoring = Scoring(labelled(truth), Resamples(ROWS))
    member = MergedMember("m", 1.0, values, RowCheck("m", "softmax", ids, True), scoring)
    method = merge_method(EnsembleConfig(), members_of(1))
    for _ in merge_blocks(method, [member], ids, TEXT_BYTES, PostProcess()):
        pass
    score = scoring.score()
    assert score is not None
    assert score.log_loss == pytest.approx(-np.log(values[np.arange(ROWS), truth]).mean(), rel=1e-9)
    assert score.accuracy == (values.argmax(axis=1) == truth).mean()
