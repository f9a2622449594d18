"""What goes into a ``Document`` in place of what the YAML says: ``--set a.b=value``, and ``${NAME}`` in texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ensemble.common.text import nearest
from ensemble.config.document import AFTER_ALL_LINES, INVALID, NOT_TEXT, Document, Loc, one_line, place, shown
from ensemble.config.yamlfile import MAX_DEPTH, Unreadable, build_data

_VARIABLE = r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)\}|\$\{"


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Put each ``a.b=value`` into the document, in order; what cannot be done is noted there as a problem.

    A part of the path is a key, a position in a list (``models.0`` or ``models[0]``) or a member's name; a
    mapping that is missing on the way is made.  The value is YAML.
    """
    for text in overrides:
        name = f"--set {one_line(text if len(text) <= 100 else text[:97] + '...')}"
        path, equals, value_text = text.partition("=")
        parts = path_of(text).split(".")
        try:
            if not equals:
                raise Unreadable("needs the form key=value, for example --set limit=100")
            if not all(parts) or len(parts) > MAX_DEPTH or re.search(NOT_TEXT, path):
                raise Unreadable(f"{shown(path)} is not a path; write it like models.0.weight")
            holder, steps, made = _find(document.data, parts)
            for known in (document.lines, document.overrides):
                for loc in [loc for loc in known if loc[: len(steps)] == steps]:
                    del known[loc]
            document.invalid = {loc for loc in document.invalid if loc[: len(steps)] != steps}
            document.overrides |= dict.fromkeys([*made, steps], (name, steps))
            before = document.value(steps)
            holder[steps[-1]] = value = build_data(value_text, document, steps, {})
            if value is None:
                document.note_null(steps, before)
        except Unreadable as error:
            document.found.append((AFTER_ALL_LINES, f"{name}: {error}"))


def path_of(override: str) -> str:
    """The path that an override names, with positions as keys: ``models.0.weight``."""
    return re.sub(r"\[(\d+)\]", r".\1", override.partition("=")[0].strip(), flags=re.ASCII)


def _find(data: dict[str, Any], parts: list[str]) -> tuple[Any, Loc, list[Loc]]:
    """What holds the value that the parts of a path name, its place, and the places of mappings that were made."""
    here: Any = data
    loc: Loc = ()
    made: list[Loc] = []
    while True:
        step: str | int
        if isinstance(here, dict):
            step, parts = _longest(parts, here)
            inner = here.get(step)
        elif isinstance(here, list):
            dicts = [(index, item) for index, item in enumerate(here) if isinstance(item, dict)]
            names = {item["name"]: index for index, item in dicts if isinstance(item.get("name"), str)}
            key, parts = _longest(parts, names)
            if key not in names and not re.fullmatch(r"[0-9]{1,6}", key):
                near = nearest(key, names)
                advice = f"; did you mean {shown(near)}?" if near is not None else ""
                raise Unreadable(f"{place(loc)} has nothing named {shown(key)}{advice}")
            step = names[key] if key in names else int(key)
            if step >= len(here):
                raise Unreadable(f"{place(loc)} has no position {step}; it holds {len(here)}, counted from 0")
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


def _longest(parts: list[str], known: Iterable[str]) -> tuple[str, list[str]]:
    """The most parts that make a known key together (a key may hold dots itself), else the first; and the rest."""
    joined = {".".join(parts[:size]): parts[size:] for size in range(len(parts), 0, -1)}
    key = next((key for key in joined if key in known), parts[0])
    return key, joined[key]


def variables_of(sources: Sequence[object], environ: Mapping[str, str]) -> list[dict[str, str]]:
    """What ``${NAME}`` stands for in each source: the environment, and as ``CONFIG_DIR`` the folder of a file.

    For what is no file ``CONFIG_DIR`` is the working directory.
    """
    folders = (one.absolute().parent if isinstance(one, Path) else Path.cwd() for one in sources)
    return [{**environ, "CONFIG_DIR": str(folder)} for folder in folders]


def expanded_text(text: str, variables: Mapping[str, str]) -> str:
    """The text with ``${NAME}`` replaced; ``$${`` stands for ``${``.

    Raises:
        LookupError: no such variable is known, or its value is no text; it says so in a sentence without the value.
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
    """The data with ``${NAME}`` replaced in every text value, by what it stands for in the value's file.

    What a variable gives is text and stays text.  Keys are left as they are.  An unknown variable is noted as
    a problem and leaves ``INVALID``.  No variable's value gets into a message: it may be a token.

    Args:
        variables: of each file; those of the first count for overrides as well.
    """

    def expanded(value: object, loc: Loc) -> Any:
        if isinstance(value, dict):
            return {key: expanded(item, (*loc, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [expanded(item, (*loc, index)) for index, item in enumerate(value)]
        if not isinstance(value, str):
            return value
        try:
            file = document.origin(loc)
            return expanded_text(value, variables[file if file < len(variables) else 0])
        except LookupError as error:
            document.refuse(loc, str(error.args[0]))
            return INVALID

    data: dict[str, Any] = expanded(document.data, ())
    return data


def with_folders(document: Document, variables: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """The data with ``${CONFIG_DIR}`` alone replaced: what means the same in a file in any folder."""

    def moved(value: object, loc: Loc) -> Any:
        if isinstance(value, dict):
            return {key: moved(item, (*loc, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [moved(item, (*loc, index)) for index, item in enumerate(value)]
        if not isinstance(value, str):
            return value
        file = document.origin(loc)
        folder = variables[file if file < len(variables) else 0]["CONFIG_DIR"].replace("${", "$${")
        return re.sub(_VARIABLE, lambda found: folder if found["name"] == "CONFIG_DIR" else found[0], value)

    data: dict[str, Any] = moved(document.data, ())
    return data
