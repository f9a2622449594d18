"""What is done before a device is free: nothing fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.members.huggingface.scoring.test_predict import LABELS, predictor, worker_spec
from tests.worker.test_session import publish


@pytest.mark.usefixtures("one_thread")
def test_what_is_wrong_with_a_checkpoint_shows_when_it_is_loaded(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", "llama", LABELS)
    (folder / "model.safetensors").unlink()
    member = predictor(worker_spec(folder, **publish(tmp_path, {"text": ["a"]})))
    with pytest.raises(ValueError, match="no safetensors weights"):
        member.load()


@pytest.mark.parametrize("gpus", [0, 1])
def test_the_driver_is_started_before_a_gpu_is_free(
    gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a part of a second, which would otherwise pass between two members."""
    import torch

    started = []

    def start() -> bool:
        started.append("driver")
        return False

    monkeypatch.setattr(torch.cuda, "is_available", start)
    folder = make_checkpoint(tmp_path / "m", "llama", LABELS)
    predictor(worker_spec(folder, gpus=gpus, **publish(tmp_path, {"text": ["a"]})))
    assert started == ["driver"] * gpus
