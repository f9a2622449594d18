"""Shards that come from elsewhere: each is on the disk before anybody hears of it, or is named with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from ensemble.common.shards import write_shards


@pytest.mark.parametrize("count", [0, 1, 20])
def test_each_shard_is_kept_or_named(tmp_path: Path, count: int) -> None:
    shards = {tmp_path / f"{number}.csv": b"%d" % number for number in range(count)}
    gone = {tmp_path / "not there" / f"{number}.csv": b"" for number in range(count // 4)}
    unsealed = write_shards({**gone, **shards})
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == shards
    assert unsealed.keys() == gone.keys()
    assert all(str(path) in str(error) for path, error in unsealed.items())
    assert write_shards(gone).keys() == gone.keys()
