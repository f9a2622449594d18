"""Truncation by field: rows of more than ``max_length`` tokens get shorter columns, and all else stays whole.

The tokens of a prompt are not those of its parts side by side: pieces merge over borders, and some tokenizers put a
space before each text.  So the columns are cut where their own tokens end, the template is rendered with what is
left, and the whole prompt is tokenized as always.  If it is too long or too short, the columns get as many tokens
less or more, until it fits; mostly once or twice.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ensemble.data.json_cells import TemplateProblem, parse_json_cell, replace_lone_surrogates
from ensemble.data.template import PromptTemplate
from ensemble.members.huggingface.spec import too_much_text

# A prompt that leaves no more tokens unused than this is full.
_UNUSED_TOKENS: Final = 2
# After so many measurements of a row the best fit so far is taken.
_MAX_MEASUREMENTS: Final = 12
# After so many the search goes by bisection, for templates that repeat or drop parts of a cell.
_MAX_GUESSES: Final = 6

Arrays: TypeAlias = dict[str, npt.NDArray[np.int64]]
# Texts -> each text's inputs by name, uncut.
Tokenize: TypeAlias = Callable[[Sequence[str]], list[Arrays]]
# Where each token of a text begins and ends, in characters.
Offsets: TypeAlias = Sequence[tuple[int, int]]


class FieldCuts:
    """Shorten the columns of rows that are too long.

    Args:
        settings: the member's key ``truncation``: ``fields``, by column ``share`` and ``keep``, and ``marker``.
        tokenize: inputs of whole prompts, uncut, as the model gets them.

    Raises:
        ValueError: the tokenizer is not a fast one, or the template's own text leaves no room.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        template: PromptTemplate,
        tokenizer: Any,
        max_length: int,
        tokenize: Tokenize,
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"truncation: {type(tokenizer).__name__} does not tell which characters a token stands for; this "
                "needs a fast tokenizer (tokenizer.json). Leave truncation out, or use truncation_side"
            )
        self._template = template
        self._max_length = max_length
        self._tokenize = tokenize
        self._tokenizer = tokenizer
        self.columns = tuple(settings["fields"])
        self._shares = [float(settings["fields"][column]["share"]) for column in self.columns]
        self._keep = [settings["fields"][column]["keep"] for column in self.columns]
        self._round_columns = tuple(
            column for column, keep in enumerate(self._keep) if keep == "newest_rounds"
        )
        self._marker = settings["marker"]
        self._marker_tokens = len(self._offsets([self._marker])[0])
        (fixed,) = tokenize(["".join(template.fixed_texts)])
        fixed_tokens = len(fixed["input_ids"])
        if fixed_tokens > max_length:
            raise ValueError(too_much_text(fixed_tokens, max_length, self.columns))

    def fit(self, row: Mapping[str, object], length: int) -> Arrays:
        """Return the inputs of a row with its columns cut, of at most ``max_length`` tokens.

        Args:
            length: tokens of the whole prompt, more than ``max_length``.

        Raises:
            TemplateProblem: the prompt is too long even without the columns, or the template fails on what is left.
        """
        cells = [_Cell(row[column], column in self._template.json_columns) for column in self.columns]
        for cell in cells:
            cell.offsets = self._offsets(cell.texts)
        units = self._units(cells)
        counts = [sum(sum(cells[column].counts) for column in unit) for unit in units]
        shares = [sum(self._shares[column] for column in unit) for unit in units]
        best: Arrays = {}
        fits, too_many = -1, sum(counts)
        tokens, unused, shortest = too_many, self._max_length - length, length
        for measurement in itertools.count():
            if too_many <= 0:
                raise TemplateProblem(
                    f"truncation: {shortest:,} tokens even without {', '.join(self.columns)}, which are all that "
                    f"may be cut; max_length is {self._max_length:,}"
                )
            if measurement < _MAX_GUESSES and fits < tokens + unused < too_many:
                tokens += unused
            else:
                tokens = (max(fits, 0) + too_many) // 2
            cut = self._cut_row(row, cells, units, share_out(counts, shares, tokens))
            try:
                text = self._template.render({**row, **cut})
            except TemplateProblem as error:
                raise TemplateProblem(f"prompt_template: with columns cut by truncation: {error}") from error
            (arrays,) = self._tokenize([text])
            length = len(arrays["input_ids"])
            unused, shortest = self._max_length - length, min(shortest, length)
            if unused < 0:
                too_many = min(too_many, tokens)
            elif tokens > fits:
                fits, best = tokens, arrays
            is_good = (
                0 <= unused <= _UNUSED_TOKENS or too_many - fits <= 1 or measurement >= _MAX_MEASUREMENTS
            )
            if best and is_good:
                break
        return best

    def _units(self, cells: Sequence[_Cell]) -> list[tuple[int, ...]]:
        """Return the columns of a row, by their positions, in groups that are cut together."""
        rounds = self._round_columns
        if len({cells[column].turns for column in rounds}) != 1 or not cells[rounds[0]].turns:
            return [(column,) for column in range(len(cells))]
        return [rounds, *((column,) for column in range(len(cells)) if column not in rounds)]

    def _cut_row(
        self,
        row: Mapping[str, object],
        cells: Sequence[_Cell],
        units: Sequence[tuple[int, ...]],
        budgets: Sequence[int],
    ) -> dict[str, object]:
        """Return the values of a row's columns, cut to so many tokens for each unit."""
        cut: dict[str, object] = {}
        for unit, budget in zip(units, budgets, strict=True):
            if len(unit) > 1:
                names = [self.columns[column] for column in unit]
                values = self._cut_rounds(row, [cells[column] for column in unit], budget)
                cut.update(zip(names, values, strict=True))
            else:
                cell = cells[unit[0]]
                texts = self._cut(cell, budget, self._keep[unit[0]])
                cut[self.columns[unit[0]]] = cell.with_texts(texts, self._template.reads_by_number)
        return cut

    def _cut_rounds(self, row: Mapping[str, object], cells: Sequence[_Cell], tokens: int) -> list[object]:
        """Return the values of cells with equally many turns, cut to so many tokens together, markers included.

        The newest rounds stay whole; the round before them shares the tokens that are left.
        """
        rounds = [list(counts) for counts in zip(*(cell.counts for cell in cells), strict=True)]
        if tokens >= sum(map(sum, rounds)):
            return [cell.value for cell in cells]
        shares = [self._shares[column] for column in self._round_columns]
        for markers in range(1, len(cells) + 1):  # as many as it takes
            budget = left = tokens - markers * self._marker_tokens
            first = len(rounds) - 1
            while sum(rounds[first]) <= left:
                left -= sum(rounds[first])
                first -= 1
            kept_counts = share_out(rounds[first], shares, left)
            is_newest = first == len(rounds) - 1
            if not is_newest and not any(kept_counts):
                first += 1
                kept_counts = rounds[first]
            is_cut = [
                sum(cell.counts[: first + 1]) > count for cell, count in zip(cells, kept_counts, strict=True)
            ]
            if sum(is_cut) <= markers:
                break
        # Where the template reads turns by number, a further list column needs the turns at their positions.
        names = {self.columns[column] for column in self._round_columns}
        lists = {name for name in self._template.columns if isinstance(row[name], list)}
        keeps_positions = (
            self._template.reads_by_number and not lists.union(self._template.json_columns) <= names
        )
        marker = self._marker if budget >= 0 else ""
        values = []
        for cell, count, has_marker in zip(cells, kept_counts, is_cut, strict=True):
            text, offsets = cell.texts[first], cell.offsets[first]
            if count < len(offsets):
                head = (count + 1) // 2 if is_newest else 0
                back = text[_start(offsets, len(offsets) - count + head) :] if count > head else ""
                text = text[: _end(offsets, head)] + marker + back
            elif has_marker:
                text = marker + text
            values.append(cell.with_texts([*[None] * first, text, *cell.texts[first + 1 :]], keeps_positions))
        return values

    def _cut(self, cell: _Cell, tokens: int, keep: str) -> Sequence[str | None]:
        """Return the texts of a cell cut to so many tokens, the marker included; None for a turn that goes."""
        counts = cell.counts
        total = sum(counts)
        if tokens >= total:
            return cell.texts
        budget = tokens - self._marker_tokens
        begin, head, tail = ranges(counts, budget, keep)
        texts: list[str | None] = []
        first = 0
        for text, offsets in zip(cell.texts, cell.offsets, strict=True):
            count = len(offsets)
            last = first + count
            front = back = None
            if begin <= first < begin + head:
                end = min(begin + head, last) - first
                front = text if end == count else text[: _end(offsets, end)]
                if begin + head <= last:
                    front += self._marker
            if total - tail < last:
                start = max(total - tail, first) - first
                back = text[_start(offsets, start) :] if start else text
                if not head and first <= total - tail:
                    back = self._marker + back
            texts.append(None if front is None and back is None else (front or "") + (back or ""))
            first = last
        if texts and not any(text is not None for text in texts):
            # Templates may look at the first or the last turn.
            texts[0 if keep == "head" else -1] = "" if budget < 0 else self._marker
        return texts

    def _offsets(self, texts: Sequence[str]) -> list[Offsets]:
        """Return the offsets of each text's tokens."""
        backend = self._tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        return [encoding.offsets for encoding in backend.encode_batch(list(texts), add_special_tokens=False)]


