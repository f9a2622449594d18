"""Truncation by field: rows of more than ``max_length`` tokens get shorter columns, and all else stays whole.

The tokens of a prompt are not those of its parts side by side: pieces merge over borders, and some tokenizers put a
space before each text.  So the columns are cut where their own tokens end, the template is rendered with what is
left, and the whole is tokenized as always.  If that is too long, or leaves room, the columns get as much less or
more, until it fits; mostly once or twice.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ensemble.data.json_cells import TemplateProblem, parse_json_cell, replace_lone_surrogates
from ensemble.data.template import PromptTemplate
from ensemble.members.huggingface.spec import too_much_text

# A prompt that leaves no more tokens unused than this is full.
_UNUSED_TOKENS: Final = 2
# How often a row is measured before what fits so far is taken; and before its room is found by halves, for
# templates that make more or less of a cell than it has.
_ROUNDS: Final = 12
_STEPS: Final = 5
# Characters at an end of a text that may belong to no token, for which its tokens are still looked up.
_SPACES: Final = 20

Arrays: TypeAlias = dict[str, npt.NDArray[np.int64]]
# Texts -> for each its inputs by name, uncut.
Tokenize: TypeAlias = Callable[[Sequence[str]], list[Arrays]]


class FieldTruncation:
    """Shortens the columns of rows that are too long.

    Args:
        settings: the member's key ``truncation``: ``fields``, by column ``share`` and ``keep``, and ``marker``.
        tokenizer: a fast transformers tokenizer.
        max_length: tokens a row may have, special tokens included.
        tokenize: inputs of whole prompts, uncut, as the model gets them.

    Raises:
        ValueError: the tokenizer is not a fast one, or what the template says of every row leaves no room.
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
        self._template, self._max_length, self._tokenize = template, max_length, tokenize
        self._tokenizer = tokenizer
        self.columns = tuple(settings["fields"])
        self._shares = [float(settings["fields"][column]["share"]) for column in self.columns]
        self._keep = [settings["fields"][column]["keep"] for column in self.columns]
        self._of_rounds = tuple(place for place, keep in enumerate(self._keep) if keep == "newest_rounds")
        self._marker = settings["marker"]
        self._marker_tokens = len(self._encode([self._marker])[0])
        (fixed,) = tokenize(["".join(template.fixed_texts)])
        if (tokens := len(fixed["input_ids"])) > max_length:
            raise ValueError(too_much_text(tokens, max_length, self.columns))

    def fit(
        self,
        rows: Mapping[int, Mapping[str, object]],
        lengths: Mapping[int, int],
        prompts: Mapping[int, tuple[str, Any]],
    ) -> tuple[dict[int, Arrays], dict[int, str]]:
        """The inputs of rows whose prompts are too long, after their columns have been cut.

        Args:
            rows: by their number.
            lengths: tokens of each, uncut, more than ``max_length``.
            prompts: the text of each, uncut, and its encoding.

        Returns:
            the inputs by row, of at most ``max_length`` tokens, and why the other rows have none.
        """
        cells = {
            (number, column): _Cell(row[column], column in self._template.json_columns)
            for number, row in rows.items()
            for column in self.columns
        }
        unlike: list[tuple[_Cell, int]] = []
        for (number, _), cell in cells.items():
            for place, text in enumerate(cell.texts):
                # Mostly the prompt has the text as it stands, and where its tokens end is known already.
                cell.parts.append(_part(text, *prompts[number]))
                if text and cell.parts[-1].encoding is None:
                    unlike.append((cell, place))
        encodings = self._encode([cell.texts[place] for cell, place in unlike])
        for (cell, place), encoding in zip(unlike, encodings, strict=True):
            cell.parts[place] = _Part(len(encoding), encoding)
        searches, units = {}, {}
        for number in rows:
            of_row = [cells[number, column] for column in self.columns]
            units[number] = self._units(of_row)
            counts = [sum(sum(of_row[place].counts) for place in unit) for unit in units[number]]
            searches[number] = _Search(counts, lengths[number], self._max_length)
        found: dict[int, Arrays] = {}
        problems: dict[int, str] = {}
        active = list(rows)
        for tried in itertools.count():
            texts: dict[int, str] = {}
            for number in active:
                search = searches[number]
                if search.tokens < 0:
                    problems[number] = (
                        f"truncation: {search.least:,} tokens even without {', '.join(self.columns)}, which are "
                        f"all that may be cut; max_length is {self._max_length:,}"
                    )
                    continue
                shares = [sum(self._shares[place] for place in unit) for unit in units[number]]
                budgets = share_out(search.counts, shares, search.tokens)
                cut: dict[str, object] = {}
                for unit, budget in zip(units[number], budgets, strict=True):
                    names = [self.columns[place] for place in unit]
                    of_unit = [cells[number, name] for name in names]
                    if len(unit) > 1:
                        cut.update(zip(names, self._cut_rounds(rows[number], of_unit, budget), strict=True))
                        continue
                    texts_of_it = self._cut(of_unit[0], budget, self._keep[unit[0]])
                    cut[names[0]] = of_unit[0].with_texts(texts_of_it, self._template.reads_by_number)
                try:
                    texts[number] = self._template.render({**rows[number], **cut})
                except TemplateProblem as error:
                    problems[number] = f"prompt_template: with columns cut by truncation: {error}"
            if not texts:
                break
            active = []
            for number, arrays in zip(texts, self._tokenize(list(texts.values())), strict=True):
                search = searches[number]
                tokens = len(arrays["input_ids"])
                if tokens <= self._max_length and search.tokens > search.fits:
                    found[number] = arrays
                if not search.measured(tokens, tried):
                    active.append(number)
        return found, problems

    def _units(self, cells: Sequence[_Cell]) -> list[tuple[int, ...]]:
        """What of a row is cut together, by the numbers of the columns."""
        rounds = self._of_rounds
        if len({cells[place].turns for place in rounds}) != 1 or not cells[rounds[0]].turns:
            return [(place,) for place in range(len(cells))]
        return [rounds, *((place,) for place in range(len(cells)) if place not in rounds)]

    def _cut_rounds(self, row: Mapping[str, object], cells: Sequence[_Cell], tokens: int) -> list[object]:
        """Cells of as many turns each with so many tokens together, the markers' among them.

        The newest rounds stay whole; the one before them shares out what is left.
        """
        rounds = [list(counts) for counts in zip(*(cell.counts for cell in cells), strict=True)]
        if tokens >= sum(map(sum, rounds)):
            return [cell.value for cell in cells]
        shares = [self._shares[place] for place in self._of_rounds]
        for markers in range(1, len(cells) + 1):  # as many as it takes
            room = left = tokens - markers * self._marker_tokens
            first = len(rounds) - 1
            while sum(rounds[first]) <= left:
                left -= sum(rounds[first])
                first -= 1
            given = share_out(rounds[first], shares, left)
            is_newest = first == len(rounds) - 1
            if not is_newest and not any(given):
                first += 1
                given = rounds[first]
            is_cut = [sum(cell.counts[: first + 1]) > count for cell, count in zip(cells, given, strict=True)]
            if sum(is_cut) <= markers:
                break
        # With a column that is none of them, and that a template reads by the rounds' numbers, these must stay.
        names = {self.columns[place] for place in self._of_rounds}
        lists = {name for name in self._template.columns if isinstance(row[name], list)}
        keeps_places = (
            self._template.reads_by_number and not lists.union(self._template.json_columns) <= names
        )
        marker = self._marker if room >= 0 else ""
        values = []
        for cell, count, has_marker in zip(cells, given, is_cut, strict=True):
            text, part = cell.texts[first], cell.parts[first]
            if count < part.tokens:
                head = (count + 1) // 2 if is_newest else 0
                back = text[part.start(part.tokens - count + head) :] if count > head else ""
                text = text[: part.end(head)] + marker + back
            elif has_marker:
                text = marker + text
            values.append(cell.with_texts([*[None] * first, text, *cell.texts[first + 1 :]], keeps_places))
        return values

    def _cut(self, cell: _Cell, tokens: int, keep: str) -> Sequence[str | None]:
        """The texts of a cell with so many of its tokens, the marker's among them; None for a turn that goes."""
        counts = cell.counts
        total = sum(counts)
        if tokens >= total:
            return cell.texts
        room = tokens - self._marker_tokens
        begin, head, tail = ranges(counts, room, keep)
        texts: list[str | None] = []
        first = 0
        for text, part, count in zip(cell.texts, cell.parts, counts, strict=True):
            last = first + count
            front = back = None
            if begin <= first < begin + head:
                end = min(begin + head, last) - first
                front = text if end == count else text[: part.end(end)]
                if begin + head <= last:
                    front += self._marker
            if total - tail < last:
                start = max(total - tail, first) - first
                back = text[part.start(start) :] if start else text
                if not head and first <= total - tail:
                    back = self._marker + back
            texts.append(None if front is None and back is None else (front or "") + (back or ""))
            first = last
        if texts and not any(text is not None for text in texts):
            # Templates may look at the first or the last turn.
            texts[0 if keep == "head" else -1] = "" if room < 0 else self._marker
        return texts

    def _encode(self, texts: Sequence[str]) -> Sequence[Any]:
        """Encodings of parts of prompts, with the characters that each token stands for."""
        backend = self._tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        return backend.encode_batch(list(texts), add_special_tokens=False) if texts else []


