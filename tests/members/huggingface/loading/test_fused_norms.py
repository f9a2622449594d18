"""A model with fused norms gives the numbers that it gave before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForSequenceClassification, BitsAndBytesConfig

from ensemble.members.huggingface.loading.fused_norms import FusedNorm, fuse_norms

SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_labels": 3,
    "pad_token_id": 0,
}


def model_of(architecture: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(architecture, **SIZES)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # as made they are all 1, or all 0
                weight.add_(0.3 * torch.randn_like(weight))
    return model.to(dtype)


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(1, 61, (32, 20), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        result: torch.Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return result.float()


@pytest.mark.parametrize(
    ("architecture", "norms"), [("llama", 5), ("qwen3", 9), ("mistral", 5), ("gemma", 5), ("gemma2", 9)]
)
def test_logits_stay(architecture: str, norms: int) -> None:
    model = model_of(architecture)
    before = logits(model)
    assert fuse_norms(model) == norms
    fused = [module for module in model.modules() if isinstance(module, FusedNorm)]
    assert {module.adds_one for module in fused} == {architecture.startswith("gemma")}
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_no_further_from_float32(architecture: str, dtype: torch.dtype) -> None:
    exact = logits(model_of(architecture, dtype).float())
    model = model_of(architecture, dtype)
    before = (logits(model) - exact).abs().mean()
    assert fuse_norms(model)
    assert (logits(model) - exact).abs().mean() <= 1.5 * before


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_large_weight_hides_no_wrong_formula(architecture: str, dtype: torch.dtype) -> None:
    """Rounding at 3,000 is larger than all other numbers of a row."""
    model = model_of(architecture, dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight[7] = 3000
    assert fuse_norms(model)
    fused = [module for module in model.modules() if isinstance(module, FusedNorm)]
    assert {module.adds_one for module in fused} == {architecture.startswith("gemma")}


def test_norms_in_another_type_than_their_input_compute_as_before() -> None:
    model = model_of("llama", torch.bfloat16)
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.float()
    fuse_norms(model)
    norm = model.model.norm
    hidden = torch.randn(2, 64, dtype=torch.bfloat16)
    assert torch.equal(norm(hidden), norm.original(hidden))


def test_other_norms_stay() -> None:
    assert fuse_norms(model_of("bert")) == 0

    class CubicRMSNorm(torch.nn.Module):
        """Computes something else by the usual name."""

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.weight * hidden**3

    class AddingRMSNorm(CubicRMSNorm):
        """Takes a residual, too."""

        def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
            hidden = hidden if residual is None else hidden + residual
            return functional.rms_norm(hidden, (8,), self.weight, self.eps)

    assert fuse_norms(torch.nn.Sequential(AddingRMSNorm())) == 0
    parent = torch.nn.Sequential(CubicRMSNorm())
    assert fuse_norms(parent) == 0
    model = model_of("llama")
    model.model.norm._hf_hook = object()
    assert fuse_norms(model) == 4


def test_a_model_that_computes_in_float32_for_a_while_keeps_its_numbers() -> None:
    from ensemble.members.huggingface.loading.float32_retry import in_float32

    model = model_of("gemma2", torch.bfloat16)
    with in_float32(model):
        before = logits(model)
    fuse_norms(model)
    with in_float32(model):
        torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-5)
    assert model.model.norm.weight.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore")  # libraries about each other's releases
def test_it_works_under_lora_where_weights_are_in_4_bits(tmp_path: Path) -> None:
    peft, _ = pytest.importorskip("peft"), pytest.importorskip("bitsandbytes")
    model_of("llama").save_pretrained(tmp_path)
    settings = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["score"])
    base = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, quantization_config=settings, device_map={"": "cpu"}, dtype=torch.float32
    )
    torch.manual_seed(0)
    lora = peft.LoraConfig(target_modules=["q_proj"], task_type="SEQ_CLS", init_lora_weights=False)
    model = peft.get_peft_model(base, lora).eval()
    before = logits(model)
    assert fuse_norms(model) == 5
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-5)
