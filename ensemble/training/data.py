"""Read what members are trained on: the rows outside a fold, or all of them, and those of extra tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ensemble.common.errors import ConfigError, DataError
from ensemble.common.files import FileState, atomic_path, file_state
from ensemble.common.protocol import Activation
from ensemble.common.shards import file_sha256
from ensemble.common.text import listed, plural, quoted
from ensemble.config import LoadedConfig, RunConfig
from ensemble.config.training import TrainingConfig
from ensemble.data.csv_file import write_csv
from ensemble.data.distinct_cells import DistinctCells, distinct_cells
from ensemble.data.formats import column_names, file_extension
from ensemble.data.ids import ID_COLUMN
from ensemble.data.row_files import FileCells
from ensemble.data.trained_rows import IN_ALL_FOLDS, TrainedRows
from ensemble.members.huggingface.checkpoint.labels import activation_of
from ensemble.members.registry import member_kind
from ensemble.pipeline.checks import Problems
from ensemble.pipeline.labelled_table import (
    LabelledRows,
    LabelledTable,
    read_labelled_table,
)
from ensemble.pipeline.member_views import MemberView, member_columns, member_files, member_views
from ensemble.pipeline.training_dir import Part
from ensemble.training.folds import Rows, RowsToDivide, divide


@dataclass(frozen=True, kw_only=True)
class TrainingData(LabelledRows):
    """Hold the rows that members are trained on, checked and divided into folds; extra tables come last.

    Attributes:
        folds: of the training table's rows, int64 [rows], from 0 to ``splits`` - 1.
        file_states: of the files that were read, by absolute path.
        columns: that a member reads in any of its views, by the member's name.
        files: the column that names files, by name of the members that read files.
        commands: the members that are trained by a command.
    """

    folds: Rows
    file_states: Mapping[str, FileState]
    columns: Mapping[str, tuple[str, ...]]
    files: Mapping[str, FileCells]
    commands: frozenset[str]
    division: RowsToDivide

    @property
    def rows(self) -> int:
        """Return the number of rows of the training table."""
        return len(self.folds)

    @property
    def splits(self) -> int:
        return self.division.splits

    @property
    def remarks(self) -> list[str]:
        """Return sentences for the user."""
        return [*self.repeated_texts(self.folds, self.columns.values())]

    def rows_of(self, part: Part) -> Rows:
        """Return the rows to train on, rising: those outside the fold, and those of the extra tables."""
        is_trained = np.ones(self.table.rows, np.bool_)
        if part.fold is not None:
            is_trained[: self.rows] = self.folds != part.fold
        return np.flatnonzero(is_trained)

    def write_folds(self, path: Path) -> None:
        """Write the id and the fold of each row of the training table as CSV."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            write_csv(temporary, [ID_COLUMN, "fold"], [self.division.ids, pa.array(self.folds)])

    def digest(self, part: Part, member: str) -> str:
        """Return a digest of everything in the tables that a member's training on these rows depends on.

        For the built-in way these are the cells that the member reads, of these rows alone; for a command, which
        may read any column, the whole files.
        """
        arrays = self._arrays(part)
        rows = arrays.pop("rows")
        hashed = blake2b(repr((self.labels, self.activation)).encode(), digest_size=32)
        if member in self.commands:
            hashed.update("".join(self._file_digests).encode() + rows.tobytes())
        cells = self.table.row_digests(self.columns[member], self.files.get(member))[rows]
        for array in (cells, *arrays.values()):
            hashed.update(np.ascontiguousarray(array).tobytes())
        return hashed.hexdigest()

    @cached_property
    def _file_digests(self) -> list[str]:
        return [file_sha256(source.data.path) for source in self.tables]

    def trained_rows(self, member: str) -> TrainedRows:
        """Return which rows a member's models have seen: those of the training table, and then the others."""
        folds = np.full(self.table.rows, IN_ALL_FOLDS)
        folds[: self.rows] = self.folds
        return TrainedRows(self.table.row_digests(self.columns[member], self.files.get(member)), folds)

    def publish(self, folder: Path) -> Path:
        """Write the table for the built-in way, as ``PublishedTable`` reads it, and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "table.arrow"
        with atomic_path(path) as temporary:
            self.table.publish(temporary)
        return path

    def write_rows(self, part: Part, path: Path) -> None:
        """Write a part for the built-in way: an npz file of ``_arrays``."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary, temporary.open("wb") as stream:
            np.savez(stream, **self._arrays(part))

    def _arrays(self, part: Part) -> dict[str, Any]:
        """Return a part's ``rows``, with their ``targets``, ``weights`` and, if folds have groups, ``groups``."""
        rows = self.rows_of(part)
        arrays: dict[str, Any] = {"rows": rows, "targets": self.targets[rows], "weights": self.weights[rows]}
        if self.division.groups is not None:
            groups = -1 - np.arange(self.table.rows)  # each extra row is a group of its own
            groups[: self.rows] = self.division.groups.numbers
            arrays["groups"] = groups[rows]
        return arrays

    @property
    def suffix(self) -> str:
        """Return the extension of the files that ``write`` writes, that of the training table."""
        return file_extension(self.division.path)


