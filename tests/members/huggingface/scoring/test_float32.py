"""Rows that overflow half precision: run again in float32, counted, and the others untouched."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import make_checkpoint, make_texts, reference
from tests.members.huggingface.scoring.test_predict import LABELS, worker_spec
from tests.sampling import one_in

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = make_texts(60)
BUDGET = 512


def make_overflowing(folder: Path, architecture: str, factor: float = 65) -> Path:
    """A float16 checkpoint whose feed-forward layers go beyond 65,504 on some tokens, and come back at once."""
    import torch
    import transformers

    make_checkpoint(folder, architecture, LABELS, dtype="float16")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate_proj" in name or "up_proj" in name:
                parameter.mul_(factor)
            if "down_proj" in name:
                parameter.mul_(1 / factor**2)
    model.save_pretrained(folder)
    return folder


def load(folder: Path, **changes: Any) -> tuple[Any, Any, Any]:
    """The model, its classifier, and the rows' tokens."""
    from ensemble.members.huggingface.loading.load import load
    from ensemble.members.huggingface.scoring.classifier import Classifier
    from ensemble.members.huggingface.scoring.encode import Prompt

    spec = worker_spec(folder, max_length=128, **{"dtype": "float16", **changes})
    loaded = load(spec)
    encoded = Prompt(spec, loaded.tokenizer, loaded.max_length).encode([{"text": text} for text in TEXTS])
    return loaded.model, Classifier(loaded.model, loaded.pad_token_id), encoded


def run(
    model: Any, classifier: Any, encoded: Any, again: bool = True, at_once: bool = False, **sizes: Any
) -> Any:
    from ensemble.members.huggingface.loading.float32_retry import in_float32
    from ensemble.members.huggingface.scoring.forward import BatchSizes, compute

    mode = partial(in_float32, model) if again else None
    batch_sizes = BatchSizes(**{"token_budget": BUDGET, "batch_size": None, **sizes})
    return compute(classifier, encoded, batch_sizes, lambda *counts: None, mode, at_once)


def bits(model: Any) -> dict[str, tuple[str, bytes]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: (str(tensor.dtype), tensor.detach().numpy().tobytes()) for name, tensor in tensors}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    return load(make_overflowing(tmp_path_factory.mktemp("llama"), "llama"))


