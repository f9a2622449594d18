"""Classifiers of 12.5 million random weights with a tokenizer, made on the spot: ``python -m bench.checkpoints``.

A process of its own, because it imports torch and the benchmark does not.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.tokenizer import counted, made_up_words, save_tokenizer

LABELS = ("a", "b", "tie")
PAIR_LABELS = ("score",)
DECODERS = ("gemma2", "llama", "qwen3")
ENCODER = "cross"
WORDS_FILE = "words.json"
# Twice the usual deviation of weights: rows then differ by much more than rounding does.
_SPREAD = 0.04
# Two thirds of them in a vocabulary of 32,768, as in the small models of these families.
VOCABULARY = 32_768
DECODER: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ENCODER: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
}


def make(folder: Path) -> None:
    """Save the checkpoints of the benchmark, one folder each, and the words that their tokenizers know."""
    words = made_up_words()
    for kind, names in (("decoder", DECODERS), ("encoder", (ENCODER,))):
        for name in names:
            tokenizer = save_tokenizer(folder / name, [f" {word}" for word in words], kind=kind)
            _save_model(folder / name, name, len(tokenizer))
    text = json.dumps(asdict(counted(folder / ENCODER, words)))
    (folder / WORDS_FILE).write_text(text, encoding="utf-8")


def _save_model(folder: Path, name: str, vocabulary: int) -> None:
    import torch
    import transformers

    labels = PAIR_LABELS if name == ENCODER else LABELS
    common = {
        "vocab_size": vocabulary if name == ENCODER else VOCABULARY,
        "pad_token_id": 0,
        "initializer_range": _SPREAD,
        "id2label": dict(enumerate(labels)),
        "label2id": {label: index for index, label in enumerate(labels)},
    }
    if name == "gemma2":
        config: Any = transformers.Gemma2Config(
            **DECODER, **common, query_pre_attn_scalar=64, sliding_window=256
        )
    elif name == "llama":
        config = transformers.LlamaConfig(**DECODER, **common)
    elif name == "qwen3":
        config = transformers.Qwen3Config(**DECODER, **common)
    else:
        config = transformers.BertConfig(**_ENCODER, **common)
    torch.manual_seed(len(name))
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
