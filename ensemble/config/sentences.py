"""What pydantic finds wrong, in plain sentences: with the place in the YAML, and today's name of an older key.

Owns the wording for wrong types, missing keys and unknown keys.  The words for a kind of value stand with it
in ``values``, the sentences of the rules in ``rules``.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError

from ensemble.config.document import Loc, Problem
from ensemble.config.rules import BROKEN_RULES
from ensemble.config.schema import DataConfig, EnsembleConfig, MemberConfig, RunConfig, SubmissionConfig
from ensemble.config.values import MAX_NAME_CHARACTERS, MustBe

M = TypeVar("M", bound=BaseModel)

# What people type from habit, where difflib would not find today's key or the value has another form as well.
OLDER_KEYS: dict[type[BaseModel], dict[str, str]] = {
    RunConfig: {
        "models": "members",
        "labels": "classes label_names",
        "data": "dataset input table",
        "output_dir": "output out_dir output_path save_dir",
        "devices": "gpus gpu_ids device_ids visible_devices",
        "limit": "max_rows n_rows nrows num_rows",
    },
    DataConfig: {
        "path": "file csv input input_path test",
        "id_column": "id id_col",
        "label_column": "label label_col target target_column",
    },
    EnsembleConfig: {"weight (in each model)": "weight weights", "method": "type strategy"},
    SubmissionConfig: {"sample": "sample_path template", "path": "file output output_path"},
}


def validate(model: type[M], values: dict[str, Any]) -> tuple[M | None, list[Problem]]:
    """The values as a model, or None and what is wrong with them."""
    try:
        return model.model_validate(values), []
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
    problems: list[Problem] = []
    for detail in details:
        loc, hint, owner = _locate(model, detail["loc"])
        if detail["type"] == BROKEN_RULES:
            problems += [((*loc, *inner), sentence) for inner, sentence in detail["ctx"]["problems"]]
        elif detail["type"] == "extra_forbidden":
            problems.append((loc, unknown_key(str(loc[-1]), [owner])))
        elif detail["type"] == "missing" and loc == detail["loc"]:  # else a list is too short
            example = owner.model_fields[str(loc[-1])].examples
            problems.append((loc, f"required, for example {loc[-1]}: {example[0] if example else '...'}"))
        else:
            # Of a package's own settings the types may have no words of ours, and rules have those of that package.
            is_rule = detail["type"] == "value_error" and isinstance(hint, type)
            phrase = "" if is_rule else expected(hint)
            theirs = " ".join(detail["msg"].removeprefix("Value error, ").split())
            words = f"must be {phrase}" if phrase else theirs.replace("Input should be", "must be", 1)
            problems.append((loc, words))
    return None, problems


def unknown_key(key: str, models: Sequence[type[BaseModel]]) -> str:
    """The sentence about a key that is none of these models' keys."""
    known: dict[str, None] = {}
    for model in models:
        older = next((OLDER_KEYS[one] for one in model.__mro__ if one in OLDER_KEYS), {})
        if issubclass(model, MemberConfig):
            older = {**older, **model.older_keys}
        for today, old in older.items():
            if key in old.split():
                return f"unknown key; use {today}"
        known |= dict.fromkeys([*model.model_fields, *(["defaults"] if model is RunConfig else [])])
    return unknown("key", key, [*known])


def unknown(what: str, given: str, known: Sequence[str]) -> str:
    """The sentence about a key, or a name that a key has for its value, which is none of those that there are."""
    near = difflib.get_close_matches(given[:MAX_NAME_CHARACTERS].lower(), known, n=1)
    return f"unknown {what}; " + (
        f"did you mean {near[0]}?" if near else f"the {what}s here are {', '.join(known)}"
    )


def expected(hint: Any) -> str:
    """What a type's values are called; ``Devices | Literal["auto"]`` is a "whole number of ... or auto".

    Empty for a type that has no words of ours.
    """
    if get_origin(hint) is Annotated:
        return next((item.phrase for item in hint.__metadata__ if isinstance(item, MustBe)), "")
    if get_origin(hint) in (Union, UnionType):
        parts = [expected(part) for part in get_args(hint) if part is not NoneType]
        return " or ".join(parts) if all(parts) else ""
    if get_origin(hint) is Literal:
        words = get_args(hint)
        return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return "a mapping of keys to values"
    return "true or false" if hint is bool else ""


@cache
def hints(model: type[BaseModel]) -> dict[str, Any]:
    """The type of each key of a model, with its words."""
    return get_type_hints(model, include_extras=True)


def _locate(model: type[BaseModel], loc: Loc) -> tuple[Loc, Any, type[BaseModel]]:
    """The part of pydantic's ``loc`` that stands in the YAML, the type wanted there, the model around it."""
    hint: Any = model
    owner = model
    for depth, step in enumerate(loc):
        plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        parts = [part for part in get_args(plain) if part is not NoneType]
        if get_origin(plain) in (Union, UnionType) and len(parts) == 1:
            plain = parts[0]
        # Python 3.10 takes dict[...] for a class.
        if get_origin(plain) is None and isinstance(plain, type) and issubclass(plain, BaseModel):
            owner = plain
            hint = hints(plain).get(str(step))
        elif get_origin(plain) is tuple and isinstance(step, int):
            hint = parts[0]
        elif get_origin(plain) is dict and depth == len(loc) - 1:
            hint = parts[1]
        else:
            return loc[:depth], hint, owner
    return loc, hint, owner
