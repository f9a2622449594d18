"""Layers on disk or in the CPU's memory: the same numbers as from a model that is whole in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from tests.checkpoints import make_checkpoint, make_texts, reference
from tests.members.huggingface.scoring.test_predict import LABELS, compute, worker_spec

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = make_texts(20, longest=25)
ROWS = [{"text": text} for text in TEXTS]
# The tiny models have 390 kB of weights in float32, their embedding 92 kB.
SOME, NOTHING, EVERYTHING = 300_000, 1_000, 10_000_000
BY_HAND = {
    **{"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu"},
    **{"model.norm": "cpu", "model.rotary_emb": "cpu", "score": "cpu"},
}


def offloaded(folder: Path, cpu_bytes: int, disk: Path | None, **changes: Any) -> Any:
    offload_folder = None if disk is None else str(disk)
    return worker_spec(folder, max_memory={"cpu": cpu_bytes}, offload_folder=offload_folder, **changes)


@pytest.mark.parametrize(
    ("architecture", "cpu_bytes"),
    [("llama", SOME), ("gemma2", SOME), ("llama", NOTHING), ("gpt2", NOTHING), ("bert", NOTHING)],
)
def test_layers_on_disk_give_the_same_numbers(architecture: str, cpu_bytes: int, tmp_path: Path) -> None:
    from ensemble.members.huggingface.loading.load import load

    folder = make_checkpoint(tmp_path / "model", architecture, LABELS)
    spec = offloaded(folder, cpu_bytes, tmp_path / "disk")
    if cpu_bytes == NOTHING and not transformers.__version__.startswith("5.23"):
        with pytest.raises(ValueError, match="cannot keep a whole model on the disk"):
            load(spec)
        return
    loaded = load(spec)
    devices = {name: parameter.device.type for name, parameter in loaded.model.named_parameters()}
    assert "meta" in devices.values(), "nothing was offloaded"
    assert ("cpu" in devices.values()) == (cpu_bytes == SOME)
    (note,) = loaded.notes
    assert "on the disk" in note
    assert ("on the CPU" in note) == (cpu_bytes == SOME)
    np.testing.assert_allclose(compute(spec, ROWS), reference(folder, TEXTS), atol=1e-5)


def test_half_precision_files_are_read_as_float32(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", LABELS, dtype="bfloat16")
    got = compute(offloaded(folder, SOME, tmp_path / "disk"), ROWS)
    np.testing.assert_allclose(got, reference(folder, TEXTS), atol=1e-5)


def test_what_fits_stays_in_memory(tmp_path: Path) -> None:
    from ensemble.members.huggingface.loading.load import load

    folder = make_checkpoint(tmp_path / "model", "llama", LABELS)
    loaded = load(offloaded(folder, EVERYTHING, tmp_path / "disk"))
    assert {parameter.device.type for parameter in loaded.model.parameters()} == {"cpu"}
    assert loaded.notes == ()


def test_nothing_is_offloaded_that_nobody_asked_for(tmp_path: Path) -> None:
    from ensemble.members.huggingface.loading.load import load

    folder = make_checkpoint(tmp_path / "model", "llama", LABELS)
    message = (
        r"does not fit into the CPU memory it may use \(max_memory.cpu\): . of its . blocks.*offload_folder"
    )
    with pytest.raises(ValueError, match=message):
        load(offloaded(folder, SOME, None))


def test_layers_placed_by_hand(tmp_path: Path) -> None:
    from ensemble.members.huggingface.loading.load import load

    folder = make_checkpoint(tmp_path / "model", "llama", LABELS)
    spec = worker_spec(folder, device_map=BY_HAND, offload_folder=str(tmp_path / "disk"))
    model = load(spec).model
    on_disk = {name for name, parameter in model.named_parameters() if parameter.device.type == "meta"}
    assert {name.split(".")[2] for name in on_disk} == {"0"}
    np.testing.assert_allclose(compute(spec, ROWS), reference(folder, TEXTS), atol=1e-5)


def test_offload_of_eight_bits_keeps_layers_in_float32(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from ensemble.members.huggingface.loading.load import load

    folder = make_checkpoint(tmp_path / "model", "llama", LABELS)
    settings = {"load_in_8bit": True, "llm_int8_enable_fp32_cpu_offload": True}
    options = {"device_map": BY_HAND, "offload_folder": str(tmp_path / "disk")}
    got = compute(worker_spec(folder, quantization_config=settings, **options), ROWS)
    # Of bitsandbytes' layers none is left where all of them are on the CPU or on disk.
    np.testing.assert_allclose(got, reference(folder, TEXTS), atol=1e-5)
    with pytest.raises(ValueError, match="llm_int8_enable_fp32_cpu_offload=True"):
        load(worker_spec(folder, quantization_config={"load_in_8bit": True}, **options))
