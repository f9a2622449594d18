"""Quantized weights on the CPU, against plain transformers with the same settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import make_checkpoint, make_texts, make_tokenizer, reference
from tests.members.huggingface.scoring.test_predict import LABELS, compute, worker_spec
from tests.sampling import one_in

pytest.importorskip("bitsandbytes")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:MatMul8bitLt"),  # it says that it casts to float16
]
TEXTS = make_texts(15, longest=25)
ROWS = [{"text": text} for text in TEXTS]
EIGHT_BITS = {"load_in_8bit": True}
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def quantized(folder: Path, settings: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig

    return AutoModelForSequenceClassification.from_pretrained(
        folder,
        dtype=torch.float32,
        device_map={"": "cpu"},
        quantization_config=BitsAndBytesConfig(**settings, llm_int8_skip_modules=["score", "classifier"]),
    ).eval()


def expected(model: Any, folder: Path) -> np.ndarray:
    """One row at a time."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = [model(**tokenizer([text], return_tensors="pt")).logits[0] for text in TEXTS]
    return torch.stack(logits).double().softmax(-1).numpy()


@pytest.mark.parametrize("architecture", one_in(2, ["llama", "bert"]))
def test_eight_bits(architecture: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, architecture, LABELS)
    model = quantized(folder, EIGHT_BITS)
    wanted = expected(model, folder)
    assert 1e-4 < np.abs(wanted - reference(folder, TEXTS)).max() < 0.3, "eight bits must show, but not much"
    spec = worker_spec(folder, quantization_config=EIGHT_BITS, batch_size=1)
    np.testing.assert_allclose(compute(spec, ROWS), wanted, atol=1e-5)
    # In a batch the neighbours' outliers decide which columns stay in float16.
    together = compute(worker_spec(folder, quantization_config=EIGHT_BITS), ROWS)
    np.testing.assert_allclose(together, wanted, atol=0.1)


def test_a_checkpoint_that_was_saved_in_four_bits(tmp_path: Path) -> None:
    import torch

    from ensemble.members.huggingface.loading.load import load
    from tests.checkpoints import inspect_folder

    folder = make_checkpoint(tmp_path / "whole", "llama", LABELS)
    model = quantized(folder, FOUR_BITS)
    saved = tmp_path / "four bits"
    model.save_pretrained(saved)
    make_tokenizer(saved)
    checkpoint = inspect_folder(saved, LABELS)
    assert checkpoint.quantization is not None
    assert checkpoint.quantization["quant_method"] == "bitsandbytes"
    loaded = load(worker_spec(saved))
    assert loaded.model.model.layers[0].mlp.up_proj.weight.dtype == torch.uint8
    assert loaded.model.score.weight.dtype == torch.float32
    np.testing.assert_allclose(compute(worker_spec(saved), ROWS), expected(model, folder), atol=1e-5)


def test_weights_that_are_unpacked_before_the_first_pass(tmp_path: Path) -> None:
    """compressed-tensors does so in a hook on the whole model, which runs only with the whole model."""
    import torch
    from transformers import AutoModelForSequenceClassification

    from ensemble.members.huggingface.loading.model import _run_first_hooks

    folder = make_checkpoint(tmp_path, "llama", LABELS)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    weight = model.model.layers[0].mlp.up_proj.weight
    packed = torch.nn.Parameter(torch.zeros_like(weight))
    model.model.layers[0].mlp.up_proj.weight = packed

    def unpack(module: Any, arguments: Any) -> None:
        module.model.layers[0].mlp.up_proj.weight = weight
        hook.remove()

    hook = model.register_forward_pre_hook(unpack)
    _run_first_hooks(model)
    assert model.model.layers[0].mlp.up_proj.weight is weight
    assert not model._forward_pre_hooks


STORED = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16"}
STORED_FLOAT32 = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}


