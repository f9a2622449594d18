"""The plan against what forward passes of real widths allocate, as a table: ``python -m tests.planning.tracking``.

Widths, heads and vocabularies are the real models'; depth is cut where a layer more allocates nothing new.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from ensemble.members.huggingface.checkpoint.weight_files import Tensor
from ensemble.members.huggingface.memory import activation, weights
from tests.checkpoints import architecture_of
from tests.planning.tracking.measure import fake_classifier, peak_bytes

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
          "head_dim", "vocab_size")  # fmt: skip
# The numbers of _SIZES, None where the family has no such key or its default is meant.
MODELS: dict[str, tuple[str, tuple[int | None, ...], Mapping[str, Any]]] = {
    "gemma2-9b": ("gemma2", (3584, 14336, 42, 16, 8, 256, 256000), {}),
    "gemma2-2b": ("gemma2", (2304, 9216, 26, 8, 4, 256, 256000), {}),
    "llama3-8b": ("llama", (4096, 14336, 32, 32, 8, None, 128256), {}),
    "qwen2.5-7b": ("qwen2", (3584, 18944, 28, 28, 4, None, 152064), {}),
    "qwen3-8b": ("qwen3", (4096, 12288, 36, 32, 8, 128, 151936), {}),
    "qwen3-0.6b": ("qwen3", (1024, 3072, 28, 16, 8, 128, 151936), {}),
    "mistral-7b": ("mistral", (4096, 14336, 32, 32, 8, None, 32000), {"sliding_window": 4096}),
    "phi3-mini": ("phi3", (3072, 8192, 32, 32, 32, None, 32064), {}),
    "gemma3-270m": ("gemma3_text", (640, 2048, 18, 4, 1, 256, 262144), {"sliding_window": 512}),
    "gemma3-1b": ("gemma3_text", (1152, 6912, 26, 4, 1, 256, 262144), {"sliding_window": 512}),
    "gpt2-xl": ("gpt2", (), {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "bert-large": ("bert", (1024, 4096, 24, 16, None, None, 30522), {}),
    "roberta-large": ("roberta", (1024, 4096, 24, 16, None, None, 50265), {"max_position_embeddings": 514}),
    "deberta-v3-large": (
        "deberta-v2",
        (1024, 4096, 24, 16, None, None, 128100),
        {
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
            "type_vocab_size": 0,
            "position_buckets": 256,
            "max_position_embeddings": 512,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
        },
    ),
    "modernbert-large": ("modernbert", (1024, 2624, 28, 16), {}),
}
BATCHES = ((256, 32), (16, 500), (8, 1024), (4, 2048))
_ONLY_EAGER = ("gemma2", "deberta-v2")
_PACKED = ("gemma2-9b", "gemma2-2b", "llama3-8b", "mistral-7b", "gemma3-270m", "gemma3-1b")
_MIB = 1 << 20


def main() -> None:
    print("| model | attention | weights, MiB | activation, MiB | planned / allocated | in total |")
    print("|---|---|---|---|---|---|")
    for name, (model_type, sizes, others) in MODELS.items():
        known = {key: size for key, size in zip(_SIZES, sizes, strict=False) if size is not None}
        attentions = ["eager"] if model_type in _ONLY_EAGER else ["sdpa", "eager"]
        for attention in (*attentions, *(["flex"] if name in _PACKED else [])):
            config = AutoConfig.for_model(model_type, **known, **others, pad_token_id=0)
            print(f"| {name} | {attention} | {' | '.join(_row(config, attention))} |", flush=True)


def _row(config: Any, attention: str) -> list[str]:
    with torch.device("meta"):
        whole = AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16)
    held = sum(parameter.nbytes for parameter in whole.parameters())
    architecture = architecture_of(config)
    tensors = [Tensor(key, "BF16", tuple(value.shape)) for key, value in whole.named_parameters()]
    planned_weights = weights(tensors, architecture, "bfloat16", None, 2).bytes
    if config.model_type != "deberta-v2":  # which keeps every layer's states
        config.num_hidden_layers = min(config.num_hidden_layers, 6)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: config.num_hidden_layers]
    planned = activation(architecture, "bfloat16", attention, 2, None, max(width for _, width in BATCHES))
    most = architecture.max_positions or (512 if config.model_type == "deberta-v2" else 1 << 30)
    batches = [(rows, width) for rows, width in BATCHES if width <= most]
    with fake_classifier(config, torch.bfloat16, attention) as (classifier, _):
        packed = [rows * width if attention == "flex" else 0 for rows, width in batches]
        peaks = [
            peak_bytes(classifier, [width] * rows, tokens)
            for (rows, width), tokens in zip(batches, packed, strict=True)
        ]
    messages = [planned.bytes(rows * width, width) for rows, width in batches]
    alone = [item / peak for item, peak in zip(messages, peaks, strict=True)]
    total = [(planned_weights + item) / (held + peak) for item, peak in zip(messages, peaks, strict=True)]
    return [
        f"{held / _MIB:,.0f}",
        f"{min(peaks) / _MIB:,.0f} to {max(peaks) / _MIB:,.0f}",
        f"{min(alone):.2f} to {max(alone):.2f}",
        f"{min(total):.3f} to {max(total):.3f}",
    ]


if __name__ == "__main__":
    main()
