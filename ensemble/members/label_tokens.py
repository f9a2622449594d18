"""Check the tokens of the labels' texts, first in the parent, as far as it knows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

# Positions of a row that go through the vocabulary at a time where labels are choices of any length.
CHOICE_POSITIONS = 32


def token_problems(
    ids: Mapping[str, Sequence[int]], special: Mapping[int, str], single_token: bool
) -> Iterator[str]:
    """Yield why these tokens do not tell the labels apart; ``special`` names special tokens, by id."""
    label_by_tokens: dict[tuple[int, ...], str] = {}
    for label, tokens in ids.items():
        where = f"label_tokens.{label}"
        if not tokens:
            yield f"{where}: its text comes to no token at all"
            continue
        name = next((special[token] for token in tokens if token in special), None)
        if name is not None:
            yield (
                f"{where}: its text holds the tokenizer's {name}, which stands for no text; take another word"
            )
        if single_token and len(tokens) > 1:
            yield (
                f"{where}: its text is {len(tokens)} tokens, and single_token demands one; take another word, or "
                "one with or without the space before it"
            )
        other = label_by_tokens.setdefault(tuple(tokens), label)
        if other != label:
            yield f"{where}: its text has the same tokens as that of label_tokens.{other}; take another word"
