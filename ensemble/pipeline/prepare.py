"""Check a run as far as no loaded model is needed, as ``validate`` does.

All problems of config, table, checkpoints, templates, devices and output become one error, so that users can fix
them together.  Nothing is written.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ensemble.common.errors import CheckpointError, DataError, DeviceError
from ensemble.common.files import FileState, file_state, folder_states
from ensemble.common.gpus import Device, Inventory
from ensemble.common.host import cpu_products
from ensemble.common.packages import unsupported
from ensemble.common.text import plural, quoted, similar_file
from ensemble.config import LoadedConfig, MemberConfig, RunConfig
from ensemble.config.schema import AllowedLabelsTable
from ensemble.data.answers import Answer, numbers_of
from ensemble.data.predictions_csv import PredictionFile
from ensemble.data.row_files import FileCells
from ensemble.data.submission import Sample, read_sample
from ensemble.data.table import DistinctCells, InputTable, TableNeeds, distinct_cells, read_table, row_text
from ensemble.data.template import PromptTemplate, compile_condition
from ensemble.jobs.job import Model, by_member, compile_models
from ensemble.jobs.when import ExpectedShare
from ensemble.members.base import ExternalPredictions, Inspection, MemberKind, OutputColumns
from ensemble.members.questions import ask
from ensemble.members.registry import kind_for_checks
from ensemble.merging.blocks import RowCheck
from ensemble.merging.methods.base import block_spans
from ensemble.merging.metrics import find_metric
from ensemble.merging.post_process import (
    AllowedLabels,
    PostProcess,
    RowRules,
    allowed_by_key,
    allowed_in_column,
    rows_that_meet,
)
from ensemble.pipeline.checks import (
    Problems,
    answer_key,
    check_answers,
    choice_counts,
    make_answers,
    member_problems,
    place_problems,
    rule_key,
    rule_problems,
    run_warnings,
    worker_warnings,
)
from ensemble.pipeline.member_views import (
    MemberView,
    first_texts,
    member_columns,
    member_files,
    member_views,
    needs_of,
    with_columns,
)
from ensemble.pipeline.prepared import Prepared, merged_activation
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import RunReport, measured_speeds
from ensemble.pipeline.selection import expected_shares, share_of_job
from ensemble.pipeline.trackers import missing_trackers
from ensemble.pipeline.trained_members import HeldOut, held_out
from ensemble.planning.forecast import Speed
from ensemble.planning.placement import ModelFacts, chosen_devices
from ensemble.planning.plan import Plan, plan_run
from ensemble.scheduling.launchers.base import Launcher, Node, make_launcher


@dataclass(frozen=True)
class _Members:
    """Hold the config's models, and what is known of those that could be inspected, by name; see ``Prepared``."""

    models: tuple[Model, ...]
    views: tuple[MemberView, ...]
    columns: dict[str, tuple[str, ...]]
    files: Mapping[str, FileCells]
    file_states: dict[str, FileState]
    of_models: dict[str, Inspection]

    @property
    def inspected(self) -> dict[str, Inspection]:
        return by_member(self.models, self.of_models)


