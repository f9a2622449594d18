"""Everything that can be known of a run without loading a model; the whole of ``validate``.

Gathers the problems of config, table, checkpoints, templates, devices and output into one error, so that one
look shows all there is to fix.  Writes nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ensemble.common.device_trials import run_trials
from ensemble.common.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DeviceError,
    EnsembleError,
    MergeError,
)
from ensemble.common.files import (
    FileState,
    HubFile,
    file_state,
    folder_states,
    unreadable,
    unwritable_reason,
)
from ensemble.common.gpus import Device, Inventory, inventory
from ensemble.common.host import cpu_products, usable_cpus
from ensemble.common.packages import installed_versions, unsupported
from ensemble.common.protocol import Activation
from ensemble.common.text import gib, plural, quoted, similar_file
from ensemble.config import LoadedConfig, RunConfig, TuningConfig
from ensemble.data.json_cells import TemplateProblem
from ensemble.data.submission import Sample, read_sample
from ensemble.data.table import InputTable, TableNeeds, Truth, read_table
from ensemble.members.base import Given, Inspection, MemberKind, OutputColumns
from ensemble.members.registry import member_kind
from ensemble.merging.blocks import block_spans
from ensemble.merging.methods import merge_method
from ensemble.merging.methods.base import Members
from ensemble.merging.row_checks import RowCheck
from ensemble.merging.rules import RowRules
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import RunReport, ScalingReport, measured_speeds
from ensemble.planning.forecast import ASSUMED, Scaling, Speed
from ensemble.planning.placement import MemberFacts, chosen_devices
from ensemble.planning.plan import Plan, plan_run
from ensemble.scheduling.launchers.base import Launcher, Node, make_launcher
from ensemble.scheduling.launchers.cpu_scaling import known_scaling

if TYPE_CHECKING:
    from ensemble.data.row_files import FileCells
    from ensemble.data.template import PromptTemplate
    from ensemble.pipeline.cascade import ExpectedShare

_RENDERED_ROWS = 5
# What the probabilities of a rule may miss 1 by.
_SUM_TOLERANCE = 1e-6
# By member name, in the config's order.
_Kinds: TypeAlias = Mapping[str, MemberKind[Any, Any]]


@dataclass(frozen=True)
class Prepared:
    """A run that has passed every check.

    Attributes:
        inspected: by member name.
        columns: those of the table that a member reads, as text or in its template, by member name.
        view_columns: the same for each of its views, in their order; of a member without views for itself.
        previews: the first row's text of each member with a template, by member name; of each view by
            "member (view name)".
        file_states: of the files that members are made of, from before anything was read of them, by absolute path.
        table_state: the same of the table's file.
        needs: what is read of the table.
        shares: what is expected of members with ``when``, by name.
        rules: of the config, with the rows that they are for; None where there are none.
        files: the column that names files, by name of the members that read some.
        nodes: of the cluster that it is to run on; none on one machine.
        reuse: the directory of another run, from which it takes over rows; None: of its own alone.
    """

    loaded: LoadedConfig
    table: InputTable
    inspected: dict[str, Inspection]
    columns: dict[str, tuple[str, ...]]
    plan: Plan
    launcher: Launcher
    inventory: Inventory
    sample: Sample | None
    warnings: tuple[str, ...]
    previews: dict[str, str]
    file_states: Mapping[str, FileState]
    table_state: FileState | None
    needs: TableNeeds
    shares: Mapping[str, ExpectedShare] = field(default_factory=dict)
    rules: RowRules | None = None
    view_columns: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    files: Mapping[str, FileCells] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()
    reuse: Path | None = None

    @property
    def config(self) -> RunConfig:
        return self.loaded.config

    @property
    def truth(self) -> Truth | None:
        """What is true of the rows, where members can be scored by it."""
        found = self.table.truth
        return found if found is None or found.ndim == 2 or _is_exclusive(self.inspected) else None

    @property
    def activation(self) -> Activation:
        """What all members' values are together."""
        return _together(self.inspected)

    def even_value(self, member: str) -> float:
        """What stands in each column of a row of which nothing is known."""
        return 0.5 if self.inspected[member].activation == "sigmoid" else 1 / len(self.config.labels)


