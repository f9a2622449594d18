"""Read the YAML of a config: plain data with the line of each value, and the problems; merge later files over it.

Unquoted words are read by the core schema of YAML 1.2, unlike PyYAML: ``yes``, ``off``, ``1:30`` and
``2024-01-31`` are text, ``012`` is twelve, ``1e-5`` is a number.

A later file replaces what an earlier file says. The top level, the sections, each model and its ``train`` are
merged key by key, models by their names as they are written. Any other value is replaced as a whole, also a mapping
such as ``label_map``. Then come ``--set a.b=value``, and ``${NAME}`` in texts.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from ensemble.common.errors import ConfigError
from ensemble.common.files import unreadable
from ensemble.common.text import did_you_mean, nearest, quoted

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
# No config comes near these limits; a wrong file, such as a CSV, or nested aliases would fill the memory.
MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 40
MAX_VALUES: Final = 10_000
# ``${NAME}``, ``$${``, or a ``${`` that is neither.
VARIABLE: Final = r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)\}|\$\{"
# The mappings at the top level that are merged key by key.
SECTIONS: Final = ("data", "ensemble", "training", "submission", "defaults")

_HINTS = {
    "'\\t'": "indent with spaces, not tabs",
    "cannot start any token": "a value that starts with this character must be in quotes",
    "mapping values are not allowed": "a value with ': ' inside must be in quotes",
    "expected <block end>": "check the indentation, and quote a value with quotes or braces in it",
    "a single document": "a config is one document, without a second ---",
}


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


def merge_documents(documents: Sequence[Document]) -> Document:
    """Merge the documents of later files into the first one, and return that one."""
    document, *later = documents
    for over in later:
        document.noted += over.noted
        for key, value in over.data.items():
            current = document.data.get(key)
            is_removed = key == "submission" and key in document.data and current is None
            if key in SECTIONS and isinstance(value, dict) and isinstance(current, dict):
                _merge(document, (key,), over, (key,))
            elif is_removed and isinstance(value, dict) and "sample" not in value:
                continue  # this file, perhaps by fit, only has its columns
            elif key == "models" and isinstance(value, list) and isinstance(current, list):
                _merge_models(document, over)
            else:
                _put(document, (key,), over, (key,))
    return document


def drop_stale_fit(document: Document) -> None:
    """Drop ``fitted_on`` if a later file or an override changes the weights or the merge."""
    fitted = document.origin(("fitted_on",))
    for loc, (source, _) in document.lines.items():
        is_weight = loc[0] == "models" and loc[-1] in ("weight", "calibration")
        if source > fitted and (is_weight or loc[0] == "ensemble"):
            document.data.pop("fitted_on", None)


def _merge_models(document: Document, over: Document) -> None:
    """Merge models into those of the same names, and add the others at the end."""
    models = document.data["models"]
    index_by_name = {_name(model): index for index, model in enumerate(models)}
    names = [name for name in index_by_name if name is not None]
    for index, model in enumerate(over.data["models"]):
        name = _name(model)
        if name is not None and name in index_by_name:
            # Popped: if the file gives a name twice, the second one is added, and refused as in a single file.
            _merge(document, ("models", index_by_name.pop(name)), over, ("models", index))
            continue
        loc = ("models", len(models))
        models.append(None)
        _put(document, loc, over, ("models", index))
        if name is not None and name not in names:
            near = did_you_mean(name, names)
            document.new_models[loc] = f"no earlier file has a model named {shown(name)}{near}"


def _name(model: object) -> str | None:
    name = model.get("name") if isinstance(model, dict) else None
    return name if isinstance(name, str) else None


def _merge(document: Document, loc: Loc, over: Document, over_loc: Loc) -> None:
    values: Any = over.value(over_loc)
    current: Any = document.value(loc)
    for key, value in values.items():
        if key == "train" and _trains_alike(current.get(key), value):
            _merge(document, (*loc, key), over, (*over_loc, key))
        else:
            _put(document, (*loc, key), over, (*over_loc, key))


def _trains_alike(current: object, value: object) -> bool:
    """Return whether a ``train`` goes over another one key by key: unless it names another way to train."""
    if not isinstance(current, dict) or not isinstance(value, dict):
        return False
    ways = {"command", "base_model"}
    return not ways & {*value} or ways & {*value} == ways & {*current}


def _put(document: Document, loc: Loc, over: Document, over_loc: Loc) -> None:
    """Add or replace a value by a value of another document, with its lines."""
    document.forget(loc)
    holder: Any = document.value(loc[:-1])
    holder[loc[-1]] = over.value(over_loc)
    depth = len(over_loc)
    for inner, line in over.lines.items():
        if inner[:depth] == over_loc:
            document.lines[*loc, *inner[depth:]] = line


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Put each ``a.b=value`` into the document, in order; problems are noted in the document.

    A part of the path is a key, a position in a list (``models.0`` or ``models[0]``) or a member's name; missing
    mappings are made. The value is YAML.
    """
    for text in overrides:
        number = len(document.sources)
        document.sources.append(f"--set {one_line(text if len(text) <= 100 else text[:97] + '...')}")
        document.targets[number] = ()
        path, equals, value = text.partition("=")
        parts = path_of(text).split(".")
        try:
            if not equals:
                raise Unreadable("needs the form key=value, for example --set limit=100")
            if not all(parts) or len(parts) > MAX_DEPTH or re.search(NOT_TEXT, path):
                raise Unreadable(f"{shown(path)} is not a path; write it like models.0.weight")
            holder, loc = _find(document, parts, number)
            document.forget(loc)
            document.lines[loc] = number, 0
            document.targets[number] = loc
            holder[loc[-1]] = build_data(value, document, loc, number)
        except Unreadable as error:
            document.noted.append(((number, 0), f"{document.sources[number]}: {error}"))


