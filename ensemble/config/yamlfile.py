"""Read YAML text into a ``Document``: plain data with the line of each value; and write plain data as YAML.

Unquoted words are read by the core schema of YAML 1.2, unlike PyYAML: ``yes``, ``off``, ``1:30`` and
``2024-01-31`` are text, ``012`` is twelve, ``1e-5`` is a number.
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
from ensemble.config.document import MAPPING, NOT_TEXT, Document, Loc, one_line, shown

# No config comes near these limits; a wrong file, such as a CSV, or nested aliases would fill the memory.
MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 40
MAX_VALUES: Final = 10_000
# ``${NAME}``, ``$${``, or a ``${`` that is neither.
VARIABLE: Final = r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)\}|\$\{"

_HINTS = {
    "'\\t'": "indent with spaces, not tabs",
    "cannot start any token": "a value that starts with this character must be in quotes",
    "mapping values are not allowed": "a value with ': ' inside must be in quotes",
    "expected <block end>": "check the indentation, and quote a value with quotes or braces in it",
    "a single document": "a config is one document, without a second ---",
}


def read_text(path: Path) -> str:
    """Return the file's text, exactly as it is; raise ConfigError if it is missing, too large or not UTF-8."""
    name = one_line(str(path))
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        names = {other.stem: other.name for other in sorted(path.parent.glob("*.y*ml"))}
        near = nearest(path.stem, names)
        hint = "" if near is None else f" (did you mean {names[near]!r}?)"
        raise ConfigError(f"{name}: no such file{hint}") from None
    except OSError as error:
        raise ConfigError(unreadable(name, error, "name a YAML file")) from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{name}: larger than {MAX_BYTES >> 20} MiB; is this the config?")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name} (line {line}): not UTF-8 text; save the file as UTF-8") from None


def parse(text: str, source: object, files: Sequence[str] = (), number: int = 0) -> Document:
    """Return YAML text as a ``Document``, which also has the problems of single values and keys.

    Args:
        source: the file's path, or a mapping's name.
        files: the names of all files of the config, of which this one has the index ``number``.

    Raises:
        ConfigError: the text as a whole cannot be used: a syntax error, too many values, or no mapping.
    """
    name = one_line(str(source))
    folder = source.absolute().parent if isinstance(source, Path) else Path.cwd()
    document = Document({}, [*files] or [name], folder)
    try:
        data = build_data(text.removeprefix("\ufeff"), document, (), number)
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
    """Report text of a file or an override that cannot be used; the message is one line."""

    def __init__(self, sentence: str, mark: tuple[int, int] | None = None) -> None:
        super().__init__(" ".join(sentence.split()))
        self.position = f" (line {mark[0]}, column {mark[1]})" if mark else ""


def build_data(text: str, document: Document, loc: Loc, source: int) -> object:
    """Return YAML text as plain data for the place ``loc``; the document gets the lines of its values.

    ``source`` is the number of the file or override. Raise Unreadable if the text is no YAML or too large.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
        return None if node is None else _Builder(document, source).build(node, loc)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        raise Unreadable(f"a character that YAML forbids, number {error.character}", (line, column)) from None
    except yaml.MarkedYAMLError as error:
        sentence = "not valid YAML: " + ", ".join(part for part in (error.context, error.problem) if part)
        hint = next((f"; {advice}" for words, advice in _HINTS.items() if words in sentence), "")
        mark = error.problem_mark or error.context_mark
        raise Unreadable(sentence + hint, (mark.line + 1, mark.column + 1) if mark else None) from None
    except RecursionError:
        raise Unreadable(f"nested more than {MAX_DEPTH} levels deep") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # such as the unknown character "\UFFFFFFFF"
        raise Unreadable(f"not valid YAML: {error}") from None


def _mark(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _integer(text: str) -> int:
    if len(text) > 100:
        raise ValueError
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


_TAG = "tag:yaml.org,2002:"
# For each type: its words without quotes, the function that reads them, and the type's name in messages.
_TYPES: dict[str, tuple[str, Callable[[str], object], str]] = {
    "null": (r"~|null|Null|NULL|", lambda text: None, "null"),
    "bool": (
        r"true|True|TRUE|false|False|FALSE",
        lambda text: {"true": True, "false": False}[text.lower()],
        "true or false",
    ),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", _integer, "a whole number"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        lambda text: float(re.sub(r"\.(?=inf|nan)", "", text.lower())),
        "a number",
    ),
    "merge": (r"<<", str, "text"),
    "str": (r"(?s:.*)", str, "text"),
}


class _Words:
    """Find the type of a word for PyYAML's reader and writer."""

    def resolve(self, kind: type[yaml.Node], value: str, implicit: tuple[bool, bool]) -> str:
        if kind is not yaml.ScalarNode:
            return _TAG + ("seq" if kind is yaml.SequenceNode else "map")
        is_quoted = not implicit[0]
        if is_quoted:
            return f"{_TAG}str"
        return _TAG + next(name for name, (words, _, _) in _TYPES.items() if re.fullmatch(words, value))


