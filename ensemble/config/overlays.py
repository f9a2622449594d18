"""Merge several config files: a later file replaces what an earlier file says.

The top level, the sections and each model are merged key by key, models by their names. Any other value is replaced
as a whole, also a mapping such as ``label_map``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ensemble.common.text import did_you_mean
from ensemble.config.document import Document, Loc, places, shown
from ensemble.config.overrides import expanded_text

# The mappings at the top level that are merged key by key.
SECTIONS: Final = ("data", "ensemble", "submission", "defaults")


def merge_documents(documents: Sequence[Document], variables: Sequence[Mapping[str, str]]) -> Document:
    """Merge the documents of later files into the first one, and return that one.

    Args:
        variables: the values of ``${NAME}`` in each file, for the names of models.
    """
    document = documents[0]
    for number, over in enumerate(documents[1:], 1):
        document.noted += over.noted
        for key, value in over.data.items():
            current = document.data.get(key)
            if key in SECTIONS and isinstance(value, dict) and isinstance(current, dict):
                _merge(document, (key,), over, (key,))
            elif key == "models" and isinstance(value, list) and isinstance(current, list):
                _merge_models(document, over, number, variables)
            else:
                _put(document, (key,), over, (key,))
    return document


def drop_stale_fit(document: Document) -> None:
    """Drop ``fitted_on`` if a later file or an override changes the weights or the merge."""
    file = document.origin(("fitted_on",))
    ensemble, models = document.data.get("ensemble"), document.data.get("models")
    settings: list[Loc] = [("ensemble",)]
    if isinstance(ensemble, dict):
        settings += [("ensemble", key) for key in ensemble]
    for index in range(len(models) if isinstance(models, list) else 0):
        settings += [("models", index, "weight"), ("models", index, "calibration")]
    if any(document.origin(loc) > file for loc in settings):
        document.data.pop("fitted_on", None)


def _merge_models(
    document: Document, over: Document, number: int, variables: Sequence[Mapping[str, str]]
) -> None:
    """Merge the models of file ``number`` into those of the same names, and add the others at the end."""
    models = document.data["models"]
    index_by_name: dict[str, int] = {}
    for index, model in enumerate(models):
        name = _name(model, variables[document.origin(("models", index, "name"))])
        if name is not None:
            index_by_name[name] = index
    names = [*index_by_name]
    for index, model in enumerate(over.data["models"]):
        name = _name(model, variables[number])
        if name in index_by_name:
            # Popped: if the file gives a name twice, the second one is added, and refused as in a single file.
            _merge(document, ("models", index_by_name.pop(name)), over, ("models", index))
            continue
        loc = ("models", len(models))
        models.append(None)
        _put(document, loc, over, ("models", index))
        if name is not None and name not in names:
            near = did_you_mean(name, names)
            document.new_models[loc] = f"no earlier file has a model named {shown(name)}{near}"


def _name(model: object, variables: Mapping[str, str]) -> str | None:
    """Return a model's name, expanded if that is possible; its problems are reported later."""
    name = model.get("name") if isinstance(model, dict) else None
    if not isinstance(name, str):
        return None
    try:
        return expanded_text(name, variables)
    except LookupError:
        return name


def _merge(document: Document, loc: Loc, over: Document, over_loc: Loc) -> None:
    values: Any = over.value(over_loc)
    for key in values:
        _put(document, (*loc, key), over, (*over_loc, key))


def _put(document: Document, loc: Loc, over: Document, over_loc: Loc) -> None:
    """Add or replace a value by a value of another document, with its lines and problems."""
    document.forget(loc)
    holder: Any = document.value(loc[:-1])
    holder[loc[-1]] = value = over.value(over_loc)
    for inner in places(value, over_loc):
        moved = (*loc, *inner[len(over_loc) :])
        if inner in over.lines:
            document.lines[moved] = over.lines[inner]
        if inner in over.invalid:
            document.invalid.update(moved[:size] for size in range(len(moved) + 1))
