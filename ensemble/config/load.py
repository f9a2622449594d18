"""From a YAML file to a ``RunConfig``, step by step: read, override, expand, merge the defaults, check.

Owns ``load_config`` and ``defaults:``, which is merged under each model, key by key: a mapping in a model
replaces that of the defaults as a whole.  Each step's own work is done in the module named after it.
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
from ensemble.config.rules import broken, broken_in_member
from ensemble.config.schema import EnsembleConfig, ModelConfig, RunConfig
from ensemble.config.sentences import unknown, validate
from ensemble.config.yamlfile import parse, read_text


@dataclass(frozen=True)
class Extensions:
    """Keys that the config's own room does not know.

    Attributes:
        merge_methods: the keys below ``ensemble`` by the name of the method that they go with.
    """

    merge_methods: Mapping[str, type[EnsembleConfig]] = field(
        default_factory=lambda: {"mean": EnsembleConfig}
    )


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
    problems += [(("defaults", *loc), sentence) for loc, sentence in _wrong_in_defaults(defaults)]
    origins = _merge_defaults(values, defaults)
    config, wrong = validate(RunConfig, values)
    for loc, sentence in (*problems, *wrong, *broken(values)):
        # What a default got wrong is said where it stands, which makes the members' copies of it one problem.
        document.report((*origins.get(loc[:3], loc[:3]), *loc[3:]), sentence)
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


def _merge_defaults(values: dict[str, Any], defaults: dict[str, Any]) -> dict[Loc, Loc]:
    """Put the defaults into the models; returns where each key that came from them stands in the YAML."""
    origins: dict[Loc, Loc] = {}
    models = values.get("models")
    for index, model in enumerate(models if isinstance(models, list) else ()):
        if not isinstance(model, dict):
            continue
        skipped = {"name", *model}
        for mine, other in (("prompt_template", "text_column"), ("text_column", "prompt_template")):
            if model.get(mine) is not None:
                skipped.add(other)
        for key in defaults.keys() - skipped:
            model[key] = deepcopy(defaults[key])
            origins["models", index, key] = ("defaults", key)
    return origins


def _wrong_in_defaults(defaults: dict[str, Any]) -> Iterator[Problem]:
    if "name" in defaults:
        yield ("name",), "belongs to each model; two models cannot share it"
    member = {"model_name_or_path": "any", **defaults, "name": "any"}
    _, wrong = validate(ModelConfig, member)
    for loc, sentence in (*wrong, *broken_in_member(member, set())):
        if loc not in {(), ("revision",)}:  # what is missing is for the models to bring
            yield loc, sentence
