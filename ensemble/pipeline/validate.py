"""Everything that can be known of a run without loading a model; the whole of ``validate``.

Gathers the problems of config, table, checkpoints, templates, devices and output into one error, so that one
look shows all there is to fix.  Writes nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ensemble.common.errors import ConfigError, DataError, DeviceError, EnsembleError, MergeError
from ensemble.common.files import FileState, file_state, folder_states, unreadable, unwritable_reason
from ensemble.common.gpus import Device, Inventory, inventory
from ensemble.common.packages import unsupported
from ensemble.common.protocol import Activation
from ensemble.common.text import plural, quoted
from ensemble.config import LoadedConfig, RunConfig
from ensemble.data.json_cells import TemplateProblem
from ensemble.data.submission import Sample, read_sample
from ensemble.data.table import InputTable, TableNeeds, Truth, read_table
from ensemble.members.base import Given, Inspection, MemberKind, OutputColumns
from ensemble.members.registry import member_kind
from ensemble.merging.blocks import block_spans
from ensemble.merging.methods import merge_method
from ensemble.merging.methods.base import Members
from ensemble.merging.row_checks import RowCheck
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import RunReport, measured_speeds
from ensemble.planning.forecast import Speed
from ensemble.planning.placement import MemberFacts, chosen_devices
from ensemble.planning.plan import Plan, plan_run
from ensemble.scheduling.launchers.base import Launcher, make_launcher

if TYPE_CHECKING:
    from ensemble.data.template import PromptTemplate
    from ensemble.pipeline.cascade import ExpectedShare

_RENDERED_ROWS = 5
# By member name, in the config's order.
_Kinds: TypeAlias = Mapping[str, MemberKind[Any, Any]]


@dataclass(frozen=True)
class Prepared:
    """A run that has passed every check.

    Attributes:
        inspected: by member name.
        columns: those of the table that a member reads, as text or in its template, by member name.
        previews: the first row's text of each member with a template, by member name.
        file_states: of the files that members are made of, from before anything was read of them, by absolute path.
        table_state: the same of the table's file.
        needs: what is read of the table.
        shares: what is expected of members with ``when``, by name.
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


def prepare(loaded: LoadedConfig, must_fit: bool = True, predictions_in: Path | None = None) -> Prepared:
    """Check a run.

    Args:
        must_fit: a member that fits on no device is a problem like any other; else it is the plan's to tell.
        predictions_in: the directory of a run whose predictions tell what share of the rows members with ``when``
            see; None: the config's own.

    Raises:
        EnsembleError: of exit code 2, with every problem found.
    """
    config, problems = loaded.config, Problems()
    launcher: Launcher | None = None
    with problems.at(loaded.document.where(("launcher",))):
        launcher = make_launcher(config.launcher)
    kinds = {model.name: member_kind(model) for model in config.models}
    keys = {name: f"models[{index}]" for index, name in enumerate(kinds)}
    columns = {name: kind.reads().columns for name, kind in kinds.items()}
    texts = [column for reads in columns.values() for column in reads]
    templates: dict[str, PromptTemplate] = {}
    for name, kind in kinds.items():
        if (template := kind.reads().template) is not None:
            # Jinja2 only where it is needed: start-up time.
            from ensemble.data.template import compile_template

            with problems.at(f"{keys[name]}.prompt_template"):
                templates[name] = compile_template(template)
                columns[name] = templates[name].columns
    file_states: dict[str, FileState] = {}
    for source in dict.fromkeys(source for kind in kinds.values() for source in kind.sources()):
        file_states |= folder_states(source)
        # Not Path.is_file, which raises an error where a folder above may not be entered.
        if os.path.isfile(source) and (state := file_state(source)) is not None:  # noqa: PTH113
            file_states[str(Path(source).absolute())] = state
    outputs = OutputColumns(config.data.id_column, config.labels)
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
        columns=tuple(dict.fromkeys([*texts, *(name for one in templates.values() for name in one.columns)])),
        json_columns=tuple(dict.fromkeys(name for one in templates.values() for name in one.json_columns)),
        text_columns=tuple(dict.fromkeys(texts)),
        limit=config.limit,
        truth_as=_together(inspected),
    )
    table_state = file_state(config.data.path)
    with problems.at():
        table = read_table(config.data.path, needs)
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
    if wants := may_use_gpus(config):
        with problems.at():
            machine = inventory() if launcher is None else launcher.inventory()
            if machine.mask_problem and any(wants):
                raise DeviceError(machine.mask_problem)
            gpus = chosen_devices(machine.gpus, config.devices)
    previews: dict[str, str] = {}
    left_out: list[str] = []
    if table is not None:
        for name, compiled in templates.items():
            for number, row in enumerate(table.head(_RENDERED_ROWS)):
                try:
                    previews.setdefault(name, compiled.render(row))
                except TemplateProblem as error:
                    place = f"row {number + 1} (id {table.ids[number].as_py()!r})"
                    problems.add([f"{keys[name]}.prompt_template: {place}: {error}"], DataError)
                    break
        rows_of = list[npt.NDArray[np.bool_]]()
        for name, kind in kinds.items():
            with problems.at(f"{keys[name]} ({name})"):
                if kind.needs_worker or name not in inspected:
                    continue
                given = given_predictions(kind, inspected[name], table, outputs)
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
    problems.add(_misfits(config, kinds, inspected, bool(gpus)))
    plan: Plan | None = None
    with problems.at():
        shares = _shares(config, kinds, inspected, table, predictions_in or config.output_dir)
        plan = _plan(config, kinds, inspected, columns, table, gpus, shares)
        if must_fit or table is None:
            problems.add(plan.problems, DeviceError)
    problems.raise_any()
    assert table is not None
    assert plan is not None
    assert launcher is not None
    warnings = [*machine.warnings, *(text for one in inspected.values() for text in one.warnings)]
    for name, kind in kinds.items():
        warnings += [f"{keys[name]}.{text}" for text in kind.warnings(inspected[name])]
    warnings += left_out
    if {one.activation for one in inspected.values()} >= {"softmax", "sigmoid"}:
        warnings.append(
            "models: some give exclusive labels (softmax), some independent ones (sigmoid); their mean is neither"
        )
    if table.truth is not None and table.truth.ndim == 1 and not _is_exclusive(inspected):
        warnings.append(
            "data.label_column: one true label for each row is for members whose labels exclude each other "
            "(softmax); no scores are shown; set data.label_columns"
        )
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
    )