@dataclass(frozen=True)
class _Rows:
    """Hold what the table's rows say beside the texts that members read; see ``Prepared``."""

    previews: dict[str, str] = field(default_factory=dict)
    post: PostProcess = field(default_factory=PostProcess)
    given: dict[str, PredictionFile] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def prepare(
    loaded: LoadedConfig, must_fit: bool = True, predictions_in: Path | None = None, is_for_run: bool = False
) -> Prepared:
    """Check a run: go through the stages, and raise the problems of all of them together.

    Args:
        must_fit: a member that fits on no device is a problem; otherwise only the plan says so.
        predictions_in: the directory of a run whose predictions tell how many rows members with ``when`` will
            compute; None: the config's own.
        is_for_run: the launcher stays open, and the caller closes it.

    Raises:
        EnsembleError: of exit code 2, with every problem.
    """
    config, problems = loaded.config, Problems()
    with contextlib.ExitStack() as on_error:
        where = loaded.document.where(("launcher",))
        launcher = problems.value_of(where, make_launcher, config.launcher, config.hang_timeout)
        if launcher is not None:
            on_error.callback(launcher.close)
        members = _inspect_members(config, problems)
        problems.add(unsupported((), needed_packages(members.models, members.of_models)))
        problems.add(place_problems(loaded, members.models))
        problems.add(missing_trackers(loaded))
        conditions = _compile_conditions(loaded, problems)
        answers = make_answers(loaded, problems)
        numbers = numbers_of(config.labels)
        metrics = [
            problems.value_of(
                loaded.document.where(("metrics", place)), find_metric, wanted.name, numbers, wanted.group
            )
            for place, wanted in enumerate(config.metrics or ())
        ]
        needs = _table_needs(config, members)
        table_state = file_state(config.data.path)
        table = problems.value_of("", _read_table, loaded, needs, conditions, answers, table_state)
        held = HeldOut()
        if table is not None and loaded.trained:
            with problems.at():
                loaded, held = held_out(loaded, table, members.columns, members.files)
            if loaded.config.models != config.models:
                config = loaded.config
                members = _inspect_members(config, problems)
        check_answers(loaded, answers, table, members.inspected, problems)
        sample = _read_sample(config, table, answers, problems)
        inventory, gpus = None, tuple[Device, ...]()
        if launcher is not None:
            inventory, gpus = problems.value_of("", _find_devices, config, launcher) or (None, ())
        rows, groups = _Rows(), dict[str, DistinctCells]()
        if table is not None:
            for column in config.group_columns:
                with problems.at("metrics"):
                    groups[column] = distinct_cells(config.data.path, table, column)
            rows = _look_at_rows(loaded, members, table, conditions, problems)
            if conditions or answers or groups or config.data.allowed_labels is not None:
                table = table.only(needs.columns)
        problems.add(member_problems(config, members.models, members.of_models))
        problems.add(rule_problems(loaded, members.inspected))
        shares = problems.value_of(
            "",
            expected_shares,
            config,
            members.models,
            members.inspected,
            rows.given,
            predictions_in or config.output_dir,
            is_named=predictions_in is not None,
        )
        plan: Plan | None = None
        nodes: tuple[Node, ...] = ()
        if launcher is not None and inventory is not None:
            hosts = inventory.hosts
            plan = problems.value_of(
                "", _plan, config, members, table, shares or {}, held.rows, gpus, hosts, launcher
            )
            if plan is not None and (must_fit or table is None):
                problems.add(plan.problems, DeviceError)
            if hosts:
                with problems.at():
                    nodes = nodes_of(members.models, members.of_models, launcher)
                    if must_fit:
                        problems.add((text for node in nodes for text in node.problems), CheckpointError)
        problems.raise_any()
        prepared = Prepared(
            loaded=loaded,
            table=problems.demand(table),
            models=members.models,
            of_models=members.of_models,
            columns=members.columns,
            plan=problems.demand(plan),
            launcher=problems.demand(launcher),
            inventory=problems.demand(inventory),
            sample=sample,
            warnings=(),
            previews=rows.previews,
            file_states=members.file_states,
            table_state=table_state,
            needs=needs,
            shares=problems.demand(shares),
            post=rows.post,
            metrics=tuple(filter(None, metrics)),
            groups=groups,
            job_columns={view.job.name: view.table_columns for view in members.views},
            job_rows=held.rows,
            files=members.files,
            nodes=nodes,
        )
        if is_for_run:
            on_error.pop_all()
    return replace(prepared, warnings=tuple(_warnings(prepared, held.remarks, rows.warnings)))


def file_problems(config: RunConfig) -> tuple[str, ...]:
    """Return problems of table, sample and members' files, of a config with stand-ins for wrong members."""
    problems = Problems()
    if re.search(r"\b(s3|gs|hf|file):/", str(config.model_dump(mode="json"))):
        return ()  # nothing is copied from its address before all keys are right
    models: list[Model] = []
    for index, member in enumerate(config.models):
        if type(member) is not MemberConfig and member.training is None:
            models += (replace(model, index=index) for model in compile_models([member], config.labels))
    ask([question for question in (model.kind.question() for model in models) if question is not None])
    for model in models:
        with problems.at(model.place):
            model.kind.inspect(_outputs(config))
    table = problems.value_of("", read_table, config.data.path, TableNeeds(config.data.id_column))
    _read_sample(config, table, {}, problems)
    return problems.texts


