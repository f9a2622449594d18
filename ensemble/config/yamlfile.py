"""YAML text -> a ``Document``: plain data that remembers on which line each value stands.

Unquoted words are read as YAML 1.2 has it (its core schema), not as PyYAML does: ``yes``, ``off``, ``1:30``
and ``2024-01-31`` are text, ``012`` is twelve, ``1e-5`` is a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from ensemble.common.errors import ConfigError
from ensemble.common.files import unreadable
from ensemble.common.text import nearest
from ensemble.config.document import INVALID, MAPPING, NOT_TEXT, Document, Line, Loc, one_line, shown

# No config comes near these; a wrong file (a CSV, say) or a bomb of aliases does, and must not fill memory.
MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 40
MAX_VALUES: Final = 10_000
MAX_DIGITS: Final = 100

_HINTS = (
    ("'\\t'", "; indent with spaces, not tabs"),
    ("cannot start any token", "; a value that starts with this character must be in quotes"),
    ("mapping values are not allowed", "; a value with ': ' inside must be in quotes"),
    ("expected <block end>", "; check the indentation, and quote a value with quotes or braces in it"),
    ("a single document", "; a config is one document, without a second ---"),
)


def read_text(path: Path) -> str:
    """Return the file's text, exactly as it stands.

    Raises:
        ConfigError: there is no such file, or it cannot be read, is too large, or is not UTF-8.
    """
    name = one_line(str(path))
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such file{_similar_yaml(path)}") from None
    except PermissionError as error:
        raise ConfigError(unreadable(name, error)) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: cannot be read: {getattr(error, 'strerror', error)}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{name}: larger than {MAX_BYTES >> 20} MiB; is this the config?")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name} (line {line}): not UTF-8 text; save the file as UTF-8") from None


def _similar_yaml(path: Path) -> str:
    """Return what to add of a file that is not there: one beside it of a like name, with any ending of YAML."""
    names = {file.stem: file.name for file in sorted(path.parent.glob("*.y*ml"))}
    near = nearest(path.stem, names)
    return "" if near is None else f" (did you mean {names[near]!r}?)"


def parse(text: str, source: object, files: Sequence[str] = (), number: int = 0) -> Document:
    """Return YAML text as a ``Document``; repeated and non-text keys are problems noted in it.

    Args:
        source: the path of the file; printed, its name.
        files: the names of all the files that are read, if there are more.
        number: of this one among them.

    Raises:
        ConfigError: nothing to go on with: a syntax error, an empty file, too many values, no mapping.
    """
    name = one_line(str(source))
    document = Document({}, {}, tuple(files) or (name,))
    try:
        data = build_data(text.removeprefix("\ufeff"), document, (), document.lines, number)
    except Unreadable as error:
        position = "" if name == MAPPING else error.position
        raise ConfigError(f"{name}{position}: {error}") from None
    if data is None:
        raise ConfigError(f"{name}: empty; a config is a mapping of keys to values")
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: the top level must be a mapping of keys to values, not {shown(data)}")
    document.data = data
    return document


class Unreadable(Exception):
    """Text that cannot be gone on with, be it YAML or an override; says why on one line."""

    def __init__(self, sentence: str, mark: tuple[int, int] | None = None) -> None:
        super().__init__(" ".join(sentence.split()))
        self.position = f" (line {mark[0]}, column {mark[1]})" if mark else ""


def build_data(text: str, document: Document, loc: Loc, lines: dict[Loc, Line], file: int = 0) -> object:
    """Return YAML text as plain data, which will stand at ``loc``; ``lines`` takes each value's line in ``file``.

    Raises:
        Unreadable: it is no YAML, or too large or too deep.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
        return None if node is None else _Builder(document, lines, file).build(node, loc)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        raise Unreadable(f"a character that YAML forbids, number {error.character}", (line, column)) from None
    except yaml.MarkedYAMLError as error:
        sentence = "not valid YAML: " + ", ".join(part for part in (error.context, error.problem) if part)
        for words, hint in _HINTS:
            if words in sentence:
                sentence += hint
                break
        mark = error.problem_mark or error.context_mark
        raise Unreadable(sentence, (mark.line + 1, mark.column + 1) if mark else None) from None
    except RecursionError:
        raise Unreadable(f"nested more than {MAX_DEPTH} levels deep") from None
    # ValueError: "\UFFFFFFFF", a character that there is not
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise Unreadable(f"not valid YAML: {error}") from None


def _mark(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


def _float(text: str) -> float:
    return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))


_TAG = "tag:yaml.org,2002:"
# The words of each type.
_WORDS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "merge": r"<<",
    "str": r"(?s:.*)",
}
# How a word of each type is read, and what such a value is called.
_READERS: dict[str, tuple[Callable[[str], object], str]] = {
    "null": (lambda text: None, "null"),
    "bool": (lambda text: {"true": True, "false": False}[text.lower()], "true or false"),
    "int": (_integer, "a whole number"),
    "float": (_float, "a number"),
    "merge": (str, "text"),
    "str": (str, "text"),
}


