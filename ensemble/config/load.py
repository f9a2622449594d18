"""Load YAML files or mappings and check them: merge, override, expand, apply the defaults, validate.

``defaults:`` is merged under each model, key by key: a mapping in a model replaces that of the defaults as a whole,
and keys that the model's kind does not have are left out. A null counts as a missing key; in a model it also keeps
the default out.

If a later file or an override excludes a key of an earlier file, the earlier key is left out: a key of another kind
or merge method, or the other one of two alternatives.
"""

from __future__ import annotations

import numbers
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from ensemble.common.errors import ConfigError
from ensemble.common.redact import Redactor
from ensemble.common.remote_files import Copy
from ensemble.common.text import nearest_or_all
from ensemble.config.document import (
    MAPPING,
    MAX_DEPTH,
    NOT_TEXT,
    Document,
    KeyProblems,
    Loc,
    Problem,
    apply_overrides,
    drop_stale_fit,
    dump,
    expand,
    merge_documents,
    one_line,
    parse,
    place,
    read_text,
    shown,
)
from ensemble.config.schema import MERGE_KEYS, DataConfig, EnsembleConfig, MemberConfig, RunConfig
from ensemble.config.values import Labels, StrictConfig

M = TypeVar("M", bound=StrictConfig)
# Those of members that people look for elsewhere.
_KEYS_OF_MODELS = ("text_column", "prompt_template", "max_length", "model_name_or_path", "label_map")
Methods: TypeAlias = Mapping[str, type[EnsembleConfig]]
Kinds: TypeAlias = Mapping[str, type[MemberConfig]]


@dataclass(frozen=True)
class MappingConfig:
    """Hold a mapping, such as a dict in Python, as the text of a YAML file in the working directory."""

    text: str

    def __str__(self) -> str:
        return MAPPING


ConfigSource: TypeAlias = Path | MappingConfig


@dataclass(frozen=True)
class TrainedMember:
    """Say which rows the models of a trained member have seen.

    Attributes:
        rows: the file of the rows that it was trained on, see ``data.trained_rows``.
        by_fold: the member for a table with such rows: each fold's model is a view.
        folds: by the name of such a view, the fold whose rows its model has not seen; None: it has seen all rows.
        oof_runs: each ``output_dir`` of a run that predicts these rows.
    """

    rows: Path
    by_fold: MemberConfig
    folds: Mapping[str, int | None]
    oof_runs: tuple[Path, ...]


