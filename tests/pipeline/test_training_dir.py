"""The files of trainings."""

from __future__ import annotations

from pathlib import Path

from ensemble.pipeline.training_dir import Part, TrainingDir


def test_what_killed_commands_left_is_removed_and_what_others_write_or_users_made_is_kept(
    tmp_path: Path,
) -> None:
    files = TrainingDir(tmp_path)
    left = [
        files.root / ".training.json.tmp-12-abababab",
        files.checkpoint("a", Part(0)).parent / ".rows.bin.tmp-12-abababab",
        files.unfinished("a", Part(1)) / "saves/0123/.best-0.pt.tmp-12-abababab",
    ]
    kept = [
        files.oof_run / ".run.json.tmp-12-abababab",  # of a command that may be in this run
        files.oof_run / "work/a/.0.shard.tmp-12-abababab",
        files.inputs_run / ".run.json.tmp-12-abababab",
        files.oof("a").with_name(".a.csv.tmp-12-abababab"),
        files.unfinished("a", Part(2)) / ".cache.tmp-12/file",  # of a user's script
        files.records,
    ]
    for path in (*left, *kept):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    files.tidy()
    assert not [path for path in left if path.exists()]
    assert all(path.exists() for path in kept)
    for path in kept:  # or they would count as left by this test
        path.unlink()
