"""Everything that can be known of a run without loading a model; the whole of ``validate``.

Gathers the problems of config, table, checkpoints, templates, devices and output into one error, so that one
look shows all there is to fix.  Writes nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ensemble.common.errors import ConfigError, DataError, DeviceError, EnsembleError, MergeError
from ensemble.common.files import (
    FileState,
    file_state,
    folder_states,
    unreadable,
    unwritable_reason,
)
from ensemble.common.gpus import Device, Inventory, inventory
from ensemble.common.packages import unsupported
from ensemble.common.text import plural
from ensemble.config import LoadedConfig, MemberConfig, RunConfig
from ensemble.data.json_cells import TemplateProblem
from ensemble.data.submission import Sample, read_sample
from ensemble.data.table import InputTable, TableNeeds, read_table
from ensemble.members.base import Given, Inspection, MemberKind, OutputColumns
from ensemble.members.registry import member_kind
from ensemble.merging.blocks import block_spans
from ensemble.merging.methods import merge_method
from ensemble.merging.methods.base import Members
from ensemble.merging.row_checks import RowCheck
from ensemble.pipeline.run_dir import RunDir, strangers
from ensemble.pipeline.run_report import RunReport, measured_speeds
from ensemble.planning.forecast import Speed
from ensemble.planning.placement import MemberFacts, chosen_devices
from ensemble.planning.plan import Plan, plan_run
from ensemble.scheduling.launchers.base import Launcher, make_launcher

if TYPE_CHECKING:
    from ensemble.data.template import PromptTemplate

_Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Prepared:
    """A run that has passed every check; ``inspected`` goes by member name.

    ``file_states`` are those of the files that members are made of, from before anything was read of them, by
    absolute path, and ``table_state`` that of the table's.
    """

    loaded: LoadedConfig
    table: InputTable
    inspected: dict[str, Inspection]
    plan: Plan
    launcher: Launcher
    inventory: Inventory
    sample: Sample | None
    warnings: tuple[str, ...]
    previews: dict[str, str]
    file_states: Mapping[str, FileState]
    table_state: FileState | None

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
        except OSError as error:  # such as a name that is too long for the file system
            text = unreadable(error.filename or place, error, "choose another place")
            self.found.append(ConfigError(f"{place}: {text}" if place and error.filename else text))
        except EnsembleError as error:
            prefixed = [f"{place}: {problem}" if place else problem for problem in error.problems]
            self.found.append(type(error)(prefixed))

    def raise_any(self) -> None:
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            raise ConfigError([problem for error in self.found for problem in error.problems])


def prepare(loaded: LoadedConfig, must_fit: bool = True) -> Prepared:
    """Check a run.

    Args:
        must_fit: a member that fits on no device is a problem like any other; else it is the plan's to tell.

    Raises:
        EnsembleError: of exit code 2, with every problem found.
    """
    config = loaded.config
    problems = _Problems()
    launcher: Launcher | None = None
    with problems.at(loaded.document.where(("launcher",))):
        launcher = make_launcher(config.launcher)
    kinds = [member_kind(model) for model in config.models]
    templates = compile_templates(config, problems.found)
    file_states = _file_states(kinds)
    columns = OutputColumns(config.data.id_column, config.labels)
    inspected: dict[str, Inspection] = {}
    for index, kind in enumerate(kinds):
        name = kind.settings.name
        with problems.at(f"models[{index}] ({name})"):
            inspected[name] = kind.inspect(columns)
    with problems.at():
        if found := [*unsupported((), needed_packages(config, inspected))]:
            raise ConfigError(found)
    with problems.at():
        _check_places(loaded, kinds)
    table: InputTable | None = None
    table_state = file_state(config.data.path)
    with problems.at():
        table = read_table(config.data.path, _needs(config, kinds, templates))
        if file_state(config.data.path) != table_state:  # it is read in several passes
            raise DataError(f"{config.data.path}: changed while it was read; start again when it is complete")
    sample: Sample | None = None
    with problems.at("submission"):
        sample = _sample(config, table)
    gpus: tuple[Device, ...] = ()
    machine = inventory() if launcher is None else launcher.inventory()
    with problems.at():
        gpus = _devices(config, kinds, machine)
    if table is None:
        with problems.at():  # what can be said of devices without the table
            _demand(plan_run(config, _facts(config, kinds, {}, {}, 1), gpus, {}))
        problems.raise_any()
    assert table is not None
    previews = render_first_rows(config, table, templates, problems.found)
    given_warnings = []
    for index, kind in enumerate(kinds):
        if not kind.needs_worker and (one := inspected.get(kind.settings.name)) is not None:
            with problems.at(f"models[{index}] ({kind.settings.name})"):
                ignored = given_predictions(kind, one, table, columns).ignored_ids
                if ignored and config.limit is None:  # a trial leaves out most of them
                    count = plural(ignored, "row")
                    given_warnings.append(
                        f"{kind.settings.name}: {count} of {' and '.join(kind.sources())} left out, with ids that "
                        "the table does not have"
                    )
    with problems.at():
        _check_members_fit(config, kinds, inspected, bool(gpus))
    plan: Plan | None = None
    with problems.at():
        lengths = _lengths(kinds, table, templates)
        facts = _facts(config, kinds, inspected, lengths, table.rows)
        plan = plan_run(config, facts, gpus, _measured_speeds(config, gpus))
        if must_fit:
            _demand(plan)
    problems.raise_any()
    assert plan is not None
    assert launcher is not None
    warnings = [*machine.warnings]
    warnings += [warning for one in inspected.values() for warning in one.warnings]
    for index, kind in enumerate(kinds):
        warnings += [f"models[{index}].{text}" for text in kind.warnings(inspected[kind.settings.name])]
    warnings += [*given_warnings, *_scoring_warnings(config, inspected)]
    return Prepared(
        loaded,
        table,
        inspected,
        plan,
        launcher,
        machine,
        sample,
        tuple(warnings),
        previews,
        file_states,
        table_state,
    )


def given_predictions(
    kind: MemberKind[Any, Any], inspected: Inspection, table: InputTable, columns: OutputColumns
) -> Given:
    """The predictions of a member that needs no worker, once they are what predictions should be.

    Raises:
        DataError: they cannot be had, or are no probabilities.
    """
    given = kind.predictions(table.ids, columns)
    check = RowCheck(" and ".join(kind.sources()), inspected.activation, table.ids, False, "correct the file")
    for start, stop in block_spans(*given.values.shape):
        check.look(start, given.values[start:stop])
    try:
        check.refuse()
    except MergeError as error:
        raise DataError(error.problems) from None
    return given


def needed_packages(config: RunConfig, inspected: Mapping[str, Inspection]) -> dict[str, str]:
    """Packages of extras that the config needs, and the first key that needs each.

    Args:
        inspected: by member name, as far as members could be inspected.
    """
    needed: dict[str, str] = {}
    for index, model in enumerate(config.models):
        for package, key in member_kind(model).packages(inspected.get(model.name)):
            needed.setdefault(package, f"models[{index}]{key}")
    return needed


def may_use_gpus(config: RunConfig) -> list[bool]:
    """For each member that needs a worker whether that may run on a GPU."""
    kinds = map(member_kind, config.models)
    return [kind.request().num_gpus != 0 for kind in kinds if kind.needs_worker]


def columns_read(model: MemberConfig) -> tuple[str, ...]:
    """The table's columns that a member reads, as text or in its template."""
    reads = member_kind(model).reads()
    if reads.template is None:
        return reads.columns
    from ensemble.data.template import compile_template  # Jinja2 only where it is needed: start-up time

    return compile_template(reads.template).columns


