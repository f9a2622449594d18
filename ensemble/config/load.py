"""From a YAML file to a ``RunConfig``, step by step: read, override, expand, merge the defaults, check.

``defaults:`` is merged under each model, key by key: a mapping in a model replaces that of the defaults as a whole,
and a key that the model's kind does not know is left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from ensemble.common.errors import ConfigError
from ensemble.common.redact import Redactor
from ensemble.common.text import nearest_or_all
from ensemble.config.document import Document, Loc, Problem
from ensemble.config.overrides import apply_overrides, expand
from ensemble.config.schema import MERGE_KEYS, EnsembleConfig, MemberConfig, RunConfig
from ensemble.config.yamlfile import parse, read_text

M = TypeVar("M", bound=BaseModel)
_PHRASES = dict.fromkeys(("model_type", "dict_type"), "a mapping of keys to values") | {
    "bool_type": "true or false"
}
Methods: TypeAlias = Mapping[str, type[EnsembleConfig]]
Kinds: TypeAlias = Mapping[str, type[MemberConfig]]


@dataclass(frozen=True)
class LoadedConfig:
    """A config, and what it was made from: the YAML exactly as given, its file, the overrides as given."""

    config: RunConfig
    text: str
    path: Path
    overrides: tuple[str, ...]
    document: Document = field(repr=False)

    @cached_property
    def redactor(self) -> Redactor:
        """For whatever is printed or written of the run."""
        return Redactor(os.environ, self.config.model_dump())


def load_config(
    path: Path,
    overrides: Sequence[str],
    merge_methods: Methods,
    member_kinds: Kinds,
    environ: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """Read, override, expand and check a config.

    Args:
        path: the YAML file.
        overrides: ``a.b=value``, the value in YAML, as in ``models.gemma2.weight=0.5``; the later one wins.
        merge_methods: the keys below ``ensemble`` by the name of the method that they go with.
        member_kinds: the keys of a model by the ``task_type`` that they go with.
        environ: what ``${NAME}`` stands for; the process's environment if None.  ``${CONFIG_DIR}`` is always
            the absolute folder of the YAML file.

    Raises:
        ConfigError: with every problem there is, each with its path in the YAML and, where known, its line.
    """
    text = read_text(path)
    document = parse(text, path)
    apply_overrides(document, overrides)
    variables = {**(os.environ if environ is None else environ), "CONFIG_DIR": str(path.absolute().parent)}
    config = _checked(document, expand(document, variables), merge_methods, member_kinds)
    if config is None or document.problems:
        raise ConfigError(document.problems)
    return LoadedConfig(config, text, path, tuple(overrides), document)


def _checked(
    document: Document, values: dict[str, Any], merge_methods: Methods, member_kinds: Kinds
) -> RunConfig | None:
    """The values as a config; what is wrong with them is noted in the document."""
    problems: list[Problem] = []
    if isinstance(given := values.get("ensemble"), dict):
        method, wrong = _named(EnsembleConfig, "method", given, merge_methods)
        checked, more = validate(method, given) if method is not None else (None, [])
        problems += [(("ensemble", *loc), sentence) for loc, sentence in (*wrong, *more)]
        values["ensemble"] = checked or EnsembleConfig()
    defaults = values.pop("defaults", None)
    if not isinstance(defaults, dict):
        if defaults is not None:
            problems.append((("defaults",), "must be a mapping of a model's keys to values"))
        defaults = {}
    models = values.get("models")
    kinds: list[type[MemberConfig] | None] = []
    members: list[object] = []
    origins: dict[Loc, Loc] = {}  # where each key that came from the defaults stands in the YAML
    for index, model in enumerate(models if isinstance(models, list) else ()):
        kinds.append(None)
        members.append(model)
        if not isinstance(model, dict):
            continue
        merged = {"task_type"} & (defaults.keys() - model.keys())
        model |= {key: defaults[key] for key in merged}
        kinds[index], wrong = _named(MemberConfig, "task_type", model, member_kinds)
        if (kind := kinds[index]) is not None:
            other = {mine: theirs for pair in kind.alternatives for mine, theirs in (pair, pair[::-1])}
            own = {"name", *model, *(other[key] for key in other if model.get(key) is not None)}
            added = (defaults.keys() & kind.model_fields.keys()) - own
            model |= {key: deepcopy(defaults[key]) for key in added}
            merged |= added
        origins |= {("models", index, key): ("defaults", key) for key in merged}
        # Of a model whose kind is not known, what all kinds have.
        known = {key: value for key, value in model.items() if kind or key in ("name", *MERGE_KEYS)}
        member, more = validate(kind or MemberConfig, known)
        problems += [(("models", index, *loc), sentence) for loc, sentence in (*wrong, *more)]
        # No name that a member can have: which are alike is told by the values in the YAML.
        members[index] = member or MemberConfig.model_construct(name=f"#{index}")
    for key in defaults:
        if key == "name":
            problems.append((("defaults", key), "belongs to each model; two models cannot share it"))
        elif not any(kind is not None and key in kind.model_fields for kind in kinds):
            # Only now, because to know the keys of every kind means to import all that is installed.
            every = [*dict.fromkeys([*filter(None, kinds), *member_kinds.values()])]
            if not any(key in kind.model_fields for kind in every):
                problems.append((("defaults", key), _unknown_key(key, every)))
    config, wrong = validate(RunConfig, {**values, "models": members} if members else values)
    for loc, sentence in (*problems, *wrong, *RunConfig.broken_rules(values, kinds)):
        # What a default got wrong is said where it stands, which makes the members' copies of it one problem.
        document.report((*origins.get(loc[:3], loc[:3]), *loc[3:]), sentence)
    return config


def _named(
    base: type[M], key: str, values: dict[str, Any], known: Mapping[str, type[M]]
) -> tuple[type[M] | None, list[Problem]]:
    """The keys of the method or kind that a mapping names; None and what is wrong with the name."""
    name = values.get(key, base.model_fields[key].default)
    problems = [problem for problem in validate(base, {key: name})[1] if problem[0] == (key,)]
    try:
        if not problems and name in known:
            return known[name], []
        return None, problems or [((key,), f"unknown {key}; {nearest_or_all(name, [*known], key)}")]
    except ConfigError as error:  # of an installed package
        return None, [((key,), sentence) for sentence in error.problems]


def validate(model: type[M], values: dict[str, Any]) -> tuple[M | None, list[Problem]]:
    """The values as a model, or None and what is wrong with them."""
    try:
        return model.model_validate(values), []
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
    found: dict[Loc, str] = {}
    for detail in details:
        kind, loc = detail["type"], detail["loc"]
        if kind in ("missing", "extra_forbidden") and isinstance(loc[-1], str):
            owner: type[BaseModel] = model
            for step in loc[:-1]:
                if step in owner.model_fields:
                    hint = owner.model_fields[str(step)].annotation
                    parts = [part for part in (hint, *get_args(hint)) if isinstance(part, type)]
                    owner = next((part for part in parts if issubclass(part, BaseModel)), owner)
            field = owner.model_fields.get(loc[-1])
            if kind == "missing":
                example = field.examples[0] if field is not None and field.examples else "..."
                found[loc] = f"required, for example {loc[-1]}: {example}"
            else:
                found[loc] = _unknown_key(loc[-1], [owner])
            continue
        stands: Any = values
        for depth, step in enumerate(loc):
            try:
                stands = stands[step]
            except (LookupError, TypeError):
                loc = loc[:depth]  # behind it pydantic has which type of a union it tried
                break
        if kind == "literal_error":
            words = re.findall("'(.*?)'", detail["ctx"]["expected"])
            sentence = "must be " + "one of " * (len(words) > 1) + ", ".join(words)
        elif kind in _PHRASES:
            sentence = f"must be {_PHRASES[kind]}"
        else:
            # Of a package's own settings the types may have no words of ours, and rules have those of that package.
            theirs = " ".join(detail["msg"].removeprefix("Value error, ").split())
            sentence = theirs.replace("Input should be", "must be", 1)
        # Of a union each type has an error.
        found[loc] = f"{found[loc]} or {sentence.removeprefix('must be ')}" if loc in found else sentence
    return None, [*found.items()]


def _unknown_key(key: str, models: Sequence[type[BaseModel]]) -> str:
    """The sentence about a key that is none of these models' keys."""
    known: list[str] = []
    for model in models:
        for today, old in getattr(model, "older_keys", {}).items():
            if key in old.split():
                return f"unknown key; use {today}"
        known += [*model.model_fields, *(["defaults"] if model is RunConfig else [])]
    return f"unknown key; {nearest_or_all(key, [*dict.fromkeys(known)], 'key')}"
