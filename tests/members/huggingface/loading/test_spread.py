"""A model over several devices: the same numbers, and nothing goes between devices twice in a pass, or back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from tests.checkpoints import make_checkpoint
from tests.members.huggingface.devices import Machine
from tests.members.huggingface.scoring.test_predict import LABELS, worker_spec
from tests.sampling import one_in

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = [9, 4, 7]


def device_map(model: Any, devices: int) -> dict[str, str]:
    """As ``infer_auto_device_map``: in the order of the modules, so that the rotary embedding comes last."""
    layers = next(name for name, part in model.named_modules() if isinstance(part, nn.ModuleList))
    count = len(model.get_submodule(layers))
    result: dict[str, str] = {}
    seen_layers = False
    for name, _ in model.named_modules():
        if name == layers:
            seen_layers = True
            result |= {f"{layers}.{index}": f"ipu:{index * devices // count}" for index in range(count)}
        elif not layers.startswith(name) and not any(
            name.startswith(f"{item}.") for item in [*result, layers]
        ):
            result[name] = f"ipu:{devices - 1 if seen_layers else 0}"
    return result


@pytest.mark.skipif(
    not transformers.__version__.startswith("5.23"), reason="what is constant differs between releases"
)
@pytest.mark.parametrize(
    ("architecture", "devices", "constants"),
    # The mask, positions, cosines and sines; Gemma-2 has a mask for each kind of layer; encoders have a mask only.
    one_in(2, [("gemma2", 2, 5), ("llama", 2, 4), ("bert", 2, 1), ("gpt2", 2, 2)]),
)
def test_each_constant_goes_to_a_device_once_in_a_pass(
    architecture: str, devices: int, constants: int, tmp_path: Path
) -> None:
    from accelerate import dispatch_model

    from ensemble.members.huggingface.loading.load import load
    from ensemble.members.huggingface.scoring.classifier import Classifier
    from ensemble.members.huggingface.scoring.encode import Encoded
    from ensemble.members.huggingface.scoring.forward import Shortcut

    folder = make_checkpoint(tmp_path / "model", architecture, LABELS, layers=6)
    loaded, rows = load(worker_spec(folder)), np.arange(len(LENGTHS))
    ids = [np.arange(3, 3 + length) for length in LENGTHS]
    encoded = Encoded({"input_ids": ids}, np.array(LENGTHS), 0)

    def logits(classifier: Classifier) -> torch.Tensor:
        classifier.taken |= classifier.possible & {Shortcut.LAST_TOKEN}
        return classifier.logits(encoded, rows, with_mask=True)

    expected = logits(Classifier(loaded.model, 0))
    with Machine() as machine, torch.inference_mode():
        model = dispatch_model(
            loaded.model,
            device_map(loaded.model, devices),
            skip_keys=list(loaded.model._skip_keys_device_placement or ()),
            force_hooks=True,
        )
        classifier = Classifier(model, 0)
        for _ in range(2):
            machine.copies.clear()
            actual_logits = logits(classifier)
            goes = [(source.device.index, device.index) for source, device in machine.copies]
            assert all(before < after for before, after in goes), [
                (source.shape, device) for source, device in machine.copies
            ]
            assert len({(id(source.value), device) for source, device in machine.copies}) == len(goes)
            assert len(goes) == (devices - 1) * (constants + 1), "once each, and the hidden states"
            assert actual_logits.device == torch.device(f"ipu:{devices - 1}")
            np.testing.assert_array_equal(actual_logits.value.numpy(), expected.numpy())  # type: ignore[attr-defined]


@pytest.mark.long
def test_devices_compute_different_batches_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of a model on two devices, given without a wait: n of them take n + 1 turns of a device, not 2 n."""
    from accelerate import dispatch_model
    from transformers import masking_utils

    from ensemble.members.huggingface.loading.load import load
    from ensemble.members.huggingface.scoring.classifier import Classifier
    from ensemble.members.huggingface.scoring.encode import Encoded
    from ensemble.members.huggingface.scoring.forward import Shortcut

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    folder = make_checkpoint(tmp_path / "model", "llama", LABELS, layers=6)
    encoded = Encoded({"input_ids": [np.arange(3, 3 + length) for length in LENGTHS]}, np.array(LENGTHS), 0)
    rows, count = np.arange(len(LENGTHS)), 8

    def steps(batches: int, spread: bool, with_mask: bool = False) -> tuple[int, int]:
        """What so many batches take, and how often the host waits."""
        loaded = load(worker_spec(folder))
        with Machine() as machine, torch.inference_mode():
            places = device_map(loaded.model, 2)
            skipped = list(loaded.model._skip_keys_device_placement or ())
            model = dispatch_model(loaded.model, places, skip_keys=skipped, force_hooks=True)
            if spread:
                classifier = Classifier(model, 0)
                classifier.taken |= classifier.possible & {Shortcut.LAST_TOKEN, Shortcut.NO_MASK}
                assert classifier.stages == 2
            machine.busy_until.clear()
            machine.looks.clear()
            machine._host = 0
            for _ in range(batches):
                if spread:
                    classifier.logits(encoded, rows, with_mask)
                else:
                    model(torch.zeros(3, 9, dtype=torch.int64).to("ipu:0"))
            return max(machine.busy_until.values()), len(machine.looks)

    alone, _ = steps(1, spread=True)
    together, looks = steps(count, spread=True)
    assert not looks, "nothing asks a device for an answer"
    # A stage has a little more than half of the work: embeddings and masks, or the head.
    assert (count + 1) / 2 * alone <= together < 1.25 * (count + 1) / 2 * alone
    with_mask, looks = steps(count, spread=True, with_mask=True)
    assert looks
    assert with_mask < 1.4 * (count + 1) / 2 * alone, (
        "who looks into the mask waits for the first device alone"
    )
    assert steps(count, spread=False)[0] > 0.9 * count * steps(1, spread=False)[0], (
        "as accelerate leaves them"
    )


