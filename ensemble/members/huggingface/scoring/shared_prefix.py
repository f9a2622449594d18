"""A beginning that many texts share, such as a template's instructions, tokenized once where that is exact.

Tokenizers cut a text into pieces before they look for tokens, and nothing before a cut depends on what follows it.
Between two ASCII words all known ones cut, so that the ids of a text are those of its beginning up to such a place
and those of the rest.  Which kinds of tokenizer keep to that is told by their parts; that a given one does, by some
texts of every block.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# Fewer texts, or a shorter beginning, and looking for it costs what it saves.
_LEAST_TEXTS = 16
_LEAST_CHARACTERS = 200
# Of the shared beginning so much stays with the rest: what a tokenizer's patterns look ahead is far less.
_MARGIN_CHARACTERS = 64
_BETWEEN_WORDS = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
_SAMPLE = 3
# Each character, or each cluster of them, is replaced by itself.
_LOCAL_NORMALIZERS = {
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Lowercase",
    "StripAccents",
    "BertNormalizer",
    "Precompiled",
}
_SPLITTERS = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer", "ByteLevel"}
_SPLITTING_BESIDE = {"Punctuation", "Digits", "Split"}
_Arrays = dict[str, list[npt.NDArray[np.int64]]]
Plain = Callable[[Sequence[str]], tuple[_Arrays, npt.NDArray[np.bool_]]]


class SharedPrefix:
    """Token ids of texts of which many begin alike.

    Args:
        tokenizer: a transformers tokenizer.
        plain: its ids of texts, special tokens and truncation included, and which texts were cut.
        max_length: tokens a text may have.
        add_special_tokens: whether ``plain`` adds them.
    """

    def __init__(self, tokenizer: Any, plain: Plain, max_length: int, add_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._plain = plain
        self._max_length = max_length
        self._add_special_tokens = add_special_tokens
        self._works: bool | None = None

    def tokenize(self, texts: Sequence[str]) -> tuple[_Arrays, npt.NDArray[np.bool_]]:
        """What ``plain`` gives, with less work where the texts begin alike."""
        cut = self._cut(texts) if len(texts) >= _LEAST_TEXTS and self._works is not False else 0
        if cut and self._works is None:
            self._works = cuts_between_words(self._tokenizer)
        if not cut or not self._works:
            return self._plain(texts)
        chosen = sorted({0, len(texts) // 2, len(texts) - 1})[:_SAMPLE]
        expected, expected_cut = self._plain([texts[place] for place in chosen])
        around = self._special_tokens(expected, expected_cut, texts[0])
        if around is None:
            return self._plain(texts)
        ids, is_cut = self._composed(texts, cut, *around)
        found = [ids[place] for place in chosen]
        if not (_same(found, expected["input_ids"]) and (is_cut[chosen] == expected_cut).all()):
            self._works = False
            return self._plain(texts)
        zeros = {name: [np.zeros_like(array) for array in ids] for name in expected if name != "input_ids"}
        return {"input_ids": ids, **zeros}, is_cut

    def _cut(self, texts: Sequence[str]) -> int:
        """Where the shared beginning ends between two words, in characters; 0 where it is not worth it."""
        shared = os.path.commonprefix(list(texts))  # noqa: RUF071  texts, not paths
        places = list(_BETWEEN_WORDS.finditer(shared[: -_MARGIN_CHARACTERS - 1]))
        return places[-1].start() if places and places[-1].start() >= _LEAST_CHARACTERS else 0

    def _composed(
        self, texts: Sequence[str], cut: int, before: list[int], after: list[int]
    ) -> tuple[list[npt.NDArray[np.int64]], npt.NDArray[np.bool_]]:
        head = np.array(self._bare([texts[0][:cut]])[0], dtype=np.int64)
        room = self._max_length - len(before) - len(after)
        is_left = self._tokenizer.truncation_side == "left"
        all_ids, is_cut = [], np.zeros(len(texts), dtype=np.bool_)
        for place, rest in enumerate(self._bare([text[cut:] for text in texts])):
            ids = np.concatenate([head, np.array(rest, dtype=np.int64)])
            is_cut[place] = len(ids) > room
            if is_cut[place]:
                ids = ids[len(ids) - room :] if is_left else ids[:room]
            all_ids.append(np.concatenate([before, ids, after]).astype(np.int64))
        return all_ids, is_cut

    def _special_tokens(
        self, expected: _Arrays, is_cut: npt.NDArray[np.bool_], text: str
    ) -> tuple[list[int], list[int]] | None:
        """What stands before and after a text; None where inputs besides the ids are more than zeros."""
        others = [array for name, arrays in expected.items() if name != "input_ids" for array in arrays]
        if any(array.any() for array in others):
            return None
        if not self._add_special_tokens:
            return [], []
        whole = self._tokenizer("a", verbose=False)["input_ids"]
        bare = self._bare(["a"])[0]
        starts = [place for place in range(len(whole)) if bare and whole[place : place + len(bare)] == bare]
        return (whole[: starts[0]], whole[starts[0] + len(bare) :]) if len(starts) == 1 else None

    def _bare(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._tokenizer(
            list(texts),
            add_special_tokens=False,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        return ids


def cuts_between_words(tokenizer: Any) -> bool:
    """Whether no token of this tokenizer can reach across the space between two ASCII words."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    state = json.loads(backend.to_str())
    if any(" " in token["content"] or _reaches_out(token) for token in state["added_tokens"]):
        return False
    normalizers = _parts(state["normalizer"], "normalizers")
    if not all(_is_local(part) for part in normalizers):
        return False
    splitters = _parts(state["pre_tokenizer"], "pretokenizers")
    if not all(_is_known(part) for part in splitters):
        return False
    replaced = any(part["type"] == "Replace" and part["content"] == "▁" for part in normalizers)
    if not replaced and any(_splits_words(part) for part in splitters):
        return True
    # Without pieces, as in Gemma's, it takes a token that goes on beyond a space.
    model = state["model"]
    return (
        replaced
        and model["type"] == "BPE"
        and not model.get("ignore_merges")
        and not any(re.search("[A-Za-z]▁", token) for token in model["vocab"])
    )