@pytest.mark.parametrize("architecture", one_in(2, ["gemma2", "llama"]))
@pytest.mark.fault(10)
def test_they_equal_the_weights_upcast_and_the_others_stay_as_they_were(
    architecture: str, tmp_path: Path
) -> None:
    from ensemble.members.huggingface.scoring.classifier import probabilities

    folder = make_overflowing(tmp_path, architecture)
    model, classifier, encoded = load(folder)
    before = bits(model)
    plain = run(model, classifier, encoded, again=False)
    bad = ~np.isfinite(plain.logits.numpy()).all(axis=1)
    assert 3 < bad.sum() < len(TEXTS) - 3, "some rows must overflow, others must not"
    assert plain.counters.recomputed_rows == 0
    computed = run(model, classifier, encoded)
    assert computed.counters.recomputed_rows == bad.sum()
    in_eights = run(model, classifier, encoded, batch_size=8)
    again_in_fours = -(-in_eights.counters.recomputed_rows // 4)
    assert in_eights.counters.batches == -(-len(TEXTS) // 8) + again_in_fours, (
        "as many bytes are half as many rows"
    )
    assert computed.counters.padded_tokens > plain.counters.padded_tokens
    np.testing.assert_array_equal(computed.logits.numpy()[~bad], plain.logits.numpy()[~bad])
    expected = reference(folder, TEXTS, 128)
    np.testing.assert_allclose(probabilities(computed.logits, "softmax")[bad], expected[bad], atol=1e-5)
    assert bits(model) == before
    assert not [module for module in model.modules() if "forward" in vars(module)]


def test_memory_may_run_out_on_the_way(llama: tuple[Any, Any, Any]) -> None:
    import torch

    from ensemble.members.huggingface.loading.float32_retry import in_float32
    from tests.oom.limit import AllocatorLimit

    model, classifier, encoded = llama
    before = bits(model)
    passes = run(model, classifier, encoded, again=False).counters.batches
    undisturbed = run(model, classifier, encoded)
    with AllocatorLimit(fail_at=frozenset({passes})):
        computed = run(model, classifier, encoded)
    assert computed.counters.oom_events == 1
    np.testing.assert_allclose(computed.logits.numpy(), undisturbed.logits.numpy(), atol=1e-5)
    bad = ~np.isfinite(run(model, classifier, encoded, again=False).logits.numpy()).all(axis=1)
    with AllocatorLimit(fail_at=frozenset(range(passes, 1000))):
        computed = run(model, classifier, encoded)
    assert computed.too_large_in_float32 == tuple(np.flatnonzero(bad))
    assert computed.too_large == ()
    assert computed.counters.recomputed_rows == 0
    assert bits(model) == before
    # Inside of a module that holds its upcast weights: the feed-forward's states are the first over the limit.
    short = np.argsort(encoded.lengths)[:25]
    states = 4 * 64 * 25 * int(encoded.lengths[short].max())
    with in_float32(model), pytest.raises(torch.OutOfMemoryError), AllocatorLimit(largest_bytes=states - 1):
        classifier.logits(encoded, short)
    assert bits(model) == before


def test_a_row_that_is_broken_in_float32_too_stays_so(tmp_path: Path) -> None:
    import torch

    model, classifier, encoded = load(make_checkpoint(tmp_path, "llama", LABELS))
    with torch.no_grad():
        model.get_input_embeddings().weight[int(encoded.inputs["input_ids"][0][-1])] = torch.nan
    computed = run(model, classifier, encoded)
    bad = ~np.isfinite(computed.logits.numpy()).all(axis=1)
    assert 0 < bad.sum() == computed.counters.recomputed_rows < len(TEXTS)


def test_a_member_of_which_all_rows_overflow(tmp_path: Path) -> None:
    """Also the rows that it is tried with after loading, from which nothing must be concluded.

    As of Gemma-3 on a T4: the next chunk is not tried in float16 any more.
    """
    from tests.members.huggingface.scoring.test_compute import member_of, read_shard

    folder = make_overflowing(tmp_path / "m", "gemma2", factor=250)
    ready, predict = member_of(tmp_path, folder, TEXTS, dtype="float16")
    assert ready.notes == ()
    work = predict()
    assert work.counters.recomputed_rows == len(TEXTS)
    got = read_shard(tmp_path / "shards", work.shard)[:, 1:]
    np.testing.assert_allclose(got, reference(folder, TEXTS, 128), atol=1e-5)
    at_once = predict()
    assert (at_once.counters.recomputed_rows, at_once.counters.float32_rows) == (0, len(TEXTS))
    assert (at_once.counters.rows, at_once.counters.tokens) == (work.counters.rows, work.counters.tokens)
    assert at_once.counters.padded_tokens < work.counters.padded_tokens
    assert at_once.counters.batches < work.counters.batches
    np.testing.assert_array_equal(read_shard(tmp_path / "shards", at_once.shard)[:, 1:], got)


def test_chunks_go_on_in_half_precision_where_few_rows_overflow(llama: tuple[Any, Any, Any]) -> None:
    import torch

    from ensemble.members.huggingface.scoring.encode import Encoded

    model, classifier, encoded = llama
    bad = ~np.isfinite(run(model, classifier, encoded, again=False).logits.numpy()).all(axis=1)

    def computed(rows: list[int]) -> Any:
        inputs = {name: [arrays[row] for row in rows] for name, arrays in encoded.inputs.items()}
        return run(model, classifier, Encoded(inputs, encoded.lengths[rows], 0))

    overflowing, others = np.flatnonzero(bad).tolist(), np.flatnonzero(~bad).tolist()
    most, few = (overflowing * 20)[:20], (others * 20)[:19]
    assert computed([*most, *few]).mostly_overflows
    assert not computed([*most[:19], *few]).mostly_overflows, "half of them are not most"
    assert not computed(overflowing[:3]).mostly_overflows, "so few rows tell nothing"
    # Rows that float32 does not help are no reason to compute the others in it.
    weight = model.score.weight
    before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.fill_(torch.nan)
        damaged = computed([*most, *few])
        assert damaged.counters.recomputed_rows == 39
        assert not damaged.mostly_overflows
    finally:
        with torch.no_grad():
            weight.copy_(before)


@pytest.mark.fault(10)
def test_rows_that_nothing_mends_are_left_out_with_advice(tmp_path: Path) -> None:
    import torch
    import transformers

    from tests.members.huggingface.scoring.test_compute import member_of, read_shard

    folder = make_checkpoint(tmp_path / "m", "llama", LABELS)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        model.score.weight[0] = torch.nan
    model.save_pretrained(folder)
    for dtype, tried in (("float16", "float32 gave no better"), ("float32", "it was computed in float32")):
        (tmp_path / dtype).mkdir()
        _, predict = member_of(tmp_path / dtype, folder, TEXTS, dtype=dtype)
        work = predict()
        assert work.bad_rows == tuple(range(60))
        assert len(set(work.bad_row_reasons)) == 1
        assert re.match(f"came out as NaN.*; {tried}.*damaged", work.bad_row_reasons[0])
        assert len(read_shard(tmp_path / dtype / "shards", work.shard)) == 0


# peft asks transformers for a name that has changed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_do_not_cast_back_to_half_precision(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import torch

    model, classifier, encoded = load(make_overflowing(tmp_path, "llama"))
    settings = peft.LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="SEQ_CLS"
    )
    adapted = peft.get_peft_model(model, settings, autocast_adapter_dtype=False).eval().half()
    inner = adapted.get_base_model()
    before = bits(inner)
    computed = run(inner, classifier, encoded)
    assert computed.counters.recomputed_rows > 3
    assert bits(inner) == before
    bad = ~np.isfinite(run(inner, classifier, encoded, again=False).logits.numpy()).all(axis=1)
    adapted.float()
    expected = run(inner, classifier, encoded).logits.numpy()
    np.testing.assert_allclose(computed.logits.numpy()[bad], expected[bad], atol=1e-4)
    assert torch.isfinite(computed.logits).all()


