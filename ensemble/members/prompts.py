"""Define keys that kinds share which read a row as a prompt, behind which a label's text follows."""

# No "from __future__ import annotations": pydantic would evaluate every annotation from its text again.

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated

from pydantic import BeforeValidator, StringConstraints

from ensemble.common.text import listed
from ensemble.config.document import Problem, place
from ensemble.config.values import MustBe, as_label, foreign_label

# Behind these a word has a space before it.
_BEFORE_SPACE = ":;,.?!"
_SHOWN_CHARACTERS = 30

Verbalizer = Annotated[
    str, BeforeValidator(as_label), StringConstraints(min_length=1), MustBe("text, and not empty")
]
LabelTokens = Annotated[dict[str, Verbalizer], MustBe("a mapping of labels to texts", dict)]


def broken_label_tokens(label_tokens: Mapping[str, str], labels: Sequence[str]) -> Iterator[Problem]:
    """Yield labels whose text lacks or is another's, and texts of no label; no labels: they are unknown."""
    if len(labels) == 1:
        yield ("label_tokens",), "there must be two labels or more to choose from"
    label_by_text: dict[str, str] = {}
    for label, text in label_tokens.items():
        first = label_by_text.setdefault(text, label)
        if labels and label not in labels:
            yield ("label_tokens", label), foreign_label(labels)
        elif first != label:
            yield ("label_tokens", label), f"the same text as {place(('label_tokens', first))} has"
    missing = [label for label in labels if label not in label_tokens]
    if missing:
        yield ("label_tokens",), f"has no text for {listed(missing)}; each label needs one"


def space_warnings(prompt: str, texts: Iterable[str]) -> Iterator[str]:
    """Yield a warning if a space should stand between a prompt and the labels' texts that follow it."""
    word = next((text for text in texts if text[:1].isalnum()), "")
    if not word or not prompt:
        return
    if prompt[-1].isalnum() or prompt[-1] in _BEFORE_SPACE:
        end = repr(prompt[-_SHOWN_CHARACTERS:] + word)
        yield f"label_tokens: in text a space would stand before them ({end}); let them begin with it"
