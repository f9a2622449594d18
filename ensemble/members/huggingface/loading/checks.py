"""What a member must prove before its first chunk: that its tokenizer and its weights are what they seem.

Wrong files rarely raise an error: transformers makes up a vocabulary, leaves tensors out, or makes the tokenizer
another class's way.  What can be known to be wrong is an error here; what only looks wrong is a note.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers, pre_tokenizers

from ensemble.members.huggingface.checkpoint.weight_files import is_left_out, stands_beside_packed
from ensemble.members.huggingface.loading.adapter import some
from ensemble.members.huggingface.spec import ModelSpec

# Of a member's first rows, so many, and so many characters of each.
ROWS, CHARACTERS = 8, 1000
# Words, digits, upper case and punctuation; no rule of a tokenizer for odd characters applies to it.
_PLAIN = "The quick brown fox jumps over 13 lazy dogs. Is it not so? Yes, it is."
# More of the tokens than this are unknown where the vocabulary is not for this kind of text.
_FLOOD = 0.2
_LEAST_TOKENS = 20
# They take what is in tokenizer.json as it is.
_TAKE_THE_FILE = ("TokenizersBackend", "PreTrainedTokenizerFast")
# Settings of tokenizer_config.json that go before what is in tokenizer.json: of which part, and the part's key.
_SETTINGS = {
    "add_prefix_space": ("pre_tokenizer", "add_prefix_space"),
    "do_lower_case": ("normalizer", "lowercase"),
    "strip_accents": ("normalizer", "strip_accents"),
    "tokenize_chinese_chars": ("normalizer", "handle_chinese_chars"),
}
# Heads that were trained for something else, as they are called beside those that ``is_left_out`` knows; poolers of
# models whose classifier does without; what a Trainer's loss keeps.
_HARMLESS = re.compile(
    r"(^|\.)(pooler|predictions|sop_classifier|lm_loss|pred_layer|multiple_choice_head|v_head|mtp"
    r"|loss|loss_fct|loss_fn|loss_function|criterion)\.|(^|\.)final_logits_bias$"
)


def check_unexpected_keys(spec: ModelSpec, keys: Sequence[str], is_quantized: bool) -> None:
    """Refuse a checkpoint with tensors that went nowhere, but for those that no classifier has a place for.

    Args:
        keys: as transformers' loading report names them.

    Raises:
        ValueError: with the first few of them.
    """
    lost = sorted(
        key
        for key in keys
        if not (is_left_out(key) or _HARMLESS.search(key) or (is_quantized and stands_beside_packed(key)))
    )
    if lost:
        changed = f", or take {', '.join(spec.model_kwargs)} out of model_kwargs" if spec.model_kwargs else ""
        raise ValueError(
            f"{spec.model_name_or_path} has weights that its config.json has no place for: {some(lost)}; they "
            f"would be left out. Copy the config.json that was saved with them{changed}"
        )


def check_ids(spec: ModelSpec, tokenizer: Any, rows: int) -> None:
    """Refuse a tokenizer with ids that its model has no embedding for.

    Args:
        rows: of the model's embeddings.

    Raises:
        ValueError: they do not belong together.
    """
    known = max(len(tokenizer), max(tokenizer.get_vocab().values(), default=-1) + 1)
    if known > rows:
        raise ValueError(
            f"the tokenizer of {spec.model_name_or_path} knows {known} tokens, its model only {rows}; "
            "they do not belong together"
        )


def check_tokenizer(
    spec: ModelSpec, tokenizer: Any, folder: Path | None, texts: Sequence[str]
) -> Iterator[str]:
    """What the user should know of a tokenizer, one sentence each.

    Args:
        folder: where its files lie; None where nobody knows.
        texts: of the member's first rows.

    Raises:
        ValueError: it knows special tokens only, or it was made by another class than its vocabulary is for.
    """
    name = spec.model_name_or_path
    try:
        tokenizer([_PLAIN], verbose=False)
    except Exception as error:  # tokenizers has no kinds of errors
        raise ValueError(
            f"the tokenizer of {name} ({type(tokenizer).__name__}) fails on plain text ({error}); see that the "
            "tokenizer_class in tokenizer_config.json is the one that its vocabulary is for"
        ) from error
    if not _knows_words(tokenizer):
        raise ValueError(
            f"the tokenizer of {name} ({type(tokenizer).__name__}) knows special tokens only, all text would be "
            "unknown to it; copy its vocabulary files, such as tokenizer.json"
        )
    texts = [text[:CHARACTERS] for text in texts if text.strip()]
    yield from _differences(spec, tokenizer, folder, texts)
    yield from _unknown_tokens(name, tokenizer, texts)
    yield from _lost_characters(name, tokenizer, texts)


def _knows_words(tokenizer: Any) -> bool:
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= set(tokenizer.all_special_tokens)
    # Where there is nothing else, T5's class makes up the token for a space.
    return any(token not in special and token != "▁" for token in tokenizer.get_vocab())


def _differences(spec: ModelSpec, tokenizer: Any, folder: Path | None, texts: Sequence[str]) -> Iterator[str]:
    """Holds the tokens that the tokenizer's class makes against those of tokenizer.json itself."""
    path = None if folder is None else folder / "tokenizer.json"
    if (
        path is None
        or not path.is_file()
        or spec.trust_remote_code
        or spec.gguf_file is not None
        or type(tokenizer).__name__ in _TAKE_THE_FILE
    ):
        return
    settings = _settings(path.parent / "tokenizer_config.json") | dict(spec.tokenizer_kwargs)
    try:
        stored = _as_set(Tokenizer.from_file(str(path)), settings)
    except Exception as error:  # tokenizers has no kinds of errors
        raise ValueError(f"{path} cannot be read ({error}); copy it again") from error
    adds_own = not any(key in settings for key in ("add_bos_token", "add_eos_token"))

    def differs(text: str) -> bool:
        found = tokenizer([text], add_special_tokens=adds_own, verbose=False)["input_ids"][0]
        return bool(found != stored.encode(text, add_special_tokens=adds_own).ids)

    others = sum(map(differs, texts))
    made_by = (
        f"{type(tokenizer).__name__}, by which transformers makes the tokenizer of {spec.model_name_or_path},"
    )
    if not spec.tokenizer_kwargs and (differs(_PLAIN) or 2 * others > len(texts)):
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