def _reaches_out(token: dict[str, Any]) -> bool:
    """Whether an added token may take the space beside a word for its own."""
    content = token["content"]
    ends = [content[:1]] * bool(token["lstrip"]) + [content[-1:]] * bool(token["rstrip"])
    return any(character.isascii() and character.isalpha() for character in ends)


def _parts(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [inner for one in part[name] for inner in _parts(one, name)]


def _is_local(part: dict[str, Any]) -> bool:
    if part["type"] == "Replace":
        return part["pattern"] in ({"String": " "}, {"Regex": " {2,}"})
    if part["type"] == "Strip":
        return not part["strip_left"]  # the rest begins with a space
    return part["type"] in _LOCAL_NORMALIZERS


def _is_known(part: dict[str, Any]) -> bool:
    if part["type"] == "Metaspace":
        return bool(part.get("split", True))
    if part["type"] == "Split" and re.search(r"\(\?(<|=|!(?!\\S\)))", str(part["pattern"].get("Regex"))):
        return False  # it looks back, or ahead further than at the next character
    return part["type"] in _SPLITTERS | _SPLITTING_BESIDE


def _splits_words(part: dict[str, Any]) -> bool:
    if part["type"] == "ByteLevel":
        return bool(part["use_regex"])
    if part["type"] == "Split":
        # A piece that is a word begins with at most one other character: GPT-2's pattern and those after it.
        return part["behavior"] == "Isolated" and r"?\p{L}+" in str(part["pattern"].get("Regex"))
    return part["type"] in _SPLITTERS or part["type"] == "Metaspace"


def _same(found: Sequence[npt.NDArray[np.int64]], expected: Sequence[npt.NDArray[np.int64]]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