@dataclass(frozen=True)
class _Part:
    """The tokens of a text: all of an encoding, or those from ``first`` on of a text that has it at ``at``."""

    tokens: int
    encoding: Any = None
    first: int = 0
    at: int = 0

    def end(self, tokens: int) -> int:
        """The character behind the first so many tokens, or before a character that only a part of them is in."""
        while 0 < tokens < self.tokens and self._chars(tokens)[0] < self._chars(tokens - 1)[1]:
            tokens -= 1
        return max(0, self._chars(tokens - 1)[1]) if tokens else 0

    def start(self, token: int) -> int:
        """The character at which a token begins, or the next one that begins one."""
        while 0 < token < self.tokens and self._chars(token)[0] < self._chars(token - 1)[1]:
            token += 1
        return max(0, self._chars(token)[0] if token < self.tokens else self._chars(token - 1)[1])

    def _chars(self, token: int) -> tuple[int, int]:
        begin, end = self.encoding.token_to_chars(self.first + token)
        return begin - self.at, end - self.at


def _part(text: str, prompt: str, encoding: Any) -> _Part:
    """The tokens that a text has where it stands in a prompt; no encoding where it does not."""
    at = prompt.find(text) if text else -1
    if at < 0:
        return _Part(0)
    inside = range(at, at + len(text))
    # What no token stands for, such as spaces.
    first = next(filter(_is_known, map(encoding.char_to_token, inside[:_SPACES])), None)
    last = next(filter(_is_known, map(encoding.char_to_token, inside[: -_SPACES - 1 : -1])), None)
    return _Part(0) if first is None or last is None else _Part(last + 1 - first, encoding, first, at)