@pytest.mark.parametrize(
    ("stored", "capability", "dtype", "expected"),
    [
        (STORED, (7, 5), "float16", "float16"),
        ({**STORED, "bnb_4bit_compute_dtype": "torch.bfloat16"}, (7, 0), "float32", "float16"),
        (STORED, (8, 0), "bfloat16", None),
        (STORED, (9, 0), "float32", None),
        (STORED, None, "float32", None),
        (STORED_FLOAT32, (7, 5), "float16", "float16"),
        (STORED_FLOAT32, (7, 5), "bfloat16", "float16"),  # asked for, and only emulated
        (STORED_FLOAT32, (8, 0), "bfloat16", "bfloat16"),
        ({"load_in_4bit": True}, (9, 0), "bfloat16", "bfloat16"),  # transformers' default is float32
        (STORED_FLOAT32, (8, 0), "float32", None),
        (STORED_FLOAT32, (8, 0), "auto", None),
        (STORED_FLOAT32, None, "bfloat16", None),  # on a CPU
        ({"load_in_8bit": True, "bnb_4bit_compute_dtype": "bfloat16"}, (7, 5), "float16", None),
        (None, (7, 5), "float16", None),
    ],
)
def test_stored_layers_compute_in_half_precision_where_others_do(
    stored: dict[str, Any] | None, capability: tuple[int, int] | None, dtype: str, expected: str | None
) -> None:
    from ensemble.members.huggingface.spec import choose_compute_dtype

    assert choose_compute_dtype(stored, capability, dtype) == expected


def test_stored_float32_layers_compute_in_half_precision_with_a_note(tmp_path: Path) -> None:
    import torch

    from ensemble.members.huggingface.loading.load import load

    folder = make_checkpoint(tmp_path / "m", "llama", LABELS)
    saved = tmp_path / "four bits"
    quantized(folder, {**FOUR_BITS, "bnb_4bit_compute_dtype": torch.float32}).save_pretrained(saved)
    make_tokenizer(saved)
    loaded = load(worker_spec(saved, dtype="bfloat16", compute_dtype="bfloat16"))
    types = {layer.compute_dtype for layer in loaded.model.modules() if hasattr(layer, "compute_dtype")}
    assert types == {torch.bfloat16}
    (note,) = [note for note in loaded.notes if note.startswith("4-bit layers")]
    assert note == (
        "4-bit layers compute in bfloat16: float32, as the checkpoint says, is several times slower, and the other "
        "layers are in half precision; dtype: float32 keeps it"
    )
    kept = load(worker_spec(saved, dtype="float32"))
    assert {layer.compute_dtype for layer in kept.model.modules() if hasattr(layer, "compute_dtype")} == {
        torch.float32
    }
    assert not [note for note in kept.notes if note.startswith("4-bit layers")]


def test_stored_layers_compute_as_the_plan_says(tmp_path: Path) -> None:
    import torch

    from ensemble.members.huggingface.loading.load import load

    folder = make_checkpoint(tmp_path / "m", "llama", LABELS)
    saved = tmp_path / "four bits"
    quantized(folder, {**FOUR_BITS, "bnb_4bit_compute_dtype": torch.bfloat16}).save_pretrained(saved)
    make_tokenizer(saved)

    def compute_dtypes(loaded: Any) -> set[torch.dtype]:
        return {module.compute_dtype for module in loaded.model.modules() if hasattr(module, "compute_dtype")}

    before, after = load(worker_spec(saved)), load(worker_spec(saved, compute_dtype="float16"))
    assert compute_dtypes(before) == {torch.bfloat16}
    assert compute_dtypes(after) == {torch.float16}
    assert before.notes == ()
    assert [note.split(":")[0] for note in after.notes] == ["4-bit layers compute in float16"]
    seen = []
    layer = after.model.model.layers[0].mlp.down_proj
    layer.register_forward_hook(lambda module, inputs, output: seen.append(module.compute_dtype))
    tokens = torch.arange(3, 20)[None]
    with torch.no_grad():
        in_float16 = after.model(tokens).logits.double().softmax(-1)
        as_stored = before.model(tokens).logits.double().softmax(-1)
    assert seen == [torch.float16], "bitsandbytes has not chosen another at the first pass"
    assert 0 < (in_float16 - as_stored).abs().max() < 0.2