class _Words:
    """Tells the type of a word without quotes as YAML 1.2 has it; for PyYAML's reader and its writer."""

    def resolve(self, kind: type[yaml.Node], value: str, implicit: tuple[bool, bool]) -> str:
        if kind is not yaml.ScalarNode:
            return _TAG + ("seq" if kind is yaml.SequenceNode else "map")
        is_quoted = not implicit[0]
        if is_quoted:
            return f"{_TAG}str"
        return _TAG + next(tag for tag, words in _WORDS.items() if re.fullmatch(words, value))


class _Loader(_Words, yaml.SafeLoader):
    pass


class _Dumper(_Words, yaml.SafeDumper):
    """PyYAML's writer, which quotes what ``_Loader`` would not read as text."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    lines = text.split("\n")
    style = "|" if len(lines) > 1 else None
    if not all(line.isprintable() for line in lines):
        style = '"'  # what PyYAML would otherwise leave to line breaks that are none in the text
    return dumper.represent_scalar(f"{_TAG}str", text, style=style)


_Dumper.add_representer(str, _text_node)


def dump(data: dict[str, Any]) -> str:
    """Return plain data as YAML text, of which ``parse`` makes the same data."""
    # No line is folded, so that an editor's search finds what stands in it.
    return yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=MAX_BYTES
    )


class _Builder:
    """Nodes -> plain data.  An alias becomes a copy, so that an override of one leaves the others alone."""

    def __init__(self, document: Document, lines: dict[Loc, Line], file: int) -> None:
        self.document = document
        self.lines = lines
        self.file = file
        self.values_left = MAX_VALUES

    def build(self, node: yaml.Node, loc: Loc) -> object:
        self._count(node, len(loc))
        if loc:
            self.lines.setdefault(loc, (self.file, _mark(node)[0]))
        kind = node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self._mapping(node, loc)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [self.build(item, (*loc, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and kind in _READERS:
            read, name = _READERS[kind]
            text = _text(node)
            try:
                return read(text)
            except (ValueError, KeyError):
                sentence = f"{shown(text)} cannot be read as {name}"
        else:
            sentence = f"the tag {shown(node.tag.replace(_TAG, '!!'))} is not allowed here; leave it out"
        if not loc:
            raise Unreadable(sentence, _mark(node))
        self.document.refuse(loc, sentence)
        return INVALID

    def _count(self, node: yaml.Node, depth: int) -> None:
        self.values_left -= 1
        if self.values_left < 0:
            sentence = (
                f"holds more than {MAX_VALUES} values, counting what *aliases repeat; is this the config?"
            )
            raise Unreadable(sentence, _mark(node))
        if depth > MAX_DEPTH:
            sentence = f"nested more than {MAX_DEPTH} levels deep; does an *alias stand inside what it names?"
            raise Unreadable(sentence, _mark(node))

    def _mapping(self, node: yaml.MappingNode, loc: Loc) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node, is_merged in self._pairs(node, loc, len(loc)):
            line = _mark(key_node)[0]
            if not isinstance(key_node, yaml.ScalarNode):
                sentence = f"a key (line {line}) must be text; a value that starts with {{ needs quotes"
                self.document.refuse(loc, sentence)
                continue
            key = _text(key_node)
            # Text, or a number as one counts GPUs and labels with, which is kept as it is written.
            is_count = key_node.tag == f"{_TAG}int" and re.fullmatch("0|[1-9][0-9]{0,8}", key) is not None
            if key_node.tag != f"{_TAG}str" and not is_count:
                sentence = f"the key {shown(key)} (line {line}) must be text; put it in quotes"
                self.document.refuse(loc, sentence)
            elif key not in values:
                self.lines[*loc, key] = self.file, line
                values[key] = self.build(value_node, (*loc, key))
            elif not is_merged:
                self.document.report((*loc, key), f"given twice; again on line {line}")
        return values

    def _pairs(
        self, node: yaml.MappingNode, loc: Loc, depth: int, is_merged: bool = False
    ) -> Iterator[tuple[yaml.Node, yaml.Node, bool]]:
        """Yield the mapping's own keys, then those that ``<<`` brings in: who comes first wins."""
        self._count(node, depth)
        bases: list[yaml.Node] = []
        for key, value in node.value:
            self._count(key, depth)
            if key.tag != f"{_TAG}merge":
                yield key, value, is_merged
            elif isinstance(value, yaml.SequenceNode):
                bases += value.value
            else:
                bases.append(value)
        for base in bases:
            if isinstance(base, yaml.MappingNode):
                yield from self._pairs(base, loc, depth + 1, is_merged=True)
            else:
                self.document.report(loc, f"<< on line {_mark(base)[0]} needs a mapping, such as <<: *name")


def _text(node: yaml.ScalarNode) -> str:
    """Return what a node says; JSON is YAML too, and writes a character above U+FFFF as a pair of surrogates."""
    text: str = re.sub(
        "[\ud800-\udbff][\udc00-\udfff]",
        lambda pair: pair[0].encode("utf-16-le", "surrogatepass").decode("utf-16-le"),
        node.value,
    )
    refused = re.search(NOT_TEXT, text)
    if refused is not None:
        what = "a NUL character" if refused[0] == "\0" else f"half of a character ({refused[0]!a})"
        raise Unreadable(f"text cannot hold {what}", _mark(node))
    return text
