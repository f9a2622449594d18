"""The config while it is read: plain data, the place of each value, and the problems."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ensemble.common.text import quoted

# A place in the YAML: ("models", 1, "weight") is models[1].weight.
Loc = tuple[str | int, ...]
# A place and a sentence.
Problem = tuple[Loc, str]


class KeyProblems(ValueError):
    """Raised by a model's validator: problems of keys below that model."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(f"{place(loc)}: {sentence}" for loc, sentence in problems))
        self.problems = tuple(problems)


# The number of a file, from 0, and of a line in it, from 1.
Line = tuple[int, int]

SHOWN_CHARACTERS: Final = 60
# The name of a mapping that is given instead of a file; it has no lines.
MAPPING: Final = "<dict>"
AFTER_ALL_LINES: Final[Line] = (sys.maxsize, 0)
# NUL, and half of a character, with which Python also keeps bytes that are not UTF-8.
NOT_TEXT: Final = r"[\x00\ud800-\udfff]"

# Replaces a value that could not be read; its problem is already noted, and no type accepts it.
INVALID: Final = object()


@dataclass
class Document:
    """The YAML as plain data, with the place of each value and all problems so far.

    Attributes:
        files: the names of the files that it is made of.
        overrides: by the place that an override made: the override and the place that it names.
        invalid: places with a known problem, and the places around them.
        new_models: models that no earlier file has, with a sentence that says so.
        noted: the problems.
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
        """Return each problem once, in the order of files and lines; problems without a line come last."""
        return tuple(dict.fromkeys(text for _, text in sorted(self.noted, key=lambda item: item[0])))

    def report(self, loc: Loc, sentence: str) -> None:
        """Note a problem; "must be ..." is completed by the value as it is written, without variables' values."""
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
        elif sentence.startswith("required") and loc[:2] in self.new_models:
            sentence += f"; {self.new_models[loc[:2]]}"
        self.noted.append((line, f"{self.where(loc)}: {sentence}"))

    def refuse(self, loc: Loc, sentence: str) -> None:
        """Note a problem and ignore all further problems of this value."""
        self.report(loc, sentence)
        self.invalid.update(loc[:size] for size in range(len(loc) + 1))

    def forget(self, loc: Loc) -> None:
        """Drop what is known about a value that will be replaced."""
        for inner in places(self.value(loc), loc):
            self.lines.pop(inner, None)
            self.overrides.pop(inner, None)
            self.invalid.discard(inner)

    def value(self, loc: Loc) -> object:
        """Return the value at ``loc`` as it is written, with ``${NAME}``; None if there is none."""
        here: Any = self.data
        for step in loc:
            try:
                here = here[step]
            except (LookupError, TypeError):
                return None
        return here

    def where(self, loc: Loc) -> str:
        """Return the key and its line, such as ``models[1].weight (line 7)``, or the override that made it.

        Of several files, the file is named as well: ``models[1].weight (weights.yaml, line 7)``.
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
        """Return the number of the file of the value at ``loc``; for an override, more than any file has."""
        for size in range(len(loc), 0, -1):
            if loc[:size] in self.overrides:
                return sys.maxsize
            if loc[:size] in self.lines:
                return self.lines[loc[:size]][0]
        return 0


def places(value: object, loc: Loc) -> Iterator[Loc]:
    """Yield the place of a value, and those of all values in it."""
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
        is_plain = isinstance(step, str) and re.fullmatch(r"[\w-]{1,60}", step)
        text += f".{step}" if is_plain else f"[{shown(step)}]"
    return text.removeprefix(".") or "top level"


def shown(value: object) -> str:
    """Return a value for a message: on one line, and short."""
    if value is None:
        return "empty"
    if value is INVALID:
        return "a value that could not be read"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, str):
        return quoted(value, SHOWN_CHARACTERS - 3)
    text = f"[{', '.join(map(shown, value))}]" if isinstance(value, list) else repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def one_line(text: str) -> str:
    """Return what the user typed for a message: on one line."""
    return text if text.isprintable() else repr(text)