def for_rows(prepared: Prepared, loaded: LoadedConfig, table: InputTable) -> Prepared:
    """The same run with other rows, without a submission; of checkpoints and devices nothing is looked at again.

    Args:
        loaded: as ``prepared`` has it but for what changes neither members nor devices; it may lack members.
        table: has the same columns.

    Raises:
        EnsembleError: a member fits on no device with these rows.
    """
    config = loaded.config
    kinds = {model.name: member_kind(model) for model in config.models}
    plan = _plan(
        config, kinds, prepared.inspected, prepared.columns, table, prepared.plan.gpus, prepared.shares
    )
    if plan.problems:
        raise DeviceError(plan.problems)
    return replace(prepared, loaded=loaded, table=table, plan=plan, sample=None, previews={})


def given_predictions(
    kind: MemberKind[Any, Any], inspected: Inspection, table: InputTable, columns: OutputColumns
) -> Given:
    """The predictions of a member that needs no worker, once they are what predictions should be.

    Raises:
        DataError: they cannot be had, or are no probabilities.
    """
    given = kind.predictions(table.ids, columns)
    source, may_lack = " and ".join(kind.sources()), kind.may_lack_rows
    check = RowCheck(source, inspected.activation, table.ids, may_lack, "correct the file")
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
) -> Plan:
    """The plan; without the table, what can be said of devices.

    Raises:
        EnsembleError: a file of a member is broken.
    """
    lengths_of = cache((lambda _: np.zeros(1, dtype=np.int64)) if table is None else table.text_lengths)
    facts = {}
    for name, kind in kinds.items():
        lengths, memory = lengths_of(columns[name]), None
        if table is not None and name in inspected:
            memory = kind.memory(inspected[name], lengths, len(config.labels))
        share = shares[name].share if name in shares and kind.settings.when is not None else 1.0
        facts[name] = MemberFacts(name, kind.request(), lengths, memory, kind.needs_worker, share)
    speeds: dict[str, Speed] = {}
    with contextlib.suppress(DataError):  # there was no run here, or one of another version
        report = RunReport.read(RunDir(config.output_dir).run_json)
        computed_as = {model.name: model.computed_as for model in config.models}
        speeds = measured_speeds(report, [gpu.name for gpu in gpus], computed_as)
    return plan_run(config, facts, gpus, speeds)


def _shares(
    config: RunConfig,
    kinds: _Kinds,
    inspected: Mapping[str, Inspection],
    table: InputTable | None,
    folder: Path,
) -> dict[str, ExpectedShare]:
    if all(model.when is None for model in config.models):
        return {}
    from ensemble.pipeline.cascade import expected_shares  # which makes use of this module

    outputs, given = OutputColumns(config.data.id_column, config.labels), {}
    for name, kind in kinds.items():
        if table is not None and not kind.needs_worker:
            with contextlib.suppress(EnsembleError):  # it is a problem, and found as one
                given[name] = kind.predictions(table.ids, outputs).values
    return expected_shares(config, inspected, given, None if table is None else table.ids, folder)


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
    inputs = [
        *loaded.paths,
        config.data.path,
        *(Path(name) for kind in kinds.values() for name in kind.sources()),
    ]
    inputs += [] if asked is None else [asked.sample]
    target = None if asked is None else asked.path
    yield from RunDir(config.output_dir).endangered(inputs, target)
    folders: dict[str, Path | None] = {"output_dir": config.output_dir}
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
