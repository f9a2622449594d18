"""Hold the rows that members are trained on, with their folds, and write the files that their trainings read."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.errors import ConfigError, DataError
from ensemble.common.files import FileState, atomic_path, file_state
from ensemble.common.protocol import Activation
from ensemble.common.shards import file_sha256
from ensemble.common.text import listed, plural, quoted, shown_path
from ensemble.config import LoadedConfig, MemberConfig, RunConfig
from ensemble.config.schema import TrainingConfig
from ensemble.data.csv_file import write_csv
from ensemble.data.digests import find_rows, with_another
from ensemble.data.file_rows import FileRows
from ensemble.data.formats import column_names, copy_rows, file_extension
from ensemble.data.ids import ID_COLUMN
from ensemble.data.input_file import first_ids
from ensemble.data.table import InputTable
from ensemble.data.trained_rows import IN_ALL_FOLDS, TrainedRows
from ensemble.jobs.job import compile_models
from ensemble.members.base import OutputColumns
from ensemble.members.registry import member_kind
from ensemble.pipeline.checks import Problems
from ensemble.pipeline.member_views import member_columns, member_files, member_views
from ensemble.pipeline.trained_members import RowKey, keys_of_rows
from ensemble.pipeline.training_dir import OF_TABLES, TrainingDir
from ensemble.training.tables import LabelledTable, Rows, divide, place_extra_rows, read_labelled_table

_Values: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Hold the rows of the training table, divided into folds, and then those of extra tables.

    Attributes:
        tables: with the same labels and ``activation``.
        table: the rows of all of them, with the columns that members read.
        folds: of all rows, int64 [rows], from 0 to ``splits`` - 1; those of extra tables are ``IN_ALL_FOLDS``, or
            have the fold of their group if the training table has that group.
        groups: of rows that stay together, int64 [rows]; None: there are no groups.
        row_keys: by what the rows that a member was trained on are recognized, by the member's name.
        members: that are trained on it, by name.
        inputs: out-of-fold predictions of members that others read, where there are any, float64 [rows, labels].
        commands: the members that are trained by a command.
        file_states: of the files that were read, by absolute path.
        notes: sentences for the user about how the tables were read.
    """

    tables: tuple[LabelledTable, ...]
    table: InputTable
    folds: Rows
    groups: Rows | None
    row_keys: Mapping[str, RowKey]
    members: Mapping[str, MemberConfig]
    inputs: Mapping[str, _Values]
    commands: frozenset[str]
    file_states: Mapping[str, FileState]
    notes: tuple[str, ...] = ()

    @property
    def main(self) -> LabelledTable:
        """Return the training table."""
        return self.tables[0]

    @property
    def splits(self) -> int:
        """Return the number of folds."""
        return int(self.folds.max()) + 1

    @cached_property
    def targets(self) -> _Values:
        """Return what is to be learned of each row, as in ``LabelledTable``: float64 [rows, labels]."""
        return np.concatenate([table.targets for table in self.tables])

    @cached_property
    def weights(self) -> _Values:
        """Return the weight of each row in the loss, float64 [rows]."""
        return np.concatenate([np.full(table.table.rows, table.weight) for table in self.tables])

    def rows_of(self, fold: int | None) -> Rows:
        """Return the rows to train on, rising: all, or those outside a fold; extra rows are among them."""
        if fold is None:
            return np.arange(len(self.folds))
        return np.flatnonzero(self.folds != fold)

    def trained_rows(self, member: str) -> TrainedRows:
        """Return which rows a member's models have seen."""
        return TrainedRows(self.table.row_digests(*self.row_keys[member]), self.folds)

    def with_inputs(self, files: Mapping[str, Path]) -> TrainingData:
        """Return the data with these members' out-of-fold predictions; raise DataError if a file lacks a row."""
        inputs = {name: self.main.values_in(file) for name, file in files.items()}
        return replace(self, inputs={**self.inputs, **inputs})

    def digests(self, member: str, fold: int | None) -> dict[str, str]:
        """Return digests of all in the tables that a training depends on, by what a user calls it (``OF_TABLES``).

        For the built-in way these are the cells that the member reads, of rows outside the fold alone; for a
        command, which may read any column, the whole files; and predictions of inputs, if they are there yet.
        """
        rows = self.main.table.rows
        is_held_out = np.zeros(len(self.folds), np.bool_) if fold is None else self.folds == fold
        groups = np.zeros(len(self.folds), np.int64) if self.groups is None else self.groups
        arrays = (self.trained_rows(member).digests, self.targets, groups)
        cells, targets, groups = (np.where(is_held_out, array.dtype.type(0), array.T).T for array in arrays)
        main, *extra = self._file_digests if member in self.commands else [""] * len(self.tables)
        parts: tuple[Sequence[Any], ...] = (
            [repr((self.main.labels, self.main.activation))],
            [str(rows)],
            [is_held_out[:rows], groups[:rows]],
            [targets[:rows]],
            [main, cells[:rows]],
            [*extra, cells[rows:], targets[rows:], self.weights[rows:], groups[rows:]],
        )
        digests = {}
        for name, values in zip(OF_TABLES, parts, strict=True):
            hashed = blake2b(digest_size=32)
            for value in values:
                hashed.update(value.encode() if isinstance(value, str) else value.tobytes())
            digests[name] = hashed.hexdigest()
        for name in self.members[member].input_names:
            if name in self.inputs:
                values = self.inputs[name][~is_held_out]
                digests[f"the predictions of {name}"] = blake2b(values.tobytes(), digest_size=32).hexdigest()
        return digests

    @cached_property
    def _file_digests(self) -> list[str]:
        return [file_sha256(source.data.path) for source in self.tables]

    def write_folds(self, path: Path) -> None:
        """Write the id and the fold of each row of the training table as CSV."""
        ids = self.main.table.ids
        with atomic_path(path) as temporary:
            write_csv(temporary, [ID_COLUMN, "fold"], [[ids, pa.array(self.folds[: len(ids)])]])

    def write_for_trainer(self, path: Path, rows: Rows) -> None:
        """Write what our own trainer learns: an npz file of ``rows`` and of what is learned of each."""
        groups = {} if self.groups is None else {"groups": self.groups[rows]}
        learned: dict[str, Any] = {"targets": self.targets[rows], "weights": self.weights[rows], **groups}
        with atomic_path(path) as temporary, temporary.open("wb") as stream:
            np.savez(stream, rows=rows, **learned)

    @property
    def suffix(self) -> str:
        """Return the extension of the files that ``write_for_command`` writes, that of the training table."""
        return file_extension(self.main.data.path)

    @property
    def added_columns(self) -> dict[str, _Values]:
        """Return what ``write_for_command`` writes beside the training table's own columns, by name, [rows].

        There is ``weight`` if some row's is not 1, and ``prob_<label>`` for each label if the label columns of the
        training table cannot say what is learned.
        """
        columns: dict[str, _Values] = {}
        if (self.weights != 1).any():
            columns["weight"] = self.weights
        main, *extras = self.tables
        has_one_column = main.data.label_columns is None
        if main.is_soft or (has_one_column and not all(extra.names_one_label.all() for extra in extras)):
            for label, values in zip(main.labels, self.targets.T, strict=True):
                columns[f"prob_{label}"] = values
        return columns

    def write_for_command(self, path: Path, rows: Rows, member: str = "") -> None:
        """Write a file like the training table's: some of its rows with all of their cells, and some extra rows.

        Extra rows have the columns that both tables have, and their labels in the training table's columns; other
        cells are empty. ``added_columns`` come last, and then predictions of the inputs of the ``member``.

        Args:
            rows: the numbers of the rows, rising.

        Raises:
            DataError: a cell of an extra table does not fit the format.
        """
        source = self.main.data
        extras = []
        for extra, numbers in self._extra_rows(rows):
            extras.append((extra.data.path, extra.rows_like(source).take(pa.array(numbers))))
        added = {name: values[rows] for name, values in self.added_columns.items()}
        if member:
            model = self.members[member]
            values = [column[rows] for name in model.input_names for column in self.inputs[name].T]
            added |= zip(model.input_columns(self.main.labels), values, strict=True)
        with atomic_path(path) as temporary:
            numbers = rows[rows < self.main.table.rows]
            if self.main.table.file_rows is not None:
                numbers = self.main.table.file_rows[numbers]
            copy_rows(source.path, FileRows(numbers, extras, added), temporary)

    def _extra_rows(self, rows: Rows) -> Iterator[tuple[LabelledTable, Rows]]:
        """Yield each extra table, and the numbers in it of those of ``rows`` that it has."""
        start = self.main.table.rows
        for extra in self.tables[1:]:
            end = start + extra.table.rows
            yield extra, rows[(start <= rows) & (rows < end)] - start
            start = end

    @property
    def remarks(self) -> list[str]:
        """Return sentences for the user: about labels, and rows that stand elsewhere, too."""
        rows, labels = self.main.table.rows, self.targets.argmax(axis=1)
        has_label = np.concatenate([table.names_one_label for table in self.tables])
        has_label &= self.main.activation == "softmax"
        has_fold = self.folds >= 0
        in_folds = np.zeros(self.table.rows, np.bool_)
        in_extras, with_labels = in_folds.copy(), in_folds.copy()
        for names in {key.columns for key in self.row_keys.values() if not key.with_ids} - {()}:
            digests = self.table.row_digests(names)
            in_folds[:rows] |= with_another(digests[has_fold], self.folds[has_fold])[:rows]
            in_extras[:rows] |= find_rows(digests[:rows], digests[~has_fold]) >= 0
            with_labels[has_label] |= with_another(digests[has_label], labels[has_label])
        advice = "training.folds.group_column keeps rows together that belong together"
        sentences = {
            f"whose text also stands in another fold, so that its model has learned it; {advice}": in_folds,
            "whose text also stands in a table of training.extra, so that all models have learned it": in_extras,
            "whose text has another label in another row; their models learn both": with_labels,
        }
        remarks = [*self.notes, *(text for table in self.tables for text in table.table.file_remarks)]
        for sentence, is_repeated in sentences.items():
            if is_repeated.any():
                count = plural(int(is_repeated.sum()), "row")
                shown = first_ids(self.table.ids.filter(pa.array(is_repeated)))
                remarks.append(f"{self.main.data.path}: {count} (id {shown}) {sentence}")
        for extra, numbers in self._extra_rows(rows + np.flatnonzero(has_fold[rows:])):
            if len(numbers):
                count, shown = plural(len(numbers), "row"), first_ids(extra.table.ids.take(pa.array(numbers)))
                remarks.append(
                    f"{extra.data.path}: {count} (id {shown}) of groups of {self.main.data.path}, left out of the "
                    "fold that holds their group out"
                )
        return remarks


