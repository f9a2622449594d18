"""The rules that tie keys together, such as "name each label once" and "the weights are not all 0".

They take plain data and pass over what is of the wrong type, so that one call of ``load_config`` shows them
beside the wrong types.  No sentence holds a value.  The rules of a kind of member stand with its keys
(``schema.MemberConfig.broken_rules``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ensemble.config.document import Problem
from ensemble.config.schema import MemberConfig
from ensemble.config.values import as_label


def broken(values: Mapping[str, Any], kinds: Sequence[type[MemberConfig] | None]) -> Iterator[Problem]:
    """The rules that a whole config breaks, those of its models included.

    Args:
        kinds: the keys of each model's kind, None where that is not known.
    """
    listed = values.get("labels")
    labels = [as_label(label) for label in listed] if isinstance(listed, list) else []
    first: dict[str, int] = {}
    for index, label in enumerate(labels):
        if isinstance(label, str) and first.setdefault(label, index) != index:
            yield ("labels", index), f"the same as labels[{first[label]}]; name each label once"
    data = values.get("data")
    id_column = data.get("id_column", "id") if isinstance(data, dict) else None
    if isinstance(id_column, str) and id_column in first:
        yield ("labels", first[id_column]), "the same as data.id_column; predictions hold both columns"
    # With a label that cannot be read, what is not among the others may still be right.
    known = set(first) if all(isinstance(label, str) for label in labels) else set()
    models = enumerate(values["models"] if kinds else ())
    members = [(index, member) for index, member in models if isinstance(member, dict)]
    names: dict[str, int] = {}
    for index, member in members:
        kind, name = kinds[index], member.get("name")
        for loc, sentence in kind.broken_rules(member, known) if kind is not None else ():
            yield ("models", index, *loc), sentence
        if isinstance(name, str) and names.setdefault(name.lower(), index) != index:
            other = f"models[{names[name.lower()]}].name"
            yield ("models", index, "name"), f"the same as {other}; names must differ in more than their case"
    weights = [member.get("weight", 1.0) for _, member in members]
    if weights and all(isinstance(weight, int | float) and 0 <= weight < math.inf for weight in weights):
        if not any(weights):
            yield ("models",), "the weights are all 0; at least one must be more"
        elif math.isinf(sum(float(weight) for weight in weights)):
            yield ("models",), "the weights add up to more than a number can hold"
    submission = values.get("submission")
    columns = submission.get("columns") if isinstance(submission, dict) else None
    for column, label in label_items(columns):
        if known and label not in known:
            yield ("submission", "columns", column), "must be one of the labels"
    if values.get("fill") == "sample" and submission is None:
        yield ("fill",), "sample needs submission.sample, the file whose values it takes"


def label_items(mapping: object) -> Iterator[tuple[str, str]]:
    """Each key of a mapping whose value can be a label, and that label; nothing of what is no mapping."""
    for key, value in mapping.items() if isinstance(mapping, dict) else ():
        label = as_label(value)
        if isinstance(label, str):
            yield key, label