class Problems:
    """Collects errors of exit code 2, so that later checks can still be made."""

    def __init__(self) -> None:
        self._found: list[EnsembleError] = []

    @contextlib.contextmanager
    def at(self, key: str = "") -> Iterator[None]:
        """Take the errors within, with the key that they are about."""
        try:
            yield
        except OSError as error:  # such as a name that is too long for the file system
            text = unreadable(error.filename or key, error, "choose another place")
            self._found.append(ConfigError(f"{key}: {text}" if key and error.filename else text))
        except TemplateProblem as error:
            self._found.append(ConfigError(f"{key}: {error}"))
        except EnsembleError as error:
            prefixed = [f"{key}: {problem}" if key else problem for problem in error.problems]
            self._found.append(type(error)(prefixed))

    def add(self, sentences: Iterable[str], kind: type[EnsembleError] = ConfigError) -> None:
        """Take problems in words, if there are any."""
        with self.at():
            if found := [*sentences]:
                raise kind(found)

    def raise_any(self) -> None:
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise ConfigError([problem for error in self._found for problem in error.problems])


def prepare(
    loaded: LoadedConfig,
    must_fit: bool = True,
    predictions_in: Path | None = None,
    is_for_run: bool = False,
) -> Prepared:
    """Check a run.

    Args:
        is_for_run: the launcher stays open, and is the caller's to close; else it has nothing on any machine.
        must_fit: a member that fits on no device is a problem like any other; else it is the plan's to tell.
        predictions_in: the directory of a run whose predictions tell what share of the rows members with ``when``
            see; None: the config's own.
        launcher: the config's; None: it is made.

    Raises:
        EnsembleError: of exit code 2, with every problem found.
    """
    launchers: list[Launcher] = []
    try:
        prepared = _prepare(loaded, must_fit, predictions_in, launchers)
    except BaseException:
        is_for_run = False
        raise
    finally:
        for launcher in () if is_for_run else launchers:
            launcher.close()
    return prepared


