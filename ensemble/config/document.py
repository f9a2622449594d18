"""The config while it is being read: plain data, where each value stands, and what is wrong so far."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

# A place in the YAML: ("models", 1, "weight") is models[1].weight.
Loc = tuple[str | int, ...]
# What is wrong, and where.
Problem = tuple[Loc, str]


class KeyProblems(ValueError):
    """What a validator of a model raises about keys below that model: each with its place and a sentence."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(f"{place(loc)}: {sentence}" for loc, sentence in problems))
        self.problems = tuple(problems)


# The number of a file, from 0, and of a line in it, from 1.
Line = tuple[int, int]

SHOWN_CHARACTERS: Final = 60
# In place of the name of a file: what was given as a mapping has no lines.
MAPPING: Final = "<dict>"
AFTER_ALL_LINES: Final[Line] = (sys.maxsize, 0)
# NUL, and half of a character, which is also how Python keeps bytes that are not UTF-8.
NOT_TEXT: Final = r"[\x00\ud800-\udfff]"

# Stands where a value could not be had: of no type that a check accepts, and already reported.
INVALID: Final = object()


@dataclass
class Document:
    """The YAML as plain data, with the place of each value and every problem found so far.

    ``files`` are the names of the files that it is made of.  ``overrides`` maps a place that an override made to
    that override and to the place that it names.  ``invalid`` are places whose problem is known, and the places
    around them.  ``new_models`` are places of models that no earlier file has, with a sentence that says so.
    """

    data: dict[str, Any]
    lines: dict[Loc, Line]
    files: tuple[str, ...] = ()
    overrides: dict[Loc, tuple[str, Loc]] = field(default_factory=dict)
    invalid: set[Loc] = field(default_factory=set)
    new_models: dict[Loc, str] = field(default_factory=dict)
    noted: list[tuple[Line, str]] = field(default_factory=list)

    @property
    def problems(self) -> tuple[str, ...]:
        """Return what is wrong, each once, from the top of the first file to the end of the last, then the rest."""
        return tuple(dict.fromkeys(text for _, text in sorted(self.noted, key=lambda item: item[0])))

    def report(self, loc: Loc, sentence: str) -> None:
        """Note a problem; after "must be ..." comes the value as it was written, never what ``${}`` gave."""
        places_around = (loc[:size] for size in range(len(loc), 0, -1))
        line = next((self.lines[outer] for outer in places_around if outer in self.lines), AFTER_ALL_LINES)
        if sentence.startswith("must be "):
            if loc in self.invalid:
                return
            value = self.value(loc)
            if not sentence.endswith(f"not {shown(value)}"):
                sentence += f", not {shown(value)}"
            if isinstance(value, str) and "${" in value:
                sentence += " (a variable always gives text)"
        elif sentence.startswith("required"):
            reason = self.new_models.get(loc[:2])
            sentence += f"; {reason}" if reason else ""
        self.noted.append((line, f"{self.where(loc)}: {sentence}"))

    def refuse(self, loc: Loc, sentence: str) -> None:
        """Note a problem with the value at ``loc`` that makes any other problem with it pointless."""
        self.report(loc, sentence)
        self.invalid.update(loc[:size] for size in range(len(loc) + 1))

    def forget(self, loc: Loc) -> None:
        """Drop what is known of the value at ``loc`` and of those inside it: another one takes its place."""
        for inner in places(self.value(loc), loc):
            self.lines.pop(inner, None)
            self.overrides.pop(inner, None)
            self.invalid.discard(inner)

    def value(self, loc: Loc) -> object:
        """The value at ``loc`` as it was written, with ``${NAME}`` unexpanded; None where there is none."""
        here: Any = self.data
        for step in loc:
            try:
                here = here[step]
            except (LookupError, TypeError):
                return None
        return here

    def where(self, loc: Loc) -> str:
        """The key and its line, such as ``models[1].weight (line 7)``, or the override that it came from.

        Of several files the line's is named as well: ``models[1].weight (weights.yaml, line 7)``.
        """
        for size in range(len(loc), 0, -1):
            if loc[:size] in self.overrides:
                text, target = self.overrides[loc[:size]]
                return text if loc == target else f"{text}: {place(loc)}"
            if loc[:size] in self.lines:
                file, line = self.lines[loc[:size]]
                if self.files[file] == MAPPING:
                    return place(loc)
                name = f"{self.files[file]}, " if len(self.files) > 1 else ""
                return f"{place(loc)} ({name}line {line})"
        return place(loc)

    def origin(self, loc: Loc) -> int:
        """The number of the file that the value at ``loc`` comes from; of an override, more than any file has."""
        for size in range(len(loc), 0, -1):
            if loc[:size] in self.overrides:
                return sys.maxsize
            if loc[:size] in self.lines:
                return self.lines[loc[:size]][0]
        return 0


def places(value: object, loc: Loc) -> Iterator[Loc]:
    """Yield a value's place, and those of all values in it."""
    yield loc
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*loc, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from places(item, (*loc, index))


def place(loc: Loc) -> str:
    """Return ``("models", 1, "weight")`` as people write it: ``models[1].weight``."""
    text = ""
    for step in loc:
        plain = isinstance(step, str) and re.fullmatch(r"[\w-]{1,60}", step)
        text += f".{step}" if plain else f"[{shown(step)}]"
    return text.removeprefix(".") or "top level"


def shown(value: object) -> str:
    """A value in an error message: on one line, and short."""
    if value is None:
        return "empty"
    if value is INVALID:
        return "a value that could not be read"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, str):
        return repr(value) if len(value) <= SHOWN_CHARACTERS else f"{value[: SHOWN_CHARACTERS - 3]!r}..."
    text = f"[{', '.join(map(shown, value))}]" if isinstance(value, list) else repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def one_line(text: str) -> str:
    """What the user typed, in a form that cannot break an error message up."""
    return text if text.isprintable() else repr(text)
