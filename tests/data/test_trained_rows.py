"""The file of the rows that a member was trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ensemble.common.errors import DataError, WriteError
from ensemble.data.trained_rows import TrainedRows, fold_count, read_trained_rows, write_trained_rows


def test_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.bin"
    digests = np.random.default_rng(0).integers(0, 2**64, (5, 2), np.uint64)
    write_trained_rows(path, TrainedRows(digests, np.array([0, 1, -1, 2, 0])))
    rows = read_trained_rows(path)
    assert (rows.digests == digests).all()
    assert rows.digests.dtype == np.uint64
    assert rows.folds.tolist() == [0, 1, -1, 2, 0]
    assert fold_count(path) == 3
    assert fold_count(tmp_path / "none.bin") == 0
    with np.load(path) as arrays:
        assert sorted(arrays) == ["digests", "folds"]


def test_a_broken_or_missing_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.bin"
    write_trained_rows(path, TrainedRows(np.zeros((100, 2), np.uint64), np.zeros(100, np.int64)))
    content = path.read_bytes()
    for broken in (b"", content[:50], content[:-30], b"text"):
        path.write_bytes(broken)
        with pytest.raises(DataError, match="train the member again"):
            read_trained_rows(path)
        assert fold_count(path) == 0
    with pytest.raises(DataError, match="cannot be read"):
        read_trained_rows(tmp_path / "none.bin")
    with pytest.raises(WriteError):
        write_trained_rows(
            tmp_path / "none" / "rows.bin", TrainedRows(np.zeros((0, 2), np.uint64), np.zeros(0, np.int64))
        )
