"""Copies between devices that go wrong are found before the first pass, and avoided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ensemble.members.huggingface.loading import pair_copies
from ensemble.members.huggingface.loading.pair_copies import THROUGH_HOST, check_copies, wrong_pairs
from tests.checkpoints import make_checkpoint
from tests.members.huggingface.devices import Machine
from tests.members.huggingface.loading.test_spread import device_map
from tests.members.huggingface.scoring.test_predict import LABELS, worker_spec

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICES = [torch.device(f"ipu:{index}") for index in range(3)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of few bytes, beside a small product: here no copy takes time."""
    monkeypatch.setattr(pair_copies, "_SIZES", (1 << 10, 1 << 12))
    monkeypatch.setattr(pair_copies, "_BUSY_WIDTH", 16)


def check_that_it_is_found(how: str) -> None:
    with Machine() as machine:
        assert wrong_pairs(DEVICES) == []
        machine.wrong = {("ipu:0", "ipu:2"): how}
        assert wrong_pairs(DEVICES) == [(DEVICES[0], DEVICES[2])]
        assert wrong_pairs(DEVICES[:1]) == []


@pytest.mark.parametrize("how", ["zeros", "late"])
def test_a_pair_whose_copies_are_wrong_is_found(how: str, small: None) -> None:
    check_that_it_is_found(how)


@pytest.mark.long
@pytest.mark.parametrize("how", ["zeros", "late"])
def test_it_is_found_by_copies_of_real_sizes(how: str) -> None:
    check_that_it_is_found(how)


@pytest.mark.parametrize("how", ["zeros", "late"])
def test_a_spread_model_avoids_them_and_says_so(how: str, tmp_path: Path, small: None) -> None:
    from accelerate import dispatch_model

    from ensemble.members.huggingface.loading.load import load
    from ensemble.members.huggingface.scoring.classifier import Classifier
    from ensemble.members.huggingface.scoring.encode import Encoded

    folder = make_checkpoint(tmp_path / "model", "llama", LABELS, layers=4)
    encoded = Encoded({"input_ids": [np.arange(3, 12), np.arange(3, 7)]}, np.array([9, 4]), 0)

    def logits(classifier: Classifier) -> Any:
        return classifier.logits(encoded, np.arange(2), with_mask=True)

    expected = logits(Classifier(load(worker_spec(folder)).model, 0)).numpy()
    for is_checked in (False, True):
        loaded = load(worker_spec(folder))
        notes: list[str] = []
        with Machine() as machine, torch.inference_mode():
            machine.wrong = {("ipu:0", "ipu:1"): how, ("ipu:1", "ipu:0"): how}
            skipped = list(loaded.model._skip_keys_device_placement or ())
            model = dispatch_model(
                loaded.model, device_map(loaded.model, 2), skip_keys=skipped, force_hooks=True
            )
            if is_checked:
                check_copies(model, notes)
                machine.copies.clear()
            actual = logits(Classifier(model, 0)).value.numpy()
            assert np.array_equal(actual, expected) == is_checked
            assert not is_checked or not machine.copies
        assert len(notes) == is_checked
    assert (
        "copies between GPUs deliver wrong bytes (ipu:0 to ipu:1, ipu:1 to ipu:0), so they go through the host's"
        in notes[0]
    )


def test_a_machine_whose_copies_are_right_keeps_them(tmp_path: Path) -> None:
    from ensemble.members.huggingface.loading.load import load

    model = load(worker_spec(make_checkpoint(tmp_path / "model", "llama", LABELS))).model
    assert not hasattr(model, THROUGH_HOST)
