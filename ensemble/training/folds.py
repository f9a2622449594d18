"""Divide the rows of the training table into folds, and give extra rows the folds of their groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ensemble.common.errors import DataError
from ensemble.common.text import listed, plural, quoted
from ensemble.config.schema import MAX_FOLDS, FoldsConfig
from ensemble.data.table import DistinctCells, distinct_cells
from ensemble.data.trained_rows import IN_ALL_FOLDS
from ensemble.pipeline.checks import Problems
from ensemble.pipeline.labelled_table import LabelledTable

Rows: TypeAlias = npt.NDArray[np.int64]


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
