"""Pages of Markdown, and their fenced blocks with the lines on which they stand."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.project import ROOT

_OPENING = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}) *(?P<info>[^`\n]*)$")
_TITLE = re.compile(r'title="([^"]*)"')
# A command of this project in a block, behind what a terminal or a notebook puts before it.
_COMMAND = re.compile(r"^\s*(?:[$!%>]\s*)?(?:\w+=\S+\s+)*(?:python3? -m )?ensemble (?P<arguments>[a-z-].*)$")
_INLINE = re.compile(r"`(?:python3? -m )?ensemble ([a-z-][^`]*)`")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        line: on which its first line stands in the page.
        title: in quotes behind the language, such as the name of a file; empty if there is none.
    """

    page: Path
    line: int
    language: str
    title: str
    text: str

    @property
    def place(self) -> str:
        return place(self.page, self.line)


@dataclass(frozen=True)
class Command:
    """A line of a block that calls ``ensemble``; ``arguments`` stand behind the name."""

    place: str
    arguments: str


def place(page: Path, line: int) -> str:
    return f"{page.relative_to(ROOT) if page.is_relative_to(ROOT) else page}, line {line}"


def pages() -> list[Path]:
    """All texts for people and agents."""
    found = [path for path in sorted(ROOT.glob("*.md")) if path.name != "SECURITY.md"]
    return [*found, *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page, without their indentation."""
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        opening = _OPENING.match(lines[number])
        number += 1
        if opening is None:
            continue
        first = number
        closing = re.compile(rf"^ *{opening['fence'][0]}{{{len(opening['fence'])},}} *$")
        while number < len(lines) and not closing.match(lines[number]):
            number += 1
        assert number < len(lines), f"{place(page, first)}: this block has no end"
        words = opening["info"].split()
        title = _TITLE.search(opening["info"])
        content = textwrap.dedent("".join(f"{line}\n" for line in lines[first:number]))
        yield Block(page, first + 1, words[0] if words else "", title[1] if title else "", content)
        number += 1


def commands(block: Block) -> Iterator[Command]:
    """Yield what a block calls of ``ensemble``; a line that ends with a backslash goes on in the next one."""
    lines = block.text.splitlines()
    number = 0
    while number < len(lines):
        first, line = number, lines[number]
        while line.endswith("\\") and number + 1 < len(lines):
            number += 1
            line = f"{line[:-1]} {lines[number].strip()}"
        number += 1
        if called := _COMMAND.match(line):
            yield Command(place(block.page, block.line + first), called["arguments"])


def inline_commands(page: Path) -> Iterator[Command]:
    """Yield what a page's text, outside blocks, calls of ``ensemble``: these may leave out arguments."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for block in blocks(page):
        lines[block.line - 1 : block.line - 1 + block.text.count("\n")] = [""] * block.text.count("\n")
    for number, line in enumerate(lines, start=1):
        yield from (Command(place(page, number), arguments) for arguments in _INLINE.findall(line))


def words(page: Path) -> int:
    """Count the words of a page, as ``wc -w`` does."""
    return len(page.read_text(encoding="utf-8").split())