def _end(offsets: Offsets, tokens: int) -> int:
    """Return the end of the first so many tokens, in characters; a character is never split."""
    while 0 < tokens < len(offsets) and offsets[tokens][0] < offsets[tokens - 1][1]:
        tokens -= 1
    return offsets[tokens - 1][1] if tokens else 0


def _start(offsets: Offsets, token: int) -> int:
    """Return the character at which a token begins; of a token that begins within one, that of the next."""
    while 0 < token < len(offsets) and offsets[token][0] < offsets[token - 1][1]:
        token += 1
    return offsets[token][0] if token < len(offsets) else offsets[token - 1][1]


class _Cell:
    """A row's value in a column that may be cut: a text, or the turns of a JSON list.

    A turn is a text, or an object with a text as its ``content``; anything else in a list stays.
    """

    def __init__(self, value: object, is_json: bool) -> None:
        self.value = value
        self.offsets: list[Offsets] = []
        self._parsed = value
        self._is_json = False
        if is_json and isinstance(value, str):
            try:
                self._parsed = parse_json_cell(value)
                self._is_json = True
            except TemplateProblem:  # in a branch that this row does not take
                pass
        self._items = self._parsed if isinstance(self._parsed, list) else [self._parsed]
        texts = {index: _text_of(item) for index, item in enumerate(self._items)}
        self._texts = {
            index: replace_lone_surrogates(text) for index, text in texts.items() if text is not None
        }
        self.texts = list(self._texts.values())

    @property
    def counts(self) -> list[int]:
        """Return the tokens of each turn."""
        return [len(offsets) for offsets in self.offsets]

    @property
    def turns(self) -> int:
        """Return the number of texts in a list; 0 if the value is no list or holds anything else."""
        is_all_text = isinstance(self._parsed, list) and len(self.texts) == len(self._items)
        return len(self.texts) if is_all_text else 0

    def with_texts(self, texts: Sequence[str | None], keeps_positions: bool) -> object:
        """Return the value with other texts.

        None leaves a turn out; if turns keep their positions, it becomes an empty text.
        """
        if texts is self.texts:
            return self.value
        items = dict(enumerate(self._items))
        for index, text in zip(self._texts, texts, strict=True):
            item, content = items[index], text or ""
            items[index] = {**item, "content": content} if isinstance(item, dict) else content
            if text is None and not keeps_positions and isinstance(self._parsed, list):
                del items[index]
        value = list(items.values()) if isinstance(self._parsed, list) else items[0]
        return json.dumps(value, ensure_ascii=False) if self._is_json else value


