"""Read tables that members learn from: the columns that they read, and what is to be learned of each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.errors import DataError, MergeError
from ensemble.common.files import atomic_path
from ensemble.common.protocol import Activation
from ensemble.config import RunConfig
from ensemble.config.table import DataConfig
from ensemble.data.file_rows import FileRows
from ensemble.data.formats import column_names, copy_rows, read_contents
from ensemble.data.input_file import Wanted
from ensemble.data.predictions_csv import guessed_id_column, read_predictions
from ensemble.data.table import InputTable, TableNeeds, read_table
from ensemble.merging.row_checks import RowCheck
from ensemble.pipeline.member_views import MemberView, with_columns


@dataclass(frozen=True, kw_only=True)
class LabelledTable:
    """Hold a table, and what is to be learned of each row.

    Attributes:
        targets: float64 [rows, labels]: probabilities, or the numbers of a regression.
        activation: "softmax" if they sum to 1, "sigmoid" if each is from 0 to 1, "none" for any numbers.
        is_soft: whether they come from another file, and not from the table's label columns.
    """

    data: DataConfig
    table: InputTable
    targets: npt.NDArray[np.float64]
    activation: Activation
    is_soft: bool

    @property
    def classes(self) -> npt.NDArray[np.int64] | None:
        """Return the number of each row's true label, [rows]; None if some row has not exactly one."""
        truth = self.table.truth
        if truth is None or truth.ndim == 1:
            return None if truth is None else truth.astype(np.int64)
        has_one = self.activation == "softmax" and bool((truth.max(axis=1) == 1).all())
        return truth.argmax(axis=1) if has_one else None

    @property
    def names_one_label(self) -> npt.NDArray[np.bool_]:
        """Return for which rows a single label is to be learned, without doubt: [rows]."""
        return np.asarray((self.targets.max(axis=1) == 1) & (self.targets.sum(axis=1) == 1))

    def rows_like(self, other: DataConfig, labels: Sequence[str]) -> pa.Table:
        """Return all rows with the columns of another table that this one has, too, and with its label columns."""
        label_columns = other.truth_columns(labels)
        shared = {*column_names(self.data.path)} - {other.label_column, *label_columns}
        names = tuple(name for name in column_names(other.path) if name in shared)
        cells = read_contents(self.data.path, Wanted(self.data.id_column, None, names, None)).columns
        if other.label_column is not None:
            likeliest = zip(self.targets.argmax(axis=1).tolist(), self.names_one_label, strict=True)
            texts = [labels[label] if is_sure else None for label, is_sure in likeliest]
            cells = cells.append_column(other.label_column, pa.array(texts, pa.string()))
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
        columns=(),
        json_columns=(),
        text_columns=(),
        limit=None,
        truth_as=activation,
        unequal_sums="; if several labels can be true at once, set problem_type: multi_label_classification",
        may_lack_truth=False,
        also=also or {},
    )
    table = read_table(data.path, with_columns(needs, views))
    targets: npt.NDArray[np.float64]
    if probabilities is not None:
        targets = _probabilities(probabilities, data, config.labels, table, activation)
    elif table.truth is None:
        raise DataError(f"{data.path}: its labels are not named; give label_column, label_columns or labels")
    else:
        one_hot = np.eye(len(config.labels))
        targets = table.truth.astype(np.float64) if table.truth.ndim == 2 else one_hot[table.truth]
    return LabelledTable(
        data=data, table=table, targets=targets, activation=activation, is_soft=probabilities is not None
    )


def _probabilities(
    path: Path, data: DataConfig, labels: tuple[str, ...], table: InputTable, activation: Activation
) -> npt.NDArray[np.float64]:
    """Return the probabilities that a file has of a table's rows, float64 [rows, labels]; it may have others."""
    id_column = guessed_id_column(column_names(path), labels, data.id_column)
    values, _ = read_predictions(path, id_column, labels).join(
        table.ids, may_have_others=True, table=str(data.path), advice="give the values of every row"
    )
    check = RowCheck(str(path), activation, table.ids, may_lack_rows=False, advice="correct these values")
    check.look(0, values)
    try:
        check.refuse()
    except MergeError as error:
        raise DataError(error.problems) from None
    return values / values.sum(axis=1, keepdims=True) if activation == "softmax" else values


def write_labelled_rows(
    path: Path,
    table: LabelledTable,
    rows: npt.NDArray[np.int64],
    extras: Sequence[LabelledTable],
    labels: Sequence[str],
    added: Mapping[str, npt.NDArray[np.float64]],
) -> None:
    """Write rows of a table's file, rising, with all of its columns, and in its format; then all rows of others.

    Others have the columns that both tables have, and their labels in the first table's columns; other cells are
    empty. The columns in ``added`` come last, float64 [rows and others].

    Raises:
        DataError: a cell of another table does not fit the format.
    """
    others = [(extra.data.path, extra.rows_like(table.data, labels)) for extra in extras]
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        copy_rows(table.data.path, FileRows(rows, others, added), temporary)
