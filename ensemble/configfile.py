"""YAML text -> plain data that remembers where each value stands; ``--set`` overrides; ``${NAME}``.

Owns the reading: which words are numbers, what an override may reach, and how a place is named in an error.
It does not know which keys there are or what they mean; that is ``config``.

Unquoted words are read as YAML 1.2 has it (its core schema), not as PyYAML does: ``yes``, ``off``, ``1:30``
and ``2024-01-31`` are text, ``012`` is twelve, ``1e-5`` is a number.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from ensemble.errors import ConfigError

# A place in the YAML: ("models", 1, "weight") is models[1].weight.
Loc = tuple[str | int, ...]

# No config comes near these; a wrong file (a CSV, say) or a bomb of aliases does, and must not fill memory.
MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 40
MAX_VALUES: Final = 10_000
MAX_DIGITS: Final = 100
SHOWN_CHARACTERS: Final = 60

# Stands where a value could not be had: of no type that a check accepts, and already reported.
INVALID: Final = object()

_TAG = "tag:yaml.org,2002:"
_WORDS = (
    (_TAG + "null", re.compile(r"~|null|Null|NULL|")),
    (_TAG + "bool", re.compile(r"true|True|TRUE|false|False|FALSE")),
    (_TAG + "int", re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")),
    (_TAG + "float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")),
    (_TAG + "float", re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")),
    (_TAG + "merge", re.compile(r"<<")),
)
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}
_HINTS = (
    ("'\\t'", "; indent with spaces, not tabs"),
    ("cannot start any token", "; a value that starts with this character must be in quotes"),
    ("mapping values are not allowed", "; a value with ': ' inside must be in quotes"),
    ("expected <block end>", "; check the indentation, and quote a value with quotes or braces in it"),
    ("a single document", "; a config is one document, without a second ---"),
)
_VARIABLE = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)\}|\$\{")
_NOT_TEXT = re.compile(r"[\x00\ud800-\udfff]")


@dataclass
class Document:
    """The YAML as plain data, with the place of each value and every problem found so far.

    ``lines`` counts from 1.  ``overrides`` maps a place that an override made to that override and to the
    place that it names.  ``invalid`` are places whose problem is known, and the places around them.
    """

    data: dict[str, Any]
    lines: dict[Loc, int]
    overrides: dict[Loc, tuple[str, Loc]] = field(default_factory=dict)
    invalid: set[Loc] = field(default_factory=set)
    found: list[tuple[int, str]] = field(default_factory=list)

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong, each once, from the top of the file to its end, then what has no line."""
        return tuple(dict.fromkeys(text for _, text in sorted(self.found, key=lambda item: item[0])))

    def report(self, loc: Loc, sentence: str) -> None:
        """Note a problem; after "must be ..." comes the value as it was written, never what ``${}`` gave."""
        line = next((self.lines[loc[:n]] for n in range(len(loc), 0, -1) if loc[:n] in self.lines), MAX_BYTES)
        if sentence.startswith("must be "):
            if loc in self.invalid:
                return
            value = self.value(loc)
            sentence += f", not {shown(value)}"
            if isinstance(value, str) and "${" in value:
                sentence += " (a variable always gives text)"
        self.found.append((line, f"{self._place(loc)}: {sentence}"))

    def refuse(self, loc: Loc, sentence: str) -> None:
        """Note a problem with the value at ``loc`` that makes any other problem with it pointless."""
        self.report(loc, sentence)
        self.invalid.update(loc[:size] for size in range(len(loc) + 1))

    def value(self, loc: Loc) -> object:
        """The value at ``loc`` as it was written, with ``${NAME}`` unexpanded; None where there is none."""
        here: Any = self.data
        for step in loc:
            try:
                here = here[step]
            except (LookupError, TypeError):
                return None
        return here

    def _place(self, loc: Loc) -> str:
        for size in range(len(loc), 0, -1):
            if loc[:size] in self.overrides:
                text, target = self.overrides[loc[:size]]
                return text if loc == target else f"{text}: {place(loc)}"
            if loc[:size] in self.lines:
                return f"{place(loc)} (line {self.lines[loc[:size]]})"
        return place(loc)