def scores_make_sense(inspected: Mapping[str, Inspection]) -> bool:
    """Log loss and accuracy are defined where every member gives probabilities of exclusive labels."""
    return all(one.activation == "softmax" for one in inspected.values())


def _check_members_fit(
    config: RunConfig,
    kinds: list[MemberKind[Any, Any]],
    inspected: Mapping[str, Inspection],
    any_gpu: bool,
) -> None:
    found = []
    for index, kind in enumerate(kinds):
        wrong = kind.problems(inspected.get(kind.settings.name), any_gpu)
        found += [f"models[{index}].{problem}" for problem in wrong]
    raw = [name for name, one in inspected.items() if one.activation == "none"]
    if raw and len(raw) < len(inspected):
        keys = {kind.activation_key for kind in kinds if kind.settings.name in raw and kind.activation_key}
        remedy = f", or set {' and '.join(sorted(keys))}" if keys else ""
        found.append(
            f"models: {', '.join(raw)} gives raw values (regression), the others probabilities; their mean means "
            f"nothing: run them separately{remedy}"
        )
    if raw and config.on_bad_row == "uniform":
        found.append("on_bad_row: uniform is for probabilities, and the models give raw values (regression)")
    if raw and config.time_limit is not None and config.fill == "uniform":
        found.append(
            "fill: uniform is for probabilities, and the models give raw values (regression); set prior (the mean "
            "of the rows that were computed) or sample"
        )
    if len(inspected) == len(config.models):  # else a method could miss those that cannot be read
        activations = tuple(one.activation for one in inspected.values())
        found += merge_method(config.ensemble, Members((*inspected,), activations, config.labels)).problems()
    if found:
        raise ConfigError(found)


def _file_states(kinds: list[MemberKind[Any, Any]]) -> dict[str, FileState]:
    names = dict.fromkeys(name for kind in kinds for name in kind.sources())
    states = {path: state for name in names for path, state in folder_states(name).items()}
    for name in names:
        path = Path(name).absolute()
        # Not Path.is_file, which raises an error where a folder above may not be entered.
        if os.path.isfile(path) and (state := file_state(path)) is not None:  # noqa: PTH113
            states[str(path)] = state
    return states


def _devices(config: RunConfig, kinds: list[MemberKind[Any, Any]], machine: Inventory) -> tuple[Device, ...]:
    if machine.mask_problem and any(may_use_gpus(config)):
        raise DeviceError(machine.mask_problem)
    return chosen_devices(machine.gpus, config.devices)


