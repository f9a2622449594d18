"""PURE: the texts of labels -> their token ids, and what is wrong with them.

The parent asks the checkpoint's ``tokenizer.json``, so that mistakes are found before anything loads; the worker
asks the tokenizer itself.  Nothing here depends on the rows; ``follows`` tells where a prompt joins with a label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

Encode = Callable[[str], Sequence[int]]
# Texts behind which a label is looked at.  By itself it would get the space that some tokenizers put before the
# first word of a text; the first of these that does not join with it decides.
_ANCHORS = (":", "\n", "")


def label_ids(encode: Encode, text: str) -> tuple[int, ...]:
    """The tokens of a label's text where other text stands before it.

    Args:
        encode: token ids of a text, without special tokens around it.
    """
    for anchor in _ANCHORS:
        before, whole = tuple(encode(anchor)) if anchor else (), tuple(encode(anchor + text))
        if whole[: len(before)] == before:
            return whole[len(before) :]
    raise AssertionError("no text at all joins with nothing")


def token_problems(
    ids: Mapping[str, Sequence[int]], special: Mapping[int, str], single_token: bool
) -> Iterator[str]:
    """Why labels cannot be told apart by these tokens, one sentence each, key first.

    Args:
        ids: each label's.
        special: the tokenizer's ids for padding, begin, end and unknown, with their names, such as pad_token.
        single_token: each label must be one token.
    """
    seen: dict[tuple[int, ...], str] = {}
    for label, tokens in ids.items():
        where = f"label_tokens.{label}"
        if not tokens:
            yield f"{where}: its text comes to no token at all"
            continue
        if name := next((special[token] for token in tokens if token in special), None):
            yield (
                f"{where}: its text holds the tokenizer's {name}, which stands for no text; take another word"
            )
        if single_token and len(tokens) > 1:
            yield (
                f"{where}: its text is {len(tokens)} tokens, and single_token demands one; take another word, or "
                "one with or without the space before it"
            )
        if (other := seen.setdefault(tuple(tokens), label)) != label:
            yield f"{where}: its text has the same tokens as that of label_tokens.{other}; take another word"


def follows(encode: Encode, prompt: str, text: str, ids: Sequence[int]) -> bool:
    """Whether the tokenizer makes these tokens of a label's text behind this prompt, too."""
    whole, before = tuple(encode(prompt + text)), tuple(encode(prompt))
    return whole == (*before, *ids)