@dataclass(frozen=True)
class LoadedConfig:
    """Hold a config and its sources.

    Attributes:
        text: the file exactly as it is, or ``whole`` if there are several or the file names ``${CONFIG_DIR}``; with
            the overrides it gives the same config. A file as it is may hold secrets.
        whole: one YAML file that gives the same config in any folder: the file exactly as it is, or files and
            overrides merged. Its paths are still relative to the working directory, and only ``${CONFIG_DIR}`` is
            replaced.
        texts: of the sources.
        copies: of the objects that the config names by their addresses; ``config`` names the copies.
        submission_address: where the submission is copied to at the end; None: nowhere.
        trained: by name, members of ``config`` that a training has made.
        untrained: by name, why other members of ``config`` could not be trained.
        out_of_time: those of them for which only the time was lacking.
        outdated: by name, of members with finished trainings that a change outdates, which folds are to be trained
            (None: all rows), and why; an empty reason: that was never trained.
    """

    config: RunConfig
    text: str
    whole: str
    sources: tuple[ConfigSource, ...]
    overrides: tuple[str, ...]
    texts: tuple[str, ...] = field(repr=False)
    document: Document = field(repr=False)
    copies: tuple[Copy, ...] = ()
    submission_address: str | None = None
    trained: Mapping[str, TrainedMember] = field(default_factory=dict)
    untrained: Mapping[str, str] = field(default_factory=dict)
    out_of_time: frozenset[str] = frozenset()
    outdated: Mapping[str, Mapping[int | None, str]] = field(default_factory=dict)

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(source for source in self.sources if isinstance(source, Path))

    @cached_property
    def redactor(self) -> Redactor:
        """Return the redactor for everything that is printed or written about the run."""
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
        sources: YAML files or mappings; later ones override earlier ones, see ``document``.
        overrides: ``a.b=value`` with a value in YAML, as in ``models.gemma2.weight=0.5``; the later one wins.
        merge_methods: the settings below ``ensemble``, by the name of the method.
        member_kinds: the settings of a model, by its ``task_type``.
        environ: the values of ``${NAME}``; None: the process's environment. ``${CONFIG_DIR}`` is always the
            absolute folder of the YAML file that names it; in a mapping, the working directory.
        texts: the files' texts, if they were read before.

    Raises:
        ConfigError: with every problem, each with its path in the YAML and, if known, its line.
    """
    names = [one_line(str(source)) for source in sources]
    read: list[str] = []
    documents: list[Document] = []
    unreadable: list[str] = []
    for number, source in enumerate(sources):
        try:
            if isinstance(source, MappingConfig):
                read.append(source.text)
            elif texts is not None:
                read.append(texts[number])
            else:
                read.append(read_text(source))
            documents.append(parse(read[-1], source, names, number))
        except ConfigError as error:
            unreadable += error.problems
    if unreadable:
        raise ConfigError(unreadable)
    variables = os.environ if environ is None else environ
    document, config = check_documents(documents, variables, overrides, merge_methods, member_kinds)
    names_folder = "${CONFIG_DIR}" in read[0]  # another folder if the text is copied
    whole = read[0]
    if len(document.sources) > 1 or names_folder:
        # Redacted as values: in the text, *** would be an alias.
        redactor = Redactor(os.environ, config.model_dump())
        whole = f"# Made of {', '.join(document.sources)}\n{dump(redactor.document(document.data))}"
    return LoadedConfig(
        config=config,
        text=whole if len(read) > 1 or names_folder else read[0],
        whole=whole,
        sources=tuple(sources),
        overrides=tuple(overrides),
        texts=tuple(read),
        document=document,
    )


def mapping_config(mapping: Mapping[Any, Any]) -> MappingConfig:
    """Write a mapping as YAML; raise ConfigError with the first key that holds what YAML cannot hold."""
    return MappingConfig(dump(_plain(mapping, ())))


def _plain(value: object, loc: Loc) -> Any:
    if len(loc) > MAX_DEPTH:  # a list may hold itself
        raise ConfigError(f"{place(loc[:3])}: nested more than {MAX_DEPTH} levels deep")
    if type(value).__name__ in ("bool", "bool_"):  # also NumPy's, without importing it
        return bool(value)
    if isinstance(value, numbers.Real):  # also NumPy's
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, list | tuple):
        return [_plain(item, (*loc, index)) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            is_count = type(key) is int and key >= 0  # the number of a GPU or a label
            if not is_count and (not isinstance(key, str) or re.search(NOT_TEXT, key)):
                raise ConfigError(f"{place(loc)}: the key {shown(repr(key))} must be text")
        return {key: _plain(item, (*loc, str(key))) for key, item in value.items()}
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if text is None or (isinstance(text, str) and not re.search(NOT_TEXT, text)):
        return text if text is None else str.__str__(text)
    content = "this text" if isinstance(text, str) else f"a value of type {type(value).__name__}"
    raise ConfigError(
        f"{place(loc)}: YAML cannot hold {content}; give texts, numbers, lists and dicts of them"
    )


def check_documents(
    documents: Sequence[Document],
    variables: Mapping[str, str],
    overrides: Sequence[str],
    merge_methods: Methods,
    member_kinds: Kinds,
) -> tuple[Document, RunConfig]:
    """Merge documents into the first one, and check them as a config; see ``load_config``."""
    document = merge_documents(documents)
    apply_overrides(document, overrides)
    drop_stale_fit(document)
    values = expand(document, variables)
    if document.problems:  # a value that cannot be read would only bring about others
        raise ConfigError(document.problems)
    checker = _Checker(document, merge_methods, member_kinds)
    config = checker.check(values)
    if config is None or document.problems:
        error = ConfigError(document.problems)
        error.rest = checker.rest
        raise error
    return document, config


def data_config(document: Document, values: dict[str, Any]) -> DataConfig:
    """Return the ``data`` of a checked config, from its document and its expanded values."""
    _leave_out_alternatives(document, ("data",), values["data"], DataConfig)
    return DataConfig.model_validate(values["data"])


class _Checker:
    """Turn plain values into a config; problems are noted in the document."""

    def __init__(self, document: Document, merge_methods: Methods, member_kinds: Kinds) -> None:
        self._document = document
        self._merge_methods = merge_methods
        self._member_kinds = member_kinds
        self._labels: tuple[str, ...] = ()
        self._problems: list[Problem] = []
        # What is left without keys that are wrong, with stand-ins for members that are.
        self.rest: RunConfig | None = None
        # The place in the YAML of each key that a model has from the defaults.
        self._origins: dict[Loc, Loc] = {}

    def check(self, values: dict[str, Any]) -> RunConfig | None:
        """Return the config; None if it has problems."""
        with suppress(ValidationError):  # reported with all other problems
            self._labels = TypeAdapter(Labels).validate_python(values.get("labels"), strict=True)
        if isinstance(values.get("data"), dict):
            _leave_out_alternatives(self._document, ("data",), values["data"], DataConfig)
        if isinstance(values.get("ensemble"), dict):
            values["ensemble"] = self._ensemble(values["ensemble"])
        defaults = values.pop("defaults", None)
        if defaults is None:
            defaults = {}
        if not isinstance(defaults, dict):
            self._problems.append((("defaults",), "must be a mapping of a model's keys to values"))
            defaults = {}
        if isinstance(values.get("models"), list):
            values["models"] = self._members(values["models"], defaults)
        config, problems = validate(RunConfig, values, self._labels)
        wrong = {loc[0] for loc, _ in (*self._problems, *problems)} - {"models"}
        right = {"output_dir": ".", **{key: value for key, value in values.items() if key not in wrong}}
        self.rest = config or validate(RunConfig, right, self._labels)[0]
        for loc, sentence in (*self._problems, *problems):
            # A wrong default is reported at its place, once for all members.
            self._document.report((*self._origins.get(loc[:3], loc[:3]), *loc[3:]), sentence)
        return config

    def _ensemble(self, values: dict[str, Any]) -> EnsembleConfig:
        loc: Loc = ("ensemble",)
        settings = self._named(EnsembleConfig, "method", loc, values, self._merge_methods)
        if settings is None:
            return EnsembleConfig()
        self._leave_out_foreign(loc, values, (*loc, "method"), settings, self._merge_methods)
        checked, problems = validate(settings, values, self._labels)
        self._problems += [((*loc, *inner), sentence) for inner, sentence in problems]
        return checked or EnsembleConfig()

    def _members(self, models: list[object], defaults: dict[str, Any]) -> list[object]:
        """Return each model's settings; wrong ones are replaced, so that all others are checked."""
        members = [*models]
        kinds: list[type[MemberConfig]] = []
        for index, model in enumerate(models):
            if not isinstance(model, dict):
                continue
            loc: Loc = ("models", index)
            name = model.get("name")
            if "task_type" not in model and defaults.get("task_type") is not None:
                model["task_type"] = defaults["task_type"]
                self._origins[*loc, "task_type"] = ("defaults", "task_type")
            kind = self._named(MemberConfig, "task_type", loc, model, self._member_kinds)
            if kind is None:  # the keys of all kinds can be checked
                model = {key: value for key, value in model.items() if key in ("name", *MERGE_KEYS)}
            else:
                kinds.append(kind)
                kind_loc = self._origins.get((*loc, "task_type"), (*loc, "task_type"))
                self._leave_out_foreign(loc, model, kind_loc, kind, self._member_kinds)
                self._inherit(loc, model, defaults, kind)
            member, problems = validate(kind or MemberConfig, model, self._labels)
            for inner, sentence in problems:
                if kind is not None:
                    sentence = self._with_other_kinds(inner, sentence, kind)
                self._problems.append(((*loc, *inner), sentence))
            stand_in = MemberConfig.model_construct(name=name if isinstance(name, str) else f"#{index}")
            members[index] = member or stand_in
        self._check_default_keys(defaults, kinds)
        return members

    def _inherit(
        self, loc: Loc, model: dict[str, Any], defaults: dict[str, Any], kind: type[MemberConfig]
    ) -> None:
        """Add the defaults of keys that the kind has and the model does not name."""
        _leave_out_alternatives(self._document, loc, model, kind)
        _leave_out_alternatives(self._document, ("defaults",), defaults, kind)
        named = {"name", *model}
        for pair in kind.alternatives:
            if any(model.get(key) is not None for key in pair):
                named.update(pair)
        for key, value in defaults.items():
            # A mistyped name would be another member, made of the defaults alone.
            is_own = loc in self._document.new_models and key in kind.model_fields
            if is_own and kind.model_fields[key].is_required():
                continue
            if key in kind.model_fields and key not in named:
                model[key] = deepcopy(value)
                self._origins[*loc, key] = ("defaults", key)

    def _check_default_keys(self, keys: Iterable[str], kinds: Sequence[type[MemberConfig]]) -> None:
        for key in keys:
            if key == "name":
                sentence = "belongs to each model; two models cannot share it"
                self._problems.append((("defaults", key), sentence))
            elif not any(key in kind.model_fields for kind in kinds):
                # Only now, because the keys of every kind need the import of every installed package.
                every = [*dict.fromkeys([*kinds, *self._member_kinds.values()])]
                if not any(key in kind.model_fields for kind in every):
                    self._problems.append((("defaults", key), _unknown_key(key, every)))

    def _with_other_kinds(self, loc: Loc, sentence: str, kind: type[MemberConfig]) -> str:
        """Return the sentence about a member's key, or one that names the other kinds that have the key."""
        if len(loc) > 1 or not sentence.startswith("unknown key") or sentence.startswith("unknown key; use"):
            return sentence
        names = []
        for name in self._member_kinds:
            with suppress(ConfigError):  # a package that cannot be imported is another problem
                if loc[0] in self._member_kinds[name].model_fields:
                    names.append(name)
        if not names:
            return sentence
        verb = "has" if len(names) == 1 else "have"
        task_type = kind.model_fields["task_type"].default
        return f"no key of task_type {task_type}; {', '.join(names)} {verb} it (docs/reference/config.md)"

    def _named(
        self, base: type[M], key: str, loc: Loc, values: dict[str, Any], by_name: Mapping[str, type[M]]
    ) -> type[M] | None:
        """Return the settings of the method or kind that a mapping names; None if the name is wrong."""
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
        name_loc: Loc,
        model: type[StrictConfig],
        by_name: Mapping[str, type[StrictConfig]],
    ) -> None:
        """Remove other methods' or kinds' keys that are null, or from files before the one that names this one."""
        named = self._document.origin(name_loc) if self._document.value(name_loc) is not None else 0
        removable = [
            key
            for key, value in values.items()
            if key not in model.model_fields and (value is None or self._document.origin((*loc, key)) < named)
        ]
        if removable:  # only now, because the keys of all need the import of every installed package
            foreign = {key for other in by_name.values() for key in other.model_fields}
            _leave_out(self._document, loc, values, foreign.intersection(removable))