def _settings(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _as_set(stored: Tokenizer, settings: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a file with what the settings say otherwise, as transformers has always patched it."""
    stored.no_truncation()
    stored.no_padding()
    kinds = {"pre_tokenizer": pre_tokenizers, "normalizer": normalizers}
    for setting, (part, key) in _SETTINGS.items():
        if settings.get(setting) is None or (held := getattr(stored, part)) is None:
            continue
        state = json.loads(held.__getstate__())
        if state.get(key) is not None and state[key] != settings[setting]:
            kind = getattr(kinds[part], state.pop("type"))
            setattr(stored, part, kind(**{**state, key: settings[setting]}))
    return stored


def _unknown_tokens(name: str, tokenizer: Any, texts: Sequence[str]) -> Iterator[str]:
    unknown = tokenizer.unk_token_id
    if unknown is None or not texts:
        return
    ids = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    count, total = sum(row.count(unknown) for row in ids), sum(map(len, ids))
    if total >= _LEAST_TOKENS and count > _FLOOD * total:
        yield (
            f"{count / total:.0%} of the tokens of its first {len(texts)} rows are {tokenizer.unk_token}: the "
            f"vocabulary of {name} does not know this kind of text"
        )


def _lost_characters(name: str, tokenizer: Any, texts: Sequence[str]) -> Iterator[str]:
    """Where text does not come back from its tokens, although neither normalizer nor splitting takes it away."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:  # nobody knows how its tokens become text again
        return
    lossy: list[tuple[str, str]] = []
    for text in texts:
        ids = tokenizer([text], add_special_tokens=False, verbose=False)["input_ids"][0]
        if tokenizer.unk_token_id in ids:
            continue
        again = _comparable(
            tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
        if again not in (kept := _comparable(_kept(backend, text)), _comparable(text)):
            lossy.append((kept, again))
    if lossy:
        kept, again = lossy[0]
        at = next(
            (i for i, (a, b) in enumerate(zip(kept, again, strict=False)) if a != b), min(map(len, lossy[0]))
        )
        yield (
            f"the tokenizer of {name} loses text of {len(lossy)} of its first {len(texts)} rows: "
            f"{kept[at : at + 12]!r} comes back as {again[at : at + 12]!r}, which its own rules do not explain"
        )


def _kept(backend: Any, text: str) -> str:
    """What the tokenizer's own rules leave of a text."""
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    if backend.pre_tokenizer is None:
        return text
    return "".join(text[start:stop] for _, (start, stop) in backend.pre_tokenizer.pre_tokenize_str(text))


def _comparable(text: str) -> str:
    """Without spaces, which decoders put where they like."""
    return "".join(unicodedata.normalize("NFC", text).replace("▁", " ").split())
