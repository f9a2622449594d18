"""Check a member's tokenizer and weights before its first chunk.

Wrong files rarely raise an error: transformers makes up a vocabulary, leaves tensors out, or uses another class for
the tokenizer.  Certain mistakes are errors here; likely mistakes are notes.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer

from ensemble.common.files import read_json
from ensemble.common.text import listed
from ensemble.members.huggingface.checkpoint.adapter_files import is_head
from ensemble.members.huggingface.checkpoint.weight_files import is_left_out, stands_beside_packed
from ensemble.members.huggingface.spec import BACKBONE, CheckpointSpec, ModelSpec

# How many of a member's first rows are checked, and how many characters of each.
ROWS, CHARACTERS = 8, 1000
# Words, digits, upper case and punctuation; no tokenizer's rule for unusual characters applies to it.
_PLAIN_TEXT = "The quick brown fox jumps over 13 lazy dogs. Is it not so? Yes, it is."
# A larger share of unknown tokens means that the vocabulary is not for this kind of text.
_MAX_UNKNOWN_SHARE = 0.2
_MIN_TOKENS = 20
# Classes that use tokenizer.json as it is.
_TAKE_THE_FILE = ("TokenizersBackend", "PreTrainedTokenizerFast")
# Settings of tokenizer_config.json that override tokenizer.json: the part of the tokenizer, and the part's key.
_SETTINGS = {
    "add_prefix_space": ("pre_tokenizer", "add_prefix_space"),
    "do_lower_case": ("normalizer", "lowercase"),
    "strip_accents": ("normalizer", "strip_accents"),
    "tokenize_chinese_chars": ("normalizer", "handle_chinese_chars"),
}
# Heads that were trained for other tasks, beside those that ``is_left_out`` knows; poolers of models whose
# classifier has none; weights that a Trainer's loss keeps.
_HARMLESS = re.compile(
    r"(^|\.)(pooler|predictions|sop_classifier|lm_loss|pred_layer|multiple_choice_head|v_head|mtp"
    r"|loss|loss_fct|loss_fn|loss_function|criterion)\.|(^|\.)final_logits_bias$"
)
# Layers before the head of some classifiers that belong to it.
_BEFORE_HEAD = re.compile(r"(pre_classifier|sequence_summary|head\.(dense|norm))\.")  # the last of ModernBERT


def is_unused(spec: CheckpointSpec, key: str) -> bool:
    """Return whether a backbone's last hidden states need no weight of this name, such as a pooler's."""
    is_of_head = _HARMLESS.search(key) or is_head(key) or _BEFORE_HEAD.match(key)
    return spec.auto_class == BACKBONE and bool(is_of_head)


def check_unexpected_keys(spec: CheckpointSpec, keys: Sequence[str], is_quantized: bool) -> None:
    """Raise a ValueError for tensors that were not loaded, except those that no classifier has a place for."""
    lost = [
        key
        for key in sorted(keys)
        if not (is_left_out(key) or _HARMLESS.search(key) or is_unused(spec, key))
        and not (is_quantized and stands_beside_packed(key))
    ]
    if lost:
        changed = f", or take {', '.join(spec.model_kwargs)} out of model_kwargs" if spec.model_kwargs else ""
        raise ValueError(
            f"{spec.model_name_or_path} has weights that its config.json has no place for: {listed(lost, 4, str)}; "
            f"they would be left out. Copy the config.json that was saved with them{changed}"
        )


def check_tokenizer(spec: ModelSpec, tokenizer: Any, texts: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for everything to know about a tokenizer, given texts of the first rows."""
    name, made_by = tokenizer.name_or_path, type(tokenizer).__name__
    try:
        tokenizer([_PLAIN_TEXT], verbose=False)
    except Exception as error:  # tokenizers has no kinds of errors
        raise ValueError(
            f"the tokenizer of {name} ({made_by}) fails on plain text ({error}); see that the tokenizer_class in "
            "tokenizer_config.json is the one that its vocabulary is for"
        ) from error
    texts = [text[:CHARACTERS] for text in texts if text.strip()]
    path = _stored_file(name, spec.revision)
    if path is not None and not spec.trust_remote_code and made_by not in _TAKE_THE_FILE:
        yield from _differences(spec, tokenizer, path, texts)
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    unknown = tokenizer.unk_token_id
    count, total = sum(row.count(unknown) for row in ids), sum(map(len, ids))
    if len(texts) > 1 and count == total:
        raise ValueError(
            f"the tokenizer of {name} ({made_by}) knows nothing of its first {len(texts)} rows: no token, or only "
            f"{tokenizer.unk_token}, stands for their text; copy its vocabulary files, such as tokenizer.json, or "
            "take a checkpoint for this kind of text"
        )
    if total >= _MIN_TOKENS and count > _MAX_UNKNOWN_SHARE * total:
        yield (
            f"{count / total:.0%} of the tokens of its first {len(texts)} rows are {tokenizer.unk_token}: the "
            f"vocabulary of {name} does not know this kind of text"
        )
    if tokenizer.is_fast and tokenizer.backend_tokenizer.decoder is not None:
        known_rows = [(text, row) for text, row in zip(texts, ids, strict=True) if unknown not in row]
        lossy = [text for text, row in known_rows if _loses_text(tokenizer, text, row)]
        if lossy:
            yield (
                f"the tokenizer of {name} loses text of {len(lossy)} of its first {len(texts)} rows, such as "
                f"{lossy[0][:60]!r}, which its own rules do not explain"
            )