def _prepare(
    loaded: LoadedConfig, must_fit: bool, predictions_in: Path | None, launchers: list[Launcher]
) -> Prepared:
    """The same; adds the launcher that it opens to ``launchers``."""
    config, problems = loaded.config, Problems()
    launcher: Launcher | None = None
    with problems.at(loaded.document.where(("launcher",))):
        launcher = make_launcher(config.launcher, config.hang_timeout)
        launchers.append(launcher)
    kinds = {model.name: member_kind(model) for model in config.models}
    keys = {name: f"models[{index}]" for index, name in enumerate(kinds)}
    views = [*_views(kinds, problems)]
    view_columns = {name: tuple(one.table_columns for one in views if one.member == name) for name in kinds}
    columns = {
        name: of_views[0] if len(of_views) == 1 else tuple(dict.fromkeys(chain.from_iterable(of_views)))
        for name, of_views in view_columns.items()
    }
    texts = [
        column for one in views if one.template is None and not one.any_type for column in one.table_columns
    ]
    conditions: dict[int, PromptTemplate] = {}
    for number, rule in enumerate(config.rules or ()):
        from ensemble.data.conditions import compile_condition

        with problems.at(_rule_key(loaded, number)):
            conditions[number] = compile_condition(rule.when)
    of_rules = {name: _rule_key(loaded, n) for n, one in conditions.items() for name in one.columns}
    file_states = _file_states(kinds.values())
    outputs = OutputColumns(config.data.id_column, config.labels, config.data.path.parent)
    files = {
        name: replace(cells, folder=cells.folder or outputs.table_folder)
        for name, kind in kinds.items()
        if (cells := kind.reads().files) is not None
    }
    inspected: dict[str, Inspection] = {}
    for name, kind in kinds.items():
        with problems.at(f"{keys[name]} ({name})"):
            inspected[name] = kind.inspect(outputs)
    problems.add(unsupported((), needed_packages(config, inspected)))
    problems.add(_unfit_places(loaded, kinds))

    table: InputTable | None = None
    needs = TableNeeds(
        id_column=config.data.id_column,
        label_column=config.data.label_column,
        label_columns=config.data.truth_columns(config.labels),
        labels=config.labels,
        columns=tuple(dict.fromkeys(name for names in columns.values() for name in names)),
        json_columns=tuple(dict.fromkeys(name for one in views for name in one.json_columns)),
        text_columns=tuple(dict.fromkeys(texts)),
        limit=config.limit,
        truth_as=_together(inspected),
        read_by={name: view.reader(name) for view in reversed(views) for name in view.table_columns},
    )
    parsed = tuple(name for one in conditions.values() for name in one.json_columns)
    table_state = file_state(config.data.path)
    with problems.at():
        table = read_table(
            config.data.path,
            replace(needs, also=of_rules, json_columns=tuple(dict.fromkeys([*needs.json_columns, *parsed]))),
        )
        if file_state(config.data.path) != table_state:  # it is read in several passes
            raise DataError(f"{config.data.path}: changed while it was read; start again when it is complete")
    sample: Sample | None = None
    with problems.at("submission"):
        if (asked := config.submission) is not None:
            sample = read_sample(asked.sample, config.data.id_column, config.labels, asked.columns)
        if sample is not None and table is not None:
            found = sample.problems(table.ids, config.limit is not None)
            if not found and config.fill == "sample" and config.time_limit is not None:
                found = sample.value_problems()
            if found:
                raise DataError(found)

    # Nobody asks for GPUs where there are no workers.
    machine, gpus = Inventory((), "", None, ()), tuple[Device, ...]()
    needs_workers = any(kind.needs_worker for kind in kinds.values())
    has_devices = config.launcher == "local" or not needs_workers  # else there is nothing to plan for
    if (wants := may_use_gpus(config)) or (config.launcher != "local" and needs_workers):
        with problems.at():
            machine = inventory() if launcher is None else launcher.inventory()
            if machine.mask_problem and any(wants):
                raise DeviceError(machine.mask_problem)
            gpus = chosen_devices(machine.gpus, config.devices)
            has_devices = True
    previews = {} if table is None else _previews(views, table, problems)
    left_out: list[str] = []
    given_values: dict[str, npt.NDArray[np.float64]] = {}
    if table is not None:
        given_values = _given(config, kinds, inspected, table, outputs, problems, left_out)
    for name, cells in files.items() if table is not None else ():
        missing, are_all = _missing_files(table, cells)
        if missing and are_all:
            problems.add([f"{keys[name]}.{missing}"], DataError)
        elif missing:
            left_out.append(f"{keys[name]}.{missing}")
    problems.add(_misfits(config, kinds, inspected, bool(gpus)))
    problems.add(_unfit_rules(loaded, inspected))
    rules: RowRules | None = None
    if table is not None and conditions:
        if len(conditions) == len(config.rules or ()):
            with problems.at():
                rules = _rows_of_rules(loaded, table, conditions, inspected)
        table = table.only(needs.columns)
    plan: Plan | None = None
    shares: dict[str, ExpectedShare] = {}
    with problems.at():
        if any(model.when is not None for model in config.models):
            from ensemble.pipeline.cascade import expected_shares  # which makes use of this module

            ids, folder = None if table is None else table.ids, predictions_in or config.output_dir
            is_named = predictions_in is not None
            shares = expected_shares(config, inspected, given_values, ids, folder, is_named=is_named)
        if has_devices:
            plan = _plan(config, kinds, inspected, columns, table, gpus, shares, machine.hosts, launcher)
        if plan is not None and (must_fit or table is None):
            problems.add(plan.problems, DeviceError)
    nodes: tuple[Node, ...] = ()
    if launcher is not None and machine.hosts:
        with problems.at():
            nodes = launcher.nodes(node_sources(config), hub_files(config, inspected))
            if must_fit:
                problems.add((text for node in nodes for text in node.problems), CheckpointError)
    problems.raise_any()
    assert table is not None
    assert plan is not None
    assert launcher is not None
    warnings = [*machine.warnings, *(text for one in inspected.values() for text in one.warnings)]
    for name, kind in kinds.items():
        warnings += [f"{keys[name]}.{text}" for text in kind.warnings(inspected[name])]
    devices = [one.name for one in gpus or machine.hosts] or [cpu_products()]
    warnings += [*left_out, *_too_many_workers(plan), *_of_all(loaded, inspected, table, rules, devices)]
    return Prepared(
        loaded=loaded,
        table=table,
        inspected=inspected,
        columns=columns,
        plan=plan,
        launcher=launcher,
        inventory=machine,
        sample=sample,
        warnings=tuple(warnings),
        previews=previews,
        file_states=file_states,
        table_state=table_state,
        needs=needs,
        shares=shares,
        rules=rules,
        view_columns=view_columns,
        files=files,
        nodes=nodes,
    )


