"""Put an ordinary member of its finished checkpoints or adapters in the place of each member that is trained.

A model of fold f has learned from all rows outside the fold. Rows are recognized by digests of the cells that the
member and its inputs read, so that a row of the training table is known in any other table, and predicted by models
that have not seen it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ensemble.common.errors import ConfigError
from ensemble.common.text import plural, were
from ensemble.config import LoadedConfig, MemberConfig, TrainedMember
from ensemble.config.document import place
from ensemble.config.load import validate
from ensemble.config.schema import DEFAULT_FOLDS
from ensemble.data.row_files import FileCells
from ensemble.data.table import InputTable
from ensemble.data.trained_rows import IN_ALL_FOLDS, fold_count, folds_of
from ensemble.jobs.job import job_name
from ensemble.members.registry import KINDS, member_kind
from ensemble.pipeline.training_dir import Part, TrainingDir, parts_of

_ADAPTER, _CHECKPOINT = "adapter_name_or_path", "model_name_or_path"
_Rows = npt.NDArray[np.bool_]


def with_trained(loaded: LoadedConfig, *, may_lack: bool = False) -> LoadedConfig:
    """Return the config with an ordinary member in place of each one that has ``train``.

    Each fold's model is a view of the member, ``fold-0``, ``fold-1`` and so on; of a member with views, each view
    has these behind its name. With ``predict_with: average`` or ``refit`` the member has a single model, and the
    folds' views are for rows that it was trained on (``LoadedConfig.trained``).

    Args:
        may_lack: members that are not trained stay as they are.

    Raises:
        ConfigError: names each member and fold that is not trained.
    """
    models = {model.name: model for model in loaded.config.models}
    trained = dict(loaded.trained)
    problems: list[str] = []
    for model in loaded.config.trained_members:
        missing = ", ".join(part.text for part in missing_parts(loaded, model))
        if not missing:
            try:
                models[model.name], trained[model.name] = _made_of_parts(loaded, model)
            except ConfigError as error:
                problems += [f"{model.name}, which is trained: {problem}" for problem in error.problems]
        elif not may_lack:
            problems.append(f"{model.name}: not trained yet: {missing}; run `ensemble train CONFIG` first")
    if problems:
        raise ConfigError(problems)
    config = loaded.config.model_copy(update={"models": tuple(models.values())})
    return replace(loaded, config=config, trained=trained)


def is_trained(loaded: LoadedConfig) -> bool:
    """Return whether all trainings have ended."""
    return not any(missing_parts(loaded, model) for model in loaded.config.trained_members)


def missing_parts(loaded: LoadedConfig, model: MemberConfig, splits: int = 1) -> list[Part]:
    """Return the trainings of a member that have not ended yet.

    ``splits`` is the number of folds if a column of the table tells it, and no training has read that yet.
    """
    if model.name in loaded.outdated:
        return [Part(fold) for fold in loaded.outdated[model.name]]
    files = TrainingDir(loaded.config.output_dir)
    trained_splits = fold_count(files.trained_rows(model.name))
    if trained_splits:
        parts = parts_of(model, trained_splits)
        return [part for part in parts if not files.is_finished(model.name, part)]
    training = loaded.config.training
    in_config = DEFAULT_FOLDS if training is None else training.folds.splits
    return parts_of(model, in_config or splits)


def _made_of_parts(loaded: LoadedConfig, model: MemberConfig) -> tuple[MemberConfig, TrainedMember]:
    """Return the member for rows that are new, and what is to be known for rows that it was trained on."""
    assert model.training is not None
    predict_with = model.training.predict_with
    files = TrainingDir(loaded.config.output_dir)
    kind = member_kind(model)
    rows = files.trained_rows(model.name)
    parts = [Part(fold) for fold in range(fold_count(rows))]
    of_folds = [kind.trained_settings(files.checkpoint(model.name, part)) for part in parts]
    keys: dict[str, Any] = {key: value for key, value in of_folds[0].items() if key != _ADAPTER}
    if predict_with == "refit":
        keys = {**kind.trained_settings(files.checkpoint(model.name, Part(None)))}
    elif predict_with == "average":
        key = _ADAPTER if _ADAPTER in of_folds[0] else _CHECKPOINT
        if any({**settings, key: ""} != {**of_folds[0], key: ""} for settings in of_folds):
            raise ConfigError("train.predict_with: the folds differ in more than weights; choose folds")
        averaged = {"average": [settings[key] for settings in of_folds]}
        keys |= {"adapters": averaged} if key == _ADAPTER else {_CHECKPOINT: None, "checkpoints": averaged}
    views: list[dict[str, Any]] = []
    folds: dict[str, int | None] = {}
    for view in _written(model).get("views") or [{}]:
        prefix = f"{view['name']}-" if view else ""
        if predict_with != "folds":  # the single model, for new rows
            name = view.get("name", predict_with)
            views.append({**view, "name": name})
            folds[name] = None
        for part, settings in zip(parts, of_folds, strict=True):
            name = prefix + part.name
            changes = {key: value for key, value in settings.items() if keys.get(key) != value}
            views.append({**view, **changes, "name": name})
            folds[name] = part.fold
    by_fold = trained_member(model, {**keys, "views": views}, loaded.config.labels)
    trained = TrainedMember(rows=rows, by_fold=by_fold, folds=folds, oof_runs=files.oof_runs)
    if predict_with == "folds":
        return by_fold, trained
    return trained_member(model, keys, loaded.config.labels), trained


def trained_member(model: MemberConfig, changes: Mapping[str, Any], labels: Sequence[str]) -> MemberConfig:
    """Return the ordinary member with these keys, by all rules of its kind; a head makes one of another kind.

    Raises:
        ConfigError: a rule is broken.
    """
    settings = KINDS.load(str(changes.get("task_type", model.task_type))).Settings
    kept = {key: value for key, value in _written(model).items() if key in settings.model_fields}
    member, problems = validate(settings, {**kept, **changes}, labels)
    if member is None:
        raise ConfigError([f"{place(loc)}: {sentence}" for loc, sentence in problems])
    return member


def _written(model: MemberConfig) -> dict[str, Any]:
    """Return the member's keys as YAML has them."""
    return model.model_dump(mode="json", exclude_unset=True, exclude={"train"})


