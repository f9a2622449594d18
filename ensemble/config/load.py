"""From YAML files to a ``RunConfig``, step by step: read, merge, override, expand, merge the defaults, check.

``defaults:`` is merged under each model, key by key: a mapping in a model replaces that of the defaults as a whole,
and a key that the model's kind does not know is left out.

Where a later file, or an override, says something that shuts out what an earlier one says, the earlier key is left
out: that of another kind or merge method, and the other one of two that are alternatives.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from ensemble.common.errors import ConfigError
from ensemble.common.redact import Redactor
from ensemble.common.text import nearest_or_all
from ensemble.config.document import Document, Loc, Problem, one_line
from ensemble.config.mapping import MappingConfig
from ensemble.config.overlays import drop_stale_fit, merge_documents, take_away
from ensemble.config.overrides import apply_overrides, expand, variables_of, with_folders
from ensemble.config.schema import (
    MERGE_KEYS,
    DataConfig,
    EnsembleConfig,
    MemberConfig,
    RunConfig,
    SubmissionConfig,
)
from ensemble.config.yamlfile import dump, parse, read_text

M = TypeVar("M", bound=BaseModel)
_PHRASES = dict.fromkeys(("model_type", "dict_type"), "a mapping of keys to values") | {
    "bool_type": "true or false"
}
ConfigSource: TypeAlias = Path | MappingConfig
Methods: TypeAlias = Mapping[str, type[EnsembleConfig]]
Kinds: TypeAlias = Mapping[str, type[MemberConfig]]


@dataclass(frozen=True)
class LoadedConfig:
    """A config, and what it was made from: its files or mappings and the overrides, as given.

    ``whole`` is one YAML file that gives the same config from any folder: the file exactly as it is where nothing
    else was given, else files and overrides merged.  Paths in it are still relative to the working directory, and
    no name but ``${CONFIG_DIR}`` is replaced.  ``text`` is the file exactly as it is; of several, and of one
    that names ``${CONFIG_DIR}``, what ``whole`` is; with the overrides it gives the same config.  Files as they are
    may hold secrets.
    """

    config: RunConfig
    text: str
    whole: str
    sources: tuple[ConfigSource, ...]
    overrides: tuple[str, ...]
    texts: tuple[str, ...] = field(repr=False)  # of the sources
    document: Document = field(repr=False)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The sources that are files."""
        return tuple(source for source in self.sources if isinstance(source, Path))

    @cached_property
    def redactor(self) -> Redactor:
        """For whatever is printed or written of the run."""
        return Redactor(os.environ, self.config.model_dump())


def load_config(
    sources: Sequence[ConfigSource],
    overrides: Sequence[str],
    merge_methods: Methods,
    member_kinds: Kinds,
    environ: Mapping[str, str] | None = None,
    texts: Sequence[str] | None = None,
) -> LoadedConfig:
    """Read, merge, override, expand and check a config.

    Args:
        sources: YAML files, or mappings in their place; later ones override earlier ones, see ``overlays``.
        overrides: ``a.b=value``, the value in YAML, as in ``models.gemma2.weight=0.5``; the later one wins.
        merge_methods: the keys below ``ensemble`` by the name of the method that they go with.
        member_kinds: the keys of a model by the ``task_type`` that they go with.
        environ: what ``${NAME}`` stands for; the process's environment if None.  ``${CONFIG_DIR}`` is always
            the absolute folder of the YAML file in which it stands; of a mapping, the working directory.
        texts: what the files held when they were read before; None: they are read now.

    Raises:
        ConfigError: with every problem there is, each with its path in the YAML and, where known, its line.
    """
    names, read, documents = [one_line(str(source)) for source in sources], list[str](), list[Document]()
    unreadable: list[str] = []
    for number, source in enumerate(sources):
        try:
            if isinstance(source, MappingConfig):
                read.append(source.text)
            else:
                read.append(read_text(source) if texts is None else texts[number])
            documents.append(parse(read[-1], source, names, number))
        except ConfigError as error:
            unreadable += error.problems
    if unreadable:
        raise ConfigError(unreadable)
    variables = variables_of(sources, os.environ if environ is None else environ)
    document, config = checked(documents, variables, overrides, merge_methods, member_kinds)
    whole, parts = read[0], [*names, *(f"--set {one_line(override)}" for override in overrides)]
    if len(parts) > 1 or "${CONFIG_DIR}" in whole:
        # By value: put into the text, *** would be an alias.
        redactor = Redactor(os.environ, config.model_dump())
        whole = f"# Made of {', '.join(parts)}\n{dump(redactor.document(with_folders(document, variables)))}"
    # Elsewhere the folder would be another one.
    text = read[0] if len(read) == 1 and "${CONFIG_DIR}" not in read[0] else whole
    return LoadedConfig(config, text, whole, tuple(sources), tuple(overrides), tuple(read), document)


