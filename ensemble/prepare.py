"""Everything that can be known of a run without loading a model; the whole of ``validate``.

Gathers the problems of config, table, checkpoints, templates, devices and output into one error, so that one
look shows all there is to mend.  Writes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ensemble.arrow import keep_pandas_out
from ensemble.checkpoint import Checkpoint, inspect_checkpoint
from ensemble.config import LoadedConfig, ModelConfig, RunConfig
from ensemble.devices import Inventory, inventory
from ensemble.errors import ConfigError, DataError, EnsembleError
from ensemble.plan import Plan, make_plan
from ensemble.rundir import unwritable_reason
from ensemble.submission import Sample, check_sample, read_sample
from ensemble.table import InputTable, TableNeeds, read_table
from ensemble.template import PromptTemplate, TemplateProblem, compile_template

RENDERED_ROWS = 5


@dataclass(frozen=True)
class Prepared:
    """A run that has passed every check; ``checkpoints`` go by member name."""

    loaded: LoadedConfig
    table: InputTable
    checkpoints: dict[str, Checkpoint]
    plan: Plan
    inventory: Inventory
    sample: Sample | None
    warnings: tuple[str, ...]
    previews: dict[str, str]

    @property
    def config(self) -> RunConfig:
        return self.loaded.config


class _Problems:
    """Collects errors of exit code 2 so that a later check can still be made."""

    def __init__(self) -> None:
        self.found: list[EnsembleError] = []

    @contextlib.contextmanager
    def at(self, place: str = "") -> Iterator[None]:
        try:
            yield
        except EnsembleError as error:
            prefixed = [f"{place}: {problem}" if place else problem for problem in error.problems]
            self.found.append(type(error)(prefixed))

    def raise_any(self) -> None:
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            raise ConfigError([problem for error in self.found for problem in error.problems])


def prepare(loaded: LoadedConfig) -> Prepared:
    """Check a run.

    Raises:
        EnsembleError: of exit code 2, with every problem found.
    """
    keep_pandas_out()
    config = loaded.config
    problems = _Problems()
    templates = _templates(config, problems)
    checkpoints = _checkpoints(config, problems)
    if reason := unwritable_reason("output_dir", config.output_dir):
        problems.found.append(ConfigError(reason))
    table: InputTable | None = None
    with problems.at():
        table = read_table(config.data.path, _needs(config, templates))
    sample: Sample | None = None
    with problems.at("submission"):
        sample = _sample(config, table)
    gpus = inventory()
    if table is None:
        with problems.at():  # what can be said of devices without the table
            make_plan(config, {model.name: np.zeros(1, dtype=np.int64) for model in config.models}, gpus.gpus)
        problems.raise_any()
    assert table is not None
    previews = _render_first_rows(config, table, templates, problems)
    plan: Plan | None = None
    with problems.at():
        plan = make_plan(config, _lengths(config, table, templates), gpus.gpus)
    problems.raise_any()
    assert plan is not None
    warnings = [*gpus.warnings, *plan.warnings]
    warnings += [warning for checkpoint in checkpoints.values() for warning in checkpoint.warnings]
    warnings += _scoring_warnings(config, checkpoints)
    return Prepared(loaded, table, checkpoints, plan, gpus, sample, tuple(warnings), previews)


def text_columns(model: ModelConfig) -> tuple[str, ...]:
    """The one or two columns a member without a template reads."""
    if model.text_column is None:
        return ()
    return (model.text_column,) if isinstance(model.text_column, str) else tuple(model.text_column)


def scores_make_sense(checkpoints: dict[str, Checkpoint]) -> bool:
    """Log loss and accuracy are defined where every member gives probabilities of exclusive labels."""
    return all(checkpoint.activation == "softmax" for checkpoint in checkpoints.values())


def _templates(config: RunConfig, problems: _Problems) -> dict[str, PromptTemplate]:
    compiled = {}
    for index, model in enumerate(config.models):
        if model.prompt_template is None:
            continue
        try:
            compiled[model.name] = compile_template(model.prompt_template)
        except TemplateProblem as error:
            problems.found.append(ConfigError(f"models[{index}].prompt_template: {error}"))
    return compiled


def _checkpoints(config: RunConfig, problems: _Problems) -> dict[str, Checkpoint]:
    found = {}
    for index, model in enumerate(config.models):
        with problems.at(f"models[{index}] ({model.name})"):
            found[model.name] = inspect_checkpoint(
                model.model_name_or_path, model.revision, config.labels, model.label_map, model.problem_type
            )
    return found


def _needs(config: RunConfig, templates: dict[str, PromptTemplate]) -> TableNeeds:
    direct = [column for model in config.models for column in text_columns(model)]
    templated = [column for template in templates.values() for column in template.columns]
    parsed = [column for template in templates.values() for column in template.json_columns]
    return TableNeeds(
        id_column=config.data.id_column,
        label_column=config.data.label_column,
        labels=config.labels,
        columns=tuple(dict.fromkeys(direct + templated)),
        json_columns=tuple(dict.fromkeys(parsed)),
        text_columns=tuple(dict.fromkeys(direct)),
        limit=config.limit,
    )


def _sample(config: RunConfig, table: InputTable | None) -> Sample | None:
    if config.submission is None:
        return None
    sample = read_sample(config.submission.sample, config.data.id_column)
    if table is not None:
        found = check_sample(
            sample,
            config.submission.sample,
            table.ids,
            config.data.id_column,
            config.labels,
            config.submission.columns,
            config.limit is not None,
        )
        if found:
            raise DataError(found)
    target = config.submission.path
    if target is not None and (reason := unwritable_reason("path", target.parent)):
        raise ConfigError(reason)
    return sample


def _columns_read(model: ModelConfig, templates: dict[str, PromptTemplate]) -> tuple[str, ...]:
    return templates[model.name].columns if model.name in templates else text_columns(model)


def _lengths(
    config: RunConfig, table: InputTable, templates: dict[str, PromptTemplate]
) -> dict[str, npt.NDArray[np.int64]]:
    by_columns: dict[tuple[str, ...], npt.NDArray[np.int64]] = {}
    lengths = {}
    for model in config.models:
        columns = _columns_read(model, templates)
        if columns not in by_columns:
            by_columns[columns] = table.text_lengths(columns)
        lengths[model.name] = by_columns[columns]
    return lengths


def _render_first_rows(
    config: RunConfig, table: InputTable, templates: dict[str, PromptTemplate], problems: _Problems
) -> dict[str, str]:
    """Render every template on the first rows; the first row's text per member is what ``validate`` shows."""
    previews: dict[str, str] = {}
    rows = table.head(RENDERED_ROWS)
    for index, model in enumerate(config.models):
        if model.name not in templates:
            continue
        for number, row in enumerate(rows):
            try:
                text = templates[model.name].render(row)
            except TemplateProblem as error:
                place = f"row {number + 1} (id {table.ids[number].as_py()!r})"
                problems.found.append(DataError(f"models[{index}].prompt_template: {place}: {error}"))
                break
            previews.setdefault(model.name, text)
    return previews


def _scoring_warnings(config: RunConfig, checkpoints: dict[str, Checkpoint]) -> list[str]:
    if config.data.label_column is None or scores_make_sense(checkpoints):
        return []
    return [
        "data.label_column: log loss and accuracy need exclusive labels from every member; none are shown"
    ]
