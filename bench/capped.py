"""Attention with capped scores on a CPU, by eager, in blocks and by flex: ``python -m bench.capped``.

All take turns on the same rows, with one thread. Prints markdown: ratios of CPU time over several rounds (median,
smallest and largest), for the attention alone and for layers as wide as Gemma-2-2B's, how far results are apart,
and how long flex compiles. A second table has a layer of Llama-3-8B, whose rows are padded for sdpa and packed for
flex.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import Gemma2Config, Gemma2Model, LlamaConfig, LlamaModel
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from bench.machine import machine, versions
from bench.shapes import GEMMA_2_2B, LLAMA_3_8B
from bench.table import plain_table
from ensemble.members.huggingface.loading.capped_attention import capped_blocks
from ensemble.members.huggingface.loading.flex_attention import Packing, flex, register_flex
from ensemble.members.huggingface.scoring.packing import Layout, lay_out
from ensemble.members.huggingface.spec import CAPPED_BLOCKS, FLEX, FLEX_BLOCK

Calls = Mapping[str, Callable[[], torch.Tensor]]
_WIDTHS = (512, 1024, 2048)
_TOKENS = 2048
_ROUNDS = 7
_HEADS, _KEY_HEADS, _HEAD_WIDTH, _CAP = 8, 4, 256, 50.0
# A batch of sorted rows, of which about 3 % are padding.
_SORTED = (530, 520, 510, 500, 490)


def packed(rows: list[torch.Tensor], tokens: int = _TOKENS) -> tuple[Layout, Packing]:
    """Return rows of token ids one behind the other."""
    layout = lay_out(np.empty(0, dtype=np.int64), [row.numpy() for row in rows], tokens)
    return layout, Packing(layout.ends, layout.positions, torch.device("cpu"))


def attention_alone(width: int) -> Calls:
    """Return calls of all attentions on the same random queries, keys and values."""
    rows = _TOKENS // width
    module: Any = SimpleNamespace(num_key_value_groups=_HEADS // _KEY_HEADS, is_causal=True, training=False)
    query = torch.randn(rows, _HEADS, width, _HEAD_WIDTH)
    key, value = torch.randn(2, rows, _KEY_HEADS, width, _HEAD_WIDTH).unbind(0)
    visible = torch.ones(width, width, dtype=torch.bool).tril()[None, None]
    added = torch.zeros(1, 1, width, width).masked_fill(~visible, torch.finfo(torch.float32).min)
    options = {"scaling": _HEAD_WIDTH**-0.5, "softcap": _CAP}
    behind = [tensor.transpose(0, 1).flatten(1, 2)[None].contiguous() for tensor in (query, key, value)]
    _, packing = packed([torch.ones(width, dtype=torch.int64)] * rows)

    def by_flex() -> torch.Tensor:
        with packing.used():
            one_row, keys, values = behind
            return flex(module, one_row, keys, values, None, **options)[0].view(
                rows, width, _HEADS, _HEAD_WIDTH
            )

    return {
        "eager": lambda: eager_attention_forward(module, query, key, value, added, **options)[0],
        "in blocks": lambda: capped_blocks(module, query, key, value, visible, **options)[0],
        FLEX: by_flex,
    }


def layers(config: Any, model_class: Any, rows: list[torch.Tensor], attentions: Mapping[str, str]) -> Calls:
    """Return passes of the same layers over rows of token ids: packed for flex, padded otherwise.

    Args:
        attentions: what transformers calls them, by the names of the table.
    """
    torch.manual_seed(0)
    model = model_class(config).eval()
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    layout, packing = packed(rows, -(-int(mask.sum()) // FLEX_BLOCK) * FLEX_BLOCK)
    positions = torch.from_numpy(layout.positions[: len(layout.ids)]).long()
    places = {"input_ids": torch.from_numpy(layout.ids), "position_ids": positions}

    def run(attention: str) -> torch.Tensor:
        model.config._attn_implementation = attention
        if attention != FLEX:
            states: torch.Tensor = model(input_ids=ids, attention_mask=mask).last_hidden_state
            return states[mask.bool()]
        with packing.used():
            states = model(**{name: array[None] for name, array in places.items()}).last_hidden_state
        return states[0]

    return {name: partial(run, attention) for name, attention in attentions.items()}


def gemma(width: int) -> Calls:
    """Return passes of two layers of Gemma-2-2B, one of them with a sliding window."""
    shape = {**GEMMA_2_2B, "num_hidden_layers": 2, "vocab_size": 1000, "pad_token_id": 0}
    shape.pop("model_type")
    rows = [torch.randint(1, 1000, (width - 7 * (row == 0),)) for row in range(_TOKENS // width)]
    names = {"eager": "eager", "in blocks": CAPPED_BLOCKS, FLEX: FLEX}
    return layers(Gemma2Config(**shape, use_cache=False), Gemma2Model, rows, names)


def llama() -> Calls:
    """Return passes of a layer of Llama-3-8B over sorted rows."""
    shape = {**LLAMA_3_8B, "num_hidden_layers": 1, "vocab_size": 1000, "pad_token_id": 0}
    shape.pop("model_type")
    rows = [torch.randint(1, 1000, (width,)) for width in _SORTED]
    return layers(LlamaConfig(**shape, use_cache=False), LlamaModel, rows, {"sdpa": "sdpa", FLEX: FLEX})


def measure(calls: Calls) -> dict[str, str]:
    """Let all take turns; return their times by that of the first, and how far results are apart."""
    first_name, *others = calls
    ratios: dict[str, list[float]] = {name: [] for name in others}
    apart, compiling = 0.0, 0.0
    with torch.inference_mode():
        for number in range(_ROUNDS + 1):
            seconds, results = {}, {}
            for name, call in calls.items():
                began = time.process_time()
                results[name] = call()
                seconds[name] = time.process_time() - began
            if number == 0:  # allocates and compiles
                compiling = seconds[FLEX]
                continue
            for name in others:
                ratios[name].append(seconds[name] / seconds[first_name])
                difference = (results[name] - results[first_name]).abs().max()
                apart = max(apart, float(difference / results[first_name].abs().max()))
    shown = {
        f"{name} / {first_name}": f"{statistics.median(of_name):.2f} ({min(of_name):.2f} to {max(of_name):.2f})"
        for name, of_name in ratios.items()
    }
    return {**shown, "apart": f"{apart:.0e}", "flex's first call, s": f"{compiling:.1f}"}


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    register_flex()
    lines = []
    for name, make in (("attention alone", attention_alone), ("two layers", gemma)):
        for width in _WIDTHS:
            lines.append({"what": name, "tokens of a row": f"{width:,}", **measure(make(width))})
    print(f"{time.strftime('%Y-%m-%d')}. {machine()}. {versions()}. CPU time. `python -m bench.capped`.\n")
    print(plain_table(lines), end="\n\n")
    print(plain_table([{"what": "a layer of Llama-3-8B, 3 % padding", **measure(llama())}]))


if __name__ == "__main__":
    main()