def _warnings(prepared: Prepared, *remarks: Sequence[str]) -> Iterator[str]:
    """Yield the warnings about a run, with remarks about its rows."""
    plan, models, of_models = prepared.plan, prepared.models, prepared.of_models
    yield from prepared.inventory.warnings
    yield from dict.fromkeys(text for inspection in of_models.values() for text in inspection.warnings)
    yield from dict.fromkeys(
        f"models[{model.index}].{text}"
        for model in models
        for text in (
            *model.kind.warnings(of_models[model.name]),
            *model.kind.prompt_warnings(prepared.previews.get(model.member, "")),
        )
    )
    yield from chain.from_iterable(remarks)
    if prepared.sample is not None:
        yield from prepared.sample.remarks
    yield from worker_warnings(plan)
    # The names of the GPUs, else of the hosts, else of this machine's CPU.
    names = [device.name for device in plan.gpus or prepared.inventory.hosts] or [cpu_products()]
    yield from run_warnings(prepared.loaded, prepared.inspected, prepared.table, prepared.post, names)


def _compile_conditions(loaded: LoadedConfig, problems: Problems) -> dict[int, PromptTemplate]:
    """Return the condition of each rule by its number, except those that have a mistake."""
    conditions: dict[int, PromptTemplate] = {}
    for number, rule in enumerate(loaded.config.rules or ()):
        with problems.at(rule_key(loaded, number)):
            conditions[number] = compile_condition(rule.when)
    return conditions


def _inspect_members(config: RunConfig, problems: Problems) -> _Members:
    """Look at each member's views and files."""
    models = compile_models(config.models, config.labels)
    views = tuple(member_views(config.models, models, _outputs(config), problems))
    columns = member_columns(views, [member.name for member in config.models])
    files = member_files(models, config.data.path.parent)
    file_states = _file_states(model.kind for model in models)  # before anything is read of the files
    questions = [model.kind.question() for model in models]
    ask([question for question in questions if question is not None])
    of_models: dict[str, Inspection] = {}
    for model in models:
        with problems.at(model.place):
            of_models[model.name] = model.kind.inspect(_outputs(config))
    return _Members(models, views, columns, files, file_states, of_models)


def _look_at_rows(
    loaded: LoadedConfig,
    members: _Members,
    table: InputTable,
    conditions: Mapping[int, PromptTemplate],
    problems: Problems,
) -> _Rows:
    """Try the templates, apply the rules' conditions, and read what stands elsewhere for the rows."""
    config = loaded.config
    previews = first_texts(members.views, table, problems)
    allowed: AllowedLabels | None = None
    rules: RowRules | None = None
    if config.data.allowed_labels is not None:
        allowed = problems.value_of("data.allowed_labels", _read_allowed_labels, config, table)
    if conditions and len(conditions) == len(config.rules or ()):
        inspected = members.inspected
        rules = problems.value_of("", _find_rule_rows, loaded, table, conditions, inspected, problems)
    given, warnings = _read_predictions(config, members, table, problems)
    warnings += _look_for_files(members, table, problems)
    choices = _read_choices(config, members, table, problems)
    return _Rows(previews, PostProcess(allowed or choices, rules), given, tuple(warnings))


def _outputs(config: RunConfig) -> OutputColumns:
    return OutputColumns.of(config.data, config.labels)


def _read_table(
    loaded: LoadedConfig,
    needs: TableNeeds,
    conditions: Mapping[int, PromptTemplate],
    answers: Mapping[str, Answer],
    state: FileState | None,
) -> InputTable:
    """Read the table with the columns of conditions, formats of answers and allowed labels.

    ``state`` is that of its file from before.
    """
    also = {name: rule_key(loaded, number) for number, rule in conditions.items() for name in rule.columns}
    for column, answer in answers.items():
        also |= dict.fromkeys(answer.columns, answer_key(loaded, column))
    templates = chain(conditions.values(), (answer.template for answer in answers.values()))
    of_templates = (template.json_columns for template in templates if template is not None)
    json_columns = [*needs.json_columns, *chain(*of_templates)]
    also |= dict.fromkeys(loaded.config.group_columns, "metrics")
    allowed = loaded.config.data.allowed_labels
    if isinstance(allowed, AllowedLabelsTable):
        also[allowed.key] = "data.allowed_labels.key"
    elif allowed is not None:
        also[allowed] = "data.allowed_labels"
        json_columns.append(allowed)
    needs = replace(needs, also=also, json_columns=tuple(dict.fromkeys(json_columns)))
    path = loaded.config.data.path
    table = read_table(path, needs)
    if file_state(path) != state:  # it is read in several passes
        raise DataError(f"{path}: changed while it was read; start again when it is complete")
    return table