def _file_states(kinds: Iterable[MemberKind[Any, Any]]) -> dict[str, FileState]:
    """Of the files that members are made of, by path."""
    states: dict[str, FileState] = {}
    for source in dict.fromkeys(source for kind in kinds for source in kind.sources()):
        states |= folder_states(source)
        # Not Path.is_file, which raises an error where a folder above may not be entered.
        if os.path.isfile(source) and (state := file_state(source)) is not None:  # noqa: PTH113
            states[str(Path(source).absolute())] = state
    return states


def _previews(views: Iterable[_View], table: InputTable, problems: Problems) -> dict[str, str]:
    """What templates make of the first row, by the view's title; tries the first few.

    What speaks against rows is added to ``problems``.
    """
    previews: dict[str, str] = {}
    for view in views:
        if view.swap and (types := table.types(view.swap)) and len(set(types.values())) > 1:
            held = " and ".join(f"{column!r} holds {kind}" for column, kind in types.items())
            problems.add([f"{view.key}.swap.columns: {held}; both must hold the same"], DataError)
            continue
        for number, row in enumerate(table.head(_RENDERED_ROWS) if view.template else ()):
            assert view.template is not None
            try:
                previews.setdefault(view.title, view.template.render(view.shown(row)))
            except TemplateProblem as error:
                place = f"row {number + 1} (id {table.ids[number].as_py()!r})"
                problems.add([f"{view.template_key}: {place}: {error}"], DataError)
                break
    return previews


def _given(
    config: RunConfig,
    kinds: _Kinds,
    inspected: Mapping[str, Inspection],
    table: InputTable,
    outputs: OutputColumns,
    problems: Problems,
    left_out: list[str],
) -> dict[str, npt.NDArray[np.float64]]:
    """Values of members that need no worker, [rows, labels] by name, where a member with when goes by them.

    What they leave out is added to ``left_out``, what is wrong with them to ``problems``.
    """
    has_when = any(model.when is not None for model in config.models)
    values: dict[str, npt.NDArray[np.float64]] = {}
    rows_of = list[npt.NDArray[np.bool_]]()
    for index, (name, kind) in enumerate(kinds.items()):
        with problems.at(f"models[{index}] ({name})"):
            if kind.needs_worker or name not in inspected:
                continue
            given = given_predictions(kind, inspected[name], table, outputs)
            if has_when:
                values[name] = given.values
            is_there = ~np.isnan(given.values[:, 0])
            if kind.settings.has_weight:
                rows_of.append(is_there)
            if not is_there.all():
                count = f"{int(is_there.sum()):,} of {plural(table.rows, 'row')}"
                left_out.append(f"{name}: has {count}; the other members decide the rest")
            ignored = given.ignored_ids
            if ignored and config.limit is None:  # a trial leaves out most of them
                rows = f"{plural(ignored, 'row')} of {' and '.join(kind.sources())}"
                left_out.append(f"{name}: {rows} left out, with ids that the table does not have")
    # Of all members that count; where one has a worker, or its file cannot be read, there are more.
    if len(rows_of) == sum(model.has_weight for model in config.models) and config.time_limit is None:
        nobody = np.flatnonzero(~np.logical_or.reduce(rows_of))
        if len(nobody):
            first = quoted(table.ids[int(nobody[0])].as_py())
            rows = plural(len(nobody), "row")
            lacking = f"no member has {rows} of the table, the first is id {first}; add one that does"
            problems.add([f"models: {lacking}"], DataError)
    return values


def _of_all(
    loaded: LoadedConfig,
    inspected: Mapping[str, Inspection],
    table: InputTable,
    rules: RowRules | None,
    devices: Sequence[str],
) -> Iterator[str]:
    """Warnings that are of no member alone."""
    config = loaded.config
    if config.tuned_on is not None:
        yield from _other_than_tuned(config.tuned_on, devices, config.cpu_workers != "auto")
    for number, rows in enumerate(rules.rows if rules is not None and config.limit is None else ()):
        if not rows.any():  # of a trial's rows a rule may well find none
            yield f"{_rule_key(loaded, number)}: is true for no row of the table"
    if {one.activation for one in inspected.values()} >= {"softmax", "sigmoid"}:
        yield (
            "models: some give exclusive labels (softmax), some independent ones (sigmoid); their mean is neither"
        )
    if table.truth is not None and table.truth.ndim == 1 and not _is_exclusive(inspected):
        yield (
            "data.label_column: one true label for each row is for members whose labels exclude each other "
            "(softmax); no scores are shown; set data.label_columns"
        )