def test_flash_attention_which_is_for_half_precision_makes_way(llama: tuple[Any, Any, Any]) -> None:
    from ensemble.members.huggingface.loading.float32_retry import in_float32

    model, classifier, encoded = llama
    rows = np.arange(8)
    with in_float32(model):
        expected = classifier.logits(encoded, rows)
    model.config._attn_implementation = "flash_attention_2"
    try:
        with in_float32(model):
            got = classifier.logits(encoded, rows)
        assert model.config._attn_implementation == "flash_attention_2"
    finally:
        model.config._attn_implementation = "sdpa"
    np.testing.assert_array_equal(got.numpy(), expected.numpy())


def test_offloaded_weights_are_upcast_when_they_have_arrived(tmp_path: Path) -> None:
    import torch
    from accelerate import cpu_offload

    from ensemble.members.huggingface.loading.float32_retry import in_float32

    model, _, encoded = load(make_overflowing(tmp_path, "llama"))
    row = int(np.argmax(encoded.lengths))
    ids = torch.from_numpy(encoded.inputs["input_ids"][row])[None]
    with torch.no_grad(), in_float32(model):
        expected = model(input_ids=ids).logits
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.model.layers[0].mlp.down_proj.weight.device.type == "meta"
    with torch.no_grad():
        half = model(input_ids=ids).logits
        with in_float32(model):
            got = model(input_ids=ids).logits
        after = model(input_ids=ids).logits
    assert not torch.isfinite(half).all()
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(after, half, equal_nan=True)
    assert model.model.layers[0].mlp.down_proj.weight.device.type == "meta"


def test_four_bits_as_if_loaded_to_compute_in_float32(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    folder = make_overflowing(tmp_path, "llama")
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    half = {**settings, "bnb_4bit_compute_dtype": "float16"}
    model, classifier, encoded = load(folder, quantization_config=half)
    plain = run(model, classifier, encoded, again=False)
    before = bits(model)  # where the CPU has AVX512_BF16, bitsandbytes repacks its weights in the first pass
    bad = ~np.isfinite(plain.logits.numpy()).all(axis=1)
    assert 0 < bad.sum() < len(TEXTS)
    computed = run(model, classifier, encoded)
    assert bits(model) == before
    assert computed.counters.recomputed_rows == bad.sum()
    other = load(
        folder, quantization_config={**settings, "bnb_4bit_compute_dtype": "float32"}, dtype="float32"
    )
    expected = run(*other, again=False).logits.numpy()
    # Older releases of bitsandbytes unpack to the type that was quantized from, here float16.
    np.testing.assert_allclose(computed.logits.numpy()[bad], expected[bad], atol=2e-2)
    assert run(*other).counters.recomputed_rows == 0


def test_eight_bits_as_the_weights_they_stand_for(tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    import torch

    from ensemble.members.huggingface.loading.float32_retry import in_float32, uses_half_precision

    folder = make_overflowing(tmp_path, "llama")
    model, classifier, encoded = load(folder, quantization_config={"load_in_8bit": True})
    rows = np.arange(len(TEXTS))
    classifier.logits(encoded, rows)  # bitsandbytes moves its scales in the first pass
    assert uses_half_precision(model)
    with in_float32(model):
        got = classifier.logits(encoded, rows)
    for name, module in list(model.named_modules()):
        if isinstance(module, bitsandbytes.nn.Linear8bitLt):
            plain = torch.nn.Linear(module.in_features, module.out_features, bias=False)
            weight = bitsandbytes.functional.int8_vectorwise_dequant(module.state.CB, module.state.SCB)
            plain.weight = torch.nn.Parameter(weight, requires_grad=False)
            model.set_submodule(name, plain)
    torch.nn.Module.float(model)  # transformers refuses its own for a model that was quantized
    assert not uses_half_precision(model)
    np.testing.assert_allclose(got.numpy(), classifier.logits(encoded, rows).numpy(), atol=1e-4)


def test_what_it_does_not_know_is_not_tried(llama: tuple[Any, Any, Any]) -> None:
    from types import SimpleNamespace

    from ensemble.members.huggingface.loading.float32_retry import why_not_float32

    assert why_not_float32(llama[0]) == ""
    quantized = SimpleNamespace(
        hf_quantizer=SimpleNamespace(quantization_config=SimpleNamespace(quant_method="gptq"))
    )
    assert "gptq" in why_not_float32(quantized)