def _leave_out_alternatives(
    document: Document, loc: Loc, values: dict[str, Any], model: type[StrictConfig]
) -> None:
    """Remove keys whose alternative is given by a later file."""
    for pair in model.alternatives:
        first, second = (document.origin((*loc, key)) for key in pair)
        if first != second and all(values.get(key) is not None for key in pair):
            _leave_out(document, loc, values, {pair[first > second]})


def _leave_out(document: Document, loc: Loc, values: dict[str, Any], keys: set[str]) -> None:
    written: Any = document.value(loc)
    for key in keys:
        del values[key], written[key]


def validate(
    model: type[M], values: dict[str, Any], labels: Sequence[str] = ()
) -> tuple[M | None, list[Problem]]:
    """Return the values as a model, or None and the problems; no labels: they are unknown."""
    try:
        return model.model_validate(values, context=labels), []
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
    broken_rules: list[Problem] = []
    sentences: dict[Loc, str] = {}
    for detail in details:
        # pydantic adds the type of a union that it tried.
        loc = (*_existing(detail["loc"][:-1], values), *detail["loc"][-1:])
        reason = detail.get("ctx", {}).get("error")
        if isinstance(reason, KeyProblems):
            loc = _existing(loc, values)
            broken_rules += [((*loc, *inner), sentence) for inner, sentence in reason.problems]
        elif detail["type"] in ("missing", "extra_forbidden") and isinstance(loc[-1], str):
            owner = _owner(model, loc)
            *outer, key = loc
            loc = (*_existing(tuple(outer), values), key)
            sentences[loc] = _unknown_key(str(key), [owner])
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
    """Return a place without the steps that the values lack."""
    existing: Loc = ()
    for step in loc:
        try:
            values = values[step]
        except (LookupError, TypeError):
            continue
        existing = (*existing, step)
    return existing


