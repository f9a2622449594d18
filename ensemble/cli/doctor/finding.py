"""One thing found, what it means for a run, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ensemble.cli.layout import Page

_WIDTH = 100  # at most: longer lines read badly
_INDENT = " " * 9

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

    def lines(self, page: Page) -> list[str]:
        """As it is printed: at most 100 columns, the advice on lines of its own."""
        page = replace(page, width=min(page.width or _WIDTH, _WIDTH))
        shown = page.wrapped(self.text, f"{self.mark:<{len(_INDENT)}}")
        return [*shown, *page.wrapped(self.advice, f"{_INDENT}-> ")] if self.advice else shown