def _read_allowed_labels(config: RunConfig, table: InputTable) -> AllowedLabels:
    """Return the labels that are possible in each row, of a config that names where they stand."""
    path, allowed = config.data.path, config.data.allowed_labels
    if isinstance(allowed, AllowedLabelsTable):
        flags = allowed_by_key(table, allowed.key, allowed.path, allowed.column, config.labels, path)
    else:
        flags = allowed_in_column(path, table, str(allowed), config.labels)
    return AllowedLabels(flags, source=f"column {allowed}")


def _table_needs(config: RunConfig, members: _Members) -> TableNeeds:
    truth_as = merged_activation(members.inspected)
    needs = needs_of(config.data, config.labels, truth_as, config.limit)
    inputs = {
        name: f"models[{index}].inputs ({member.name})"
        for index, member in enumerate(config.models)
        for name in member.input_columns(config.labels)
    }
    return replace(with_columns(needs, members.views), inputs=inputs)


def _read_sample(
    config: RunConfig, table: InputTable | None, answers: Mapping[str, Answer], problems: Problems
) -> Sample | None:
    """Read the submission's sample, and compare it with the table's ids."""
    submission = config.submission
    sample: Sample | None = None
    if submission is None or len(answers) < len(submission.answers):
        return None
    with problems.at("submission"):
        columns = dict.fromkeys(chain.from_iterable(answer.columns for answer in answers.values()))
        cells = table.only([*columns]) if table is not None and columns else None
        label_by_column = submission.label_by_column
        sample = read_sample(submission.sample, config.data.id_column, config.labels, label_by_column)
        sample = replace(sample, answers=answers, table=cells)
        if table is not None:
            texts = sample.problems(table.ids, config.limit is not None)
            if not texts and config.fill == "sample" and config.time_limit is not None:
                texts = sample.value_problems()
            problems.add(texts, DataError)
    return sample


def _find_rule_rows(
    loaded: LoadedConfig,
    table: InputTable,
    conditions: Mapping[int, PromptTemplate],
    inspected: Mapping[str, Inspection],
    problems: Problems,
) -> RowRules:
    """Return the rules with the rows that they are for, if each row keeps a label."""
    rows = np.zeros((len(conditions), table.rows), dtype=np.bool_)
    for number, condition in conditions.items():
        with problems.at(rule_key(loaded, number)):
            rows[number] = rows_that_meet(table, condition)
    rules = RowRules(loaded.config.rules or (), loaded.config.labels, rows)
    if merged_activation(inspected) != "softmax":
        return rules
    spans = block_spans(table.rows, len(loaded.config.labels))
    masked = np.concatenate([rules.without_labels(*span) for span in spans])
    if len(masked):
        row = int(masked[0])
        raise DataError(
            f"{loaded.document.where(('rules',))}: together they mask every label of {plural(len(masked), 'row')}, "
            f"the first is {row_text(row, table.ids)}; leave one"
        )
    return rules


def _find_devices(config: RunConfig, launcher: Launcher) -> tuple[Inventory, tuple[Device, ...]]:
    """Return the devices, and the GPUs to use; raise a DeviceError if the config chooses GPUs that are not there.

    Nobody looks for devices where no member needs a worker, whatever the config chooses.
    """
    may_use = may_use_gpus(config)
    if not any(may_use) and (config.launcher == "local" or not may_use):
        return Inventory((), "", None, ()), ()
    machine = launcher.inventory()
    if machine.mask_problem and any(may_use):
        raise DeviceError(machine.mask_problem)
    return machine, chosen_devices(machine.gpus, config.devices)


