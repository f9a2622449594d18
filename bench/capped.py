"""Attention in blocks against eager attention, for Gemma-2's shape on a CPU: ``python -m bench.capped``.

Both take turns on the same rows, with one thread. Prints markdown: the ratio of CPU time over several rounds
(median, smallest and largest), for the attention alone and for layers as wide as Gemma-2-2B's, and how far results
are apart.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Gemma2Config, Gemma2Model
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from bench.machine import machine, versions
from bench.shapes import GEMMA_2_2B
from bench.table import plain_table
from ensemble.members.huggingface.loading.capped_attention import capped_blocks, register_capped_blocks
from ensemble.members.huggingface.spec import CAPPED_BLOCKS

_WIDTHS = (512, 1024, 2048)
_TOKENS = 2048
_ROUNDS = 7
_HEADS, _KEY_HEADS, _HEAD_WIDTH, _CAP = 8, 4, 256, 50.0


def attention_alone(width: int) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    """Return calls of both attentions on the same random queries, keys and values."""
    rows = _TOKENS // width
    module: Any = SimpleNamespace(num_key_value_groups=_HEADS // _KEY_HEADS, is_causal=True, training=False)
    query = torch.randn(rows, _HEADS, width, _HEAD_WIDTH)
    key, value = torch.randn(2, rows, _KEY_HEADS, width, _HEAD_WIDTH).unbind(0)
    visible = torch.ones(width, width, dtype=torch.bool).tril()[None, None]
    added = torch.zeros(1, 1, width, width).masked_fill(~visible, torch.finfo(torch.float32).min)
    options = {"scaling": _HEAD_WIDTH**-0.5, "softcap": _CAP}

    def eager() -> torch.Tensor:
        result: torch.Tensor = eager_attention_forward(module, query, key, value, added, **options)[0]
        return result

    return eager, lambda: capped_blocks(module, query, key, value, visible, **options)[0]


def layers(width: int) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    """Return passes of the same two layers, one of them with a sliding window, with both attentions."""
    shape = {**GEMMA_2_2B, "num_hidden_layers": 2, "vocab_size": 1000, "pad_token_id": 0}
    shape.pop("model_type")
    torch.manual_seed(0)
    model = Gemma2Model(Gemma2Config(**shape, use_cache=False)).eval()
    ids = torch.randint(1, 1000, (_TOKENS // width, width))
    mask = torch.ones_like(ids)
    mask[0, -7:] = 0  # so that there is padding

    def run(attention: str) -> torch.Tensor:
        model.config._attn_implementation = attention
        states: torch.Tensor = model(input_ids=ids, attention_mask=mask).last_hidden_state
        return states[mask.bool()]

    return lambda: run("eager"), lambda: run(CAPPED_BLOCKS)


def measure(pair: tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]) -> dict[str, str]:
    """Let both take turns; return the ratio of the second to the first, and how far their results are apart."""
    ratios = []
    apart = 0.0
    with torch.inference_mode():
        for _ in range(_ROUNDS):
            seconds, results = [], []
            for call in pair:
                began = time.process_time()
                results.append(call())
                seconds.append(time.process_time() - began)
            ratios.append(seconds[1] / seconds[0])
            apart = max(apart, float((results[0] - results[1]).abs().max() / results[0].abs().max()))
    ratios = sorted(ratios[1:])  # the first round allocates
    spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    return {"CPU time, in blocks / eager": spread, "apart": f"{apart:.0e}"}


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    register_capped_blocks()
    lines = []
    for name, make in (("attention alone", attention_alone), ("two layers", layers)):
        for width in _WIDTHS:
            lines.append({"what": name, "tokens of a row": f"{width:,}", **measure(make(width))})
    print(f"{time.strftime('%Y-%m-%d')}. {machine()}. {versions()}. `python -m bench.capped`.\n")
    print(plain_table(lines))


if __name__ == "__main__":
    main()