def _too_many_workers(plan: Plan) -> Iterator[str]:
    """For more workers side by side than this machine has cores or memory for; ``auto`` keeps to what there is."""
    workers, host = plan.config.cpu_workers, plan.host
    if workers == "auto":
        return
    if workers > usable_cpus() and plan.config.launcher == "local":
        yield (
            f"cpu_workers: {workers} workers share {plural(usable_cpus(), 'core')}, and take memory for a model "
            "each; more than one for each core end no sooner"
        )
    if workers > 1 and host is not None and plan.host_bytes > (free := host.total_bytes - host.used_bytes):
        yield (
            f"cpu_workers: side by side they take about {gib(plan.host_bytes)} of memory, and {gib(free)} are "
            "free: they may be killed; lower it"
        )


def node_sources(config: RunConfig) -> dict[str, tuple[str, ...]]:
    """What each member that needs a worker is made of, by its name: folders and files, or what a hub has."""
    kinds = {model.name: member_kind(model) for model in config.models}
    return {name: kind.sources() for name, kind in kinds.items() if kind.needs_worker}


def hub_files(config: RunConfig, inspected: Mapping[str, Any]) -> dict[str, tuple[HubFile, ...]]:
    """What those that were inspected have from the hub."""
    kinds = {model.name: member_kind(model) for model in config.models}
    return {
        name: kind.hub_files(inspected[name])
        for name, kind in kinds.items()
        if kind.needs_worker and name in inspected
    }


@dataclass(frozen=True)
class _View:
    """A view of a member's rows; of a member without views the only one, which shows them as they are.

    Attributes:
        key: where it stands in the config.
        title: what it is called.
        swap: the column whose cells stand in another one's place, by that one's name.
        columns: that the member reads of a row in this view.
    """

    member: str
    key: str
    title: str
    template_key: str
    swap: Mapping[str, str]
    columns: tuple[str, ...]
    any_type: bool
    template: PromptTemplate | None

    @property
    def table_columns(self) -> tuple[str, ...]:
        """The columns of the table that are needed for it, in the order in which the member reads them."""
        if not self.swap:
            return self.columns
        needed = [self.swap.get(name, name) for name in self.columns]
        return tuple(dict.fromkeys([*(one for one in self.columns if one in needed), *needed]))

    def reader(self, column: str) -> str:
        """The key that asks for one of ``table_columns``, or the member that does."""
        if column not in self.columns:
            return f"{self.key}.swap"
        return f"{self.key} ({self.member})" if self.template is None else self.template_key

    @property
    def json_columns(self) -> tuple[str, ...]:
        """Those that its template parses."""
        parsed = () if self.template is None else self.template.json_columns
        return tuple(self.swap.get(name, name) for name in parsed)

    def shown(self, row: Mapping[str, object]) -> dict[str, object]:
        """A row of the table as this view has it."""
        return {name: row[self.swap.get(name, name)] for name in self.columns}


def _views(kinds: _Kinds, problems: Problems) -> Iterator[_View]:
    """The views of all members' rows; what is wrong with one that is left out is a problem."""
    for index, (name, kind) in enumerate(kinds.items()):
        model, key = kind.settings, f"models[{index}]"
        shown: list[tuple[str, str, Mapping[str, str], MemberKind[Any, Any], bool]] = [
            (
                f"{key}.views[{model.views.index(view)}]",
                f"{name} (view {view.name})",
                view.columns,
                member_kind(model.as_view(view)),
                bool(view.changes),
            )
            for view in model.counted_views
        ] or [(key, name, {}, kind, True)]
        for place, title, swap, as_shown, has_template in shown:
            reads, template = as_shown.reads(), None
            columns, template_key = reads.columns, f"{place if has_template else key}.prompt_template"
            if reads.template is not None:
                # Jinja2 only where it is needed: start-up time.
                from ensemble.data.template import compile_template

                with problems.at(template_key):
                    template = compile_template(reads.template)
                    columns = template.columns
                if template is None:
                    continue
            if swap and not {*swap} & {*columns}:
                problems.add(
                    [
                        f"{place}.swap.columns: the member reads neither of them; it reads "
                        f"{', '.join(columns) or 'no column'}"
                    ]
                )
                continue
            yield _View(name, place, title, template_key, swap, columns, reads.any_type, template)