class _Loader(_Words, yaml.SafeLoader):
    pass


class _Dumper(_Words, yaml.SafeDumper):
    """Write YAML, with quotes around words that ``_Loader`` would not read as text."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    lines = text.split("\n")
    style = "|" if len(lines) > 1 else None
    if not all(line.isprintable() for line in lines):
        style = '"'  # because PyYAML would treat other characters as line breaks
    return dumper.represent_scalar(f"{_TAG}str", text, style=style)


_Dumper.add_representer(str, _text_node)


def dump(data: dict[str, Any]) -> str:
    """Return plain data as YAML text, which ``parse`` reads as the same data; no line is folded."""
    return yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=MAX_BYTES
    )


class _Builder:
    """Turn nodes into plain data. An alias becomes a copy, so that an override changes one of them."""

    def __init__(self, document: Document, source: int) -> None:
        self.document = document
        self.source = source
        self.values_left = MAX_VALUES

    def build(self, node: yaml.Node, loc: Loc) -> object:
        self._count(node, len(loc))
        if loc:
            self.document.lines.setdefault(loc, (self.source, _mark(node)[0]))
        kind = node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self._mapping(node, loc)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [self.build(item, (*loc, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and kind in _TYPES:
            _, read, name = _TYPES[kind]
            text = _text(node)
            try:
                if kind != "str":
                    return read(text)
                folder = str(self.document.folder).replace("${", "$${")
                return re.sub(
                    VARIABLE, lambda match: folder if match["name"] == "CONFIG_DIR" else match[0], text
                )
            except (ValueError, KeyError):
                sentence = f"{shown(text)} cannot be read as {name}"
        else:
            sentence = f"the tag {shown(node.tag.replace(_TAG, '!!'))} is not allowed here; leave it out"
        if not loc:
            raise Unreadable(sentence, _mark(node))
        self.document.report(loc, sentence)
        return None

    def _count(self, node: yaml.Node, depth: int) -> None:
        self.values_left -= 1
        sentence = ""
        if self.values_left < 0:
            sentence = f"more than {MAX_VALUES} values, with what *aliases repeat; is this the config?"
        elif depth > MAX_DEPTH:
            sentence = f"nested more than {MAX_DEPTH} levels deep; does an *alias stand inside what it names?"
        if sentence:
            raise Unreadable(sentence, _mark(node))

    def _mapping(self, node: yaml.MappingNode, loc: Loc) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node, is_merged in self._pairs(node, loc, len(loc)):
            line = _mark(key_node)[0]
            if not isinstance(key_node, yaml.ScalarNode):
                sentence = f"a key (line {line}) must be text; a value that starts with {{ needs quotes"
                self.document.report(loc, sentence)
                continue
            key = _text(key_node)
            # Numbers of GPUs and labels are keys, too, as they are written.
            is_count = key_node.tag == f"{_TAG}int" and re.fullmatch("0|[1-9][0-9]{0,8}", key) is not None
            if key_node.tag != f"{_TAG}str" and not is_count:
                sentence = f"the key {shown(key)} (line {line}) must be text; put it in quotes"
                self.document.report(loc, sentence)
            elif key not in values:
                self.document.lines[*loc, key] = self.source, line
                values[key] = self.build(value_node, (*loc, key))
            elif not is_merged:
                self.document.report((*loc, key), f"given twice; again on line {line}")
        return values

    def _pairs(
        self, node: yaml.MappingNode, loc: Loc, depth: int, is_merged: bool = False
    ) -> Iterator[tuple[yaml.Node, yaml.Node, bool]]:
        """Yield the mapping's own keys and then those of ``<<``; the first of the same name wins."""
        self._count(node, depth)
        bases: list[yaml.Node] = []
        for key, value in node.value:
            self._count(key, depth)
            if key.tag != f"{_TAG}merge":
                yield key, value, is_merged
            else:
                bases += value.value if isinstance(value, yaml.SequenceNode) else [value]
        for base in bases:
            if isinstance(base, yaml.MappingNode):
                yield from self._pairs(base, loc, depth + 1, is_merged=True)
            else:
                self.document.report(loc, f"<< on line {_mark(base)[0]} needs a mapping, such as <<: *name")


def _text(node: yaml.ScalarNode) -> str:
    """Return a node's text; JSON, which is YAML too, writes a character above U+FFFF as a pair of surrogates."""
    text: str = node.value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    refused = re.search(NOT_TEXT, text)
    if refused is not None:
        character = "a NUL character" if refused[0] == "\0" else f"half of a character ({refused[0]!a})"
        raise Unreadable(f"text cannot hold {character}", _mark(node))
    return text