def training_files(config: RunConfig) -> list[Path]:
    """Return the paths of the tables that members are trained on, and of soft labels."""
    training = config.training or TrainingConfig()
    paths = [config.training_data.path, training.labels]
    for extra in training.extra or ():
        paths += [extra.path, extra.labels]
    return [path for path in paths if path is not None]


def read_training_data(loaded: LoadedConfig) -> TrainingData:
    """Read what a config's members with ``train`` are trained on. Nothing is written.

    Raises:
        EnsembleError: of exit code 2, with every problem of the tables, their labels and their folds.
    """
    config, problems = loaded.config, Problems()
    training, activation = config.training or TrainingConfig(), _activation(config)
    states = {str(path.absolute()): file_state(path) for path in training_files(config)}
    kinds = {model.name: member_kind(model) for model in config.models}
    trained = {model.name: model.training for model in config.trained_members}
    views = [view for view in member_views(kinds, problems) if view.member in trained]
    tables, distinct = _read_tables(loaded, training, views, activation, problems)
    problems.raise_any()
    main, *others = tables
    joined = main.table.only(tuple(dict.fromkeys(chain(*(view.table_columns for view in views)))))
    for other in others:
        joined = joined.followed_by(other.table, other.data.path)
    division = RowsToDivide(
        config=training.folds,
        path=main.data.path,
        ids=main.table.ids,
        labels=config.labels,
        classes=main.classes,
        groups=distinct.get("group_column"),
        column=distinct.get("column"),
    )
    result = TrainingData(
        labels=config.labels,
        tables=tuple(tables),
        table=joined,
        folds=divide(division),
        file_states={path: state for path, state in states.items() if state is not None},
        columns=member_columns(views, trained),
        files=member_files(kinds, main.data.path.parent),
        commands=frozenset(
            name for name, train in trained.items() if train is not None and train.command is not None
        ),
        division=division,
    )
    problems.add(_problems(result), DataError)
    problems.raise_any()
    return result


def _read_tables(
    loaded: LoadedConfig,
    training: TrainingConfig,
    views: Sequence[MemberView],
    activation: Activation,
    problems: Problems,
) -> tuple[list[LabelledTable], dict[str, DistinctCells]]:
    """Return the training table and the extra tables, and the cells of the columns that decide folds, by key."""
    config, data = loaded.config, loaded.config.training_data
    columns = {"column": training.folds.column, "group_column": training.folds.group_column}
    also = {name: f"training.folds.{key}" for key, name in columns.items() if name is not None}
    tables: list[LabelledTable] = []
    distinct: dict[str, DistinctCells] = {}
    with problems.at():
        main = read_labelled_table(data, config, views, activation, training.labels, also)
        tables.append(main)
        for key, name in columns.items():
            with problems.at(f"training.folds.{key}"):
                if name is not None:
                    distinct[key] = distinct_cells(data.path, main.table, name)
    for number, extra in enumerate(training.extra or ()):
        with problems.at(loaded.document.where(("training", "extra", number))):
            keys = extra.as_data(data)
            table = read_labelled_table(keys, config, views, activation, extra.labels, weight=extra.weight)
            tables.append(table)
    return tables, distinct


def _activation(config: RunConfig) -> Activation:
    """Return what the members learn, by their ``problem_type``; raise ConfigError if they differ."""
    by_member = {
        model.name: activation_of(getattr(model, "problem_type", None), len(config.labels))
        for model in config.trained_members
    }
    if len(set(by_member.values())) > 1:
        names = listed([*by_member])
        raise ConfigError(f"models: {names} are trained together; give them the same problem_type")
    return next(iter(by_member.values()))


def _problems(data: TrainingData) -> Iterator[str]:
    """Yield labels that nobody could learn, and columns that a command's file would have twice."""
    if data.activation == "softmax":
        seen = [data.targets[data.rows_of(Part(fold))].sum(axis=0) > 0 for fold in range(data.splits)]
        for label, in_folds in zip(data.labels, np.array(seen).T, strict=True):
            folds = np.flatnonzero(~in_folds).tolist()
            if len(folds) == data.splits:
                where = f"{data.division.path}: no row has the label {quoted(label)}"
                yield f"{where}; add rows of it, or drop the label"
            elif folds:
                where = f"{plural(len(folds), 'fold')} ({listed([*map(str, folds)], 5, str)})"
                yield (
                    f"training.folds: all rows with the label {quoted(label)} are held out in {where}, and none is "
                    "left to train on; choose other folds, or add rows of it to training.extra"
                )
    if data.commands:
        twice = [name for name in column_names(data.division.path) if name in data.added_columns]
        if twice:
            yield (
                f"{data.division.path}: has {listed(twice)}, where the files for train.command have weights or "
                "probabilities; rename these columns"
            )