def for_rows(prepared: Prepared, loaded: LoadedConfig, table: InputTable) -> Prepared:
    """The same run with other rows, without a submission or rules; checkpoints and devices are not looked at again.

    Args:
        loaded: as ``prepared`` has it but for what changes neither members nor devices; it may lack members.
        table: has the same columns.

    Raises:
        EnsembleError: a member fits on no device with these rows.
    """
    config = loaded.config
    kinds = {model.name: member_kind(model) for model in config.models}
    plan = _plan(
        config,
        kinds,
        prepared.inspected,
        prepared.columns,
        table,
        prepared.plan.gpus,
        prepared.shares,
        prepared.inventory.hosts,
        prepared.launcher,
    )
    if plan.problems:
        raise DeviceError(plan.problems)
    return replace(prepared, loaded=loaded, table=table, plan=plan, sample=None, previews={}, rules=None)


def _missing_files(table: InputTable, cells: FileCells) -> tuple[str, bool]:
    """The sentence about files that a member's rows name and that are missing, behind its key; whether all are."""
    looked = table.look_for_files(cells)
    if not looked.missing:
        return "", False
    number, path = looked.missing[0]
    place = f"row {number + 1:,} (id {quoted(table.ids[number].as_py())})"
    what = f"its cell in {quoted(cells.column)} is empty" if path is None else f"no such file: {path}"
    few = f"{cells.key}: {len(looked.missing):,} of {plural(looked.rows, 'file')} looked at are missing"
    if len(looked.missing) < looked.rows:
        return f"{few}, the first in {place}: {what}", False
    what += similar_file(path) if path is not None else ""
    return f"{few}; {place}: {what}; {cells.advice}", True


def _other_than_tuned(tuned: TuningConfig, devices: Sequence[str], says_workers: bool) -> Iterator[str]:
    """What differs from the machine that ``tune`` has measured on, a sentence each.

    Args:
        says_workers: whether the config says how many workers there are side by side on a CPU.
    """
    advice = "its settings may be slower here, or not as near to float32: run tune again"
    if set(devices) != set(tuned.devices):
        there, here = (", ".join(dict.fromkeys(names)) for names in (tuned.devices, devices))
        yield f"tuned_on: tune has measured on {there}, and this is {here}; {advice}"
    if says_workers and tuned.cores is not None and tuned.cores != usable_cpus():
        yield (
            f"tuned_on: tune has measured cpu_workers on {plural(tuned.cores, 'core')}, and here are "
            f"{usable_cpus()}; leave cpu_workers out, or run tune again"
        )
    installed = installed_versions(tuned.versions)
    others = [
        f"{name} {version}, and this is {installed.get(name, 'not installed')}"
        for name, version in tuned.versions.items()
        if installed.get(name) != version
    ]
    if others:
        yield f"tuned_on: tune has measured with {'; with '.join(others)}; {advice}"


def _rule_key(loaded: LoadedConfig, number: int) -> str:
    return loaded.document.where(("rules", number, "when"))


def _rows_of_rules(
    loaded: LoadedConfig,
    table: InputTable,
    conditions: Mapping[int, PromptTemplate],
    inspected: Mapping[str, Inspection],
) -> RowRules:
    """The rules and the rows that they are for.

    Raises:
        DataError: a condition fails for a row, or no label is left for one.
    """
    from ensemble.data.conditions import ConditionProblem, rows_that_meet

    config = loaded.config
    try:
        rows = rows_that_meet(table, [*conditions.values()])
    except ConditionProblem as problem:
        raise DataError(f"{_rule_key(loaded, problem.condition)}: {problem}") from None
    rules = RowRules(config.rules or (), config.labels, rows)
    if _is_exclusive(inspected):
        found = [rules.without_labels(*span) for span in block_spans(table.rows, len(config.labels))]
        if len(bare := np.concatenate(found)):
            row = int(bare[0])
            first = f"row {row + 1:,} (id {quoted(table.ids[row].as_py())})"
            raise DataError(
                f"{loaded.document.where(('rules',))}: together they mask every label of "
                f"{plural(len(bare), 'row')}, the first is {first}; leave one"
            )
    return rules


