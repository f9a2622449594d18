"""Divide the rows of the training table into folds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.errors import DataError
from ensemble.common.text import listed, plural, quoted
from ensemble.config.training import FoldsConfig
from ensemble.data.distinct_cells import DistinctCells

Rows: TypeAlias = npt.NDArray[np.int64]
_MAX_FOLDS: Final = 1000  # as many as n_splits may be; a column with more values holds something else


@dataclass(frozen=True, kw_only=True)
class RowsToDivide:
    """Hold what decides the fold of each row.

    Attributes:
        path: of the table, for messages.
        classes: the number of each row's true label, int64 [rows]; None: a row has no single label.
        groups: of ``group_column``, and ``column`` of the fold column; None: there is none.
    """

    config: FoldsConfig
    path: Path
    ids: pa.ChunkedArray
    labels: tuple[str, ...]
    classes: Rows | None
    groups: DistinctCells | None
    column: DistinctCells | None

    @property
    def splits(self) -> int:
        """Return the number of folds."""
        return self.config.splits or len(self.column.values if self.column is not None else ())


def divide(rows: RowsToDivide) -> Rows:
    """Return the fold of each row, int64 [rows]: from the column, or stratified by label, shuffled by the seed.

    Rows without a single label (several labels each, probabilities, numbers) have no class of which each fold could
    get its share; they are shuffled alone.

    Raises:
        DataError: with every problem of the column, or of the numbers of rows and groups.
    """
    problems = list(_count_problems(rows) if rows.column is None else _column_problems(rows, rows.column))
    if problems:
        raise DataError(problems)
    return _split(rows) if rows.column is None else rows.column.numbers


def _split(rows: RowsToDivide) -> Rows:
    from sklearn.model_selection import GroupKFold, KFold, StratifiedGroupKFold, StratifiedKFold

    seed, groups = rows.config.seed, None if rows.groups is None else rows.groups.numbers
    if groups is not None and rows.classes is not None:
        splitter = StratifiedGroupKFold(rows.splits, shuffle=True, random_state=seed)
    elif groups is not None:  # GroupKFold itself shuffles from scikit-learn 1.6 on only
        splitter = GroupKFold(rows.splits)
        groups = np.random.default_rng(seed).permutation(int(groups.max()) + 1)[groups]
    elif rows.classes is not None:
        splitter = StratifiedKFold(rows.splits, shuffle=True, random_state=seed)
    else:
        splitter = KFold(rows.splits, shuffle=True, random_state=seed)
    cells = np.zeros(len(rows.ids))  # which no splitter looks at
    folds = np.empty(len(cells), np.int64)
    for fold, (_, held_out) in enumerate(splitter.split(cells, rows.classes, groups)):
        folds[held_out] = fold
    if np.bincount(folds, minlength=rows.splits).min() == 0:
        raise DataError(
            f"training.folds.n_splits: {rows.splits:,}, and the groups of {quoted(str(rows.config.group_column))} "
            f"in {rows.path} leave a fold without rows; choose fewer folds"
        )
    return folds


def _column_problems(rows: RowsToDivide, column: DistinctCells) -> Iterator[str]:
    where = f"training.folds.column: column {quoted(str(rows.config.column))} of {rows.path}"
    if len(column.values) == 1:
        yield f"{where} holds {quoted(column.values[0])} in every row; there must be two folds or more"
    if len(column.values) > _MAX_FOLDS:
        count = f"{len(column.values):,} values"
        yield f"{where} holds {count}, each of which would be a fold; name the column of the folds"
    if rows.groups is None:
        return
    pairs = np.unique(np.stack([rows.groups.numbers, column.numbers]), axis=1)
    split = np.flatnonzero(np.bincount(pairs[0]) > 1).tolist()
    if split:
        names = listed([rows.groups.values[group] for group in split], 3)
        yield (
            f"{where} divides {plural(len(split), 'group')} of {quoted(str(rows.config.group_column))} ({names}); "
            "give all rows of a group the same fold, or drop group_column"
        )


def _count_problems(rows: RowsToDivide) -> Iterator[str]:
    where = f"training.folds.n_splits: {rows.splits:,}, but {rows.path} has"
    if len(rows.ids) < rows.splits:
        yield f"{where} {plural(len(rows.ids), 'row')}; choose as many folds at most"
    elif rows.classes is not None:
        counts = np.bincount(rows.classes, minlength=len(rows.labels)).tolist()
        few = [label for label, count in zip(rows.labels, counts, strict=True) if 0 < count < rows.splits]
        if few:
            shown = listed(few, 5, lambda label: f"{quoted(label)} ({counts[rows.labels.index(label)]:,})")
            yield f"{where} fewer rows of {shown}; choose fewer folds, or add rows of these labels"
    if rows.groups is not None and len(rows.groups.values) < rows.splits:
        groups = f"{plural(len(rows.groups.values), 'group')} in {quoted(str(rows.config.group_column))}"
        yield f"{where} {groups}; choose as many folds at most"