class Block(nn.Module):
    """Gives back what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, hidden_states: torch.Tensor, *others: Any, **named: Any) -> Any:
        return hidden_states, others, named


class TwoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.embedding = Block(), Block(), nn.Embedding(2, 2)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding


def test_a_copy_lasts_as_long_as_what_it_is_of_and_no_longer_than_the_pass() -> None:
    from accelerate import dispatch_model

    from ensemble.members.huggingface.loading.spread import Spread

    with Machine() as machine, torch.inference_mode():
        devices = {"first": "ipu:0", "second": "ipu:1", "embedding": "ipu:0"}
        model = dispatch_model(TwoBlocks(), devices, skip_keys=["kept"], force_hooks=True)
        spread = Spread(model)
        there = torch.device("ipu:1")
        states, mask = torch.zeros(2, device="ipu:0"), torch.arange(3, device="ipu:0")
        with spread.forward_pass():
            _, (first,), named = model.second(states, mask, nested=[{"mask": mask}], kept=mask)
            assert first.device == there
            assert named["nested"][0]["mask"] is first
            assert named["kept"] is mask, "what accelerate is told to leave where it is"
            assert model.first(states, mask)[1][0] is mask
            # Those that change from layer to layer, perhaps in place, are never kept.
            assert model.second(states)[0] is not model.second(states)[0]
            assert model.second(hidden_states=states)[0] is not model.second(hidden_states=states)[0]
            # One after the other in the same place of memory, with the same id.
            for number in range(50):
                item = torch.full((2,), number, device="ipu:0")
                assert int(model.second(states, item)[1][0].value[0]) == number
                del item
                machine.copies.clear()  # which holds on to it
            assert len(spread._copies) == 1
        assert not len(spread._copies)
        with spread.forward_pass():
            assert model.second(states, mask)[1][0] is not first
        machine.copies.clear()
        model.second(states, mask, mask=mask)
        assert len(machine.copies) == 3, "outside of a pass accelerate does what it does"


def test_a_model_in_one_place_is_left_alone(tmp_path: Path) -> None:
    from ensemble.members.huggingface.loading.load import load
    from ensemble.members.huggingface.scoring.classifier import Classifier

    folder = make_checkpoint(tmp_path / "model", "llama", LABELS)
    spec = worker_spec(folder, max_memory={"cpu": 300_000}, offload_folder=str(tmp_path / "disk"))
    for model in (load(worker_spec(folder)).model, load(spec).model):
        Classifier(model, 0)
        assert not any(part._forward_pre_hooks for part in model.modules())