def _unfit_rules(loaded: LoadedConfig, inspected: Mapping[str, Inspection]) -> Iterator[str]:
    """What is wrong with values and masks of rules, as far as it depends on what members give."""
    config = loaded.config
    if len(inspected) < len(config.models):
        return
    together, is_exclusive = _together(inspected), _is_exclusive(inspected)
    for number, rule in enumerate(config.rules or ()):
        values = rule.set or {}
        at_set, at_mask = (loaded.document.where(("rules", number, key)) for key in ("set", "mask"))
        if together == "none":
            if rule.mask:
                yield f"{at_mask}: is for probabilities, and the models give raw values (regression); use set"
            continue
        if any(not 0 <= value <= 1 for value in values.values()):
            yield f"{at_set}: a probability is a number from 0 to 1"
        elif is_exclusive and values:
            total, is_all = math.fsum(values.values()), len(values) == len(config.labels)
            if total > 1 + _SUM_TOLERANCE or (is_all and total < 1 - _SUM_TOLERANCE):
                yield f"{at_set}: the probabilities sum to {total:g}; those of exclusive labels sum to 1"
        if is_exclusive and rule.mask and set(rule.mask) == set(config.labels):
            yield f"{at_mask}: masks every label; leave one"


def given_predictions(
    kind: MemberKind[Any, Any], inspected: Inspection, table: InputTable, columns: OutputColumns
) -> Given:
    """The predictions of a member that needs no worker, once they are what predictions should be.

    Raises:
        DataError: they cannot be had, or are no probabilities.
    """
    given = kind.predictions(table.ids, columns)
    source, may_lack = " and ".join(kind.sources()), kind.may_lack_rows
    check = RowCheck(source, inspected.activation, table.ids, may_lack, kind.rows_advice)
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


def _together(inspected: Mapping[str, Inspection]) -> Activation:
    """What the members' values are together: exclusive probabilities only where each one's are."""
    found = {one.activation for one in inspected.values()}
    return "none" if "none" in found else "sigmoid" if "sigmoid" in found else "softmax"


def _is_exclusive(inspected: Mapping[str, Inspection]) -> bool:
    """Log loss and accuracy are defined where every member gives probabilities of exclusive labels."""
    return all(one.activation == "softmax" for one in inspected.values())


def _plan(
    config: RunConfig,
    kinds: _Kinds,
    inspected: Mapping[str, Inspection],
    columns: Mapping[str, tuple[str, ...]],
    table: InputTable | None,
    gpus: tuple[Device, ...],
    shares: Mapping[str, ExpectedShare],
    hosts: tuple[Device, ...],
    launcher: Launcher | None,
) -> Plan:
    """The plan; without the table, what can be said of devices.

    Raises:
        EnsembleError: a file of a member is broken.
    """
    lengths_of = cache((lambda _: np.zeros(1, dtype=np.int64)) if table is None else table.text_lengths)
    facts = {}
    for name, kind in kinds.items():
        lengths, memory = lengths_of(columns[name]), None
        if (row_bytes := kind.reads().row_bytes) is not None:
            lengths = np.full(len(lengths), row_bytes, dtype=np.int64)
        if table is not None and name in inspected:
            memory = kind.memory(inspected[name], lengths, len(config.labels))
        share = shares[name].share if name in shares and kind.settings.when is not None else 1.0
        facts[name] = MemberFacts(name, kind.request(), lengths, memory, kind.needs_worker, share)
    speeds: dict[str, Speed] = {}
    seen: ScalingReport | None = None
    with contextlib.suppress(DataError):  # there was no run here, or one of another version
        report = RunReport.read(RunDir(config.output_dir).run_json)
        # A run that goes on shares the CPU as it did, whatever has been measured since.
        seen = None if report.status == "complete" and not report.left_out else report.cpu_scaling
        computed_as = {model.name: model.computed_as for model in config.models}
        speeds = measured_speeds(report, [gpu.name for gpu in gpus], computed_as)

    def scaling() -> Scaling:
        known = known_scaling() if config.launcher == "local" else ASSUMED
        if seen is not None and seen.machine == known.machine:
            return replace(known, slowdowns=seen.slowdowns)
        return known

    trials = run_trials if launcher is None else launcher.trials
    return plan_run(config, facts, gpus, speeds, hosts, trials, scaling)