def _is_known(token: int | None) -> bool:
    return token is not None


class _Cell:
    """What of a column can be cut: text, or the turns of a JSON list.

    A turn is a text, or an object with a text as its ``content``; anything else in a list stays.
    """

    def __init__(self, value: object, is_json: bool) -> None:
        self.value = value
        self.parts: list[_Part] = []
        self._parsed: object = value
        self._was_text = isinstance(value, str)
        self._is_json = False
        if is_json and self._was_text:
            try:
                self._parsed = parse_json_cell(value)
                self._is_json = True
            except TemplateProblem:  # in a branch that this row does not take
                self._parsed = value
        self._items = self._parsed if isinstance(self._parsed, list) else [self._parsed]
        self._places = [place for place, item in enumerate(self._items) if _text_of(item) is not None]
        self.texts = [replace_lone_surrogates(_text_of(self._items[place]) or "") for place in self._places]

    @property
    def counts(self) -> list[int]:
        """Tokens of each turn."""
        return [part.tokens for part in self.parts]

    @property
    def turns(self) -> int:
        """How many texts a list consists of; 0 where it is none, or has something else in it."""
        return (
            len(self.texts) if isinstance(self._parsed, list) and len(self._places) == len(self._items) else 0
        )

    def with_texts(self, texts: Sequence[str | None], keeps_places: bool) -> object:
        """The value with other texts; None leaves a turn out, or empty if all shall keep their places."""
        if texts is self.texts:
            return self.value
        items = list(self._items)
        for place, text in zip(self._places, texts, strict=True):
            item = items[place]
            shown = "" if text is None else text
            items[place] = {**item, "content": shown} if isinstance(item, dict) else shown
        if not isinstance(self._parsed, list):
            value: object = items[0]
        elif keeps_places:
            value = items
        else:
            gone = {place for place, text in zip(self._places, texts, strict=True) if text is None}
            value = [item for place, item in enumerate(items) if place not in gone]
        return json.dumps(value, ensure_ascii=False) if self._is_json else value


