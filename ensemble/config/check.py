"""From YAML documents to a ``RunConfig``: merge, override, expand, merge the defaults, check.

``defaults:`` is merged under each model, key by key: a mapping in a model replaces that of the defaults as a whole,
and a key that the model's kind does not know is left out.  A null counts as a key that is left out; in a model it
keeps a default out.

Where a later file, or an override, says something that shuts out what an earlier one says, the earlier key is left
out: that of another kind or merge method, and the other one of two that are alternatives.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any, TypeAlias, TypeVar, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from ensemble.common.errors import ConfigError
from ensemble.common.text import nearest_or_all
from ensemble.config.document import Document, KeyProblems, Loc, Problem
from ensemble.config.overlays import drop_stale_fit, merge_documents
from ensemble.config.overrides import apply_overrides, expand
from ensemble.config.schema import (
    MERGE_KEYS,
    DataConfig,
    EnsembleConfig,
    MemberConfig,
    RunConfig,
    SubmissionConfig,
)
from ensemble.config.values import Labels

M = TypeVar("M", bound=BaseModel)
Methods: TypeAlias = Mapping[str, type[EnsembleConfig]]
Kinds: TypeAlias = Mapping[str, type[MemberConfig]]


def check_documents(
    documents: Sequence[Document],
    variables: Sequence[Mapping[str, str]],
    overrides: Sequence[str],
    merge_methods: Methods,
    member_kinds: Kinds,
) -> tuple[Document, RunConfig]:
    """Merge documents into the first one, and check what they say as a config; see ``load_config``.

    Args:
        variables: what ``${NAME}`` stands for in each.
    """
    document = merge_documents(documents, variables)
    apply_overrides(document, overrides)
    drop_stale_fit(document)
    config = _Checker(document, merge_methods, member_kinds).check(expand(document, *variables))
    if config is None or document.problems:
        raise ConfigError(document.problems)
    return document, config


class _Checker:
    """Makes a config of plain values; what is wrong with them is noted in the document."""

    def __init__(self, document: Document, merge_methods: Methods, member_kinds: Kinds) -> None:
        self._document = document
        self._merge_methods = merge_methods
        self._member_kinds = member_kinds
        self._labels: tuple[str, ...] = ()
        self._problems: list[Problem] = []
        # Where each key of a model that comes from the defaults stands in the YAML.
        self._origins: dict[Loc, Loc] = {}

    def check(self, values: dict[str, Any]) -> RunConfig | None:
        """Return the config; None where its keys are wrong."""
        with suppress(ValidationError):  # is found with all else that is wrong
            self._labels = TypeAdapter(Labels).validate_python(values.get("labels"), strict=True)
        _drop_nulls(values, {*RunConfig.model_fields, "defaults"})
        for key, model in (("data", DataConfig), ("submission", SubmissionConfig)):
            if isinstance(values.get(key), dict):
                _drop_nulls(values[key], model.model_fields)
        if isinstance(values.get("data"), dict):
            _leave_out_alternatives(self._document, ("data",), values["data"], DataConfig)
        if isinstance(values.get("ensemble"), dict):
            values["ensemble"] = self._ensemble(values["ensemble"])
        defaults = values.pop("defaults", {})
        if not isinstance(defaults, dict):
            self._problems.append((("defaults",), "must be a mapping of a model's keys to values"))
            defaults = {}
        if isinstance(values.get("models"), list):
            values["models"] = self._members(values["models"], defaults)
        config = self._validate(RunConfig, values, ())
        for loc, sentence in self._problems:
            # What a default got wrong is said where it stands, which makes the members' copies of it one problem.
            self._document.report((*self._origins.get(loc[:3], loc[:3]), *loc[3:]), sentence)
        return config

    def _validate(self, model: type[M], values: dict[str, Any], loc: Loc) -> M | None:
        checked, problems = validate(model, values, self._labels)
        self._problems += [((*loc, *inner), sentence) for inner, sentence in problems]
        return checked

    def _ensemble(self, values: dict[str, Any]) -> EnsembleConfig:
        loc = ("ensemble",)
        settings = self._named(EnsembleConfig, "method", loc, values, self._merge_methods)
        if settings is None:
            return EnsembleConfig()
        self._leave_out_foreign(loc, values, (*loc, "method"), settings, self._merge_methods)
        _drop_nulls(values, settings.model_fields)
        return self._validate(settings, values, loc) or EnsembleConfig()

    def _members(self, models: list[object], defaults: dict[str, Any]) -> list[object]:
        """Return each model's settings; a stand-in for those that are wrong, so that the others are checked."""
        default_keys = [*defaults]
        _drop_nulls(defaults, default_keys)
        members = [*models]
        kinds: list[type[MemberConfig]] = []
        for index, model in enumerate(models):
            if not isinstance(model, dict):
                continue
            name = model.get("name")
            if "task_type" in defaults and "task_type" not in model:
                model["task_type"] = defaults["task_type"]
                self._origins["models", index, "task_type"] = ("defaults", "task_type")
            kind = self._named(MemberConfig, "task_type", ("models", index), model, self._member_kinds)
            if kind is None:  # what all kinds have can be checked
                model = {key: value for key, value in model.items() if key in ("name", *MERGE_KEYS)}
            else:
                kinds.append(kind)
                named_at: Loc = ("models", index, "task_type")
                named_at = self._origins.get(named_at, named_at)
                self._leave_out_foreign(("models", index), model, named_at, kind, self._member_kinds)
                self._inherit(index, model, defaults, kind)
            member, problems = validate(kind or MemberConfig, model, self._labels)
            for loc, sentence in problems:
                if kind is not None:
                    sentence = self._of_other_kinds(loc, sentence, kind)
                self._problems.append((("models", index, *loc), sentence))
            stand_in = MemberConfig.model_construct(name=name if isinstance(name, str) else f"#{index}")
            members[index] = member or stand_in
        self._check_default_keys(default_keys, kinds)
        return members

    def _inherit(
        self, index: int, model: dict[str, Any], defaults: dict[str, Any], kind: type[MemberConfig]
    ) -> None:
        """Add the defaults of the keys that the kind has and the model does not say."""
        _leave_out_alternatives(self._document, ("models", index), model, kind)
        _leave_out_alternatives(self._document, ("defaults",), defaults, kind)
        said = {"name", *model}
        for pair in kind.alternatives:
            if any(model.get(key) is not None for key in pair):
                said.update(pair)
        inherited = [key for key in defaults if key in kind.model_fields and key not in said]
        reason = self._document.new_models.get(("models", index))
        for key in sorted(inherited) if reason is not None else ():
            # A name that was mistyped would be one more member, of what the defaults say.
            if kind.model_fields[key].is_required():
                self._problems.append((("models", index), f"{reason}; one that is new says its own {key}"))
        _drop_nulls(model, kind.model_fields)
        for key in inherited:
            model[key] = deepcopy(defaults[key])
            self._origins["models", index, key] = ("defaults", key)

    def _check_default_keys(self, keys: Sequence[str], kinds: Sequence[type[MemberConfig]]) -> None:
        for key in keys:
            if key == "name":
                sentence = "belongs to each model; two models cannot share it"
                self._problems.append((("defaults", key), sentence))
            elif not any(key in kind.model_fields for kind in kinds):
                # Only now, because to know the keys of every kind means to import all that is installed.
                every = [*dict.fromkeys([*kinds, *self._member_kinds.values()])]
                if not any(key in kind.model_fields for kind in every):
                    self._problems.append((("defaults", key), _unknown_key(key, every)))

    def _of_other_kinds(self, loc: Loc, sentence: str, kind: type[MemberConfig]) -> str:
        """Return the sentence about a member's key; where other kinds have the key, one that names them."""
        if len(loc) > 1 or not sentence.startswith("unknown key") or sentence.startswith("unknown key; use"):
            return sentence
        # Only now, because to know the keys of every kind means to import all that is installed.
        having = []
        for name in self._member_kinds:
            with suppress(ConfigError):  # a package that cannot be imported is not what is wrong here
                if loc[0] in self._member_kinds[name].model_fields:
                    having.append(name)
        if not having:
            return sentence
        verb = "has" if len(having) == 1 else "have"
        task_type = kind.model_fields["task_type"].default
        return f"no key of task_type {task_type}; {', '.join(having)} {verb} it (docs/config.md)"

    def _named(
        self, base: type[M], key: str, loc: Loc, values: dict[str, Any], by_name: Mapping[str, type[M]]
    ) -> type[M] | None:
        """Return the keys of the method or kind that a mapping names; None where the name is wrong."""
        name = values.get(key)
        if name is None:
            name = base.model_fields[key].default
        problems = [sentence for inner, sentence in validate(base, {key: name})[1] if inner == (key,)]
        try:
            if not problems and name in by_name:
                return by_name[name]
            problems = problems or [f"unknown {key}; {nearest_or_all(name, [*by_name], key)}"]
        except ConfigError as error:  # of an installed package
            problems = [*error.problems]
        self._problems += [((*loc, key), sentence) for sentence in problems]
        return None

    def _leave_out_foreign(
        self,
        loc: Loc,
        values: dict[str, Any],
        named_at: Loc,
        model: type[BaseModel],
        by_name: Mapping[str, type[BaseModel]],
    ) -> None:
        """Take away other methods' or kinds' keys that are null, or of files before the one that names this one."""
        named = self._document.origin(named_at) if self._document.value(named_at) is not None else 0
        left = [
            key
            for key, value in values.items()
            if key not in model.model_fields and (value is None or self._document.origin((*loc, key)) < named)
        ]
        if left:  # only now, because to know the keys of all means to import all that is installed
            foreign = {key for other in by_name.values() for key in other.model_fields}
            _leave_out(self._document, loc, values, foreign.intersection(left))