def path_of(override: str) -> str:
    """Return the path of an override, with positions as keys: ``models.0.weight``."""
    return re.sub(r"\[(\d+)\]", r".\1", override.partition("=")[0].strip(), flags=re.ASCII)


def _find(document: Document, parts: list[str], number: int) -> tuple[Any, Loc]:
    """Return the container of the value that a path names, and the value's place; make missing mappings."""
    here: Any = document.data
    loc: Loc = ()
    while True:
        step: str | int
        if isinstance(here, dict):
            step, parts = _longest(parts, here)
            inner = here.get(step)
        elif isinstance(here, list):
            step, parts = _position(here, loc, parts)
            inner = here[step]
        else:
            raise Unreadable(f"{place(loc)} is {shown(here)} and has no keys inside")
        loc = (*loc, step)
        if not parts:
            return here, loc
        if inner is None:
            inner = here[step] = {}
            document.lines[loc] = number, 0
        here = inner


def _position(items: list[Any], loc: Loc, parts: list[str]) -> tuple[int, list[str]]:
    """Return the position in a list that the first parts of a path name, and the rest of the path."""
    index_by_name = {str(_name(item)): index for index, item in enumerate(items) if _name(item) is not None}
    key, other_parts = _longest(parts, index_by_name)
    if key in index_by_name:
        return index_by_name[key], other_parts
    if not re.fullmatch(r"[0-9]{1,6}", key):
        raise Unreadable(f"{place(loc)} has nothing named {shown(key)}{did_you_mean(key, index_by_name)}")
    if int(key) >= len(items):
        raise Unreadable(f"{place(loc)} has no position {int(key)}; it holds {len(items)}, counted from 0")
    return int(key), other_parts


def _longest(parts: list[str], keys: Container[str]) -> tuple[str, list[str]]:
    """Return the longest key that the first parts make, because keys may hold dots, and the rest of the parts."""
    for size in range(len(parts), 1, -1):
        key = ".".join(parts[:size])
        if key in keys:
            return key, parts[size:]
    return parts[0], parts[1:]


def expand(document: Document, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the data with ``${NAME}`` replaced in every text, but not in keys; the result is always text.

    ``$${`` stands for ``${``. An unknown variable is noted as a problem, without any variable's value, which may be
    secret.
    """

    def expanded(value: object, loc: Loc) -> Any:
        if isinstance(value, dict):
            return {key: expanded(item, (*loc, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [expanded(item, (*loc, index)) for index, item in enumerate(value)]
        if not isinstance(value, str):
            return value
        try:
            return re.sub(VARIABLE, lambda match: _replacement(match, variables), value)
        except ValueError as error:
            document.report(loc, str(error))
            return value

    data: dict[str, Any] = expanded(document.data, ())
    return data


def _replacement(match: re.Match[str], variables: Mapping[str, str]) -> str:
    name = match["name"]
    if match[0] == "$${":
        return "${"
    if name is None:
        raise ValueError("${ is not followed by a variable's name and }; write $${ for a plain ${")
    if name not in variables:
        raise ValueError(f"the environment variable {name} is not set; to keep {match[0]}, write ${match[0]}")
    if re.search(NOT_TEXT, variables[name]):
        raise ValueError(f"the value of the environment variable {name} is not UTF-8 text")
    return variables[name]