def _text_of(item: object) -> str | None:
    text = item.get("content") if isinstance(item, dict) else item
    return text if isinstance(text, str) else None


class _Search:
    """How many tokens a row's columns may have together: as many as leave its prompt no longer than it may be.

    Attributes:
        counts: tokens of each column.
        tokens: what to try next; below 0 where even nothing of them is too much.
        fits: the most so far of which the prompt was short enough; -1 for none.
        least: the tokens of the shortest prompt so far.
    """

    def __init__(self, counts: list[int], length: int, max_length: int) -> None:
        self.counts = counts
        self.fits, self._too_many = -1, sum(counts)
        self._max_length, self.least = max_length, length
        self.tokens = self._too_many
        self._choose(max_length - length, 0)

    def measured(self, length: int, tried: int) -> bool:
        """Takes what the prompt came to; whether that, or what fitted before, is all that can be had."""
        self.least = min(self.least, length)
        unused = self._max_length - length
        if unused >= 0:
            self.fits = max(self.fits, self.tokens)
        else:
            self._too_many = min(self._too_many, self.tokens)
        if self.fits >= 0 and (
            0 <= unused <= _UNUSED_TOKENS or self._too_many - self.fits <= 1 or tried >= _ROUNDS
        ):
            return True
        self._choose(unused, tried)
        return False

    def _choose(self, unused: int, tried: int) -> None:
        guess = self.tokens + unused
        if self._too_many <= 0:
            self.tokens = -1
        elif tried < _STEPS and self.fits < guess < self._too_many:
            self.tokens = guess
        else:
            self.tokens = (max(self.fits, 0) + self._too_many) // 2 if self.fits >= 0 else self._too_many // 2


def share_out(counts: Sequence[int], shares: Sequence[float], tokens: int) -> list[int]:
    """Tokens for each field, together so many, or all where that is enough.

    Args:
        counts: tokens that each field has.
        shares: relative to each other, more than 0.

    Returns:
        at most its count for each.  A field that needs less than its share leaves the rest to the others, by their
        shares.
    """
    given = [0] * len(counts)
    hungry = [index for index, count in enumerate(counts) if count > 0]
    left = max(0, tokens)
    while hungry:
        whole = sum(shares[index] for index in hungry)
        parts = {index: left * shares[index] / whole for index in hungry}
        content = [index for index in hungry if counts[index] <= parts[index]]
        if not content:
            break
        for index in content:
            given[index] = counts[index]
            left -= counts[index]
        hungry = [index for index in hungry if index not in content]
    if hungry:
        for index in hungry:
            given[index] = int(parts[index])
        rest = left - sum(given[index] for index in hungry)
        for index in sorted(hungry, key=lambda index: given[index] - parts[index])[: max(0, rest)]:
            given[index] += 1
    return given


def ranges(counts: Sequence[int], tokens: int, keep: str) -> tuple[int, int, int]:
    """Which tokens of a field stay, where it has more than it may have.

    Args:
        counts: tokens of its turns.
        tokens: how many may stay.
        keep: head, tail, head_tail, newest_turns or newest_rounds.

    Returns:
        where the head begins, how many tokens it has, and how many the tail has.
    """
    room, begin = max(0, tokens), 0
    if keep == "head":
        return 0, room, 0
    if keep in ("newest_turns", "newest_rounds"):
        newest = next((count for count in reversed(counts) if count), 0)
        if newest <= room:
            return 0, 0, room
        begin = sum(counts) - newest
    elif keep == "tail":
        return 0, 0, room
    head = (room + 1) // 2
    return begin, head, room - head
