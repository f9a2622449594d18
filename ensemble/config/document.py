"""Hold the config while it is read: plain data, the place of each value, and the problems."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ensemble.common.text import quoted

# A place in the YAML: ("models", 1, "weight") is models[1].weight.
Loc = tuple[str | int, ...]
# A place and a sentence.
Problem = tuple[Loc, str]
# The number of a file or override, from 0, and of a line in it, from 1.
Line = tuple[int, int]

SHOWN_CHARACTERS: Final = 60
# The name of a mapping that is given instead of a file; it has no lines.
MAPPING: Final = "<dict>"
_AFTER_ALL_LINES: Final[Line] = (sys.maxsize, 0)
# NUL, and half of a character, with which Python also keeps bytes that are not UTF-8.
NOT_TEXT: Final = r"[\x00\ud800-\udfff]"


class KeyProblems(ValueError):
    """Report problems of keys below a model, from the model's validator."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(f"{place(loc)}: {sentence}" for loc, sentence in problems))
        self.problems = tuple(problems)


@dataclass
class Document:
    """Hold the YAML as plain data, with the place of each value and all problems so far.

    Attributes:
        sources: the names of the files, then the overrides.
        folder: of the file, for ``${CONFIG_DIR}``.
        targets: the places that overrides name, by the override's number among the sources.
        new_models: models that no earlier file has, with a sentence that says so.
        noted: the problems.
    """

    data: dict[str, Any]
    sources: list[str]
    folder: Path = field(default_factory=Path.cwd)
    lines: dict[Loc, Line] = field(default_factory=dict)
    targets: dict[int, Loc] = field(default_factory=dict)
    new_models: dict[Loc, str] = field(default_factory=dict)
    noted: list[tuple[Line, str]] = field(default_factory=list)

    @property
    def problems(self) -> tuple[str, ...]:
        """Return each problem once, in the order of files and lines; problems without a line come last."""
        return tuple(dict.fromkeys(text for _, text in sorted(self.noted, key=lambda item: item[0])))

    def report(self, loc: Loc, sentence: str) -> None:
        """Note a problem; "must be ..." is completed by the value as it is written, without variables' values."""
        if sentence.startswith("must be "):
            value = self.value(loc)
            sentence += f", not {shown(value)}"
            if isinstance(value, str) and "${" in value:
                sentence += " (a variable always gives text)"
        elif sentence.startswith("required") and loc[:2] in self.new_models:
            sentence += f"; {self.new_models[loc[:2]]}"
        self.noted.append((self._line(loc) or _AFTER_ALL_LINES, f"{self.where(loc)}: {sentence}"))

    def forget(self, loc: Loc) -> None:
        """Drop the lines of a value that will be replaced."""
        self.lines = {inner: line for inner, line in self.lines.items() if inner[: len(loc)] != loc}

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
        number, line = self._line(loc) or (0, 0)
        name = self.sources[number]
        if number in self.targets:
            return name if loc == self.targets[number] else f"{name}: {place(loc)}"
        if not line or name == MAPPING:
            return place(loc)
        has_one_file = len(self.sources) - len(self.targets) == 1
        return f"{place(loc)} ({'' if has_one_file else f'{name}, '}line {line})"

    def origin(self, loc: Loc) -> int:
        """Return the number of the file or override that has the value at ``loc``."""
        return (self._line(loc) or (0, 0))[0]

    def _line(self, loc: Loc) -> Line | None:
        places_around = (loc[:size] for size in range(len(loc), 0, -1))
        return next((self.lines[outer] for outer in places_around if outer in self.lines), None)


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