class RowKey(NamedTuple):
    """Say by what rows are recognized, as ``InputTable.row_digests`` takes it."""

    columns: tuple[str, ...]
    files: FileCells | None
    with_ids: bool


def keys_of_rows(
    members: Sequence[MemberConfig],
    trained: Container[str],
    columns: Mapping[str, tuple[str, ...]],
    files: Mapping[str, FileCells],
) -> dict[str, RowKey]:
    """Return by what each member that is ``trained`` knows a row: what it reads, and what its inputs read.

    Of an input that is not trained, or that reads files, the row's id tells. ``columns`` are those that each member
    reads in any of its views, ``files`` those that name files.
    """
    keys: dict[str, RowKey] = {}
    for member in members:
        if member.name in trained:
            inputs = [keys.get(name, RowKey((), None, True)) for name in member.input_names]
            names = dict.fromkeys([*columns[member.name], *(name for key in inputs for name in key.columns)])
            with_ids = any(key.with_ids or key.files is not None for key in inputs)
            keys[member.name] = RowKey(tuple(names), files.get(member.name), with_ids)
    return keys


@dataclass(frozen=True)
class HeldOut:
    """Hold which rows views of trained members compute.

    Attributes:
        rows: the rows that the model of a job may predict, bool [rows], by the job's name; other jobs: all.
        remarks: how many rows a member was trained on, in words.
    """

    rows: Mapping[str, _Rows] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


def held_out(
    loaded: LoadedConfig,
    table: InputTable,
    columns: Mapping[str, tuple[str, ...]],
    files: Mapping[str, FileCells],
) -> tuple[LoadedConfig, HeldOut]:
    """Return the config with a view for each fold that is needed, and which rows trained members' views compute.

    A row that is new goes to every fold's model, or to the single model that predicts for all of them; a row of the
    training table goes to the model of its fold; a row that all models have seen counts as new, with a remark.

    ``columns`` and ``files`` are as for ``keys_of_rows``.
    """
    models: list[MemberConfig] = []
    rows: dict[str, _Rows] = {}
    remarks: list[str] = []
    keys = keys_of_rows(loaded.config.models, loaded.trained, columns, files)
    for model in loaded.config.models:
        trained = loaded.trained.get(model.name)
        if trained is not None:
            folds = folds_of(trained.rows, table.row_digests(*keys[model.name]))
            # The run that makes out-of-fold predictions has no ``training``: these rows are what it is for.
            remarks += _remarks(model.name, folds, is_expected=loaded.config.training is None)
            if (folds >= 0).any():
                model = trained.by_fold
                rows |= _rows_of_jobs(trained, folds)
        models.append(model)
    config = loaded.config.model_copy(update={"models": tuple(models)})
    return replace(loaded, config=config), HeldOut(rows, tuple(remarks))


def _rows_of_jobs(trained: TrainedMember, folds: npt.NDArray[np.int64]) -> dict[str, _Rows]:
    """Return the rows that the model of each job may predict, bool [rows], by the job's name."""
    counts_as_new = folds < 0
    has_model_for_new = None in trained.folds.values()
    rows: dict[str, _Rows] = {}
    for view in trained.by_fold.counted_views:
        fold, name = trained.folds[view.name], job_name(trained.by_fold.name, view.name)
        if fold is None:
            rows[name] = counts_as_new
        elif has_model_for_new:
            rows[name] = folds == fold
        else:
            rows[name] = (folds == fold) | counts_as_new
    return rows


def _remarks(name: str, folds: npt.NDArray[np.int64], is_expected: bool) -> list[str]:
    """Return how many rows a member was trained on; if that ``is_expected``, only those of all folds."""
    rows = plural(len(folds), "row")
    held = int((folds >= 0).sum())
    seen = int((folds == IN_ALL_FOLDS).sum())
    remarks: list[str] = []
    if held and not is_expected:
        remarks.append(
            f"{name}: {held:,} of {rows} {were(held)} trained on; the model of the fold that has not seen a row "
            "predicts it"
        )
    if seen:
        remarks.append(
            f"{name}: {seen:,} of {rows} {were(seen)} trained on in every fold; all of its models have seen them"
        )
    return remarks
