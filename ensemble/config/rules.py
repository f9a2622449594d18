"""The rules that tie keys together, such as "exactly one of these two" and "the weights are not all 0".

They take plain data and pass over what is of the wrong type, so that one call of ``load_config`` shows them
beside the wrong types.  No sentence holds a value.  What a single key may hold is in ``values``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic_core import PydanticCustomError

from ensemble.config.document import Problem, place
from ensemble.config.values import as_label, with_home

# The type of pydantic's error for broken rules; it carries them as ``problems``.
BROKEN_RULES: Final = "broken_rules"
T = TypeVar("T")


def broken(values: Mapping[str, Any]) -> Iterator[Problem]:
    """The rules that a whole config breaks, those of its models included."""
    labels = _texts(values.get("labels"))
    first: dict[str, int] = {}
    for index, label in enumerate(labels):
        if label is not None and first.setdefault(label, index) != index:
            yield ("labels", index), f"the same as labels[{first[label]}]; each label stands once"
    data = values.get("data")
    id_column = data.get("id_column", "id") if isinstance(data, dict) else None
    if isinstance(id_column, str) and id_column in first:
        yield ("labels", first[id_column]), "the same as data.id_column; predictions hold both columns"
    # With a label that cannot be read, what is not among the others may still be right.
    known = set() if None in labels else set(first)
    yield from _broken_in_models(values.get("models"), known)
    submission = values.get("submission")
    columns = submission.get("columns") if isinstance(submission, dict) else None
    for column, label in _items(columns):
        if known and label not in known:
            yield ("submission", "columns", column), "must be one of the labels"


def _broken_in_models(models: object, labels: set[str]) -> Iterator[Problem]:
    listed = models if isinstance(models, list | tuple) else ()
    members = [(index, member) for index, member in enumerate(listed) if isinstance(member, dict)]
    names: dict[str, int] = {}
    for index, member in members:
        for loc, sentence in broken_in_member(member, labels):
            yield ("models", index, *loc), sentence
        name = member.get("name")
        if isinstance(name, str) and names.setdefault(name.lower(), index) != index:
            first = f"models[{names[name.lower()]}].name"
            yield ("models", index, "name"), f"the same as {first}; names must differ in more than their case"
    weights = [member.get("weight", 1.0) for _, member in members]
    if weights and all(isinstance(weight, int | float) and 0 <= weight < math.inf for weight in weights):
        if not any(weights):
            yield ("models",), "the weights are all 0; at least one must be more"
        elif math.isinf(sum(float(weight) for weight in weights)):
            yield ("models",), "the weights add up to more than a number can hold"


def broken_in_member(member: Mapping[str, Any], labels: set[str]) -> Iterator[Problem]:
    """The rules that one model breaks; ``labels`` are the config's, empty where they are not known."""
    inputs = [key for key in ("prompt_template", "text_column") if member.get(key) is not None]
    if not inputs:
        yield (), "prompt_template or text_column is required, for example text_column: text"
    elif len(inputs) == 2:
        yield ("prompt_template",), "give either prompt_template or text_column, not both"
    if member.get("trust_remote_code") is True and member.get("revision") is None and _is_remote(member):
        yield ("revision",), "required with trust_remote_code: true, so that no other code is run later"
    given: dict[str, str] = {}
    for key, label in _items(member.get("label_map")):
        if labels and label not in labels:
            yield ("label_map", key), "must be one of the labels"
        elif given.setdefault(label, key) != key:
            yield ("label_map", key), f"the same label as {place(('label_map', given[label]))} has"


def _is_remote(member: Mapping[str, Any]) -> bool:
    source = member.get("model_name_or_path")
    try:
        return isinstance(source, str) and not Path(with_home(source)).is_dir()
    except (OSError, ValueError):  # a name that no folder can have
        return True


def _texts(values: object) -> list[str | None]:
    texts = [as_label(value) for value in values] if isinstance(values, list | tuple) else []
    return [text if isinstance(text, str) else None for text in texts]


def _items(mapping: object) -> Iterator[tuple[str, str]]:
    for key, value in mapping.items() if isinstance(mapping, dict) else ():
        label = as_label(value)
        if isinstance(label, str):
            yield key, label


def checked(value: T, problems: Iterator[Problem]) -> T:
    """The value itself, if there are no problems.

    Raises:
        PydanticCustomError: of type ``BROKEN_RULES``, with all of them.
    """
    found = list(problems)
    if found:
        text = "; ".join(f"{place(loc)}: {sentence}" for loc, sentence in found)
        raise PydanticCustomError(BROKEN_RULES, "{text}", {"text": text, "problems": found})
    return value