def _sentence(detail: Any) -> str:
    """Return the sentence for one of pydantic's errors."""
    if detail["type"] in ("model_type", "dict_type"):
        return "must be a mapping of keys to values"
    if detail["type"] == "bool_type":
        return "must be true or false"
    if detail["type"] == "too_short" and detail["ctx"]["min_length"] == 1:
        return "must not be empty"
    # An installed package may use other types than ours, and its own validators.
    sentence = " ".join(detail["msg"].removeprefix("Value error, ").split())
    return sentence.replace("Input should be", "must be", 1)


def _owner(model: type[BaseModel], loc: Loc) -> type[BaseModel]:
    """Return the model to which the last key of a place belongs."""
    for step in loc[:-1]:
        if step in model.model_fields:
            model = next(_models_in(model.model_fields[str(step)].annotation), model)
    return model


def _models_in(hint: Any) -> Iterator[type[BaseModel]]:
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        yield hint
    for part in get_args(hint):
        yield from _models_in(part)


def _unknown_key(key: str, models: Sequence[type[BaseModel]]) -> str:
    """Return the sentence for a key that none of these models has."""
    keys: list[str] = []
    for model in models:
        for today, older in getattr(model, "older_keys", {}).items():
            if key in older.split():
                return f"unknown key; use {today}"
        keys += model.model_fields
        if model is RunConfig:
            keys.append("defaults")
        if key in _KEYS_OF_MODELS and not issubclass(model, MemberConfig):
            return "belongs to a model, or to defaults"
    return f"unknown key; {nearest_or_all(key, [*dict.fromkeys(keys)], 'key')}"
