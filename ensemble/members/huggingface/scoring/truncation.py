"""Truncate by field: cut columns of rows with more than ``max_length`` tokens, and nothing else of the prompt.

A prompt does not have the tokens of its parts: pieces merge across borders, and some tokenizers put a space before
each text.  So columns are cut between their tokens, the template is rendered with the shorter columns, and the
whole prompt is tokenized.  If the prompt is too long or too short by some tokens, the columns get that many fewer
or more, until the prompt fits.  Most prompts need one or two attempts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ensemble.data.json_cells import TemplateProblem, parse_json_cell, replace_lone_surrogates
from ensemble.data.template import PromptTemplate
from ensemble.members.huggingface.spec import too_much_text

# A prompt with at most this many unused tokens is full.
_UNUSED_TOKENS: Final = 2
# After this many measurements of a row, the best fit so far is used.
_MAX_MEASUREMENTS: Final = 12
# After this many guesses the search uses bisection, for templates that repeat or drop parts of a cell.
_MAX_GUESSES: Final = 6

Arrays: TypeAlias = dict[str, npt.NDArray[np.int64]]
# Where each token of a text begins and ends, in characters.
Offsets: TypeAlias = Sequence[tuple[int, int]]


class FieldCuts:
    """Shorten the columns of rows that are too long.

    Args:
        settings: the member's key ``truncation``.
        tokenize: returns the inputs of a whole prompt, uncut, as the model gets them.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        template: PromptTemplate,
        tokenizer: Any,
        max_length: int,
        tokenize: Callable[[str], Arrays],
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"truncation: {type(tokenizer).__name__} does not map tokens to characters; truncation needs a "
                "fast tokenizer (tokenizer.json). Leave truncation out, or use truncation_side"
            )
        self._template = template
        self._max_length = max_length
        self._tokenize = tokenize
        self._tokenizer = tokenizer
        self._fields: dict[str, Mapping[str, Any]] = dict(settings["fields"])
        self._rounds = [name for name, field in self._fields.items() if field["keep"] == "newest_rounds"]
        self._marker = settings["marker"]
        self._marker_tokens = len(self._offsets([self._marker])[0])
        fixed_tokens = len(tokenize("".join(template.fixed_texts))["input_ids"])
        if fixed_tokens > max_length:
            raise ValueError(too_much_text(fixed_tokens, max_length, list(self._fields)))

    def fit(self, row: Mapping[str, object], length: int) -> Arrays:
        """Return the inputs of a row with its columns cut, of at most ``max_length`` tokens.

        Args:
            length: tokens of the whole prompt, more than ``max_length``.
        """
        cells = {name: _Cell(row[name], name in self._template.json_columns) for name in self._fields}
        for cell in cells.values():
            cell.offsets = self._offsets(cell.texts)
        units = self._units(cells)
        counts = [sum(sum(cells[name].counts) for name in unit) for unit in units]
        shares = [sum(float(self._fields[name]["share"]) for name in unit) for unit in units]
        best: Arrays = {}
        fits, too_many = -1, sum(counts)
        guess, shortest, measurements = too_many + self._max_length - length, length, 0
        while too_many > 0:
            tokens = guess
            if measurements >= _MAX_GUESSES or not fits < guess < too_many:
                tokens = (max(fits, 0) + too_many) // 2
            cut: dict[str, object] = {}
            for unit, budget in zip(units, share_out(counts, shares, tokens), strict=True):
                cut |= self._cut_unit(row, {name: cells[name] for name in unit}, budget)
            try:
                text = self._template.render({**row, **cut})
            except TemplateProblem as error:
                raise TemplateProblem(f"prompt_template: with columns cut by truncation: {error}") from error
            arrays = self._tokenize(text)
            unused = self._max_length - len(arrays["input_ids"])
            shortest = min(shortest, len(arrays["input_ids"]))
            if unused < 0:
                too_many = min(too_many, tokens)
            elif tokens > fits:
                fits, best = tokens, arrays
            is_good = 0 <= unused <= _UNUSED_TOKENS or too_many - fits <= 1
            if best and (is_good or measurements >= _MAX_MEASUREMENTS):
                return best
            guess = tokens + unused
            measurements += 1
        raise TemplateProblem(
            f"truncation: {shortest:,} tokens even without {', '.join(self._fields)}, and nothing else "
            f"may be cut; max_length is {self._max_length:,}"
        )

    def _units(self, cells: Mapping[str, _Cell]) -> list[list[str]]:
        """Group columns that are cut together: columns with ``newest_rounds``, if they have equally many turns."""
        turns = {cells[name].turns for name in self._rounds}
        if len(turns) != 1 or turns == {0}:
            return [[name] for name in cells]
        return [self._rounds, *([name] for name in cells if name not in self._rounds)]

    def _cut_unit(
        self, row: Mapping[str, object], cells: Mapping[str, _Cell], tokens: int
    ) -> dict[str, object]:
        """Return the values of a group of columns, cut to ``tokens`` tokens with their markers."""
        if tokens >= sum(sum(cell.counts) for cell in cells.values()):
            return {name: cell.value for name, cell in cells.items()}
        if len(cells) > 1:
            return self._cut_rounds(row, cells, tokens)
        ((name, cell),) = cells.items()
        texts = self._cut(cell, tokens - self._marker_tokens, self._fields[name]["keep"])
        return {name: cell.with_texts(texts, self._template.reads_by_number)}

    def _cut_rounds(
        self, row: Mapping[str, object], cells: Mapping[str, _Cell], tokens: int
    ) -> dict[str, object]:
        """Cut cells with equally many turns together.

        The newest rounds stay whole; the round before them gets the remaining tokens.
        """
        rounds = list(zip(*(cell.counts for cell in cells.values()), strict=True))
        budget = remaining = tokens - len(cells) * self._marker_tokens
        first = newest = len(rounds) - 1
        while first > 0 and sum(rounds[first]) <= remaining:
            remaining -= sum(rounds[first])
            first -= 1
        kept_counts = share_out(rounds[first], [self._fields[name]["share"] for name in cells], remaining)
        if first < newest and not any(kept_counts):
            first += 1
            kept_counts = list(rounds[first])
        # If the template reads turns by number, and reads another list column, turns must keep their positions.
        lists = {name for name in self._template.columns if isinstance(row[name], list)}
        others = lists.union(self._template.json_columns) - cells.keys()
        keeps_positions = self._template.reads_by_number and bool(others)
        marker = self._marker if budget >= 0 else ""
        values = {}
        for (name, cell), count in zip(cells.items(), kept_counts, strict=True):
            text, offsets = cell.texts[first], cell.offsets[first]
            if count < len(offsets):
                head = (count + 1) // 2 if first == newest else 0
                text = (
                    _before(text, offsets, head) + marker + _after(text, offsets, len(offsets) - count + head)
                )
            elif any(cell.counts[:first]):
                text = marker + text
            values[name] = cell.with_texts([*[None] * first, text, *cell.texts[first + 1 :]], keeps_positions)
        return values

    def _cut(self, cell: _Cell, tokens: int, keep: str) -> Sequence[str | None]:
        """Return the texts of a cell, cut to ``tokens`` tokens plus the marker; None for a dropped turn."""
        total, budget = sum(cell.counts), max(0, tokens)
        newest = next((count for count in reversed(cell.counts) if count), 0)
        # The tokens from ``begin`` to ``head_end`` stay, and the tokens from ``tail_start`` on.
        begin, head = 0, (budget + 1) // 2
        if keep == "head":
            head = budget
        elif keep == "tail" or (keep.startswith("newest") and newest <= budget):
            head = 0
        elif keep.startswith("newest"):
            begin = total - newest
        head_end, tail_start = begin + head, total - budget + head
        texts: list[str | None] = []
        first = 0
        for text, offsets in zip(cell.texts, cell.offsets, strict=True):
            last = first + len(offsets)
            front = back = None
            if begin <= first < head_end:
                front = _before(text, offsets, head_end - first)
                if head_end <= last:
                    front += self._marker
            if tail_start < last:
                back = _after(text, offsets, tail_start - first)
                if not head and first <= tail_start:
                    back = self._marker + back
            texts.append(None if front is None and back is None else (front or "") + (back or ""))
            first = last
        if texts and not any(text is not None for text in texts):
            # Templates may read the first or the last turn.
            texts[0 if keep == "head" else -1] = "" if tokens < 0 else self._marker
        return texts

    def _offsets(self, texts: Sequence[str]) -> list[Offsets]:
        backend = self._tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        return [encoding.offsets for encoding in backend.encode_batch(list(texts), add_special_tokens=False)]


