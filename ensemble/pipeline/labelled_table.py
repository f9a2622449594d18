"""Read, check and copy tables that members learn from: columns that they read, and what is learned of each row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.errors import DataError, MergeError
from ensemble.common.files import atomic_path
from ensemble.common.protocol import Activation
from ensemble.common.text import plural
from ensemble.config import RunConfig
from ensemble.config.table import DataConfig
from ensemble.data.digests import find_rows, with_another
from ensemble.data.file_rows import FileRows
from ensemble.data.formats import column_names, copy_rows, read_contents
from ensemble.data.input_file import Wanted, first_ids
from ensemble.data.predictions_csv import guessed_id_column, read_predictions
from ensemble.data.table import InputTable, TableNeeds, read_table
from ensemble.merging.row_checks import RowCheck
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
        if other.label_column is not None:
            likeliest = pa.array(self.targets.argmax(axis=1), mask=~self.names_one_label)
            cells = cells.append_column(other.label_column, pa.array(self.labels).take(likeliest))
        for number, name in enumerate(label_columns):
            cells = cells.append_column(name, pa.array(self.targets[:, number]))
        return cells


@dataclass(frozen=True, kw_only=True)
class LabelledRows:
    """Hold the rows of the table to learn, and then those of extra tables that are learned beside it.

    Attributes:
        tables: with the same labels and ``activation``.
        table: the rows of all of them, with the columns that members read.
    """

    tables: tuple[LabelledTable, ...]
    table: InputTable

    @property
    def first(self) -> LabelledTable:
        """Return the table to learn."""
        return self.tables[0]

    @cached_property
    def targets(self) -> _Values:
        """Return what is to be learned of each row, as in ``LabelledTable``: float64 [all rows, labels]."""
        return np.concatenate([table.targets for table in self.tables])

    @cached_property
    def weights(self) -> _Values:
        """Return the weight of each row in the loss, float64 [all rows]."""
        return np.concatenate([np.full(table.table.rows, table.weight) for table in self.tables])

    @property
    def added_columns(self) -> dict[str, _Values]:
        """Return what ``write`` writes beside the first table's own columns, by name, [all rows].

        There is ``weight`` if some row's is not 1, and ``prob_<label>`` for each label if the label columns of the
        first table cannot say what is learned.
        """
        columns = {}
        if (self.weights != 1).any():
            columns["weight"] = self.weights
        first, *extras = self.tables
        has_one_column = first.data.label_columns is None
        if first.is_soft or (has_one_column and not all(extra.names_one_label.all() for extra in extras)):
            for label, values in zip(first.labels, self.targets.T, strict=True):
                columns[f"prob_{label}"] = values
        return columns

    def write(self, path: Path, rows: _Numbers) -> None:
        """Write a file like the first table's: some of its rows with all of their cells, and all extra rows.

        Extra rows have the columns that both tables have, and their labels in the first table's columns; other
        cells are empty. ``added_columns`` come last.

        Args:
            rows: the numbers of the rows, rising.

        Raises:
            DataError: a cell of an extra table does not fit the format.
        """
        source = self.first.data
        extras = [(extra.data.path, extra.rows_like(source)) for extra in self.tables[1:]]
        added = {name: values[rows] for name, values in self.added_columns.items()}
        with atomic_path(path) as temporary:
            copy_rows(source.path, FileRows(rows[rows < self.first.table.rows], extras, added), temporary)

    def repeated_texts(self, folds: _Numbers, columns: Iterable[tuple[str, ...]]) -> Iterator[str]:
        """Yield how many rows stand elsewhere, too, in all of the ``columns`` that a member reads."""
        rows, labels = self.first.table.rows, self.targets.argmax(axis=1)
        has_label = np.concatenate([table.names_one_label for table in self.tables])
        has_label &= self.first.activation == "softmax"
        in_folds = np.zeros(self.table.rows, np.bool_)
        in_extras, with_labels = in_folds.copy(), in_folds.copy()
        for names in {*columns} - {()}:
            digests = self.table.row_digests(names)
            in_folds[:rows] |= with_another(digests[:rows], folds[:rows])
            in_extras[:rows] |= find_rows(digests[:rows], digests[rows:]) >= 0
            with_labels[has_label] |= with_another(digests[has_label], labels[has_label])
        advice = "training.folds.group_column keeps rows together that belong together"
        sentences = {
            f"whose text also stands in another fold, so that its model has learned it; {advice}": in_folds,
            "whose text also stands in a table of training.extra, so that all models have learned it": in_extras,
            "whose text has another label in another row; their models learn both": with_labels,
        }
        for sentence, is_repeated in sentences.items():
            if is_repeated.any():
                shown = first_ids(self.table.ids.filter(pa.array(is_repeated)))
                yield f"{self.first.data.path}: {plural(int(is_repeated.sum()), 'row')} (id {shown}) {sentence}"


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
        columns=(),
        json_columns=(),
        text_columns=(),
        limit=None,
        truth_as=activation,
        unequal_sums="; set problem_type: multi_label_classification if several labels can be true at once, or "
        "regression for numbers",
        may_lack_truth=False,
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
    check = RowCheck(str(path), activation, table.ids, may_lack_rows=False, advice="correct these values")
    check.look(0, values)
    try:
        check.refuse()
    except MergeError as error:
        raise DataError(error.problems) from None
    return values / values.sum(axis=1, keepdims=True) if activation == "softmax" else values
