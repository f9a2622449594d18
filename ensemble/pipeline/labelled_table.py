"""Read and check a table that members learn from: columns that they read, and what is learned of each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.errors import DataError, MergeError
from ensemble.common.protocol import Activation
from ensemble.config import RunConfig
from ensemble.config.schema import DataConfig
from ensemble.data.formats import column_names, read_contents
from ensemble.data.input_file import Wanted
from ensemble.data.predictions_csv import guessed_id_column, read_predictions
from ensemble.data.table import InputTable, TableNeeds, read_table
from ensemble.merging.blocks import RowCheck
from ensemble.pipeline.member_views import MemberView, with_columns

_Values: TypeAlias = npt.NDArray[np.float64]
_Numbers: TypeAlias = npt.NDArray[np.int64]


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
    def classes(self) -> _Numbers | None:
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
    needs = TableNeeds(
        id_column=data.id_column,
        label_column=data.label_column,
        label_columns=data.truth_columns(config.labels),
        labels=config.labels,
        truth_as=activation,
        unequal_sums="; set problem_type: multi_label_classification if several labels can be true at once, or "
        "regression for numbers",
        may_lack_truth=False,
        skip_unlabelled=data.skip_unlabelled,
        also=also or {},
    )
    table = read_table(data.path, with_columns(needs, views))
    if probabilities is not None:
        targets = _probabilities(probabilities, data, config.labels, table, activation)
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
    try:
        check.refuse()
    except MergeError as error:
        raise DataError(error.problems) from None
    return values / values.sum(axis=1, keepdims=True) if activation == "softmax" else values
