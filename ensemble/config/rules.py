"""The rules that tie keys together, such as "name each label once" and "the weights are not all 0".

They take plain data and pass over what is of the wrong type, so that one call of ``load_config`` shows them
beside the wrong types.  No sentence holds a value.  What a single key may hold is in ``values``, and the rules of a
kind of member stand with its keys (``schema.MemberConfig.broken_rules``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from pydantic_core import PydanticCustomError

from ensemble.config.document import Problem, place
from ensemble.config.values import as_label

# The type of pydantic's error for broken rules; it carries them as ``problems``.
BROKEN_RULES: Final = "broken_rules"
# What ``schema.MemberConfig.broken_rules`` is, of one kind of member.
MemberRules = Callable[[Mapping[str, Any], Collection[str]], Iterator[Problem]]
T = TypeVar("T")


def broken(values: Mapping[str, Any], of_members: Sequence[MemberRules | None]) -> Iterator[Problem]:
    """The rules that a whole config breaks, those of its models included.

    Args:
        of_members: the rules of each model's kind, None where that is not known.
    """
    labels = _texts(values.get("labels"))
    first: dict[str, int] = {}
    for index, label in enumerate(labels):
        if label is not None and first.setdefault(label, index) != index:
            yield ("labels", index), f"the same as labels[{first[label]}]; name each label once"
    data = values.get("data")
    id_column = data.get("id_column", "id") if isinstance(data, dict) else None
    if isinstance(id_column, str) and id_column in first:
        yield ("labels", first[id_column]), "the same as data.id_column; predictions hold both columns"
    # With a label that cannot be read, what is not among the others may still be right.
    known = set() if None in labels else set(first)
    yield from _broken_in_models(values.get("models"), of_members, known)
    submission = values.get("submission")
    columns = submission.get("columns") if isinstance(submission, dict) else None
    for column, label in label_items(columns):
        if known and label not in known:
            yield ("submission", "columns", column), "must be one of the labels"
    yield from _broken_limit(values)


def _broken_limit(values: Mapping[str, Any]) -> Iterator[Problem]:
    limit = values.get("time_limit")
    if isinstance(limit, int | float) and not isinstance(limit, bool) and limit == 0:
        yield ("time_limit",), "must be more than 0"
    if values.get("fill") == "sample" and values.get("submission") is None:
        yield ("fill",), "sample needs submission.sample, the file whose values it takes"


def _broken_in_models(
    models: object, of_members: Sequence[MemberRules | None], labels: set[str]
) -> Iterator[Problem]:
    listed = models if isinstance(models, list | tuple) else ()
    members = [(index, member) for index, member in enumerate(listed) if isinstance(member, dict)]
    names: dict[str, int] = {}
    for index, member in members:
        rules = of_members[index]
        for loc, sentence in rules(member, labels) if rules is not None else ():
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


def _texts(values: object) -> list[str | None]:
    texts = [as_label(value) for value in values] if isinstance(values, list | tuple) else []
    return [text if isinstance(text, str) else None for text in texts]


def label_items(mapping: object) -> Iterator[tuple[str, str]]:
    """Each key of a mapping whose value can be a label, and that label; nothing of what is no mapping."""
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
