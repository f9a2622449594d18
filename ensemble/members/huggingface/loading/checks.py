"""What a member must prove before its first chunk: that its tokenizer and its weights are what they seem.

Wrong files rarely raise an error: transformers makes up a vocabulary, leaves tensors out, or makes the tokenizer
another class's way.  What can be known to be wrong is an error here; what only looks wrong is a note.
"""

from __future__ import annotations

import json
import os.path
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers, pre_tokenizers

from ensemble.common.files import read_json
from ensemble.members.huggingface.checkpoint.adapter_files import is_head
from ensemble.members.huggingface.checkpoint.weight_files import is_left_out, stands_beside_packed
from ensemble.members.huggingface.loading.adapter import some
from ensemble.members.huggingface.spec import BACKBONE, CheckpointSpec, ModelSpec

# Of a member's first rows, so many, and so many characters of each.
ROWS, CHARACTERS = 8, 1000
# Words, digits, upper case and punctuation; no rule of a tokenizer for odd characters applies to it.
_PLAIN = "The quick brown fox jumps over 13 lazy dogs. Is it not so? Yes, it is."
# More of the tokens than this are unknown where the vocabulary is not for this kind of text.
_FLOOD = 0.2
_MIN_TOKENS = 20
# They take what is in tokenizer.json as it is.
_TAKE_THE_FILE = ("TokenizersBackend", "PreTrainedTokenizerFast")
# Settings of tokenizer_config.json that go before what is in tokenizer.json: of which part, and the part's key.
_SETTINGS = {
    "add_prefix_space": ("pre_tokenizer", "add_prefix_space", pre_tokenizers),
    "do_lower_case": ("normalizer", "lowercase", normalizers),
    "strip_accents": ("normalizer", "strip_accents", normalizers),
    "tokenize_chinese_chars": ("normalizer", "handle_chinese_chars", normalizers),
}
# Heads that were trained for something else, as they are called beside those that ``is_left_out`` knows; poolers of
# models whose classifier does without; what a Trainer's loss keeps.
_HARMLESS = re.compile(
    r"(^|\.)(pooler|predictions|sop_classifier|lm_loss|pred_layer|multiple_choice_head|v_head|mtp"
    r"|loss|loss_fct|loss_fn|loss_function|criterion)\.|(^|\.)final_logits_bias$"
)
# What stands before the head of some classifiers, and belongs to it.
_BEFORE_HEAD = re.compile(r"(pre_classifier|sequence_summary)\.")


def is_unused(spec: CheckpointSpec, key: str) -> bool:
    """Whether a backbone's last hidden states do without a weight of this name, such as a pooler's or a head's."""
    is_of_head = _HARMLESS.search(key) or is_head(key) or _BEFORE_HEAD.match(key)
    return spec.auto_class == BACKBONE and bool(is_of_head)


