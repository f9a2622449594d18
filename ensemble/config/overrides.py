"""Apply ``--set a.b=value`` to a ``Document``, and expand ``${NAME}`` in its texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from ensemble.common.text import nearest
from ensemble.config.document import AFTER_ALL_LINES, INVALID, NOT_TEXT, Document, Loc, one_line, place, shown
from ensemble.config.yamlfile import MAX_DEPTH, Unreadable, build_data

_VARIABLE = r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)\}|\$\{"


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Put each ``a.b=value`` into the document, in order; problems are noted in the document.

    A part of the path is a key, a position in a list (``models.0`` or ``models[0]``) or a member's name; missing
    mappings are made. The value is YAML.
    """
    for text in overrides:
        name = f"--set {one_line(text if len(text) <= 100 else text[:97] + '...')}"
        path, equals, value = text.partition("=")
        parts = path_of(text).split(".")
        try:
            if not equals:
                raise Unreadable("needs the form key=value, for example --set limit=100")
            if not all(parts) or len(parts) > MAX_DEPTH or re.search(NOT_TEXT, path):
                raise Unreadable(f"{shown(path)} is not a path; write it like models.0.weight")
            holder, loc, made = _find(document.data, parts)
            document.forget(loc)
            document.overrides |= dict.fromkeys([*made, loc], (name, loc))
            holder[loc[-1]] = build_data(value, document, loc, {})
        except Unreadable as error:
            document.noted.append((AFTER_ALL_LINES, f"{name}: {error}"))


def path_of(override: str) -> str:
    """Return the path of an override, with positions as keys: ``models.0.weight``."""
    return re.sub(r"\[(\d+)\]", r".\1", override.partition("=")[0].strip(), flags=re.ASCII)


def _find(data: dict[str, Any], parts: list[str]) -> tuple[Any, Loc, list[Loc]]:
    """Return the container of the value that a path names, its place, and the places of mappings that were made."""
    here: Any = data
    loc: Loc = ()
    made: list[Loc] = []
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
            return here, loc, made
        if inner is None:
            inner = here[step] = {}
            made.append(loc)
        here = inner


def _position(items: list[Any], loc: Loc, parts: list[str]) -> tuple[int, list[str]]:
    """Return the position in a list that the first parts of a path name, and the rest of the path."""
    index_by_name = {
        item["name"]: index
        for index, item in enumerate(items)
        if isinstance(item, dict) and isinstance(item.get("name"), str)
    }
    key, rest = _longest(parts, index_by_name)
    if key in index_by_name:
        return index_by_name[key], rest
    if not re.fullmatch(r"[0-9]{1,6}", key):
        near = nearest(key, index_by_name)
        advice = f"; did you mean {shown(near)}?" if near is not None else ""
        raise Unreadable(f"{place(loc)} has nothing named {shown(key)}{advice}")
    if int(key) >= len(items):
        raise Unreadable(f"{place(loc)} has no position {int(key)}; it holds {len(items)}, counted from 0")
    return int(key), rest


def _longest(parts: list[str], keys: Container[str]) -> tuple[str, list[str]]:
    """Return the longest key that the first parts make, because keys may hold dots, and the rest of the parts."""
    for size in range(len(parts), 1, -1):
        key = ".".join(parts[:size])
        if key in keys:
            return key, parts[size:]
    return parts[0], parts[1:]


def variables_of(sources: Sequence[object], environ: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the variables for each source: the environment, and ``CONFIG_DIR``, the file's folder.

    For a source that is no file ``CONFIG_DIR`` is the working directory.
    """
    folders = (source.absolute().parent if isinstance(source, Path) else Path.cwd() for source in sources)
    return [{**environ, "CONFIG_DIR": str(folder)} for folder in folders]


def expanded_text(text: str, variables: Mapping[str, str]) -> str:
    """Return the text with ``${NAME}`` replaced; ``$${`` stands for ``${``.

    Raises:
        LookupError: the variable is unknown or not text; the message does not have its value, which may be secret.
    """

    def replacement(match: re.Match[str]) -> str:
        name = match["name"]
        if match[0] == "$${":
            return "${"
        if name is None:
            raise LookupError("${ is not followed by a variable's name and }; write $${ for a plain ${")
        if name not in variables:
            raise LookupError(
                f"the environment variable {name} is not set; to keep {match[0]}, write ${match[0]}"
            )
        if re.search(NOT_TEXT, variables[name]):
            raise LookupError(f"the value of the environment variable {name} is not UTF-8 text")
        return variables[name]

    return re.sub(_VARIABLE, replacement, text)


def expand(document: Document, *variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the data with ``${NAME}`` replaced in every text, but not in keys; the result is always text.

    An unknown variable is noted as a problem and leaves ``INVALID``.

    Args:
        variables: of each file; those of the first are also used for overrides.
    """

    def expanded(text: str, loc: Loc) -> object:
        try:
            return expanded_text(text, _variables_at(document, loc, variables))
        except LookupError as error:
            document.refuse(loc, str(error.args[0]))
            return INVALID

    data: dict[str, Any] = _with_texts(document.data, (), expanded)
    return data


def with_folders(document: Document, variables: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return the data with only ``${CONFIG_DIR}`` replaced, so that it means the same in a file in any folder."""

    def moved(text: str, loc: Loc) -> str:
        folder = _variables_at(document, loc, variables)["CONFIG_DIR"].replace("${", "$${")
        return re.sub(_VARIABLE, lambda match: folder if match["name"] == "CONFIG_DIR" else match[0], text)

    data: dict[str, Any] = _with_texts(document.data, (), moved)
    return data


def _variables_at(document: Document, loc: Loc, variables: Sequence[Mapping[str, str]]) -> Mapping[str, str]:
    file = document.origin(loc)
    return variables[file if file < len(variables) else 0]


def _with_texts(value: object, loc: Loc, replaced: Callable[[str, Loc], object]) -> Any:
    """Return plain data with ``replaced(text, place)`` for every text."""
    if isinstance(value, dict):
        return {key: _with_texts(item, (*loc, key), replaced) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_texts(item, (*loc, index), replaced) for index, item in enumerate(value)]
    return replaced(value, loc) if isinstance(value, str) else value
