"""Adapters on their base, against plain transformers and peft run one row at a time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import (
    adapter_reference,
    four_bits_tolerance,
    make_adapter,
    make_base,
    make_checkpoint,
    make_texts,
)
from tests.members.huggingface.scoring.test_predict import LABELS, compute, worker_spec
from tests.sampling import one_in

pytest.importorskip("peft")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # peft on transformers 5
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),  # GPT-2; peft fixes it by itself
    pytest.mark.filterwarnings("ignore:Found missing adapter keys"),  # an error of ours
]
HEADLESS: dict[str, Any] = {"task_type": None, "target_modules": ["q_proj", "v_proj"]}
TEXTS = make_texts(25, longest=30)
ROWS = [{"text": text} for text in TEXTS]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base without a head, in its own folder."""
    return make_base(tmp_path_factory.mktemp("bases") / "llama", "llama", pad="<pad>")


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapters") / "lora", llama, 3)


def adapted(base: Path, adapter: Path, **changes: Any) -> Any:
    return worker_spec(base, adapter_name_or_path=str(adapter), **changes)


def load_notes(spec: Any) -> tuple[str, ...]:
    from ensemble.members.huggingface.loading.load import load

    return load(spec).notes


@pytest.mark.parametrize(
    "settings",
    [
        {"use_dora": True},
        {"target_modules": ["q_proj", "embed_tokens"]},  # peft saves the embedding itself as well
        {"target_modules": ["q_proj"], "modules_to_save": ["score", "embed_tokens"]},
    ],
    ids=lambda settings: next(reversed(settings)),
)
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")  # peft's
def test_other_kinds_of_lora(settings: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", llama, 3, **settings)
    expected = adapter_reference(llama, adapter, TEXTS, 3)
    for merge in (False, True):
        got = compute(adapted(llama, adapter, merge_adapter=merge), ROWS)
        np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("architecture", one_in(2, ["llama", "gemma2", "bert", "gpt2"]))
def test_probabilities_equal_plain_peft_row_by_row(architecture: str, tmp_path: Path) -> None:
    if architecture == "bert":
        base = make_checkpoint(tmp_path / "base", "bert", ["x", "y"])  # a head of another size
    else:
        base = make_base(tmp_path / "base", architecture)
    adapter = make_adapter(tmp_path / "adapter", base, 3)
    expected = adapter_reference(base, adapter, TEXTS, 3)
    without = adapter_reference(base, make_adapter(tmp_path / "other", base, 3, seed=5), TEXTS, 3)
    assert np.abs(expected - without).max() > 0.1, "the adapter must matter"
    np.testing.assert_allclose(compute(adapted(base, adapter), ROWS), expected, atol=1e-5)


def test_merged_gives_the_same_and_is_plain_transformers(llama: Path, lora: Path) -> None:
    from ensemble.members.huggingface.loading.load import load

    expected = adapter_reference(llama, lora, TEXTS, 3)
    spec = adapted(llama, lora, merge_adapter=True)
    np.testing.assert_allclose(compute(spec, ROWS), expected, atol=1e-5)
    loaded = load(spec)
    assert not [name for name, _ in loaded.model.named_modules() if "lora" in name]
    assert loaded.notes == (f"LoRA adapter {lora}, rank 4, over 14 modules, merged into the weights",)
    assert load(adapted(llama, lora)).notes == (f"LoRA adapter {lora}, rank 4, over 14 modules, unmerged",)


def test_an_adapter_without_a_head_uses_the_bases_own(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "llama", LABELS)
    adapter = make_adapter(tmp_path / "adapter", base, 3, **HEADLESS)
    assert not any("score" in name for name in _tensors(adapter)), "the adapter must have no head"
    got = compute(adapted(base, adapter), ROWS)
    np.testing.assert_allclose(got, adapter_reference(base, adapter, TEXTS, 3), atol=1e-5)


def test_it_is_computed_in_the_models_own_type(llama: Path, lora: Path) -> None:
    import torch

    from ensemble.members.huggingface.loading.load import load

    model = load(adapted(llama, lora, dtype="bfloat16")).model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    got = compute(adapted(llama, lora, dtype="bfloat16"), ROWS)
    difference = np.abs(got - adapter_reference(llama, lora, TEXTS, 3)).max()
    assert 1e-5 < difference < 0.3


@pytest.mark.parametrize("saved", [False, True], ids=["on the fly", "saved so"])
def test_on_a_base_of_four_bits(saved: bool, llama: Path, lora: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    whole = BitsAndBytesConfig(**settings, llm_int8_skip_modules=["score"])
    base = llama
    given: dict[str, Any] | None = settings
    if saved:  # as published: nothing in it knows of a classifier's head
        only_lm_head = BitsAndBytesConfig(**settings, llm_int8_skip_modules=["lm_head"])
        base = tmp_path / "four bits"
        shutil.copytree(llama, base, ignore=shutil.ignore_patterns("*.safetensors"))
        model = AutoModelForCausalLM.from_pretrained(
            llama, quantization_config=only_lm_head, device_map="cpu"
        )
        model.save_pretrained(base)
        given = None
    expected = adapter_reference(llama, lora, TEXTS, 3, quantization_config=whole, device_map={"": "cpu"})
    got = compute(adapted(base, lora, quantization_config=given), ROWS)
    np.testing.assert_allclose(got, expected, atol=four_bits_tolerance())


def test_settings_for_the_bases_config(llama: Path, lora: Path) -> None:
    settings = {"model_kwargs": {"rms_norm_eps": 0.5, "local_files_only": True}}
    expected = adapter_reference(llama, lora, TEXTS, 3, rms_norm_eps=0.5)
    np.testing.assert_allclose(compute(adapted(llama, lora, **settings), ROWS), expected, atol=1e-5)
    assert np.abs(expected - adapter_reference(llama, lora, TEXTS, 3)).max() > 0.01, "they must matter"


def _tensors(adapter: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(adapter / "adapter_model.safetensors"))


def _changed(adapter: Path, folder: Path, change: Any) -> Path:
    from safetensors.torch import save_file

    shutil.copytree(adapter, folder)
    save_file(change(_tensors(adapter)), folder / "adapter_model.safetensors")
    return folder


def test_parts_that_are_missing_or_too_many_are_named(llama: Path, lora: Path, tmp_path: Path) -> None:
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    beyond = first.replace("layers.0", "layers.7")
    cases: dict[str, tuple[Any, str]] = {
        "headless": (
            lambda tensors: {name: tensor for name, tensor in tensors.items() if "score" not in name},
            r"has no weights for base_model\.model\.score\.weight, which its config says it was trained with",
        ),
        "half": (
            lambda tensors: {name: tensor for name, tensor in tensors.items() if name != first},
            r"has no weights for model\.layers\.0\.self_attn\.q_proj\.lora_A\.weight; they would be random",
        ),
        "deeper": (
            lambda tensors: {**tensors, beyond: tensors[first].clone()},
            r"is not for .*, which has no place for model\.layers\.7\.self_attn\.q_proj\.lora_A\.weight; it was",
        ),
    }
    for name, (change, message) in cases.items():
        with pytest.raises(ValueError, match=message):
            load_notes(adapted(llama, _changed(lora, tmp_path / name, change)))


def test_a_head_that_neither_brought(llama: Path, tmp_path: Path) -> None:
    trained_on = make_checkpoint(tmp_path / "base", "llama", LABELS)
    adapter = make_adapter(tmp_path / "adapter", trained_on, 3, **HEADLESS)
    message = r"neither .*llama nor its adapter .*adapter has weights for score\.weight; they would be random"
    with pytest.raises(ValueError, match=message):
        load_notes(adapted(llama, adapter))


def test_adapters_for_another_base(llama: Path, lora: Path, tmp_path: Path) -> None:
    bert = make_adapter(tmp_path / "bert", make_checkpoint(tmp_path / "b", "bert", LABELS), 3)
    with pytest.raises(ValueError, match=r"adapter .*bert is not for .*llama: .*it was trained on"):
        load_notes(adapted(llama, bert))
    wider = make_checkpoint(tmp_path / "wider", "llama", LABELS)
    config = json.loads((wider / "config.json").read_text())
    config |= {"hidden_size": 48, "head_dim": 12}
    (wider / "config.json").write_text(json.dumps(config))
    from transformers import AutoConfig, AutoModelForSequenceClassification

    AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(wider)).save_pretrained(wider)
    with pytest.raises(
        ValueError, match=r"is not for .*wider: size mismatch for .* it was trained on .*llama"
    ):
        load_notes(adapted(wider, lora))