def _text_of(item: object) -> str | None:
    text = item.get("content") if isinstance(item, dict) else item
    return text if isinstance(text, str) else None


def share_out(counts: Sequence[int], shares: Sequence[float], tokens: int) -> list[int]:
    """Return each field's tokens, at most its count; a field that needs less leaves the rest to the others."""
    budgets = [0] * len(counts)
    unmet = [index for index, count in enumerate(counts) if count > 0]
    left = max(0, tokens)
    while unmet:
        total = sum(shares[index] for index in unmet)
        parts = {index: left * shares[index] / total for index in unmet}
        met = [index for index in unmet if counts[index] <= parts[index]]
        if not met:
            break
        for index in met:
            budgets[index] = counts[index]
            left -= counts[index]
        unmet = [index for index in unmet if index not in met]
    if not unmet:
        return budgets
    for index in unmet:
        budgets[index] = int(parts[index])
    rest = left - sum(budgets[index] for index in unmet)
    # The largest remainders get one token more.
    for index in sorted(unmet, key=lambda index: budgets[index] - parts[index])[: max(0, rest)]:
        budgets[index] += 1
    return budgets


def ranges(counts: Sequence[int], tokens: int, keep: str) -> tuple[int, int, int]:
    """Return the first token of a field's head, and how many tokens of its head and of its tail stay."""
    budget, begin = max(0, tokens), 0
    if keep == "head":
        return 0, budget, 0
    if keep in ("newest_turns", "newest_rounds"):
        newest = next((count for count in reversed(counts) if count), 0)
        if newest <= budget:
            return 0, 0, budget
        begin = sum(counts) - newest
    elif keep == "tail":
        return 0, 0, budget
    head = (budget + 1) // 2
    return begin, head, budget - head