def _stored_file(name_or_path: str, revision: str | None) -> Path | None:
    """Return the tokenizer.json in a folder or the hub's cache; None if there is none."""
    path = Path(name_or_path) / "tokenizer.json"
    if path.parent.is_dir():
        return path if path.is_file() else None
    cached = try_to_load_from_cache(name_or_path, path.name, revision=revision)
    return Path(cached) if isinstance(cached, str) else None


def _differences(spec: ModelSpec, tokenizer: Any, path: Path, texts: Sequence[str]) -> Iterator[str]:
    """Compare the tokens that the tokenizer's class makes with those of tokenizer.json itself."""
    settings = read_json(path.parent / "tokenizer_config.json") | dict(spec.tokenizer_kwargs)
    try:
        stored = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers has no kinds of errors
        raise ValueError(f"{path} cannot be read ({error}); copy it again") from error
    stored.no_truncation()
    stored.no_padding()
    for setting, (part, key) in _SETTINGS.items():
        rule = getattr(stored, part)
        by_file = None if rule is None else json.loads(rule.__getstate__()).get(key)
        if None not in (settings.get(setting), by_file) and by_file != settings[setting]:
            return  # the class follows the setting, as it should
    with_special = not any(key in settings for key in ("add_bos_token", "add_eos_token"))

    def differs(text: str) -> bool:
        ids = tokenizer([text], add_special_tokens=with_special, verbose=False)["input_ids"][0]
        return bool(ids != stored.encode(text, add_special_tokens=with_special).ids)

    # The plain text first: the wrong class may fail on the others.
    is_other_class = differs(_PLAIN_TEXT)
    others = 0 if is_other_class else sum(map(differs, texts))
    made_by = (
        f"{type(tokenizer).__name__}, by which transformers makes the tokenizer of {tokenizer.name_or_path},"
    )
    if not spec.tokenizer_kwargs and (is_other_class or 2 * others > len(texts)):
        raise ValueError(
            f"{made_by} gives other tokens than tokenizer.json itself: it is not the tokenizer_class that this "
            "vocabulary is for. Copy tokenizer_config.json again, or set tokenizer_class in it to "
            "PreTrainedTokenizerFast, which takes tokenizer.json as it is"
        )
    if others:
        yield (
            f"{made_by} gives other tokens than tokenizer.json for {others} of its first {len(texts)} rows; if it "
            "was trained with that file's, its probabilities are off"
        )


def _loses_text(tokenizer: Any, text: str, ids: Sequence[int]) -> bool:
    """Return whether a text cannot be decoded from its tokens although its rules remove none of it."""
    backend = tokenizer.backend_tokenizer
    kept = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    if backend.pre_tokenizer is not None:
        kept = "".join(kept[slice(*span)] for _, span in backend.pre_tokenizer.pre_tokenize_str(kept))
    decoded = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return _without_spaces(decoded) not in (_without_spaces(kept), _without_spaces(text))


def _without_spaces(text: str) -> str:
    # Decoders put spaces where they like.
    return "".join(unicodedata.normalize("NFC", text).replace("▁", " ").split())
