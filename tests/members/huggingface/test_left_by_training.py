"""What a user's command leaves, in the layouts that Trainer writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ensemble.common.errors import CheckpointError
from ensemble.members.huggingface.parent import lift_checkpoint


def make(folder: Path, content: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(content, encoding="utf-8")
    (folder / "model.safetensors").write_text(content, encoding="utf-8")


def test_a_kill_while_a_result_is_moved_up_refuses_it_not(tmp_path: Path) -> None:
    make(tmp_path / "final", "the weights")
    aside = (tmp_path / "final").rename(tmp_path / ".final.moving")
    (aside / "config.json").rename(tmp_path / "config.json")
    assert lift_checkpoint(tmp_path) == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("places", "taken"),
    [
        ([".", "checkpoint-5", "checkpoint-10"], "."),
        (["final", "checkpoint-5"], "final"),
        (["runs/final"], "runs/final"),
        (["runs/final", "runs/checkpoint-5"], "runs/final"),
        (["checkpoint-5"], "checkpoint-5"),
        (["runs/checkpoint-5"], "runs/checkpoint-5"),
        (["checkpoint-5", "checkpoint-10"], None),
        (["first", "runs/second"], None),
    ],
)
def test_layouts_of_trainer(tmp_path: Path, places: list[str], taken: str | None) -> None:
    out = tmp_path / "out"
    for place in places:
        make(out / place, place)
    if taken is None:
        with pytest.raises(CheckpointError, match="unknown which"):
            lift_checkpoint(out)
        return
    note = lift_checkpoint(out)
    assert (out / "config.json").read_text(encoding="utf-8") == taken
    assert (out / "model.safetensors").read_text(encoding="utf-8") == taken
    assert (taken in note) if "checkpoint" in taken else not note
