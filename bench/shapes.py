"""Checkpoints of full size made on the spot: real configs, real names and shapes of tensors.

Their weights are holes in a file, for what only reads the headers, or random, for what runs them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.tokenizer import made_up_words, save_tokenizer

# As the models' own config.json have them (google/gemma-2-9b, google/gemma-2-2b, meta-llama/Meta-Llama-3-8B,
# google/gemma-3-270m, BAAI/bge-reranker-v2-m3).
GEMMA_2_9B: dict[str, Any] = {
    "model_type": "gemma2",
    "vocab_size": 256_000,
    "hidden_size": 3584,
    "intermediate_size": 14_336,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256,
}
GEMMA_2_2B: dict[str, Any] = {
    **GEMMA_2_9B,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
GEMMA_3_270M: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 262_144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "query_pre_attn_scalar": 256,
}
BGE_RERANKER_M3: dict[str, Any] = {
    "model_type": "xlm-roberta",
    "vocab_size": 250_002,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "max_position_embeddings": 8194,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
_KINDS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
# Numbers drawn once and written again and again: drawing 9 billion of them would take longer than running them.
_DRAWN = 1 << 22
_SPREAD = 0.02


def make_full_size(
    folder: Path,
    shape: Mapping[str, Any],
    labels: Sequence[str],
    dtype: str = "bfloat16",
    weights: str = "holes",
) -> Path:
    """A classifier's folder.

    Args:
        shape: the numbers of its config, ``model_type`` among them.
        dtype: of the weights; random ones in bfloat16 or float32.
        weights: "holes", which take no disk, or "random", normal with a deviation of 0.02, norms 1.
    """
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    save_tokenizer(folder, [f" {word}" for word in made_up_words()])
    options = {key: value for key, value in shape.items() if key != "model_type"}
    config = AutoConfig.for_model(
        shape["model_type"], **options, id2label=dict(enumerate(labels)), pad_token_id=0
    )
    config.dtype = dtype
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config, dtype=getattr(torch, dtype))
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in model.state_dict().items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _KINDS[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if weights == "random":
            drawn = _numbers(np.random.default_rng(0).normal(0, _SPREAD, _DRAWN), dtype)
            ones = _numbers(np.ones(_DRAWN), dtype)
            for name, tensor in header.items():
                is_norm = "norm" in name.lower() and name.endswith("weight")
                source = ones if is_norm else drawn
                left = tensor["data_offsets"][1] - tensor["data_offsets"][0]
                while left:
                    left -= file.write(source[: min(left, len(source))])
        file.truncate(8 + len(text) + end)
    return folder


def _numbers(values: np.ndarray, dtype: str) -> memoryview:
    narrow = values.astype(np.float32)
    if dtype == "bfloat16":  # the upper half of a float32
        return memoryview((narrow.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    return memoryview(narrow.astype(dtype).tobytes())
