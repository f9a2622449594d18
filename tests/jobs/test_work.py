"""What an earlier run did is believed where it can be proved, and only there."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ensemble.common.shards import file_sha256, shard_name, shards_in
from ensemble.jobs.causes import Causes
from ensemble.jobs.work import Computation, Work, find_work, take_over, write_bad_rows, write_manifest
from ensemble.pipeline.run_dir import RunDir

ROWS = 6
COMPUTED = Computation(at="2026-11-26", seconds=1.5, versions={"torch": "2.9"}, devices={"GPU-1": "A100"})
NOW = Causes({"max_length": "a" * 64}, {"weights": "b" * 64, "tokenizer": "c" * 64}, "d" * 64)


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "a run")
    made.create()
    made.tidy()
    return made


def find(rundir: RunDir, causes: Causes = NOW, keeps_bad_rows: bool = False) -> Work:
    work = find_work(rundir, "m", causes, ROWS, keeps_bad_rows)
    work.row_digests = np.arange(2 * ROWS, dtype="<u8").reshape(ROWS, 2)
    return work


def write_shard(rundir: RunDir, rows: list[int], start: int = 0) -> Path:
    folder = rundir.shards_dir("m", NOW.digest)
    folder.mkdir(exist_ok=True)
    content = "".join(
        f"{line}\n" for line in ['"row","p0","p1"', *(f"{row},0.25,0.75" for row in rows)]
    ).encode()
    path = folder / shard_name(start, start + len(rows), content)
    path.write_bytes(content)
    return path


def complete(rundir: RunDir, bad_rows: dict[int, str] | None = None) -> None:
    lines = ["id,a,b", *(f'"{row}\n",0.{row + 1},1' for row in range(ROWS))]
    rundir.predictions("m").write_text("\n".join([*lines, ""]))
    digest = file_sha256(rundir.predictions("m"))
    work = find(rundir)
    work.bad_rows, work.is_done[:] = bad_rows or {}, True
    write_manifest(rundir, work, digest, COMPUTED)


@pytest.mark.fault(17)
def test_shards_that_are_not_what_their_names_say_are_done_again(rundir: RunDir) -> None:
    write_shard(rundir, [4, 1])
    cut, edited = write_shard(rundir, [0, 2], 2), write_shard(rundir, [3], 4)
    assert find(rundir).is_done.tolist() == [True, True, True, True, True, False]
    cut.write_bytes(cut.read_bytes()[:-4])
    edited.write_bytes(edited.read_bytes().replace(b"0.25", b"0.35"))
    work = find(rundir)
    assert work.is_done.tolist() == [False, True, False, False, True, False]
    assert not cut.exists()
    assert not edited.exists()
    (shard,) = shards_in(work.shards_dir, ROWS)
    assert shard.column("row").to_pylist() == [4, 1]
    assert shard.column("p1").to_pylist() == [0.75, 0.75]


def test_an_empty_shard_is_a_shard(rundir: RunDir) -> None:
    write_shard(rundir, [])
    work = find(rundir)
    assert not work.is_done.any()
    assert [len(shard) for shard in shards_in(work.shards_dir, ROWS)] == [0]


def test_shards_of_other_work_are_not_taken(rundir: RunDir) -> None:
    write_shard(rundir, [0, 1, 2])
    assert find(rundir).is_done.any()
    assert not find(rundir, replace(NOW, content={**NOW.content, "weights": "e" * 64})).is_done.any()


def test_complete_predictions_are_done(rundir: RunDir) -> None:
    complete(rundir)
    work = find(rundir)
    assert work.is_complete
    assert work.is_done.all()
    assert work.computed_before == (COMPUTED,)
    other = find(rundir, replace(NOW, content={**NOW.content, "weights": "e" * 64}, rows="f" * 64))
    assert not other.is_complete
    assert other.why_again.startswith("weights, rows changed")


@pytest.mark.parametrize("harm", ["edited", "missing", "no manifest", "broken manifest", "odd manifest"])
@pytest.mark.fault(17)
def test_predictions_that_are_not_what_their_manifest_says_are_made_again(rundir: RunDir, harm: str) -> None:
    complete(rundir)
    predictions, manifest = rundir.predictions("m"), rundir.manifest("m")
    if harm == "edited":
        predictions.write_text(predictions.read_text().replace("0.5,1", "0.6,1"))
    elif harm == "missing":
        predictions.unlink()
    elif harm == "no manifest":
        manifest.unlink()
    elif harm == "broken manifest":
        manifest.write_text(manifest.read_text()[:-9])
    else:
        manifest.write_text(json.dumps([1, {"fingerprint": 3}]))
    work = find(rundir)
    assert not work.is_complete
    assert not work.is_done.any()


def test_rows_that_could_not_be_computed_are_tried_again_unless_they_are_to_be_uniform(
    rundir: RunDir,
) -> None:
    write_shard(rundir, [0, 1, 2, 3])
    write_bad_rows(find(rundir), {5: "too long"})
    assert np.flatnonzero(~find(rundir).is_done).tolist() == [4, 5]
    kept = find(rundir, keeps_bad_rows=True)
    assert np.flatnonzero(~kept.is_done).tolist() == [4]
    assert kept.bad_rows == {5: "too long"}
    complete(rundir, {5: "too long"})
    assert find(rundir, keeps_bad_rows=True).is_complete
    again = find(rundir)
    assert not again.is_complete
    assert np.flatnonzero(~again.is_done).tolist() == [4, 5], "the shards still count"
    shutil.rmtree(again.shards_dir)
    again = find(rundir)
    ids = pa.chunked_array([[f"{row}\n" for row in range(ROWS)]])
    take_over(again, ids, rundir, labels=2, keeps_bad_rows=False)
    assert np.flatnonzero(~again.is_done).tolist() == [5], "and where they are gone, the predictions"
    (shard,) = shards_in(again.shards_dir, ROWS)
    assert shard.column("p0").to_pylist() == [0.1, 0.2, 0.3, 0.4, 0.5]
