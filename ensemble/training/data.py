"""Read what members are trained on: rows outside a fold, or all of them, in folds, and those of extra tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ensemble.common.errors import ConfigError, DataError
from ensemble.common.files import file_state
from ensemble.common.protocol import Activation
from ensemble.common.text import listed, plural, quoted
from ensemble.config import LoadedConfig, RunConfig
from ensemble.config.schema import MAX_FOLDS, FoldsConfig, TrainingConfig
from ensemble.data.formats import column_names
from ensemble.data.table import DistinctCells, distinct_cells
from ensemble.data.trained_rows import IN_ALL_FOLDS
from ensemble.members.huggingface.checkpoint.labels import activation_of
from ensemble.members.registry import member_kind
from ensemble.pipeline.checks import Problems
from ensemble.pipeline.labelled_table import LabelledTable, read_labelled_table
from ensemble.pipeline.member_views import member_columns, member_files, member_views
from ensemble.pipeline.training_data import TrainingData

Rows: TypeAlias = npt.NDArray[np.int64]


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


def divide(table: LabelledTable, config: FoldsConfig) -> tuple[Rows, DistinctCells | None]:
    """Return the fold of each row, int64 [rows], and the groups; None: there are no groups.

    Raises:
        EnsembleError: of exit code 2, with every problem of the columns, or of the numbers of rows and groups.
    """
    problems = Problems()
    cells: dict[str, DistinctCells] = {}
    for key, name in config.columns.items():
        with problems.at(f"training.folds.{key}"):
            cells[key] = distinct_cells(table.data.path, table.table, name)
    problems.raise_any()
    groups = cells.get("group_column")
    if config.splits is None:
        problems.add(_column_problems(table.data.path, cells["column"], groups), DataError)
        problems.raise_any()
        folds = cells["column"].numbers
    else:
        problems.add(_count_problems(table, config.splits, groups), DataError)
        problems.raise_any()
        folds = _split(table, config.splits, config.seed, groups)
    return folds, groups


def place_extra_rows(
    extras: Sequence[LabelledTable], folds: Rows, groups: DistinctCells | None
) -> tuple[Rows, Rows]:
    """Return the fold and the group of each row of extra tables, int64 [rows].

    A row of one of the training table's groups has that group's fold, so that it is left out of the same part. All
    other rows are ``IN_ALL_FOLDS``; those with the same cell are a group, with a number below 0, and so is each row
    without one.

    Args:
        folds: of the rows of the training table, and ``groups`` of the same rows.
    """
    numbers = np.arange(sum(extra.table.rows for extra in extras))
    if groups is None or not len(numbers):
        return np.full_like(numbers, IN_ALL_FOLDS), -1 - numbers
    count = len(groups.values)
    columns = [pa.array(groups.values, pa.large_string())]
    for extra in extras:
        has_groups = groups.name in extra.table.types([groups.name])
        cells = (
            extra.table.texts(groups.name) if has_groups else pa.nulls(extra.table.rows, pa.large_string())
        )
        columns += cells.chunks if has_groups else [cells]
    cells = pc.fill_null(pa.chunked_array(columns, pa.large_string()), "")
    # Whole numbers as 7, not as 7.0, as pandas writes them once a cell was missing.
    cells = pc.replace_substring_regex(cells, r"^(-?[0-9]+)\.0$", r"\1").combine_chunks()
    # Of each extra row the first with its cell, by its number in ``numbers``; below 0: that is a group's own.
    _, first, places = np.unique(
        cells.dictionary_encode().indices.to_numpy(), return_index=True, return_inverse=True
    )
    first_row = np.where(pc.equal(cells, "").to_numpy(False)[count:], numbers, first[places][count:] - count)
    fold_of_group = np.full(count + 1, IN_ALL_FOLDS)
    fold_of_group[groups.numbers] = folds
    group = np.minimum(first_row, 0) + count
    return fold_of_group[group], np.where(first_row < 0, group, -1 - first_row)


def _column_problems(path: Path, column: DistinctCells, groups: DistinctCells | None) -> Iterator[str]:
    where = f"training.folds.column: column {quoted(column.name)} of {path}"
    if len(column.values) == 1:
        yield f"{where} holds {quoted(column.values[0])} in every row; there must be two folds or more"
    if len(column.values) > MAX_FOLDS:  # the column holds something else
        count = f"{len(column.values):,} values"
        yield f"{where} holds {count}, each of which would be a fold; name the column of the folds"
    if groups is not None:
        pairs = np.unique(np.stack([groups.numbers, column.numbers]), axis=1)
        divided = np.flatnonzero(np.bincount(pairs[0]) > 1).tolist()
        if divided:
            names = listed([groups.values[group] for group in divided], 3)
            yield (
                f"{where} divides {plural(len(divided), 'group')} of {quoted(groups.name)} ({names}); give all "
                "rows of a group the same fold, or drop group_column"
            )


def _count_problems(table: LabelledTable, splits: int, groups: DistinctCells | None) -> Iterator[str]:
    where = f"training.folds.n_splits: {splits:,}, but {table.data.path} has"
    if table.table.rows < splits:
        yield f"{where} {plural(table.table.rows, 'row')}; choose as many folds at most"
    elif table.classes is not None:
        counts = np.bincount(table.classes, minlength=len(table.labels)).tolist()
        by_label = zip(table.labels, counts, strict=True)
        few = [f"{quoted(label)} ({count:,})" for label, count in by_label if 0 < count < splits]
        if few:
            shown = listed(few, 5, str)
            yield f"{where} fewer rows of {shown}; choose fewer folds, or add rows of these labels"
    if groups is not None and len(groups.values) < splits:
        count_text = plural(len(groups.values), "group")
        yield f"{where} {count_text} in {quoted(groups.name)}; choose as many folds at most"


def _split(table: LabelledTable, splits: int, seed: int, groups: DistinctCells | None) -> Rows:
    """Return the fold of each row as scikit-learn divides them: stratified by label, shuffled by the seed.

    Rows without a single label (several labels each, probabilities, numbers) have no class of which each fold could
    get its share; they are shuffled alone.
    """
    from sklearn.model_selection import GroupKFold, KFold, StratifiedGroupKFold, StratifiedKFold

    classes = table.classes
    numbers = None if groups is None else groups.numbers
    if groups is None:
        splitter_type = KFold if classes is None else StratifiedKFold
        splitter = splitter_type(splits, shuffle=True, random_state=seed)
    elif classes is not None:
        splitter = StratifiedGroupKFold(splits, shuffle=True, random_state=seed)
    else:  # GroupKFold itself shuffles from scikit-learn 1.6 on only
        splitter = GroupKFold(splits)
        numbers = np.random.default_rng(seed).permutation(len(groups.values))[groups.numbers]
    folds = np.empty(table.table.rows, np.int64)
    for fold, (_, held_out) in enumerate(splitter.split(folds, classes, numbers)):
        folds[held_out] = fold
    if groups is not None and len(np.unique(folds)) < splits:
        raise DataError(
            f"training.folds.n_splits: {splits:,}, and the groups of {quoted(groups.name)} in {table.data.path} "
            "leave a fold without rows; choose fewer folds"
        )
    return folds
