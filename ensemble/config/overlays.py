"""Merge later files and ``--set a.b=value`` over a config, and expand ``${NAME}`` in its texts.

A later file replaces what an earlier file says. The top level, the sections, each model and its ``train`` are
merged key by key, models by their names as they are written. Any other value is replaced as a whole, also a mapping
such as ``label_map``.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Any, Final

from ensemble.common.text import did_you_mean
from ensemble.config.document import NOT_TEXT, Document, Loc, one_line, place, shown
from ensemble.config.yamlfile import MAX_DEPTH, VARIABLE, Unreadable, build_data

# The mappings at the top level that are merged key by key.
SECTIONS: Final = ("data", "ensemble", "training", "submission", "defaults")


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
