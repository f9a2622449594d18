"""Capped attention in blocks gives what transformers' own eager attention gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma2ForSequenceClassification
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from ensemble.members.huggingface.loading.capped_attention import capped_blocks, register_capped_blocks
from ensemble.members.huggingface.spec import CAPPED_BLOCKS, QUERIES_PER_BLOCK

# Into the third block, and beyond the window of half the layers.
LONG, WINDOW = 2 * QUERIES_PER_BLOCK + 41, QUERIES_PER_BLOCK + 30
# The scores of a tiny random model are near 0, where a cap does nothing; this scale brings them to it.
LARGE = 40.0


def tiny(architecture: Any, **settings: Any) -> Any:
    """A Gemma-2 of two layers, one with a sliding window, whose scores reach the cap."""
    register_capped_blocks()
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        attn_logit_softcapping=5.0,
        pad_token_id=0,
        **settings,
    )
    model = architecture(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "v_proj" in name:
                weight.mul_(LARGE)
    return model


def numbers(model: Any, attention: str, **inputs: Any) -> torch.Tensor:
    model.config._attn_implementation = attention
    with torch.inference_mode():
        logits: torch.Tensor = model(**inputs).logits
    return logits


@pytest.mark.parametrize("side", ["left", "right", None])
def test_a_classifier_has_the_numbers_of_eager_attention(side: str | None) -> None:
    model = tiny(Gemma2ForSequenceClassification, num_labels=3)
    ids = torch.randint(1, 97, (3, LONG))
    mask = torch.ones_like(ids)
    if side is not None:
        for row, missing in enumerate([0, 7, LONG - 20]):
            padding = slice(0, missing) if side == "left" else slice(LONG - missing, LONG)
            ids[row, padding], mask[row, padding] = 0, 0
    blocks = numbers(model, CAPPED_BLOCKS, input_ids=ids, attention_mask=mask)
    eager = numbers(model, "eager", input_ids=ids, attention_mask=mask)
    torch.testing.assert_close(blocks, eager, rtol=0, atol=2e-5)
    uncapped = tiny(Gemma2ForSequenceClassification, num_labels=3)
    for layer in uncapped.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    assert (numbers(uncapped, "eager", input_ids=ids, attention_mask=mask) - eager).abs().max() > 5e-4


def test_without_a_mask_queries_see_no_later_keys() -> None:
    model = tiny(Gemma2ForCausalLM)
    ids = torch.randint(1, 97, (2, LONG))
    blocks, eager = (numbers(model, attention, input_ids=ids) for attention in (CAPPED_BLOCKS, "eager"))
    torch.testing.assert_close(blocks, eager, rtol=0, atol=2e-5)


def test_keys_and_values_of_a_prefix_are_seen() -> None:
    model = tiny(Gemma2ForCausalLM)
    ids = torch.randint(1, 97, (2, LONG))
    whole = numbers(model, "eager", input_ids=ids)
    model.config._attn_implementation = CAPPED_BLOCKS
    split = LONG - QUERIES_PER_BLOCK - 5
    with torch.inference_mode():
        prefix = model(input_ids=ids[:, :split], use_cache=True)
        name = "cache" if "cache" in prefix else "past_key_values"  # since transformers 5.24
        cache = {name: prefix[name]}
        rest = model(input_ids=ids[:, split:], attention_mask=torch.ones_like(ids), **cache)
    torch.testing.assert_close(rest.logits, whole[:, split:], rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_no_further_from_float32_than_eager_is(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    module: Any = SimpleNamespace(num_key_value_groups=2, is_causal=True, training=False, head_dim=64)
    query = torch.randn(2, 4, LONG, 64) * 4
    key, value = torch.randn(2, 2, 2, LONG, 64).unbind(0)
    causal = torch.full((LONG, LONG), torch.finfo(torch.float32).min).triu(1)[None, None]
    expected, _ = eager_attention_forward(module, query, key, value, causal, softcap=20.0)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    causal = torch.full((LONG, LONG), torch.finfo(dtype).min, dtype=dtype).triu(1)[None, None]
    eager, _ = eager_attention_forward(module, query, key, value, causal, softcap=20.0)
    blocks, _ = capped_blocks(module, query, key, value, None, softcap=20.0)
    assert blocks.dtype == dtype
    assert (blocks - expected).abs().mean() <= 1.1 * (eager - expected).abs().mean()


def test_a_mask_of_numbers_is_added_and_a_module_that_is_not_causal_sees_all_keys() -> None:
    module: Any = SimpleNamespace(num_key_value_groups=1, is_causal=False, training=False, head_dim=8)
    query, key, value = torch.randn(3, 1, 2, LONG, 8).unbind(0)
    mask = torch.randn(1, 1, LONG, LONG)
    for each in (mask, None):
        expected, _ = eager_attention_forward(module, query, key, value, each, softcap=2.0)
        actual, weights = capped_blocks(module, query, key, value, each, softcap=2.0)
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)
        assert weights is None