def _read_predictions(
    config: RunConfig, members: _Members, table: InputTable, problems: Problems
) -> tuple[dict[str, PredictionFile], list[str]]:
    """Return the predictions of members that need no worker, by name, and warnings about rows that do not fit."""
    files: dict[str, PredictionFile] = {}
    warnings: list[str] = []
    for model in members.models:
        name, kind = model.member, model.kind
        if kind.needs_worker or name not in members.inspected:
            continue
        with problems.at(f"models[{model.index}] ({name})"):
            predictions = given_predictions(kind, members.inspected[name], table, _outputs(config))
            values, source = predictions.values, " and ".join(kind.sources())
            files[name] = PredictionFile(
                Path(source), config.data.id_column, config.labels, table.ids, values
            )
            present = int((~np.isnan(values[:, 0])).sum())
            if present < table.rows:
                count = f"{present:,} of {plural(table.rows, 'row')}"
                warnings.append(f"{name}: has {count}; the other members decide the rest")
            if predictions.ignored_ids and config.limit is None:  # a trial leaves out most of them
                rows = f"{plural(predictions.ignored_ids, 'row')} of {source}"
                warnings.append(f"{name}: {rows} left out, with ids that the table does not have")
    return files, warnings


def _look_for_files(members: _Members, table: InputTable, problems: Problems) -> list[str]:
    """Return warnings about files that rows name and that are missing; that all are is a problem."""
    warnings: list[str] = []
    indexes = {model.member: model.index for model in members.models}
    for name, cells in members.files.items():
        checked, missing = table.look_for_files(cells)
        if not missing:
            continue
        number, path = missing[0]
        place = row_text(number, table.ids)
        reason = f"no such file: {path}"
        if path is None:
            reason = f"its cell in {quoted(cells.column)} is empty"
        count = f"{len(missing):,} of {plural(checked, 'file')} looked at are missing"
        text = f"models[{indexes[name]}].{cells.key}: {count}"
        if len(missing) < checked:
            warnings.append(f"{text}, the first in {place}: {reason}")
        else:
            similar = "" if path is None else similar_file(path)
            problems.add([f"{text}; {place}: {reason}{similar}; {cells.advice}"], DataError)
    return warnings


def _read_choices(
    config: RunConfig, members: _Members, table: InputTable, problems: Problems
) -> AllowedLabels | None:
    """Return the positions that each row's choices have; None: no member has choices, or there is a problem."""
    counts: dict[str, list[int]] = {}
    for view in members.views:
        column = view.choices_column
        if column is not None and column not in counts:
            with problems.at(f"{view.key}.choices"):
                counts[column] = choice_counts(table, column, len(config.labels))
    if not counts:
        return None
    most = np.max([*counts.values()], axis=0)
    return AllowedLabels(np.arange(len(config.labels)) < most[:, None], f"column {config.possible_labels}")


def _file_states(kinds: Iterable[MemberKind[Any, Any]]) -> dict[str, FileState]:
    """Return the states of the members' files, by path."""
    states: dict[str, FileState] = {}
    for source in dict.fromkeys(source for kind in kinds for source in kind.sources()):
        states |= folder_states(source)
        # Path.is_file raises an error if a folder above it cannot be entered.
        state = file_state(source) if os.path.isfile(source) else None  # noqa: PTH113
        if state is not None:
            states[str(Path(source).absolute())] = state
    return states


def nodes_of(
    models: Sequence[Model], inspected: Mapping[str, Inspection], launcher: Launcher
) -> tuple[Node, ...]:
    """Return the nodes of a launcher's cluster, with what they lack of the models that need a worker."""
    kinds = {model.name: model.kind for model in models if model.kind.needs_worker}
    sources = {name: kind.sources() for name, kind in kinds.items()}
    hub_files = {name: kind.hub_files(inspected[name]) for name, kind in kinds.items() if name in inspected}
    return launcher.nodes(sources, hub_files)


