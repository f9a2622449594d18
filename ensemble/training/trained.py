"""Replace members that are trained by ordinary members of their finished checkpoints and adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ensemble.common.errors import ConfigError
from ensemble.config import LoadedConfig, MemberConfig, TrainedMember
from ensemble.config.check import validate
from ensemble.config.document import place
from ensemble.config.training import DEFAULT_FOLDS
from ensemble.members.registry import KINDS, member_kind
from ensemble.pipeline.held_out import fold_count
from ensemble.training.layout import Part, TrainingDir, parts_of

_ADAPTER = "adapter_name_or_path"


def with_trained(loaded: LoadedConfig, *, may_lack: bool = False, by_fold: bool = False) -> LoadedConfig:
    """Return the config with an ordinary member in place of each one that has ``train``.

    Each fold's model is a view of the member, ``fold-0``, ``fold-1`` and so on; of a member with views, each view
    has these behind its name. With ``predict_with: average`` or ``refit`` the member has a single model, and the
    folds' views are for rows that it was trained on (``LoadedConfig.trained``).

    Args:
        may_lack: members that are not trained stay as they are.
        by_fold: take the folds' models whatever ``predict_with`` says.

    Raises:
        ConfigError: names each member and fold that is not trained.
    """
    models, trained, problems = list(loaded.config.models), dict(loaded.trained), list[str]()
    for index, model in enumerate(models):
        if model.training is None:
            continue
        missing = ", ".join(part.text for part in missing_parts(loaded, model))
        if missing and not may_lack:
            problems.append(f"{model.name}: not trained yet: {missing}; run `ensemble train CONFIG` first")
        elif not missing:
            try:
                models[index], trained[model.name] = _made_of_parts(loaded, model, by_fold)
            except ConfigError as error:
                problems += [f"{model.name}, which is trained: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return replace(loaded, config=loaded.config.model_copy(update={"models": tuple(models)}), trained=trained)


def is_trained(loaded: LoadedConfig) -> bool:
    """Return whether all trainings have ended."""
    return not any(missing_parts(loaded, model) for model in loaded.config.trained_members)


def missing_parts(loaded: LoadedConfig, model: MemberConfig, splits: int = 1) -> list[Part]:
    """Return the trainings of a member that have not ended yet.

    ``splits`` is the number of folds if a column of the table tells it, and no training has read that yet.
    """
    folder, training = TrainingDir(loaded.config.output_dir), loaded.config.training
    rows = folder.trained_rows(model.name)
    in_config = DEFAULT_FOLDS if training is None else training.folds.splits
    parts = parts_of(model, fold_count(rows) or in_config or splits)
    return [part for part in parts if not rows.is_file() or not folder.is_finished(model.name, part)]


def _made_of_parts(
    loaded: LoadedConfig, model: MemberConfig, by_fold: bool
) -> tuple[MemberConfig, TrainedMember]:
    """Return the member for rows that are new, and what is to be known for others."""
    assert model.training is not None
    folder, kind = TrainingDir(loaded.config.output_dir), member_kind(model)
    rows = folder.trained_rows(model.name)
    parts = [Part(fold) for fold in range(fold_count(rows))]
    of_folds = [kind.trained_settings(folder.checkpoint(model.name, part)) for part in parts]
    fields = _settings(model, of_folds[0]).model_fields
    required = {key for key, field in fields.items() if field.is_required()}
    # Of all folds, or of the first one what a member cannot be without.
    keys: dict[str, Any] = {
        key: value
        for key, value in of_folds[0].items()
        if key in required or all(fold.get(key) == value for fold in of_folds)
    }
    predict_with = "folds" if by_fold else model.training.predict_with
    if predict_with == "refit":
        keys |= kind.trained_settings(folder.checkpoint(model.name, Part(None)))
    elif predict_with == "average":
        if not all(_ADAPTER in fold for fold in of_folds):
            raise ConfigError(
                "train.predict_with: average is of adapters, and these are whole models; choose folds"
            )
        keys["adapters"] = {"average": [fold[_ADAPTER] for fold in of_folds]}
    views: list[dict[str, Any]] = []
    folds: dict[str, int | None] = {}
    for view in _written(model).get("views") or [{}]:
        name, prefix = view.get("name", predict_with), f"{view['name']}-" if view else ""
        if predict_with != "folds":
            views.append({**view, "name": name})
            folds[name] = None
        for part, fold in zip(parts, of_folds, strict=True):
            name = f"{prefix}{part.name}"
            views.append({**view, **_changes(keys, fold), "name": name})
            folds[name] = part.fold
    with_folds = trained_member(model, {**keys, "views": views}, loaded.config.labels)
    is_single = predict_with != "folds"
    member = trained_member(model, keys, loaded.config.labels) if is_single else with_folds
    return member, TrainedMember(rows=rows, by_fold=with_folds, folds=folds, oof_run=folder.oof_run)


def _changes(keys: Mapping[str, Any], fold: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in fold.items() if keys.get(key) != value}


def trained_member(model: MemberConfig, changes: Mapping[str, Any], labels: tuple[str, ...]) -> MemberConfig:
    """Return the ordinary member with these keys, by all rules of its kind.

    Raises:
        ConfigError: a rule is broken.
    """
    settings = _settings(model, changes)
    kept = {key: value for key, value in _written(model).items() if key in settings.model_fields}
    member, problems = validate(settings, {**kept, **changes}, labels)
    if member is None:
        raise ConfigError([f"{place(loc)}: {sentence}" for loc, sentence in problems])
    return member


def _settings(model: MemberConfig, changes: Mapping[str, Any]) -> type[MemberConfig]:
    """Return the keys of the ordinary member's kind: a trained head makes a member of another kind."""
    return KINDS.load(str(changes.get("task_type", model.task_type))).Settings


def _written(model: MemberConfig) -> dict[str, Any]:
    """Return the member's keys as YAML has them."""
    return model.model_dump(mode="json", exclude_unset=True, exclude={"train"})
