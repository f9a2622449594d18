"""One thing found, what it means for a run, and what to do about it."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Literal

_WIDTH = 100
_INDENT = " " * 9
NO_BREAK = "\xa0"  # a space at which no line ends

Mark = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """``text`` is what was found, ``advice`` what to do; with a problem no run can start."""

    mark: Mark
    text: str
    advice: str = ""

    @classmethod
    def of_sentence(cls, mark: Mark, sentence: str, otherwise: str) -> Finding:
        """A finding from one of this package's sentences, most of which end with what to do after a semicolon.

        Args:
            otherwise: the advice where the sentence has none.
        """
        text, _, advice = sentence.rpartition("; ")
        return cls(mark, text, advice) if text else cls(mark, sentence, otherwise)

    def lines(self) -> list[str]:
        """As it is printed: 100 columns, the advice on lines of its own."""
        shown = _wrapped(self.text, f"{self.mark:<{len(_INDENT)}}")
        return [*shown, *_wrapped(self.advice, f"{_INDENT}-> ")] if self.advice else shown


def _wrapped(text: str, first: str) -> list[str]:
    lines = textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,  # paths and UUIDs are there to be copied
        break_on_hyphens=False,
    )
    return [line.replace(NO_BREAK, " ") for line in lines]