def for_rows(prepared: Prepared, loaded: LoadedConfig, table: InputTable) -> Prepared:
    """Return the same run with other rows of the same columns, without submission, allowed labels and rules.

    ``loaded`` may lack members of ``prepared``, and differ from it in what changes neither members nor devices.
    """
    models = compile_models(loaded.config.models, loaded.config.labels)
    if not prepared.job_columns.keys() >= {job.name for model in models for job in model.jobs}:
        # The folds' models of a trained member stood in for the member that ``loaded`` has.
        problems = Problems()
        members = _inspect_members(loaded.config, problems)
        problems.raise_any()
        job_columns = {view.job.name: view.table_columns for view in members.views}
        prepared = replace(prepared, of_models=members.of_models, job_columns=job_columns, job_rows={})
    members = _Members(models, (), prepared.columns, prepared.files, {}, prepared.of_models)
    gpus, hosts = prepared.plan.gpus, prepared.inventory.hosts
    plan = _plan(loaded.config, members, table, prepared.shares, {}, gpus, hosts, prepared.launcher)
    if plan.problems:
        raise DeviceError(plan.problems)
    prepared = replace(prepared, sample=None, previews={}, post=PostProcess())
    return replace(prepared, loaded=loaded, models=models, table=table, plan=plan)


def given_predictions(
    kind: MemberKind[Any, Any], inspected: Inspection, table: InputTable, columns: OutputColumns
) -> ExternalPredictions:
    """Return the predictions of a member that needs no worker; a DataError says that they are no probabilities."""
    predictions = kind.predictions(table.ids, columns)
    source, may_lack = " and ".join(kind.sources()), kind.may_lack_rows
    advice = kind.rows_advice
    check = RowCheck(source, inspected.activation, table.ids, may_lack, advice, columns.labels)
    for start, stop in block_spans(*predictions.values.shape):
        check.look(start, predictions.values[start:stop])
    check.refuse(DataError)
    return predictions


def needed_packages(models: Sequence[Model], inspected: Mapping[str, Inspection]) -> dict[str, str]:
    """Return the packages of extras that the config needs, and the first key that needs each."""
    needed: dict[str, str] = {}
    for model in models:
        for package, key in model.kind.packages(inspected.get(model.name)):
            needed.setdefault(package, f"models[{model.index}]{key}")
    return needed


def may_use_gpus(config: RunConfig) -> list[bool]:
    """Return for each member that needs a worker whether it may run on a GPU."""
    kinds = map(kind_for_checks, config.models)
    return [kind.request().num_gpus != 0 for kind in kinds if kind.needs_worker]


def _plan(
    config: RunConfig,
    members: _Members,
    table: InputTable | None,
    shares: Mapping[str, ExpectedShare],
    rows_of_jobs: Mapping[str, npt.NDArray[np.bool_]],
    gpus: Sequence[Device],
    hosts: Sequence[Device],
    launcher: Launcher,
) -> Plan:
    """Plan the run; without the table, this plans devices only."""
    expected = {name: share.share for name, share in shares.items()}
    facts: dict[str, ModelFacts] = {}
    for model in members.models:
        name, kind = model.name, model.kind
        lengths, memory = np.zeros(1, dtype=np.int64), None
        if table is not None:
            lengths = table.text_lengths(members.columns[model.member])
            if kind.reads().row_bytes is not None:
                lengths = np.full(table.rows, kind.reads().row_bytes, dtype=np.int64)
            if name in members.of_models:
                memory = kind.memory(members.of_models[name], lengths, len(config.labels))
        facts[name] = ModelFacts(
            name=name,
            request=kind.request(),
            lengths=lengths,
            memory=memory,
            needs_worker=kind.needs_worker,
            job_shares={job.name: share_of_job(job.selection, expected) for job in model.jobs},
            job_rows={job.name: rows_of_jobs[job.name] for job in model.jobs if job.name in rows_of_jobs},
        )
    speeds: dict[str, Speed] = {}
    with contextlib.suppress(DataError):  # there was no run here, or one of another version
        report = RunReport.read(RunDir(config.output_dir).run_json)
        computed_as = {model.name: model.computed_as for model in config.models}
        speeds = measured_speeds(report, [gpu.name for gpu in gpus], computed_as)
    return plan_run(config, members.models, facts, gpus, speeds, hosts, launcher.trials)
