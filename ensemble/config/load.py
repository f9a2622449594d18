"""From a YAML file to a ``RunConfig``, step by step: read, override, expand, merge the defaults, check.

Owns ``load_config`` and ``defaults:``, which is merged under each model, key by key: a mapping in a model
replaces that of the defaults as a whole, and a key that the model's kind does not know is left out.  Each step's
own work is done in the module named after it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ensemble.common.errors import ConfigError
from ensemble.common.redact import Redactor
from ensemble.config.document import Document, Loc, Problem
from ensemble.config.overrides import apply_overrides, expand
from ensemble.config.rules import MemberRules, broken
from ensemble.config.schema import EnsembleConfig, MemberConfig, RunConfig
from ensemble.config.sentences import unknown, unknown_key, validate
from ensemble.config.yamlfile import parse, read_text


@dataclass(frozen=True)
class Extensions:
    """Keys that the config's own room does not know.

    Attributes:
        merge_methods: the keys below ``ensemble`` by the name of the method that they go with.
        member_kinds: the keys of a model by the ``task_type`` that they go with.
    """

    merge_methods: Mapping[str, type[EnsembleConfig]] = field(
        default_factory=lambda: {"mean": EnsembleConfig}
    )
    member_kinds: Mapping[str, type[MemberConfig]] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadedConfig:
    """A config, and what it was made from: the YAML exactly as given, its file, the overrides as given."""

    config: RunConfig
    text: str
    path: Path
    overrides: tuple[str, ...]

    @cached_property
    def redactor(self) -> Redactor:
        """For whatever is printed or written of the run."""
        return Redactor(os.environ, self.config.model_dump())


def load_config(
    path: Path,
    overrides: Sequence[str] = (),
    extensions: Extensions | None = None,
    *,
    environ: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """Read, override, expand and check a config.

    Args:
        path: the YAML file.
        overrides: ``a.b=value``, the value in YAML, as in ``models.gemma2.weight=0.5``; the later one wins.
        extensions: what there is beside the mean; ``ensemble.pipeline.load`` knows all that is installed.
        environ: what ``${NAME}`` stands for; the process's environment if None.  ``${CONFIG_DIR}`` is always
            the absolute folder of the YAML file.

    Raises:
        ConfigError: with every problem there is, each with its path in the YAML and, where known, its line.
    """
    text = read_text(path)
    document = parse(text, path)
    apply_overrides(document, overrides)
    variables = {**(os.environ if environ is None else environ), "CONFIG_DIR": str(path.absolute().parent)}
    config = _validated(document, expand(document, variables), extensions or Extensions())
    if config is None or document.problems:
        raise ConfigError(document.problems)
    return LoadedConfig(config, text, path, tuple(overrides))


def _validated(document: Document, values: dict[str, Any], extensions: Extensions) -> RunConfig | None:
    problems: list[Problem] = []
    if isinstance(values.get("ensemble"), dict):
        values["ensemble"], wrong = _ensemble(values["ensemble"], extensions.merge_methods)
        problems += [(("ensemble", *loc), sentence) for loc, sentence in wrong]
    defaults = values.pop("defaults", None)
    defaults = {} if defaults is None else defaults
    if not isinstance(defaults, dict):
        problems.append((("defaults",), "must be a mapping of a model's keys to values"))
        defaults = {}
    members = _Members(values.get("models"), defaults, extensions.member_kinds)
    problems += members.problems
    config, wrong = validate(RunConfig, {**values, "models": members.checked} if members.checked else values)
    for loc, sentence in (*problems, *wrong, *broken(values, members.rules)):
        # What a default got wrong is said where it stands, which makes the members' copies of it one problem.
        document.report((*members.origins.get(loc[:3], loc[:3]), *loc[3:]), sentence)
    return config


def _ensemble(
    values: dict[str, Any], methods: Mapping[str, type[EnsembleConfig]]
) -> tuple[EnsembleConfig, list[Problem]]:
    """The keys below ``ensemble`` as their method has them; a stand-in where something is wrong with them."""
    stand_in = EnsembleConfig()
    named, problems = validate(EnsembleConfig, {key: values[key] for key in ("method",) if key in values})
    if named is None:
        return stand_in, problems
    try:
        if named.method not in methods:
            return stand_in, [(("method",), unknown("method", named.method, [*methods]))]
        settings, problems = validate(methods[named.method], values)
    except ConfigError as error:  # of an installed package
        return stand_in, [(("method",), sentence) for sentence in error.problems]
    return settings or stand_in, problems


class _Members:
    """The models of a config, each with the keys of its kind and the defaults that these keys have.

    Args:
        models: as they stand in the YAML; the defaults are put into them.
        kinds: the keys of each kind.

    Attributes:
        checked: the models as their kinds have them, a stand-in where something is wrong with one.
        rules: of each model's kind; None where that is not known.
        origins: where each key that came from the defaults stands in the YAML.
        problems: what is wrong with models and defaults.
    """

    def __init__(
        self, models: object, defaults: dict[str, Any], kinds: Mapping[str, type[MemberConfig]]
    ) -> None:
        self._defaults = defaults
        self._kinds = kinds
        self.checked: list[object] = []
        self.rules: list[MemberRules | None] = []
        self.origins: dict[Loc, Loc] = {}
        self.problems: list[Problem] = []
        used: dict[type[MemberConfig], None] = {}
        for index, model in enumerate(models if isinstance(models, list) else ()):
            settings = self._kind_of(model, index) if isinstance(model, dict) else None
            self.rules.append(settings.broken_rules if settings is not None else None)
            if settings is not None:
                used[settings] = None
                self._merge_defaults(model, index, settings)
            self.checked.append(self._check(model, index, settings))
        if not used or "task_type" in defaults:
            usual = self._kind_of({}, None)
            used |= {} if usual is None else {usual: None}
        found = [(("defaults", *loc), sentence) for loc, sentence in self._wrong_in_defaults([*used])]
        self.problems = [*found, *self.problems]

    def _kind_of(self, model: dict[str, Any], index: int | None) -> type[MemberConfig] | None:
        """The keys of a model's kind, or of that which the defaults name."""
        loc: Loc = ("defaults", "task_type") if index is None else ("models", index, "task_type")
        if "task_type" not in model and "task_type" in self._defaults and index is not None:
            self.origins[loc] = ("defaults", "task_type")
        given = {key: one[key] for one in (self._defaults, model) for key in ("task_type",) if key in one}
        named, wrong = validate(MemberConfig, {"name": "any", **given})
        try:
            if named is not None and named.task_type in self._kinds:
                return self._kinds[named.task_type]
            if named is not None:
                wrong = [((), unknown("task_type", named.task_type, [*self._kinds]))]
        except ConfigError as error:  # of an installed package
            wrong = [((), sentence) for sentence in error.problems]
        self.problems += [(loc, sentence) for _, sentence in wrong]
        return None

    def _merge_defaults(self, model: dict[str, Any], index: int, settings: type[MemberConfig]) -> None:
        skipped = {"name", *model}
        for pair in settings.alternatives:
            for mine, other in (pair, pair[::-1]):
                if model.get(mine) is not None:
                    skipped.add(other)
        for key in (self._defaults.keys() & settings.model_fields.keys()) - skipped:
            model[key] = deepcopy(self._defaults[key])
            self.origins["models", index, key] = ("defaults", key)

    def _check(self, model: object, index: int, settings: type[MemberConfig] | None) -> object:
        if not isinstance(model, dict):
            return model
        if settings is not None:
            checked, wrong = validate(settings, model)
        else:  # what can be said of a model whose kind is not known
            common = {key: model[key] for key in ("name", "weight") if key in model}
            checked, wrong = validate(MemberConfig, common)
        self.problems += [(("models", index, *loc), sentence) for loc, sentence in wrong]
        # No name that a member can have: which are alike is told by the values in the YAML.
        return checked or MemberConfig.model_construct(name=f"#{index}")

    def _wrong_in_defaults(self, used: Sequence[type[MemberConfig]]) -> Iterator[Problem]:
        if "name" in self._defaults:
            yield ("name",), "belongs to each model; two models cannot share it"
        given = {key: value for key, value in self._defaults.items() if key != "name"}
        for settings in used:
            # The kind itself was looked at before: it need not be this one.
            known = {
                key: value
                for key, value in given.items()
                if key in settings.model_fields and key != "task_type"
            }
            _, wrong = validate(settings, known)
            # What is missing is for the models to bring, and so is what a rule demands beside what they bring.
            optional = {key: known[key] for key in known if not settings.model_fields[key].is_required()}
            for loc, sentence in (*wrong, *settings.broken_rules(optional, ())):
                if loc and loc[0] in known:
                    yield loc, sentence
        unknown_keys = [key for key in given if not any(key in one.model_fields for one in used)]
        if not unknown_keys:
            return
        # Only now, because to know the keys of every kind means to import all that is installed.
        every = dict.fromkeys([*used, *(self._kinds[name] for name in self._kinds)])
        for key in unknown_keys:
            if not any(key in one.model_fields for one in every):
                yield (key,), unknown_key(key, [*every])