def _before(text: str, offsets: Offsets, tokens: int) -> str:
    """Return the text of the first ``tokens`` tokens; a character is never split."""
    if tokens >= len(offsets):
        return text
    while tokens > 0 and offsets[tokens][0] < offsets[tokens - 1][1]:
        tokens -= 1
    return text[: offsets[tokens - 1][1]] if tokens > 0 else ""


def _after(text: str, offsets: Offsets, token: int) -> str:
    """Return the text from a token on, or from the next token if this token begins within a character."""
    if token <= 0:
        return text
    while token < len(offsets) and offsets[token][0] < offsets[token - 1][1]:
        token += 1
    return text[offsets[token][0] :] if token < len(offsets) else ""


class _Cell:
    """Hold a row's value in a column that may be cut: a text, or the turns of a JSON list.

    A turn is a text, or an object with a text as its ``content``; other items of a list stay.
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
        contents = [item.get("content") if isinstance(item, dict) else item for item in self._items]
        texts = {
            index: replace_lone_surrogates(content)
            for index, content in enumerate(contents)
            if isinstance(content, str)
        }
        self._positions, self.texts = list(texts), list(texts.values())

    @property
    def counts(self) -> list[int]:
        """Return the tokens of each turn."""
        return [len(offsets) for offsets in self.offsets]

    @property
    def turns(self) -> int:
        """Return the number of turns; 0 if the value is not a list, or has other items than turns."""
        is_all_text = isinstance(self._parsed, list) and len(self.texts) == len(self._items)
        return len(self.texts) if is_all_text else 0

    def with_texts(self, texts: Sequence[str | None], keeps_positions: bool) -> object:
        """Return the value with new texts; None drops a turn, or empties the turn if turns keep positions."""
        items = dict(enumerate(self._items))
        for index, text in zip(self._positions, texts, strict=True):
            item, content = items[index], text or ""
            items[index] = {**item, "content": content} if isinstance(item, dict) else content
            if text is None and not keeps_positions and isinstance(self._parsed, list):
                del items[index]
        value = list(items.values()) if isinstance(self._parsed, list) else items[0]
        return json.dumps(value, ensure_ascii=False) if self._is_json else value


def share_out(counts: Sequence[int], shares: Sequence[float], tokens: int) -> list[int]:
    """Return the tokens of each field; a field that needs less than its share leaves the rest to other fields."""
    budgets = [0] * len(counts)
    unmet = [index for index, count in enumerate(counts) if count > 0]
    remaining = max(0, tokens)
    while unmet:
        total = sum(shares[index] for index in unmet)
        parts = {index: remaining * shares[index] / total for index in unmet}
        met = [index for index in unmet if counts[index] <= parts[index]]
        if not met:
            break
        for index in met:
            budgets[index] = counts[index]
            remaining -= counts[index]
        unmet = [index for index in unmet if index not in met]
    for index in unmet:
        budgets[index] = int(parts[index])
        remaining -= budgets[index]
    # The largest remainders get one token more.
    remainders = sorted(unmet, key=lambda index: budgets[index] - parts[index])
    for index in remainders[: max(0, remaining)]:
        budgets[index] += 1
    return budgets
