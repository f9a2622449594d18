"""Byte-level BPE tokenizers, trained on the spot on words that are made up."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.data import Words

VOCABULARY = 4096
_WORDS = 3000
_ONSETS = "b c d f g h k l m n p r s t v w st tr pl gr sh ch br".split()
_VOWELS = "a e i o u ai ea ou".split()
_CODAS = ["", "", "", "n", "r", "s", "t", "l", "nd", "ng"]


def save_tokenizer(
    folder: Path,
    texts: Iterable[str],
    *,
    vocabulary: int = VOCABULARY,
    kind: str = "decoder",
    pad: str | None = "<pad>",
    side: str = "right",
) -> Any:
    """Train a fast tokenizer and save it.

    Args:
        kind: "encoder" adds [CLS] and [SEP] around texts, "decoder" a <bos> before them.
        pad: None for a tokenizer without a pad token.
        side: where transformers shall pad.

    Returns:
        A ``PreTrainedTokenizerFast``.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    names: dict[str, str] = {}
    if kind == "encoder":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 3), ("[SEP]", 4)],
        )
        names = {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    else:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 1)]
        )
        names = {"bos_token": "<bos>", "eos_token": "<eos>"}
    inputs = ["input_ids", "attention_mask"] + (["token_type_ids"] if kind == "encoder" else [])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, padding_side=side, model_input_names=inputs, **names
    )
    fast.save_pretrained(folder)
    return fast


def made_up_words(count: int = _WORDS, seed: int = 0) -> list[str]:
    """Different words of one to three syllables, the same ones for the same seed."""
    chooser = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        syllables = chooser.choices((1, 2, 3), (3, 5, 2))[0]
        parts = (chooser.choice(_ONSETS) + chooser.choice(_VOWELS) for _ in range(syllables))
        found["".join(parts) + chooser.choice(_CODAS)] = None
    return list(found)


def counted(folder: Path, words: Iterable[str]) -> Words:
    """The words with the tokens that each takes of this checkpoint's tokenizer.

    A byte-level BPE takes each word with the space before it by itself, so that a text takes their sum.
    """
    from tokenizers import Tokenizer

    known = list(words)
    found = Tokenizer.from_file(str(folder / "tokenizer.json")).encode_batch(
        [f" {word}" for word in known], add_special_tokens=False
    )
    return Words(tuple(known), tuple(len(each.ids) for each in found))
