"""Gemma-2's attention alone, packed by flex, in blocks and eager: ``python -m bench.gpu.attention``.

The same random queries, keys and values of 16,384 tokens for all. Prints rows of a table as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from bench.gpu.passes import packs
from bench.gpu.peak import half_precision
from bench.shapes import GEMMA_2_2B, GEMMA_2_9B
from ensemble.members.huggingface.loading.capped_attention import capped_blocks
from ensemble.members.huggingface.loading.flex_attention import Packing, flex
from ensemble.members.huggingface.spec import CAPPED_BLOCKS, FLEX

_TOKENS, _WIDTHS = 16_384, (512, 1024, 2048, 4096)
_REHEARSED_TOKENS, _REHEARSED_WIDTHS = 256, (64, 128)
_SECONDS = 0.3
Attention = Callable[[], torch.Tensor]


def attentions(shape: dict[str, Any], tokens: int, width: int, device: torch.device) -> dict[str, Attention]:
    """Return a call for each attention, of rows of so many tokens; each returns [tokens, heads, numbers]."""
    heads, key_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    numbers, dtype = shape["head_dim"], half_precision(device.type == "cuda")
    chooser = torch.Generator(device).manual_seed(0)
    states = [
        torch.randn(tokens, count, numbers, device=device, dtype=dtype, generator=chooser)
        for count in (heads, key_heads, key_heads)
    ]
    query, key, value = (state[None].transpose(1, 2) for state in states)
    padded = [state.view(-1, width, *state.shape[1:]).transpose(1, 2) for state in states]
    module: Any = SimpleNamespace(num_key_value_groups=heads // key_heads, is_causal=True, training=False)
    visible = torch.ones(width, width, dtype=torch.bool, device=device).tril()[None, None]
    added = torch.zeros(visible.shape, dtype=dtype, device=device)
    added.masked_fill_(~visible, torch.finfo(dtype).min)
    options = {
        "scaling": shape["query_pre_attn_scalar"] ** -0.5,
        "softcap": shape["attn_logit_softcapping"],
    }
    places = np.arange(tokens, dtype=np.int32)
    positions = places % width
    packing = Packing(places - positions + width, positions, device)  # a pass needs one for all of its layers

    def in_flex() -> torch.Tensor:
        with packing.used():
            return flex(module, query, key, value, None, **options)[0]

    def in_blocks() -> torch.Tensor:
        query, key, value = padded
        return capped_blocks(module, query, key, value, None, **options)[0]

    def eager() -> torch.Tensor:
        result: torch.Tensor = eager_attention_forward(module, *padded, added, **options)[0]
        return result

    return {
        "eager": eager,
        CAPPED_BLOCKS: in_blocks,
        **({FLEX: in_flex} if packs(device) else {}),
    }


def measured(name: str, width: int, calls: dict[str, Attention], device: torch.device) -> dict[str, Any]:
    """Return a row: each attention's time, and how far the others' results are from eager's."""
    row: dict[str, Any] = {"heads of": name, "tokens of a row": width}
    results: dict[str, torch.Tensor] = {}
    for attention, call in calls.items():

        def seconds(repeats: int, call: Attention = call) -> float:
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            torch.cuda.synchronize() if device.type == "cuda" else None
            return (time.perf_counter() - began) / repeats

        try:
            row[f"{attention}, first call, s"] = seconds(1)
            repeats = max(1, min(100, int(_SECONDS / seconds(1))))
            row[f"{attention}, ms"] = 1000 * seconds(repeats)
            results[attention] = call().flatten(0, -3).float()
        except torch.OutOfMemoryError:
            continue
    if "eager" in results:
        eager = results.pop("eager")
        for attention, result in results.items():
            row[f"{attention} apart"] = f"{float((result - eager).abs().max() / eager.abs().max()):.0e}"
    return row


def rows(device: torch.device) -> Iterator[dict[str, Any]]:
    on_gpu = device.type == "cuda"
    tokens, widths = (_TOKENS, _WIDTHS) if on_gpu else (_REHEARSED_TOKENS, _REHEARSED_WIDTHS)
    for name, shape in (("gemma9b", GEMMA_2_9B), ("gemma2b", GEMMA_2_2B)):
        for width in widths:
            yield measured(name, width, attentions(shape, tokens, width, device), device)


def main() -> None:
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    with torch.inference_mode():
        for row in rows(device):
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
