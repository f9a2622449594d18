"""Read what members are trained on: the rows outside a fold, or all of them, and those of extra tables."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from ensemble.common.errors import ConfigError, DataError
from ensemble.common.files import file_state
from ensemble.common.protocol import Activation
from ensemble.common.text import listed, quoted
from ensemble.config import LoadedConfig, RunConfig
from ensemble.config.schema import TrainingConfig
from ensemble.data.formats import column_names
from ensemble.data.trained_rows import IN_ALL_FOLDS
from ensemble.members.huggingface.checkpoint.labels import activation_of
from ensemble.members.registry import member_kind
from ensemble.pipeline.checks import Problems
from ensemble.pipeline.labelled_table import LabelledTable, read_labelled_table
from ensemble.pipeline.member_views import member_columns, member_files, member_views
from ensemble.pipeline.training_data import TrainingData
from ensemble.training.folds import divide, place_extra_rows


def read_training_data(loaded: LoadedConfig) -> TrainingData:
    """Read what a config's members with ``train`` are trained on. Nothing is written.

    Raises:
        EnsembleError: of exit code 2, with every problem of the tables, their labels and their folds.
    """
    config, problems = loaded.config, Problems()
    training, data = config.training or TrainingConfig(), config.training_data
    states = {str(path.absolute()): file_state(path) for path in config.training_files}
    activation = _activation(config)
    kinds = {model.name: member_kind(model) for model in config.models}
    trained = {model.name: model.training for model in config.trained_members}
    views = [view for view in member_views(kinds, problems) if view.member in trained]
    tables: list[LabelledTable] = []
    notes: list[str] = []
    with problems.at():
        also = {name: f"training.folds.{key}" for key, name in training.folds.columns.items()}
        tables.append(read_labelled_table(data, config, views, activation, training.labels, also))
        folds, groups = divide(tables[0], training.folds)
    for number, extra in enumerate(training.extra or ()):
        with problems.at(loaded.document.where(("training", "extra", number))):
            keys = extra.as_data(data)
            group_column = training.folds.group_column
            has_groups = group_column is not None and group_column in column_names(keys.path)
            also = {str(group_column): "training.folds.group_column"} if has_groups else {}
            if group_column is not None and not has_groups:
                notes.append(
                    f"{keys.path}: has no column {quoted(group_column)} (training.folds.group_column); its rows "
                    "are trained on in all folds, whatever their groups"
                )
            table = read_labelled_table(keys, config, views, activation, extra.labels, also, extra.weight)
            tables.append(table)
    problems.raise_any()
    columns = member_columns(views, trained)
    joined = tables[0].table.only([*dict.fromkeys(chain.from_iterable(columns.values()))])
    for other in tables[1:]:
        joined = joined.followed_by(other.table, other.data.path)
    extra_folds, extra_groups = place_extra_rows(tables[1:], folds, groups)
    result = TrainingData(
        tables=tuple(tables),
        table=joined,
        folds=np.append(folds, extra_folds),
        groups=None if groups is None else np.append(groups.numbers, extra_groups),
        columns=columns,
        files=member_files(kinds, data.path.parent),
        commands=frozenset(name for name, train in trained.items() if train is not None and train.command),
        file_states={path: state for path, state in states.items() if state is not None},
        notes=tuple(notes),
    )
    problems.add(_problems(result), DataError)
    problems.raise_any()
    return result


def _activation(config: RunConfig) -> Activation:
    """Return what the members learn, by their ``problem_type``; raise ConfigError if they differ."""
    activations = {
        activation_of(getattr(model, "problem_type", None), len(config.labels))
        for model in config.trained_members
    }
    if len(activations) > 1:
        names = listed([model.name for model in config.trained_members])
        raise ConfigError(f"models: {names} are trained together; give them the same problem_type")
    return activations.pop()


def _problems(data: TrainingData) -> Iterator[str]:
    """Yield labels that nobody could learn, and columns that a command's file would have twice."""
    path = data.main.data.path
    if data.main.activation == "softmax":
        for label, values in zip(data.main.labels, data.targets.T, strict=True):
            folds = np.unique(data.folds[values > 0]).tolist()
            if not folds:
                yield f"{path}: no row has the label {quoted(label)}; add rows of it, or drop the label"
            elif len(folds) == 1 and folds != [IN_ALL_FOLDS]:
                yield (
                    f"training.folds: all rows with the label {quoted(label)} are held out in 1 fold ({folds[0]}), "
                    "and none is left to train on; choose other folds, or add rows of it to training.extra"
                )
    twice = [name for name in column_names(path) if name in data.added_columns]
    if data.commands and twice:
        yield (
            f"{path}: has {listed(twice)}, where the files for train.command have weights or probabilities; "
            "rename these columns"
        )
