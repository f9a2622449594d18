"""Replace members that are trained by ordinary members of their finished checkpoints and adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ensemble.common.errors import CheckpointError, ConfigError, EnsembleError
from ensemble.config import LoadedConfig, MemberConfig, TrainedMember
from ensemble.config.check import validate
from ensemble.config.document import place
from ensemble.members.registry import member_kind
from ensemble.pipeline.held_out import fold_count
from ensemble.training.layout import Part, TrainingDir

_ADAPTER = "adapter_name_or_path"


def with_trained(loaded: LoadedConfig, *, may_lack: bool = False, by_fold: bool = False) -> LoadedConfig:
    """Return the config with an ordinary member in place of each one that has ``train``.

    A view of the member is one for each fold, named ``VIEW-fold-0``, ``VIEW-fold-1`` and so on; without views they
    are ``fold-0``, ``fold-1``. With ``predict_with: average`` or ``refit`` the member has a single model, and the
    folds' views are used for rows that it was trained on (``LoadedConfig.trained``).

    Args:
        may_lack: members that are not trained stay as they are.
        by_fold: take the folds' models whatever ``predict_with`` says.

    Raises:
        EnsembleError: of exit code 2, with each member and fold that is not trained.
    """
    config, problems = loaded.config, list[str]()
    models = list(config.models)
    trained = dict(loaded.trained)
    error: type[EnsembleError] = CheckpointError
    for index, model in enumerate(config.models):
        if model.training is None:
            continue
        key = f"models[{index}] ({model.name})"
        missing = missing_parts(loaded, model)
        if missing:
            parts = ", ".join(part.text for part in missing)
            if not may_lack:
                problems.append(f"{key}: not trained yet: {parts}; run `ensemble train CONFIG` first")
            continue
        try:
            models[index], trained[model.name] = _Lowering(loaded, model, by_fold).members()
        except ConfigError as not_possible:
            error = ConfigError
            problems += [f"{key}: {problem}" for problem in not_possible.problems]
    if problems:
        raise error(problems)
    return replace(loaded, config=config.model_copy(update={"models": tuple(models)}), trained=trained)


def missing_parts(loaded: LoadedConfig, model: MemberConfig) -> list[Part]:
    """Return the trainings of a member that have not ended yet; the first, if nobody knows the number of folds."""
    folder, training = TrainingDir(loaded.config.output_dir), loaded.config.training
    rows = folder.trained_rows(model.name)
    splits = fold_count(rows) or (None if training is None else training.folds.splits) or 1
    parts = [Part(fold) for fold in range(splits)]
    if model.training is not None and model.training.predict_with == "refit":
        parts.append(Part(None))
    return [part for part in parts if not rows.is_file() or not folder.checkpoint(model.name, part).is_dir()]


class _Lowering:
    """Make the ordinary members that stand for a trained one."""

    def __init__(self, loaded: LoadedConfig, model: MemberConfig, by_fold: bool) -> None:
        assert model.training is not None
        self._model = model
        self._labels = loaded.config.labels
        self._folder = TrainingDir(loaded.config.output_dir)
        self._predict_with = "folds" if by_fold else model.training.predict_with
        count = fold_count(self._folder.trained_rows(model.name))
        self._folds = {fold: self._settings_of(Part(fold)) for fold in range(count)}

    def members(self) -> tuple[MemberConfig, TrainedMember]:
        """Return the member for rows that are new, and what is to be known for others; raise ConfigError."""
        whole = self._whole()
        keys = {**self._shared, **whole}
        folds: dict[str, int | None] = {}
        views: list[dict[str, Any]] = []
        for view in self._views():
            prefix = f"{view['name']}-" if view else ""
            if whole:
                views.append({**view, "name": view.get("name", self._predict_with)})
                folds[views[-1]["name"]] = None
            for fold, settings in self._folds.items():
                own = {key: value for key, value in settings.items() if value != keys.get(key)}
                views.append({**view, **own, "name": f"{prefix}{Part(fold).name}"})
                folds[views[-1]["name"]] = fold
        by_fold = self._valid({**keys, "views": views})
        member = self._valid(keys) if whole else by_fold
        return member, TrainedMember(
            rows=self._folder.trained_rows(self._model.name),
            by_fold=by_fold,
            folds=folds,
            oof_run=self._folder.oof_run,
        )

    @property
    def _shared(self) -> dict[str, str]:
        """Return the keys that all folds share; others that a member must have are those of the first fold."""
        first, fields = self._folds[0], type(self._model).model_fields
        return {
            key: value
            for key, value in first.items()
            if fields[key].is_required() or all(fold.get(key) == value for fold in self._folds.values())
        }

    def _whole(self) -> dict[str, Any]:
        """Return the keys of the single model that predicts new rows; none: each fold's model does."""
        if self._predict_with == "refit":
            return dict(self._settings_of(Part(None)))
        if self._predict_with == "average":
            adapters = [fold.get(_ADAPTER) for fold in self._folds.values()]
            if None in adapters:
                raise ConfigError(
                    "train.predict_with: average is of adapters, and the folds have whole checkpoints; choose "
                    "folds or refit"
                )
            return {"adapters": {"average": adapters}}
        return {}

    def _settings_of(self, part: Part) -> Mapping[str, str]:
        return member_kind(self._model).trained_settings(self._folder.checkpoint(self._model.name, part))

    def _views(self) -> Iterator[dict[str, Any]]:
        """Yield the member's own views; without views, one that changes nothing."""
        views: Sequence[dict[str, Any]] = self._values.get("views") or [{}]
        yield from views

    @property
    def _values(self) -> dict[str, Any]:
        """Return the member's keys as YAML has them, those that are set."""
        return self._model.model_dump(mode="json", exclude_unset=True, exclude={"train"})

    def _valid(self, changes: Mapping[str, Any]) -> MemberConfig:
        """Return the member with other keys, by all rules of its kind."""
        member, problems = validate(type(self._model), {**self._values, **changes}, self._labels)
        if member is None:
            raise ConfigError([f"{place(loc)}: {sentence}" for loc, sentence in problems])
        return member