def place(loc: Loc) -> str:
    """``("models", 1, "weight")`` as people write it: ``models[1].weight``."""
    text = ""
    for step in loc:
        plain = isinstance(step, str) and re.fullmatch(r"[\w-]{1,60}", step)
        text += f".{step}" if plain else f"[{shown(step)}]"
    return text.removeprefix(".") or "top level"


def shown(value: object) -> str:
    """A value in an error message: on one line, and short."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    text = f"[{', '.join(map(shown, value))}]" if isinstance(value, list) else repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def read_text(path: Path) -> str:
    """The file's text, exactly as it stands.

    Raises:
        ConfigError: there is no such file, or it cannot be read, is too large, or is not UTF-8.
    """
    name = _one_line(str(path))
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{name}: a folder, not a YAML file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{name}: cannot be read: {reason}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{name}: larger than {MAX_BYTES >> 20} MiB; is this the config?")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name} (line {line}): not UTF-8 text; save the file as UTF-8") from None


def parse(text: str, path: Path) -> Document:
    """YAML text as a ``Document``; repeated and non-text keys are problems noted in it.

    Args:
        text: the YAML; may start with a byte order mark.
        path: the file it came from, to name in errors.

    Raises:
        ConfigError: nothing to go on with: a syntax error, an empty file, too many values, no mapping.
    """
    name = _one_line(str(path))
    document = Document({}, {})
    try:
        data = _build(text.removeprefix("\ufeff"), document, ())
    except _BadYaml as error:
        raise ConfigError(f"{name}{error.position}: {error}") from None
    if data is None:
        raise ConfigError(f"{name}: empty; a config is a mapping of keys to values")
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: the top level must be a mapping of keys to values, not {shown(data)}")
    document.data = data
    return document


class _BadYaml(Exception):
    def __init__(self, sentence: str, mark: tuple[int, int] | None = None) -> None:
        super().__init__(" ".join(sentence.split()))
        self.position = f" (line {mark[0]}, column {mark[1]})" if mark else ""


def _mark(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


class _Loader(yaml.SafeLoader):
    """PyYAML's composer with the words of YAML 1.2, and with an end: it is slow, and recursive."""

    depth = 0
    nodes = 0

    def resolve(self, kind: type[yaml.Node], value: str, implicit: tuple[bool, bool]) -> str:
        if kind is yaml.ScalarNode:
            unquoted = implicit[0]
            return next((tag for tag, word in _WORDS if unquoted and word.fullmatch(value)), _TAG + "str")
        return _TAG + ("seq" if kind is yaml.SequenceNode else "map")

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if parent is not None and self.depth > MAX_DEPTH:
            raise _BadYaml(f"nested more than {MAX_DEPTH} levels deep", _mark(parent))
        self.nodes += 1
        if parent is not None and self.nodes > MAX_VALUES:
            raise _BadYaml(f"holds more than {MAX_VALUES} values; is this the config?", _mark(parent))
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _compose(text: str) -> yaml.Node | None:
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        raise _BadYaml(f"a character that YAML forbids, number {error.character}", (line, column)) from None
    except yaml.MarkedYAMLError as error:
        parts = [part for part in (error.context, error.problem) if part]
        sentence = "not valid YAML: " + ", ".join(parts)
        sentence += next((hint for words, hint in _HINTS if words in sentence), "")
        mark = error.problem_mark or error.context_mark
        raise _BadYaml(sentence, (mark.line + 1, mark.column + 1) if mark else None) from None
    except (
        yaml.YAMLError,
        ValueError,
        OverflowError,
    ) as error:  # ValueError: "\UFFFFFFFF", a character that there is not
        raise _BadYaml(f"not valid YAML: {error}") from None


def _build(text: str, document: Document, loc: Loc, *, with_lines: bool = True) -> object:
    node = _compose(text)
    return None if node is None else _Builder(document, with_lines).build(node, loc)