def _misfits(
    config: RunConfig, kinds: _Kinds, inspected: Mapping[str, Inspection], any_gpu: bool
) -> Iterator[str]:
    """What is wrong with members, alone and together, beside what their inspection has found."""
    for index, (name, kind) in enumerate(kinds.items()):
        yield from (f"models[{index}].{text}" for text in kind.problems(inspected.get(name), any_gpu))
        is_raw = name in inspected and inspected[name].activation == "none"
        if is_raw and config.models[index].calibration is not None:
            yield f"models[{index}].calibration: is for probabilities, and {name} gives raw values (regression)"
    raw = [name for name, one in inspected.items() if one.activation == "none"]
    if raw and len(raw) < len(inspected):
        keys = {kind.activation_key for name, kind in kinds.items() if name in raw and kind.activation_key}
        remedy = f", or set {' and '.join(sorted(keys))}" if keys else ""
        yield (
            f"models: {', '.join(raw)} gives raw values (regression), the others probabilities; their mean means "
            f"nothing: run them separately{remedy}"
        )
    for index, model in enumerate(config.models):
        if model.when is None:
            continue
        values = [name for name in (one.name for one in config.models[:index]) if name in raw]
        if values:
            yield (
                f"models[{index}].when: {', '.join(values)} gives raw values (regression), and a margin is one of "
                "probabilities"
            )
        bound = model.when.get("entropy_above", -1.0)
        before = [inspected[name].activation for name in config.deciders(index) if name in inspected]
        labels = len(config.labels)
        most = math.log(labels) if set(before) == {"softmax"} else labels * math.log(2)
        if before and not values and bound >= most:
            yield (
                f"models[{index}].when.entropy_above: no row of {plural(labels, 'label')} has an entropy above "
                f"{most:.4g} nats; give a smaller number"
            )
    if raw and config.on_bad_row == "uniform":
        yield "on_bad_row: uniform is for probabilities, and the models give raw values (regression)"
    if raw and config.time_limit is not None and config.fill == "uniform":
        yield (
            "fill: uniform is for probabilities, and the models give raw values (regression); set prior (the mean "
            "of the rows that were computed) or sample"
        )
    if len(inspected) == len(config.models):  # else a method could miss those that cannot be read
        activations = tuple(one.activation for one in inspected.values())
        weights = tuple(model.weight for model in config.models)
        members = Members((*inspected,), activations, config.labels, weights)
        yield from merge_method(config.ensemble, members).problems()


def _unfit_places(loaded: LoadedConfig, kinds: _Kinds) -> Iterator[str]:
    """Where the run cannot write, or would write what it reads."""
    config, asked = loaded.config, loaded.config.submission
    rundir = RunDir(config.output_dir)
    # A run of the config.yaml that an earlier one left here writes it again as it is.
    is_kept = loaded.redactor(loaded.whole) == loaded.texts[0]
    inputs = [
        *(path for path in loaded.paths if not (is_kept and path.resolve() == rundir.config.resolve())),
        config.data.path,
        *(Path(name) for kind in kinds.values() for name in kind.sources()),
    ]
    inputs += [] if asked is None else [asked.sample]
    target = None if asked is None else asked.path
    yield from rundir.endangered(inputs, target)
    folders: dict[str, Path | None] = {"output_dir": config.output_dir}
    if config.launcher == "local":  # else on the machines on which its workers run
        folders |= {
            f"models[{index}].offload_folder": kind.request().offload_folder
            for index, kind in enumerate(kinds.values())
        }
    if target is not None and target.is_dir():
        yield f"submission.path: {target} is a directory; name a file in it"
    elif target is not None:
        folders["submission.path"] = target.parent
    reasons = (unwritable_reason(key, folder) for key, folder in folders.items() if folder is not None)
    yield from filter(None, reasons)
    if target is not None and any(target.resolve().is_relative_to(path.resolve()) for path in inputs):
        yield f"submission.path: {target} would replace what the run reads; choose another name"
