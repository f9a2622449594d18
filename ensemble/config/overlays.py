"""Several config files as one: what a later file says takes the place of what an earlier one says.

The top level, the sections and each model are merged key by key, the models by their name.  Any other value is
replaced as a whole, also one that is a mapping, such as ``label_map``: half of each would be neither.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ensemble.common.text import did_you_mean
from ensemble.config.document import Document, Loc, shown
from ensemble.config.overrides import expanded_text

# The mappings at the top level that are merged key by key.
SECTIONS: Final = ("data", "ensemble", "submission", "defaults")


def merge_documents(documents: Sequence[Document], variables: Sequence[Mapping[str, str]]) -> Document:
    """The documents of several files as one; it is made of the first.

    Args:
        variables: what ``${NAME}`` stands for in each file, for the names of models.
    """
    overlays = _Overlays(documents[0], variables)
    for number, document in enumerate(documents[1:], 1):
        overlays.add(document, number)
    return documents[0]


def take_away(document: Document) -> list[Loc]:
    """Take away the keys that a later file, or an override, says are null; it comes behind all of them.

    It is for keys of mappings that are merged key by key: in any other, such as ``model_kwargs``, null is a value.
    In a model null stays where it keeps a default out, as it does in one file.

    Returns:
        The places of those that nothing else gives a value: nobody knows yet whether there are such keys.
    """
    defaults, new = document.data.get("defaults"), []
    # Defaults that are taken away keep none out of a model.
    for loc, was_there in sorted(document.nulls.items(), key=lambda item: item[0][0] == "models"):
        is_of_model = len(loc) == 3 and loc[0] == "models"
        if not is_of_model and len(loc) != 1 and (len(loc) != 2 or loc[0] not in SECTIONS):
            continue
        holder, key = document.value(loc[:-1]), str(loc[-1])
        is_default = is_of_model and isinstance(defaults, dict) and key in defaults
        if isinstance(holder, dict) and holder.get(key, "") is None and not is_default:
            del holder[key]
            if not was_there:
                new.append(loc)
    return new


def drop_stale_fit(document: Document) -> None:
    """Drop ``fitted_on`` if a later file, or an override, changes the weights or the merge that it speaks of."""
    file = document.origin(("fitted_on",))
    places: list[Loc] = [("ensemble",)]
    places += [("ensemble", key) for key in document.data.get("ensemble") or ()]
    for index in range(len(document.data.get("models") or ())):
        places += [("models", index, "weight"), ("models", index, "calibration")]
    if any(document.origin(place) > file for place in places):
        document.data.pop("fitted_on", None)


class _Overlays:
    """Puts documents of later files over the first one's."""

    def __init__(self, document: Document, variables: Sequence[Mapping[str, str]]) -> None:
        self._document = document
        self._variables = variables

    def add(self, over: Document, number: int) -> None:
        """Put the document of file ``number`` over those before it."""
        document = self._document
        document.found += over.found
        for key, value in over.data.items():
            here = document.data.get(key)
            if key in SECTIONS and isinstance(value, dict) and (here is None or isinstance(here, dict)):
                if here is None:
                    self._put((key,), over, (key,))
                self._merge((key,), over, (key,))
            elif key == "models" and isinstance(value, list) and isinstance(here, list):
                self._merge_models(over, number)
            else:
                self._put((key,), over, (key,))

    def _merge_models(self, over: Document, number: int) -> None:
        models = self._document.data["models"]
        places = {name: index for index, name in self._names(models)}
        known = [*places]
        given = dict(self._names(over.data["models"], number))
        for index in range(len(over.data["models"])):
            # Of a name that a file gives twice, only the first is known: the other is an error, as in one file.
            name = given.get(index)
            if name in places:
                self._merge(("models", places.pop(name)), over, ("models", index))
                continue
            loc = ("models", len(models))
            models.append(None)
            self._put(loc, over, ("models", index))
            if name is not None and name not in known:
                near = did_you_mean(name, known)
                self._document.new_models[loc] = f"no earlier file has a model named {shown(name)}{near}"

    def _names(self, models: list[Any], number: int | None = None) -> Iterator[tuple[int, str]]:
        for index, model in enumerate(models):
            if isinstance(model, dict) and isinstance(name := model.get("name"), str):
                file = self._document.origin(("models", index, "name")) if number is None else number
                with contextlib.suppress(LookupError):  # a problem that is told when all is expanded
                    name = expanded_text(name, self._variables[file])
                yield index, name

    def _merge(self, loc: Loc, over: Document, over_loc: Loc) -> None:
        values: Any = over.value(over_loc)
        for key in values:
            self._put((*loc, key), over, (*over_loc, key))

    def _put(self, loc: Loc, over: Document, over_loc: Loc) -> None:
        """Put a value of another document, with all that is known of it, where one stands or none."""
        document = self._document
        holder: Any = document.value(loc[:-1])
        step, value = loc[-1], over.value(over_loc)
        before = document.value(loc)
        for old in _places(before, loc):
            document.lines.pop(old, None)
            document.invalid.discard(old)
        holder[step] = value
        for place in _places(value, over_loc):
            moved = (*loc, *place[len(over_loc) :])
            if place in over.lines:
                document.lines[moved] = over.lines[place]
            if place in over.invalid:
                document.invalid.update(moved[:size] for size in range(len(moved) + 1))
        if value is None:
            document.note_null(loc, before)


def _places(value: object, loc: Loc) -> Iterator[Loc]:
    """A value's place, and those of all values in it."""
    yield loc
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, item in items:
        yield from _places(item, (*loc, step))
