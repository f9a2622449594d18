"""Everything that can be known of a run without loading a model; the whole of ``validate``.

Gathers the problems of config, table, checkpoints, templates, devices and output into one error, so that one
look shows all there is to fix.  Writes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ensemble.common.errors import ConfigError, DataError, DeviceError, EnsembleError
from ensemble.common.files import FileState, file_state, folder_states, unreadable, unwritable_reason
from ensemble.common.gpus import Device, Inventory, inventory
from ensemble.common.packages import unsupported
from ensemble.config import LoadedConfig, ModelConfig, RunConfig
from ensemble.data.submission import Sample, read_sample
from ensemble.data.table import InputTable, TableNeeds, read_table
from ensemble.members.huggingface.checkpoint.inspect import Checkpoint, inspect_checkpoint
from ensemble.members.huggingface.checkpoint.quantization_keys import (
    BITSANDBYTES,
    carried_warning,
    fp4_warning,
    method_of,
    quantization_problems,
)
from ensemble.members.huggingface.checkpoint.remote_code import Trust
from ensemble.merging.methods import merge_method
from ensemble.merging.methods.base import Members
from ensemble.pipeline.run_dir import RunDir, strangers
from ensemble.planning.placement import chosen_devices
from ensemble.planning.plan import Plan
from ensemble.planning.planner import Outlook, look_ahead
from ensemble.scheduling.launchers.base import Launcher, make_launcher

if TYPE_CHECKING:
    from ensemble.data.template import PromptTemplate
from typing import TYPE_CHECKING

from ensemble.data.json_cells import TemplateProblem

if TYPE_CHECKING:
    from ensemble.data.template import PromptTemplate

_KEYS_OF_THEIR_OWN = (
    *("dtype", "revision", "trust_remote_code", "quantization_config", "attn_implementation"),
    *("device_map", "max_memory", "offload_folder", "gguf_file"),
)


@dataclass(frozen=True)
class Prepared:
    """A run that has passed every check; ``checkpoints`` go by member name.

    ``file_states`` are those of the checkpoints' files from before anything was read of them, by absolute path, and
    ``table_state`` that of the table's.
    """

    loaded: LoadedConfig
    table: InputTable
    checkpoints: dict[str, Checkpoint]
    outlook: Outlook
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

    @property
    def plan(self) -> Plan:
        return self.outlook.plan


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
    with problems.at("launcher"):
        launcher = make_launcher(config.launcher)
    templates = compile_templates(config, problems.found)
    file_states = _file_states(config)
    checkpoints = _checkpoints(config, problems)
    with problems.at():
        if found := [*unsupported((), needed_packages(config, checkpoints))]:
            raise ConfigError(found)
    with problems.at():
        _check_places(loaded)
    table: InputTable | None = None
    table_state = file_state(config.data.path)
    with problems.at():
        table = read_table(config.data.path, _needs(config, templates))
        if file_state(config.data.path) != table_state:  # it is read in several passes
            raise DataError(f"{config.data.path}: changed while it was read; start again when it is complete")
    sample: Sample | None = None
    with problems.at("submission"):
        sample = _sample(config, table)
    gpus: tuple[Device, ...] = ()
    machine = inventory() if launcher is None else launcher.inventory()
    with problems.at():
        gpus = _devices(config, machine)
    if table is None:
        with problems.at():  # what can be said of devices without the table
            _demand(look_ahead(config, checkpoints, {}, gpus).plan)
        problems.raise_any()
    assert table is not None
    previews = render_first_rows(config, table, templates, problems.found)
    with problems.at():
        _check_members_fit(config, checkpoints)
    with problems.at():
        _check_quantization(config, checkpoints, bool(gpus))
    outlook: Outlook | None = None
    with problems.at():
        outlook = look_ahead(config, checkpoints, _lengths(config, table, templates), gpus)
        if must_fit:
            _demand(outlook.plan)
    problems.raise_any()
    assert outlook is not None
    assert launcher is not None
    warnings = [*machine.warnings]
    warnings += [warning for checkpoint in checkpoints.values() for warning in checkpoint.warnings]
    warnings += _quantization_warnings(config, checkpoints)
    warnings += _scoring_warnings(config, checkpoints)
    return Prepared(
        loaded,
        table,
        checkpoints,
        outlook,
        launcher,
        machine,
        sample,
        tuple(warnings),
        previews,
        file_states,
        table_state,
    )


def needed_packages(config: RunConfig, checkpoints: Mapping[str, Checkpoint]) -> dict[str, str]:
    """Packages of extras that the config needs, and the first key that needs each.

    Args:
        checkpoints: by member name, as far as they could be read.
    """
    needed: dict[str, str] = {}
    for index, model in enumerate(config.models):
        stored = checkpoints[model.name].quantization if model.name in checkpoints else None
        if method_of(model.quantization_config) == BITSANDBYTES:
            needed.setdefault(BITSANDBYTES, f"models[{index}].quantization_config")
        elif method_of(stored) == BITSANDBYTES:
            needed.setdefault(BITSANDBYTES, f"models[{index}], a quantized checkpoint,")
        if model.adapter_name_or_path is not None:
            needed.setdefault("peft", f"models[{index}].adapter_name_or_path")
        if model.gguf_file is not None:
            needed.setdefault("gguf", f"models[{index}].gguf_file")
    return needed


def text_columns(model: ModelConfig) -> tuple[str, ...]:
    """The one or two columns a member without a template reads."""
    if model.text_column is None:
        return ()
    return (model.text_column,) if isinstance(model.text_column, str) else tuple(model.text_column)


def scores_make_sense(checkpoints: dict[str, Checkpoint]) -> bool:
    """Log loss and accuracy are defined where every member gives probabilities of exclusive labels."""
    return all(checkpoint.activation == "softmax" for checkpoint in checkpoints.values())


def _check_members_fit(config: RunConfig, checkpoints: dict[str, Checkpoint]) -> None:
    found = [
        f"models[{index}].model_kwargs.{key}: use the model's own key {key} instead"
        for index, model in enumerate(config.models)
        for key in _KEYS_OF_THEIR_OWN
        if key in model.model_kwargs
    ]
    raw = [name for name, checkpoint in checkpoints.items() if checkpoint.activation == "none"]
    if raw and len(raw) < len(checkpoints):
        found.append(
            f"models: {', '.join(raw)} gives raw values (regression), the others probabilities; their mean means "
            "nothing: run them separately, or set problem_type"
        )
    if raw and config.on_bad_row == "uniform":
        found.append("on_bad_row: uniform is for probabilities, and the models give raw values (regression)")
    if raw and config.time_limit is not None and config.fill == "uniform":
        found.append(
            "fill: uniform is for probabilities, and the models give raw values (regression); set prior (the mean "
            "of the rows that were computed) or sample"
        )
    if len(checkpoints) == len(config.models):  # else a method could miss those that cannot be read
        activations = tuple(checkpoint.activation for checkpoint in checkpoints.values())
        found += merge_method(
            config.ensemble, Members((*checkpoints,), activations, config.labels)
        ).problems()
    if found:
        raise ConfigError(found)


def _check_quantization(config: RunConfig, checkpoints: dict[str, Checkpoint], any_gpu: bool) -> None:
    found = []
    for index, model in enumerate(config.models):
        checkpoint = checkpoints.get(model.name)
        stored = checkpoint.quantization if checkpoint is not None else None
        on_gpu = any_gpu if model.num_gpus is None else model.num_gpus > 0
        wrong = quantization_problems(model.quantization_config, stored, on_gpu, model.merge_adapter)
        found += [f"models[{index}].{problem}" for problem in wrong]
    if found:
        raise ConfigError(found)


def _quantization_warnings(config: RunConfig, checkpoints: dict[str, Checkpoint]) -> Iterator[str]:
    for index, model in enumerate(config.models):
        stored = checkpoints[model.name].quantization
        for warning in (fp4_warning, carried_warning):
            if text := warning(model.quantization_config, stored):
                yield f"models[{index}].{text}"


def _checkpoints(config: RunConfig, problems: _Problems) -> dict[str, Checkpoint]:
    found = {}
    for index, model in enumerate(config.models):
        with problems.at(f"models[{index}] ({model.name})"):
            found[model.name] = inspect_checkpoint(
                model.model_name_or_path,
                model.revision,
                config.labels,
                model.label_map,
                model.problem_type,
                model.adapter_name_or_path,
                model.gguf_file,
                Trust(
                    model.allow_pickle,
                    model.trust_remote_code,
                    model.model_kwargs.get("code_revision"),
                    model.tokenizer_kwargs.get("code_revision"),
                ),
                model.tokenizer_kwargs,
            )
    return found


def _file_states(config: RunConfig) -> dict[str, FileState]:
    names = [
        name for model in config.models for name in (model.model_name_or_path, model.adapter_name_or_path)
    ]
    return {
        path: state
        for name in dict.fromkeys(names)
        if name is not None
        for path, state in folder_states(name).items()
    }


def _devices(config: RunConfig, machine: Inventory) -> tuple[Device, ...]:
    if machine.mask_problem and any(model.num_gpus != 0 for model in config.models):
        raise DeviceError(machine.mask_problem)
    return chosen_devices(machine.gpus, config.devices)


def _demand(plan: Plan) -> None:
    if plan.problems:
        raise DeviceError(plan.problems)


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


def _check_places(loaded: LoadedConfig) -> None:
    """Nothing that the run reads may be what it writes."""
    config = loaded.config
    inputs = [loaded.path, config.data.path, *(Path(model.model_name_or_path) for model in config.models)]
    inputs += [Path(model.adapter_name_or_path) for model in config.models if model.adapter_name_or_path]
    if config.submission is not None:
        inputs.append(config.submission.sample)
    target = config.submission.path if config.submission is not None else None
    rundir = RunDir(config.output_dir)
    found = [*rundir.endangered(strangers(rundir), inputs, target)]
    if reason := unwritable_reason("output_dir", config.output_dir):
        found.append(reason)
    for index, model in enumerate(config.models):
        if model.offload_folder is not None:
            key = f"models[{index}].offload_folder"
            if reason := unwritable_reason(key, model.offload_folder):
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


def _scoring_warnings(config: RunConfig, checkpoints: dict[str, Checkpoint]) -> list[str]:
    kinds = {checkpoint.activation for checkpoint in checkpoints.values()}
    found = []
    if kinds >= {"softmax", "sigmoid"}:
        found.append(
            "models: some give exclusive labels (softmax), some independent ones (sigmoid); their mean is neither"
        )
    if config.data.label_column is not None and not scores_make_sense(checkpoints):
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
        if model.prompt_template is None:
            continue
        from ensemble.data.template import compile_template

        try:
            compiled[model.name] = compile_template(model.prompt_template)
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