def _measured_speeds(config: RunConfig, gpus: tuple[Device, ...]) -> dict[str, Speed]:
    """What an earlier run has measured here."""
    computed_as = {model.name: model.computed_as for model in config.models}
    with contextlib.suppress(DataError):  # there is none, or another version wrote it
        report = RunReport.read(RunDir(config.output_dir).run_json)
        return measured_speeds(report, [gpu.name for gpu in gpus], computed_as)
    return {}


def _facts(
    config: RunConfig,
    kinds: list[MemberKind[Any, Any]],
    inspected: Mapping[str, Inspection],
    lengths: Mapping[str, _Lengths],
    rows: int,
) -> dict[str, MemberFacts]:
    """What the plan must know of each member, as far as it could be read.

    Raises:
        EnsembleError: a file of a member is broken.
    """
    facts = {}
    for kind in kinds:
        name, memory = kind.settings.name, None
        if name in inspected and name in lengths:
            memory = kind.memory(inspected[name], lengths[name], len(config.labels))
        own = lengths.get(name, np.zeros(rows, dtype=np.int64))
        facts[name] = MemberFacts(name, kind.request(), own, memory, kind.needs_worker)
    return facts


def _demand(plan: Plan) -> None:
    if plan.problems:
        raise DeviceError(plan.problems)


def _needs(
    config: RunConfig, kinds: list[MemberKind[Any, Any]], templates: dict[str, PromptTemplate]
) -> TableNeeds:
    direct = [column for kind in kinds for column in kind.reads().columns]
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
    asked = config.submission
    if asked is None:
        return None
    sample = read_sample(asked.sample, config.data.id_column, config.labels, asked.columns)
    if table is not None:
        found = sample.problems(table.ids, config.limit is not None)
        if not found and config.fill == "sample" and config.time_limit is not None:
            found = sample.value_problems()
        if found:
            raise DataError(found)
    return sample


def _check_places(loaded: LoadedConfig, kinds: list[MemberKind[Any, Any]]) -> None:
    """Nothing that the run reads may be what it writes."""
    config = loaded.config
    inputs = [loaded.path, config.data.path, *(Path(name) for kind in kinds for name in kind.sources())]
    if config.submission is not None:
        inputs.append(config.submission.sample)
    target = config.submission.path if config.submission is not None else None
    rundir = RunDir(config.output_dir)
    found = [*rundir.endangered(strangers(rundir), inputs, target)]
    if reason := unwritable_reason("output_dir", config.output_dir):
        found.append(reason)
    for index, kind in enumerate(kinds):
        folder = kind.request().offload_folder
        if folder and (reason := unwritable_reason(f"models[{index}].offload_folder", folder)):
            found.append(reason)
    if target is not None:
        if target.is_dir():
            found.append(f"submission.path: {target} is a directory; name a file in it")
        elif reason := unwritable_reason("submission.path", target.parent):
            found.append(reason)
        if any(path.resolve() in (target.resolve(), *target.resolve().parents) for path in inputs):
            found.append(f"submission.path: {target} would replace what the run reads; choose another name")
    if found:
        raise ConfigError(found)


def _lengths(
    kinds: list[MemberKind[Any, Any]], table: InputTable, templates: dict[str, PromptTemplate]
) -> dict[str, _Lengths]:
    by_columns: dict[tuple[str, ...], _Lengths] = {}
    lengths = {}
    for kind in kinds:
        name = kind.settings.name
        columns = templates[name].columns if name in templates else kind.reads().columns
        if columns not in by_columns:
            by_columns[columns] = table.text_lengths(columns)
        lengths[name] = by_columns[columns]
    return lengths


def _scoring_warnings(config: RunConfig, inspected: Mapping[str, Inspection]) -> list[str]:
    activations = {one.activation for one in inspected.values()}
    found = []
    if activations >= {"softmax", "sigmoid"}:
        found.append(
            "models: some give exclusive labels (softmax), some independent ones (sigmoid); their mean is neither"
        )
    if config.data.label_column is not None and not scores_make_sense(inspected):
        found.append(
            "data.label_column: log loss and accuracy need exclusive labels from every member; none are shown"
        )
    return found


RENDERED_ROWS = 5


def compile_templates(config: RunConfig, problems: list[EnsembleError]) -> dict[str, PromptTemplate]:
    """Templates by member name, without those that are wrong.

    Args:
        problems: takes an error for each of those.
    """
    compiled = {}
    for index, model in enumerate(config.models):
        if (template := member_kind(model).reads().template) is None:
            continue
        from ensemble.data.template import compile_template

        try:
            compiled[model.name] = compile_template(template)
        except TemplateProblem as error:
            problems.append(ConfigError(f"models[{index}].prompt_template: {error}"))
    return compiled


def render_first_rows(
    config: RunConfig,
    table: InputTable,
    templates: dict[str, PromptTemplate],
    problems: list[EnsembleError],
) -> dict[str, str]:
    """Render every template on the first rows; the first row's text per member is what ``validate`` shows.

    Args:
        problems: takes an error for each template that fails.
    """
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
                problems.append(DataError(f"models[{index}].prompt_template: {place}: {error}"))
                break
            previews.setdefault(model.name, text)
    return previews