def checked(
    documents: Sequence[Document],
    variables: Sequence[Mapping[str, str]],
    overrides: Sequence[str],
    merge_methods: Methods,
    member_kinds: Kinds,
) -> tuple[Document, RunConfig]:
    """Documents merged into the first one, and what they say as a config; see ``load_config``.

    Args:
        variables: what ``${NAME}`` stands for in each.
    """
    document = merge_documents(documents, variables)
    apply_overrides(document, overrides)
    new = take_away(document)
    drop_stale_fit(document)
    config = _checked(document, expand(document, *variables), merge_methods, member_kinds, new)
    if config is None or document.problems:
        raise ConfigError(document.problems)
    return document, config


def _checked(
    document: Document,
    values: dict[str, Any],
    merge_methods: Methods,
    member_kinds: Kinds,
    taken_away: Sequence[Loc],
) -> RunConfig | None:
    """The values as a config; what is wrong with them is noted in the document.

    Args:
        taken_away: places of keys that were nowhere given a value; here they are said to be unknown, too.
    """
    problems: list[Problem] = []
    owners: dict[Loc, type[BaseModel]] = {
        (): RunConfig,
        ("data",): DataConfig,
        ("submission",): SubmissionConfig,
    }
    if isinstance(given := values.get("ensemble"), dict):
        method, wrong = _named(EnsembleConfig, "method", given, merge_methods)
        if method is not None:
            owners["ensemble",] = method
            _leave_out_foreign(document, ("ensemble",), given, ("ensemble", "method"), method, merge_methods)
        checked, more = validate(method, given) if method is not None else (None, [])
        problems += [(("ensemble", *loc), sentence) for loc, sentence in (*wrong, *more)]
        values["ensemble"] = checked or EnsembleConfig()
    defaults = values.pop("defaults", None)
    if not isinstance(defaults, dict):
        if defaults is not None:
            problems.append((("defaults",), "must be a mapping of a model's keys to values"))
        defaults = {}
    if isinstance(given := values.get("data"), dict):
        _leave_out_alternatives(document, ("data",), given, DataConfig)
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
            owners["models", index] = kind
            named_at: Loc = (*(("defaults",) if merged else ("models", index)), "task_type")
            _leave_out_foreign(document, ("models", index), model, named_at, kind, member_kinds)
            _leave_out_alternatives(document, ("models", index), model, kind)
            _leave_out_alternatives(document, ("defaults",), defaults, kind)
            other = {mine: theirs for pair in kind.alternatives for mine, theirs in (pair, pair[::-1])}
            own = {"name", *model, *(other[key] for key in other if model.get(key) is not None)}
            added = (defaults.keys() & kind.model_fields.keys()) - own
            if (why := document.new_models.get(("models", index))) is not None:
                # A name that was mistyped would be one more member, of what the defaults say.
                for key in sorted(key for key in added if kind.model_fields[key].is_required()):
                    problems.append((("models", index), f"{why}; one that is new says its own {key}"))
            # Null keeps a default out, and is no value of all keys itself.
            for key in defaults.keys() & kind.model_fields.keys() & model.keys():
                if model[key] is None:
                    del model[key]
            model |= {key: deepcopy(defaults[key]) for key in added}
            merged |= added
        origins |= {("models", index, key): ("defaults", key) for key in merged}
        # Of a model whose kind is not known, what all kinds have.
        known = {key: value for key, value in model.items() if kind or key in ("name", *MERGE_KEYS)}
        member, more = validate(kind or MemberConfig, known)
        if kind is not None:
            more = [_of_other_kinds(loc, sentence, kind, member_kinds) for loc, sentence in more]
        problems += [(("models", index, *loc), sentence) for loc, sentence in (*wrong, *more)]
        # No name that a member can have: which are alike is told by the values in the YAML.
        members[index] = member or MemberConfig.model_construct(name=f"#{index}")
    for key in (*defaults, *(str(loc[1]) for loc in taken_away if loc[:-1] == ("defaults",))):
        if key == "name":
            problems.append((("defaults", key), "belongs to each model; two models cannot share it"))
        elif not any(kind is not None and key in kind.model_fields for kind in kinds):
            # Only now, because to know the keys of every kind means to import all that is installed.
            every = [*dict.fromkeys([*filter(None, kinds), *member_kinds.values()])]
            if not any(key in kind.model_fields for kind in every):
                problems.append((("defaults", key), _unknown_key(key, every)))
    for loc in taken_away:
        owner, key = owners.get(loc[:-1]), str(loc[-1])
        if owner is not None and key not in owner.model_fields and loc != ("defaults",):
            problems.append((loc, _unknown_key(key, [owner])))
    config, wrong = validate(RunConfig, {**values, "models": members} if members else values)
    for loc, sentence in (*problems, *wrong, *RunConfig.broken_rules(values, kinds)):
        # What a default got wrong is said where it stands, which makes the members' copies of it one problem.
        document.report((*origins.get(loc[:3], loc[:3]), *loc[3:]), sentence)
    return config


