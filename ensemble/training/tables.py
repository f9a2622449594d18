"""Read a table that members learn from, what is learned of each row, and the fold that holds each row out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ensemble.common.errors import DataError
from ensemble.common.protocol import Activation
from ensemble.common.text import listed, plural, quoted
from ensemble.config import RunConfig
from ensemble.config.schema import MAX_FOLDS, DataConfig, FoldsConfig
from ensemble.data.formats import column_names, read_contents
from ensemble.data.input_file import Wanted
from ensemble.data.predictions_csv import guessed_id_column, read_predictions
from ensemble.data.table import DistinctCells, InputTable, distinct_cells, read_table
from ensemble.data.trained_rows import IN_ALL_FOLDS
from ensemble.merging.blocks import RowCheck
from ensemble.pipeline.checks import Problems
from ensemble.pipeline.member_views import (
    MemberView,
    needs_of,
    with_columns,
)

_Values: TypeAlias = npt.NDArray[np.float64]
Rows: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class LabelledTable:
    """Hold a table, and what is to be learned of each row.

    Attributes:
        targets: float64 [rows, labels]: probabilities, or the numbers of a regression.
        activation: "softmax" if they sum to 1, "sigmoid" if each is from 0 to 1, "none" for any numbers.
        is_soft: whether they come from another file, and not from the table's label columns.
        weight: of each row in the loss.
    """

    data: DataConfig
    labels: tuple[str, ...]
    table: InputTable
    targets: _Values
    activation: Activation
    is_soft: bool
    weight: float

    @property
    def classes(self) -> Rows | None:
        """Return the number of each row's true label, [rows]; None if some row has not exactly one."""
        truth = self.table.truth
        if truth is None:
            return None
        if truth.ndim == 1:
            return truth.astype(np.int64)
        has_one_label = self.activation == "softmax" and (truth.max(axis=1) == 1).all()
        return truth.argmax(axis=1) if has_one_label else None

    @property
    def names_one_label(self) -> npt.NDArray[np.bool_]:
        """Return for which rows a single label is to be learned, without doubt: [rows]."""
        return np.asarray((self.targets.max(axis=1) == 1) & (self.targets.sum(axis=1) == 1))

    def values_in(self, path: Path) -> _Values:
        """Return the probabilities, or numbers, that a file has of all rows; raise DataError if it lacks some."""
        return _probabilities(path, self.data, self.labels, self.table, self.activation)

    def rows_like(self, other: DataConfig) -> pa.Table:
        """Return all rows with the columns of another table that this one has, too, and with its label columns."""
        label_columns = other.truth_columns(self.labels)
        learned = {other.label_column, *label_columns}
        names = tuple(name for name in column_names(other.path) if name not in learned)
        cells = read_contents(self.data.path, Wanted(self.data.id_column, None, names, None)).columns
        if self.table.file_rows is not None:
            cells = cells.take(pa.array(self.table.file_rows))
        if other.label_column is not None:
            likeliest = pa.array(self.targets.argmax(axis=1), mask=~self.names_one_label)
            cells = cells.append_column(other.label_column, pa.array(self.labels).take(likeliest))
        for number, name in enumerate(label_columns):
            cells = cells.append_column(name, pa.array(self.targets[:, number]))
        return cells


def read_labelled_table(
    data: DataConfig,
    config: RunConfig,
    views: Sequence[MemberView],
    activation: Activation,
    probabilities: Path | None = None,
    also: Mapping[str, str] | None = None,
    weight: float = 1.0,
) -> LabelledTable:
    """Read all rows of a table with the columns of views; the run's ``limit`` is of the rows to predict.

    Args:
        activation: what is to be learned.
        probabilities: a file of probabilities by id, to learn in place of the table's labels.
        also: as in ``TableNeeds``.

    Raises:
        DataError: with every problem of the table, or of the file of probabilities.
    """
    needs = replace(
        needs_of(data, config.labels, activation),
        unequal_sums="; set problem_type: multi_label_classification if several labels can be true at once, or "
        "regression for numbers",
        may_lack_truth=False,
        also=also or {},
    )
    table = read_table(data.path, with_columns(needs, views))
    if probabilities is not None:
        targets = _probabilities(probabilities, data, config.labels, table, activation)
        targets = targets / targets.sum(axis=1, keepdims=True) if activation == "softmax" else targets
    elif table.truth is None:
        raise DataError(f"{data.path}: its labels are not named; give label_column, label_columns or labels")
    elif table.truth.ndim == 1:
        targets = np.eye(len(config.labels))[table.truth]
    else:
        targets = table.truth.astype(np.float64)
    return LabelledTable(
        data=data,
        labels=config.labels,
        table=table,
        targets=targets,
        activation=activation,
        is_soft=probabilities is not None,
        weight=weight,
    )


def _probabilities(
    path: Path, data: DataConfig, labels: tuple[str, ...], table: InputTable, activation: Activation
) -> _Values:
    """Return the probabilities that a file has of a table's rows, float64 [rows, labels]; it may have others."""
    id_column = guessed_id_column(column_names(path), labels, data.id_column)
    values, _ = read_predictions(path, id_column, labels).join(
        table.ids, may_have_others=True, table=str(data.path), advice="give the values of every row"
    )
    advice = "correct these values"
    check = RowCheck(str(path), activation, table.ids, may_lack_rows=False, advice=advice, columns=labels)
    check.look(0, values)
    check.refuse(DataError)
    return values


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
        return cells["column"].numbers, groups
    problems.add(_count_problems(table, config.splits, groups), DataError)
    problems.raise_any()
    return _split(table, config.splits, config.seed, groups), groups


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