class _Builder:
    """Nodes -> plain data.  An alias becomes a copy, so that an override of one leaves the others alone."""

    def __init__(self, document: Document, with_lines: bool) -> None:
        self.document = document
        self.with_lines = with_lines
        self.values_left = MAX_VALUES

    def build(self, node: yaml.Node, loc: Loc) -> object:
        self._spend(node, len(loc))
        if self.with_lines and loc:
            self.document.lines.setdefault(loc, _mark(node)[0])
        kind = node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self._mapping(node, loc)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [self.build(item, (*loc, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and kind in {"str", "int", "float", "bool", "null", "merge"}:
            return self._scalar(node, kind, loc)
        self.document.refuse(loc, f"the tag {shown(node.tag)} is not allowed here")
        return INVALID

    def _spend(self, node: yaml.Node, depth: int) -> None:
        self.values_left -= 1
        if self.values_left < 0:
            raise _BadYaml(f"holds more than {MAX_VALUES} values, counting what *aliases repeat", _mark(node))
        if depth > MAX_DEPTH * 2:
            raise _BadYaml("nested too deep; does an *alias stand inside what it names?", _mark(node))

    def _mapping(self, node: yaml.MappingNode, loc: Loc) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node, merged in self._pairs(node, loc, len(loc)):
            if key_node.tag != _TAG + "str" or not isinstance(key_node, yaml.ScalarNode):
                self._refuse_key(key_node, loc)
                continue
            key, inside = key_node.value, (*loc, key_node.value)
            if key not in values:
                if self.with_lines:
                    self.document.lines[inside] = _mark(key_node)[0]
                values[key] = self.build(value_node, inside)
            elif not merged:
                again = f"; again on line {_mark(key_node)[0]}" if self.with_lines else ""
                self.document.report(inside, f"given twice{again}")
        return values

    def _pairs(
        self, node: yaml.MappingNode, loc: Loc, depth: int, merged: bool = False
    ) -> Iterator[tuple[yaml.Node, yaml.Node, bool]]:
        """The mapping's own keys, then those that ``<<`` brings in: who comes first wins."""
        self._spend(node, depth)
        bases: list[yaml.Node] = []
        for key, value in node.value:
            self._spend(key, depth)
            if key.tag != _TAG + "merge":
                yield key, value, merged
            elif isinstance(value, yaml.SequenceNode):
                bases += value.value
            else:
                bases.append(value)
        for base in bases:
            if isinstance(base, yaml.MappingNode):
                yield from self._pairs(base, loc, depth + 1, True)
            else:
                self.document.report(loc, f"<< on line {_mark(base)[0]} needs a mapping, such as <<: *name")

    def _refuse_key(self, node: yaml.Node, loc: Loc) -> None:
        line = _mark(node)[0]
        if isinstance(node, yaml.ScalarNode):
            sentence = f"the key {shown(node.value)} (line {line}) must be text; put it in quotes"
        else:
            sentence = f"a key (line {line}) must be text; a value that starts with {{ needs quotes"
        self.document.refuse(loc, sentence)

    def _scalar(self, node: yaml.ScalarNode, kind: str, loc: Loc) -> object:
        text: str = node.value
        try:
            if kind == "int":
                if len(text) > MAX_DIGITS:
                    raise ValueError
                base = {"0o": 8, "0x": 16}.get(text[:2], 10)
                return int(text if base == 10 else text[2:], base)
            if kind == "float":
                return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
            if kind == "bool":
                return {"true": True, "false": False}[text.lower()]
        except (ValueError, KeyError):
            self.document.refuse(loc, f"{shown(text)} cannot be read as {_KINDS[kind]}")
            return INVALID
        return None if kind == "null" else text


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Put each ``a.b=value`` into the document, in order; what cannot be done is noted there as a problem.

    A part of the path is a key, a position in a list (``models.0`` or ``models[0]``) or a member's name; a
    mapping that is missing on the way is made.  The value is YAML.
    """
    for text in overrides:
        name = f"--set {_one_line(text if len(text) <= 100 else text[:97] + '...')}"
        try:
            _override(document, text, name)
        except _BadYaml as error:
            document.found.append((MAX_BYTES, f"{name}: {error}"))


def _override(document: Document, text: str, name: str) -> None:
    path, equals, value_text = text.partition("=")
    parts = re.sub(r"\[(\d+)\]", r".\1", path.strip(), flags=re.ASCII).split(".")
    if not equals:
        raise _BadYaml("needs the form key=value, for example --set limit=100")
    if not all(parts) or len(parts) > MAX_DEPTH:
        raise _BadYaml(f"{shown(path)} is not a path; write it like models.0.weight")
    steps = _find(document.data, parts)
    for known in (document.lines, document.overrides):
        for loc in [loc for loc in known if loc[: len(steps)] == steps]:
            del known[loc]
    document.invalid = {loc for loc in document.invalid if loc[: len(steps)] != steps}
    document.overrides[steps] = (name, steps)
    value = _build(value_text, document, steps, with_lines=False)
    here: Any = document.data
    for depth, step in enumerate(steps[:-1], start=1):
        inner = here.get(step) if isinstance(here, dict) else here[step]
        if inner is None:
            inner = here[step] = {}
            document.overrides[steps[:depth]] = (name, steps)
        here = inner
    here[steps[-1]] = value


def _find(data: dict[str, Any], parts: Sequence[str]) -> Loc:
    here: Any = data
    loc: Loc = ()
    rest = list(parts)
    while rest:
        if here is None:
            here = {}
        if isinstance(here, dict):
            used = _longest(rest, here)
            step: str | int = ".".join(rest[:used])
        elif isinstance(here, list):
            step, used = _position(here, loc, rest)
        else:
            raise _BadYaml(f"{place(loc)} is {shown(here)} and has no keys inside")
        here = here.get(step) if isinstance(here, dict) else here[int(step)]
        loc, rest = (*loc, step), rest[used:]
    return loc


def _longest(parts: Sequence[str], known: Mapping[str, Any]) -> int:
    """How many parts make a known key together: a key may hold dots itself.  One if none does."""
    return next((size for size in range(len(parts), 0, -1) if ".".join(parts[:size]) in known), 1)


def _position(items: list[Any], loc: Loc, parts: Sequence[str]) -> tuple[int, int]:
    names = {item["name"]: i for i, item in enumerate(items) if isinstance(item, dict) and _has_name(item)}
    used = _longest(parts, names)
    key = ".".join(parts[:used])
    number = int(key) if re.fullmatch(r"[0-9]{1,6}", key) else None
    if number is not None and names.get(key, number) != number:
        raise _BadYaml(f"{key} is both a position and the name of {place((*loc, names[key]))}; rename it")
    if key in names:
        return names[key], used
    if number is None:
        near = difflib.get_close_matches(key[:SHOWN_CHARACTERS], names, n=1)
        advice = f"; did you mean {shown(near[0])}?" if near else ""
        raise _BadYaml(f"{place(loc)} has nothing named {shown(key)}{advice}")
    if number >= len(items):
        raise _BadYaml(f"{place(loc)} has no position {number}; it holds {len(items)}, counted from 0")
    return number, used


def _has_name(item: Mapping[str, Any]) -> bool:
    return isinstance(item.get("name"), str)


def expand(document: Document, variables: Mapping[str, str]) -> dict[str, Any]:
    """The data with ``${NAME}`` replaced in every text value; ``$${`` stands for ``${``.

    What a variable gives is text and stays text.  Keys are left as they are.  An unknown variable is noted as
    a problem and leaves ``INVALID``.  No variable's value gets into a message: it may be a token.
    """
    return {key: _expanded(document, variables, value, (key,)) for key, value in document.data.items()}


def _expanded(document: Document, variables: Mapping[str, str], value: object, loc: Loc) -> object:
    if isinstance(value, dict):
        return {key: _expanded(document, variables, item, (*loc, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_expanded(document, variables, item, (*loc, index)) for index, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    try:
        text = _VARIABLE.sub(lambda match: _replacement(match, variables), value)
        if not _NOT_TEXT.search(text):
            return text
        reason = "has a character that is not text"
    except LookupError as error:
        reason = str(error.args[0])
    document.refuse(loc, reason)
    return INVALID


def _replacement(match: re.Match[str], variables: Mapping[str, str]) -> str:
    name = match["name"]
    if match[0] == "$${":
        return "${"
    if name is None:
        raise LookupError("${ is not followed by a variable's name and }; write $${ for a plain ${")
    if name not in variables:
        raise LookupError(
            f"the environment variable {name} is not set; to keep {match[0]}, write ${match[0]}"
        )
    return variables[name]


def _one_line(text: str) -> str:
    return text if text.isprintable() else repr(text)