def read_training_data(loaded: LoadedConfig) -> TrainingData:
    """Read what a config's members with ``train`` are trained on. Nothing is written.

    Raises:
        EnsembleError: of exit code 2, with every problem of the tables, their labels and their folds.
    """
    config, problems = loaded.config, Problems()
    training, data = config.training or TrainingConfig(), config.training_data
    states = {str(path.absolute()): file_state(path) for path in config.training_files}
    activation = learned_activation(config)
    models = compile_models(config.models, config.labels)
    trained = {model.name: model.training for model in config.trained_members}
    outputs = OutputColumns.of(data, config.labels)
    views = [
        view for view in member_views(config.models, models, outputs, problems) if view.member in trained
    ]
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
    files = member_files(models, data.path.parent)
    row_keys = keys_of_rows(config.models, trained, member_columns(views, trained), files)
    joined = tables[0].table.only([*dict.fromkeys(chain(*(key.columns for key in row_keys.values())))])
    for other in tables[1:]:
        joined = joined.followed_by(other.table, other.data.path)
    extra_folds, extra_groups = place_extra_rows(tables[1:], folds, groups)
    result = TrainingData(
        tables=tuple(tables),
        table=joined,
        folds=np.append(folds, extra_folds),
        groups=None if groups is None else np.append(groups.numbers, extra_groups),
        row_keys=row_keys,
        members={model.name: model for model in config.trained_members},
        inputs={},
        commands=frozenset(name for name, train in trained.items() if train is not None and train.command),
        file_states={path: state for path, state in states.items() if state is not None},
        notes=tuple(notes),
    )
    problems.add(_problems(result), DataError)
    directory = TrainingDir(config.output_dir)
    for name, reader in untrained_inputs(config).items():
        if not directory.oof(name).is_file():
            override = shlex.quote(f"data.path={shown_path(data.path)}")
            text = (
                f"{shown_path(directory.oof(name))}: no such file; {reader} learns from {name} (inputs), which has "
                f"no train: put DIR/predictions/{name}.csv there after `ensemble run CONFIG --set {override} --set "
                f"output_dir=DIR`, where CONFIG has {name} alone, with a model that has not seen these rows"
            )
            problems.add([text], DataError)
    problems.raise_any()
    return result.with_inputs({name: directory.oof(name) for name in untrained_inputs(config)})


def learned_activation(config: RunConfig) -> Activation:
    """Return what the members learn; raise ConfigError if they differ."""
    activations = {
        member_kind(model).learned_activation(len(config.labels)) for model in config.trained_members
    }
    if len(activations) > 1:
        names = listed([model.name for model in config.trained_members])
        raise ConfigError(
            f"models: {names} are trained together; give them the same problem_type or activation"
        )
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
    columns = [name for model in data.members.values() for name in model.input_columns(data.main.labels)]
    twice = [name for name in column_names(path) if name in (*data.added_columns, *columns)]
    if data.commands and twice:
        yield (
            f"{path}: has {listed(twice)}, where the files for train.command have weights or probabilities; "
            "rename these columns"
        )
    if columns and len(data.tables) > 1:
        yield "training.extra: there are no out-of-fold predictions of its rows for inputs; drop one of the two"


def untrained_inputs(config: RunConfig) -> dict[str, str]:
    """Return the members without ``train`` that a trained one reads, each with the name of that one."""
    trained = {model.name: model for model in config.trained_members}
    names = {name: model.name for model in trained.values() for name in model.input_names}
    return {name: reader for name, reader in names.items() if name not in trained}