def _leave_out_foreign(
    document: Document,
    loc: Loc,
    values: dict[str, Any],
    named_at: Loc,
    model: type[BaseModel],
    known: Mapping[str, type[BaseModel]],
) -> None:
    """Take away keys of another method or kind, of files before the one that names this one, at ``named_at``."""
    named = document.origin(named_at) if document.value(named_at) is not None else 0
    earlier = [
        key for key in values if document.origin((*loc, key)) < named and key not in model.model_fields
    ]
    if earlier:  # only now, because to know the keys of all means to import all that is installed
        every = {key for one in known.values() for key in one.model_fields}
        _leave_out(document, loc, values, every.intersection(earlier))


def _leave_out_alternatives(
    document: Document, loc: Loc, values: dict[str, Any], model: type[DataConfig | MemberConfig]
) -> None:
    """Take away the keys to which a later file gives the alternative."""
    for pair in model.alternatives:
        first, second = (document.origin((*loc, key)) for key in pair)
        if first != second and all(values.get(key) is not None for key in pair):
            _leave_out(document, loc, values, {pair[first > second]})


def _leave_out(document: Document, loc: Loc, values: dict[str, Any], keys: set[str]) -> None:
    given: Any = document.value(loc)
    for key in keys:
        del values[key], given[key]


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
                    owner = next(_models_in(owner.model_fields[str(step)].annotation), owner)
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
        elif kind == "too_short" and detail["ctx"]["min_length"] == 1:
            sentence = "must not be empty"
        else:
            # Of a package's own settings the types may have no words of ours, and rules have those of that package.
            theirs = " ".join(detail["msg"].removeprefix("Value error, ").split())
            sentence = theirs.replace("Input should be", "must be", 1)
        # Of a union each type has an error.
        found[loc] = f"{found[loc]} or {sentence.removeprefix('must be ')}" if loc in found else sentence
    return None, [*found.items()]


def _models_in(hint: Any) -> Iterator[type[BaseModel]]:
    """The models that a type is made of."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        yield hint
    for part in get_args(hint):
        yield from _models_in(part)


def _of_other_kinds(
    loc: Loc, sentence: str, kind: type[MemberConfig], known: Mapping[str, type[MemberConfig]]
) -> Problem:
    """A problem of a member; where its key is one of other kinds' keys, this is what is said."""
    if len(loc) > 1 or not sentence.startswith("unknown key") or sentence.startswith("unknown key; use"):
        return loc, sentence
    # Only now, because to know the keys of every kind means to import all that is installed.
    having = []
    for name in known:
        with suppress(ConfigError):  # a package that cannot be imported is not what is wrong here
            if loc[0] in known[name].model_fields:
                having.append(name)
    if having:
        own = kind.model_fields["task_type"].default
        verb = "has" if len(having) == 1 else "have"
        sentence = f"no key of task_type {own}; {', '.join(having)} {verb} it (docs/config.md)"
    return loc, sentence


def _unknown_key(key: str, models: Sequence[type[BaseModel]]) -> str:
    """The sentence about a key that is none of these models' keys."""
    known: list[str] = []
    for model in models:
        for today, old in getattr(model, "older_keys", {}).items():
            if key in old.split():
                return f"unknown key; use {today}"
        if (advice := getattr(model, "gone_keys", {}).get(key)) is not None:
            return f"no key any more; {advice}"
        known += [*model.model_fields, *(["defaults"] if model is RunConfig else [])]
    return f"unknown key; {nearest_or_all(key, [*dict.fromkeys(known)], 'key')}"
