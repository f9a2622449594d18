"""Read, check and copy tables that members learn from: columns that they read, and what is learned of each row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

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

WEIGHT_COLUMN: Final = "weight"
PROBABILITY_PREFIX: Final = "prob_"


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
    table: InputTable
    targets: npt.NDArray[np.float64]
    activation: Activation
    is_soft: bool
    weight: float

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


@dataclass(frozen=True, kw_only=True)
class LabelledRows:
    """Hold the rows of the table to learn, and then those of tables that are learned beside it.

    Attributes:
        tables: with the same ``activation``.
        table: the rows of all of them, with the columns that members read.
    """

    labels: tuple[str, ...]
    tables: tuple[LabelledTable, ...]
    table: InputTable

    @cached_property
    def targets(self) -> npt.NDArray[np.float64]:
        """Return what is to be learned of each row, as in ``LabelledTable``: float64 [all rows, labels]."""
        return np.concatenate([table.targets for table in self.tables])

    @cached_property
    def weights(self) -> npt.NDArray[np.float64]:
        """Return the weight of each row in the loss, float64 [all rows]."""
        return np.concatenate([np.full(table.table.rows, table.weight) for table in self.tables])

    @property
    def activation(self) -> Activation:
        return self.tables[0].activation

    @cached_property
    def added_columns(self) -> dict[str, npt.NDArray[np.float64]]:
        """Return what ``write`` writes beside the first table's own columns, by name, [all rows].

        There is ``weight`` if some row's is not 1, and ``prob_<label>`` for each label if the label columns of the
        first table cannot say what is learned.
        """
        columns = {} if (self.weights == 1).all() else {WEIGHT_COLUMN: self.weights}
        first, *extras = self.tables
        has_numbers = first.data.label_columns is not None
        if first.is_soft or not (has_numbers or all(extra.names_one_label.all() for extra in extras)):
            for label, values in zip(self.labels, self.targets.T, strict=True):
                columns[f"{PROBABILITY_PREFIX}{label}"] = values
        return columns

    def write(self, path: Path, rows: npt.NDArray[np.int64]) -> None:
        """Write rows of the first table's file with all of its columns, in its format, and those of the others.

        Others have the columns that both tables have, and their labels in the first table's columns; other cells
        are empty. ``added_columns`` come last.

        Args:
            rows: their numbers, rising; those of the others are all there.

        Raises:
            DataError: a cell of another table does not fit the format.
        """
        first, *extras = self.tables
        others = [(extra.data.path, extra.rows_like(first.data, self.labels)) for extra in extras]
        added = {name: values[rows] for name, values in self.added_columns.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            copy_rows(first.data.path, FileRows(rows[rows < first.table.rows], others, added), temporary)

    def repeated_texts(
        self, folds: npt.NDArray[np.int64], columns: Iterable[tuple[str, ...]]
    ) -> Iterator[str]:
        """Yield how many rows of the first table stand elsewhere, too, as a member reads them.

        Args:
            folds: of the first table's rows, [rows].
            columns: those that a member reads, for each member.
        """
        first, rows = self.tables[0], self.tables[0].table.rows
        is_sure = np.concatenate([table.names_one_label for table in self.tables])
        is_sure &= self.activation == "softmax"
        in_folds, in_extras, with_labels = (np.zeros(self.table.rows, np.bool_) for _ in range(3))
        for names in {*columns} - {()}:
            digests = self.table.row_digests(names)
            in_folds[:rows] |= with_another(digests[:rows], folds)
            in_extras[:rows] |= find_rows(digests[:rows], digests[rows:]) >= 0
            with_labels[is_sure] |= with_another(digests[is_sure], self.targets[is_sure].argmax(axis=1))
        advice = "training.folds.group_column keeps rows together that belong together"
        sentences = {
            f"whose text also stands in another fold, so that its model has learned it; {advice}": in_folds,
            "whose text also stands in a table of training.extra, so that all models have learned it": in_extras,
            "whose text has another label in another row; their models learn both": with_labels,
        }
        for sentence, is_repeated in sentences.items():
            if is_repeated.any():
                shown = first_ids(self.table.ids.filter(pa.array(is_repeated)))
                yield f"{first.data.path}: {plural(int(is_repeated.sum()), 'row')} (id {shown}) {sentence}"


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
    targets: npt.NDArray[np.float64]
    if probabilities is not None:
        targets = _probabilities(probabilities, data, config.labels, table, activation)
    elif table.truth is None:
        raise DataError(f"{data.path}: its labels are not named; give label_column, label_columns or labels")
    else:
        one_hot = np.eye(len(config.labels))
        targets = table.truth.astype(np.float64) if table.truth.ndim == 2 else one_hot[table.truth]
    return LabelledTable(
        data=data,
        table=table,
        targets=targets,
        activation=activation,
        is_soft=probabilities is not None,
        weight=weight,
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