def data_config(document: Document, values: dict[str, Any]) -> DataConfig:
    """Return the ``data`` of a config that has been checked, from its document and its expanded values."""
    section: dict[str, Any] = values["data"]
    _leave_out_alternatives(document, ("data",), section, DataConfig)
    _drop_nulls(section, DataConfig.model_fields)
    return DataConfig.model_validate(section)


def _leave_out_alternatives(
    document: Document, loc: Loc, values: dict[str, Any], model: type[DataConfig | MemberConfig]
) -> None:
    """Take away the keys to which a later file gives the alternative."""
    for pair in model.alternatives:
        first, second = (document.origin((*loc, key)) for key in pair)
        if first != second and all(values.get(key) is not None for key in pair):
            _leave_out(document, loc, values, {pair[first > second]})


def _leave_out(document: Document, loc: Loc, values: dict[str, Any], keys: set[str]) -> None:
    written: Any = document.value(loc)
    for key in keys:
        del values[key], written[key]


def _drop_nulls(values: dict[str, Any], keys: Collection[str]) -> None:
    """Take away those of the keys that are null; a key that nobody has is left, to be refused."""
    for key in keys:
        if key in values and values[key] is None:
            del values[key]


def validate(
    model: type[M], values: dict[str, Any], labels: Sequence[str] = ()
) -> tuple[M | None, list[Problem]]:
    """Return the values as a model, or None and what is wrong with them.

    Args:
        labels: the config's; empty where they are not known.
    """
    try:
        return model.model_validate(values, context=labels), []
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
    broken_rules: list[Problem] = []
    sentences: dict[Loc, str] = {}
    for detail in details:
        loc = detail["loc"]
        reason = detail.get("ctx", {}).get("error")
        if isinstance(reason, KeyProblems):
            broken_rules += [((*loc, *inner), sentence) for inner, sentence in reason.problems]
        elif detail["type"] in ("missing", "extra_forbidden") and isinstance(loc[-1], str):
            owner = _owner(model, loc)
            sentences[loc] = _unknown_key(loc[-1], [owner])
            if detail["type"] == "missing":
                examples = owner.model_fields[loc[-1]].examples if loc[-1] in owner.model_fields else None
                sentences[loc] = f"required, for example {loc[-1]}: {examples[0] if examples else '...'}"
        else:
            loc = _existing(loc, values)
            sentence = _sentence(detail)
            if loc in sentences:  # of a union each type has an error
                sentence = f"{sentences[loc]} or {sentence.removeprefix('must be ')}"
            sentences[loc] = sentence
    return None, [*sentences.items(), *broken_rules]


