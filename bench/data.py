"""The tables of the benchmark: rows of words whose lengths have a long tail, made from a seed.

Owns the lengths.  What a word is, and how many tokens it takes, comes from the checkpoints' tokenizer.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp
from pathlib import Path
from statistics import NormalDist

# Token counts of a table of prompts.  With <bos> and what the last word is too long by, rows have a median of 60
# tokens, a mean of 86 and a 99th percentile of 400; a few are longer than the 512 at which every contestant cuts.
_MEDIAN_TOKENS = 58
_SPREAD = 0.84
_LONGEST_TOKENS = 700
# Titles, questions, glosses.
_SHORT_MEDIAN_TOKENS = 14
_SHORT_SPREAD = 0.45
# A question of a few words, and a passage that fills the model's 512 positions now and then.
_QUESTION_TOKENS = (6, 24)
_PASSAGE_MEDIAN_TOKENS = 190
_PASSAGE_SPREAD = 0.55
# Words are drawn like those of a language: the k-th most frequent in proportion to 1 / (k + 3).
_RANK_OFFSET = 3


@dataclass(frozen=True)
class Words:
    """Words with the number of tokens that each takes behind a space, most frequent first."""

    words: tuple[str, ...]
    tokens: tuple[int, ...]


class Writer:
    """Draws texts of a given number of tokens.

    Args:
        words: what texts consist of.
        seed: the same one gives the same texts.
    """

    def __init__(self, words: Words, seed: int) -> None:
        self._words = words
        self._chooser = random.Random(seed)
        weights = (1 / (rank + _RANK_OFFSET) for rank in range(len(words.words)))
        self._weights = list(accumulate(weights))

    def text(self, tokens: int) -> str:
        """Words of ``tokens`` tokens together, or a token or two more."""
        found: list[str] = []
        while tokens > 0:
            words = range(len(self._words.words))
            for index in self._chooser.choices(words, cum_weights=self._weights, k=tokens):
                found.append(self._words.words[index])
                tokens -= self._words.tokens[index]
                if tokens <= 0:
                    break
        return " ".join(found)

    def single(self, rows: int) -> list[str]:
        """Texts whose lengths have a long tail."""
        return [self.text(length) for length in self._lengths(rows, _MEDIAN_TOKENS, _SPREAD)]

    def short(self, rows: int) -> list[str]:
        """Texts of a line each."""
        return [self.text(length) for length in self._lengths(rows, _SHORT_MEDIAN_TOKENS, _SHORT_SPREAD)]

    def repeated(self, rows: int, share: float) -> list[str]:
        """The same kind of texts; this share of the rows are copies of others."""
        distinct = self.single(max(1, rows - round(share * rows)))
        found = distinct + self._chooser.choices(distinct, k=rows - len(distinct))
        self._chooser.shuffle(found)
        return found

    def pairs(self, rows: int) -> list[tuple[str, str]]:
        """A short text and a long one each."""
        lengths = self._lengths(rows, _PASSAGE_MEDIAN_TOKENS, _PASSAGE_SPREAD)
        return [(self.text(self._chooser.randint(*_QUESTION_TOKENS)), self.text(each)) for each in lengths]

    def _lengths(self, rows: int, median: int, spread: float) -> list[int]:
        """Token counts at even steps through a lognormal's quantiles, shuffled: few rows have its median, too."""
        normal = NormalDist()
        steps = [normal.inv_cdf((row + 0.5) / rows) for row in range(rows)]
        lengths = [round(median * exp(spread * step)) for step in steps]
        self._chooser.shuffle(lengths)
        return [min(_LONGEST_TOKENS, max(1, length)) for length in lengths]


def write_table(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A CSV with an ``id`` before the other columns."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", *header])
        writer.writerows([f"r{number}", *row] for number, row in enumerate(rows))