def check_unexpected_keys(spec: CheckpointSpec, keys: Sequence[str], is_quantized: bool) -> None:
    """Refuse a checkpoint with tensors that went nowhere, but for those that no classifier has a place for.

    Args:
        keys: as transformers' loading report names them.

    Raises:
        ValueError: with the first few of them.
    """
    lost = sorted(
        key
        for key in keys
        if not (
            is_left_out(key)
            or _HARMLESS.search(key)
            or (is_quantized and stands_beside_packed(key))
            or is_unused(spec, key)
        )
    )
    if lost:
        changed = f", or take {', '.join(spec.model_kwargs)} out of model_kwargs" if spec.model_kwargs else ""
        raise ValueError(
            f"{spec.model_name_or_path} has weights that its config.json has no place for: {some(lost)}; they "
            f"would be left out. Copy the config.json that was saved with them{changed}"
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
    name, made_by = spec.model_name_or_path, type(tokenizer).__name__
    try:
        tokenizer([_PLAIN], verbose=False)
    except Exception as error:  # tokenizers has no kinds of errors
        raise ValueError(
            f"the tokenizer of {name} ({made_by}) fails on plain text ({error}); see that the tokenizer_class in "
            "tokenizer_config.json is the one that its vocabulary is for"
        ) from error
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    # Where there is nothing else, T5's class makes up the token for a space.
    if tokenizer.get_vocab().keys() <= special | {*tokenizer.all_special_tokens, "▁"}:
        raise ValueError(
            f"the tokenizer of {name} ({made_by}) knows special tokens only, all text would be unknown to it; copy "
            "its vocabulary files, such as tokenizer.json"
        )
    texts = [text[:CHARACTERS] for text in texts if text.strip()]
    path = None if folder is None else folder / "tokenizer.json"
    is_plain = not spec.trust_remote_code and spec.gguf_file is None and made_by not in _TAKE_THE_FILE
    if path is not None and path.is_file() and is_plain:
        yield from _differences(spec, tokenizer, path, texts)
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    unknown = tokenizer.unk_token_id
    count, total = sum(row.count(unknown) for row in ids), sum(map(len, ids))
    if total >= _MIN_TOKENS and count > _FLOOD * total:
        yield (
            f"{count / total:.0%} of the tokens of its first {len(texts)} rows are {tokenizer.unk_token}: the "
            f"vocabulary of {name} does not know this kind of text"
        )
    known = [(text, row) for text, row in zip(texts, ids, strict=True) if unknown not in row]
    yield from _lost_characters(name, tokenizer, known, len(texts))


def _differences(spec: ModelSpec, tokenizer: Any, path: Path, texts: Sequence[str]) -> Iterator[str]:
    """Holds the tokens that the tokenizer's class makes against those of tokenizer.json itself."""
    settings = read_json(path.parent / "tokenizer_config.json") | dict(spec.tokenizer_kwargs)
    try:
        stored = Tokenizer.from_file(str(path))
        stored.no_truncation()
        stored.no_padding()
        # What the settings say otherwise, as transformers has always patched it.
        for setting, (part, key, kinds) in _SETTINGS.items():
            if settings.get(setting) is not None and (rule := getattr(stored, part)) is not None:
                state = json.loads(rule.__getstate__())
                if state.get(key) not in (None, settings[setting]):
                    kind = getattr(kinds, state.pop("type"))
                    setattr(stored, part, kind(**{**state, key: settings[setting]}))
    except Exception as error:  # tokenizers has no kinds of errors
        raise ValueError(f"{path} cannot be read ({error}); copy it again") from error
    adds_own = not any(key in settings for key in ("add_bos_token", "add_eos_token"))

    def differs(text: str) -> bool:
        found = tokenizer([text], add_special_tokens=adds_own, verbose=False)["input_ids"][0]
        return bool(found != stored.encode(text, add_special_tokens=adds_own).ids)

    # The plain text first: the wrong class may fail on others.
    is_other = differs(_PLAIN)
    others = 0 if is_other else sum(map(differs, texts))
    made_by = (
        f"{type(tokenizer).__name__}, by which transformers makes the tokenizer of {spec.model_name_or_path},"
    )
    if not spec.tokenizer_kwargs and (is_other or 2 * others > len(texts)):
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


def _lost_characters(
    name: str, tokenizer: Any, known: Sequence[tuple[str, list[int]]], rows: int
) -> Iterator[str]:
    """Where text does not come back from its tokens, although neither normalizer nor splitting takes it away."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:  # nobody knows how its tokens become text again
        return
    lossy: list[tuple[str, str]] = []
    for text, ids in known:
        kept = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
        if backend.pre_tokenizer is not None:
            kept = "".join(kept[slice(*span)] for _, span in backend.pre_tokenizer.pre_tokenize_str(kept))
        again = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        # Without spaces, which decoders put where they like.
        text, kept, again = (
            "".join(unicodedata.normalize("NFC", one).replace("▁", " ").split())
            for one in (text, kept, again)
        )
        if again not in (kept, text):
            lossy.append((kept, again))
    if lossy:
        kept, again = lossy[0]
        at = len(os.path.commonprefix(lossy[0]))  # noqa: RUF071  of characters it is
        yield (
            f"the tokenizer of {name} loses text of {len(lossy)} of its first {rows} rows: "
            f"{kept[at : at + 12]!r} comes back as {again[at : at + 12]!r}, which its own rules do not explain"
        )