def _existing(loc: Loc, values: Any) -> Loc:
    """Return the part of a place that the values have: behind it pydantic has which type of a union it tried."""
    for depth, step in enumerate(loc):
        try:
            values = values[step]
        except (LookupError, TypeError):
            return loc[:depth]
    return loc


def _sentence(detail: Any) -> str:
    """Return what is wrong with a value, by one of pydantic's errors."""
    if detail["type"] == "literal_error":
        words = re.findall("'(.*?)'", detail["ctx"]["expected"])
        return "must be " + "one of " * (len(words) > 1) + ", ".join(words)
    if detail["type"] in ("model_type", "dict_type"):
        return "must be a mapping of keys to values"
    if detail["type"] == "bool_type":
        return "must be true or false"
    if detail["type"] == "too_short" and detail["ctx"]["min_length"] == 1:
        return "must not be empty"
    # Of a package's own settings the types may have no words of ours, and rules have those of that package.
    sentence = " ".join(detail["msg"].removeprefix("Value error, ").split())
    return sentence.replace("Input should be", "must be", 1)


def _owner(model: type[BaseModel], loc: Loc) -> type[BaseModel]:
    """Return the model that the last key of a place belongs to."""
    for step in loc[:-1]:
        if step in model.model_fields:
            model = next(_models_in(model.model_fields[str(step)].annotation), model)
    return model


def _models_in(hint: Any) -> Iterator[type[BaseModel]]:
    """The models that a type is made of."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        yield hint
    for part in get_args(hint):
        yield from _models_in(part)


def _unknown_key(key: str, models: Sequence[type[BaseModel]]) -> str:
    """Return the sentence about a key that is none of these models' keys."""
    keys: list[str] = []
    for model in models:
        for today, older in getattr(model, "older_keys", {}).items():
            if key in older.split():
                return f"unknown key; use {today}"
        if (advice := getattr(model, "gone_keys", {}).get(key)) is not None:
            return f"no key any more; {advice}"
        keys += model.model_fields
        if model is RunConfig:
            keys.append("defaults")
    return f"unknown key; {nearest_or_all(key, [*dict.fromkeys(keys)], 'key')}"
