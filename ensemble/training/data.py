"""Read what members are trained on: the rows outside a fold, or all of them, and those of extra tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from ensemble.common.text import listed, quoted
from ensemble.config import LoadedConfig, RunConfig
from ensemble.config.training import TrainingConfig
from ensemble.data.csv_file import write_csv
from ensemble.data.formats import column_names, file_extension
from ensemble.data.ids import ID_COLUMN
from ensemble.data.row_files import FileCells
from ensemble.data.trained_rows import IN_ALL_FOLDS, TrainedRows
from ensemble.members.huggingface.checkpoint.labels import activation_of
from ensemble.members.registry import member_kind
from ensemble.pipeline.checks import Problems
from ensemble.pipeline.labelled_table import LabelledRows, LabelledTable, read_labelled_table
from ensemble.pipeline.member_views import member_columns, member_files, member_views
from ensemble.training.folds import Rows, divide
from ensemble.training.layout import Part


@dataclass(frozen=True, kw_only=True)
class TrainingData(LabelledRows):
    """Hold the rows that members are trained on, checked and divided into folds; extra tables come last.

    Attributes:
        folds: of all rows, int64 [all rows], from 0 to ``splits`` - 1; those of extra tables are ``IN_ALL_FOLDS``.
        groups: of rows that stay together, int64 [all rows]; None: there are no groups.
        columns: that a member reads in any of its views, by the member's name.
        files: the column that names files, by name of the members that read files.
        commands: the members that are trained by a command.
        file_states: of the files that were read, by absolute path.
    """

    folds: Rows
    groups: Rows | None
    columns: Mapping[str, tuple[str, ...]]
    files: Mapping[str, FileCells]
    commands: frozenset[str]
    file_states: Mapping[str, FileState]

    @property
    def splits(self) -> int:
        return int(self.folds.max()) + 1

    @property
    def suffix(self) -> str:
        """Return the extension of the files that ``write`` writes, that of the training table."""
        return file_extension(self.first.data.path)

    @property
    def remarks(self) -> list[str]:
        """Return sentences for the user."""
        return [*self.repeated_texts(self.folds, self.columns.values())]

    def rows_of(self, part: Part) -> Rows:
        """Return the rows to train on, rising: those outside the fold, and those of the extra tables."""
        if part.fold is None:
            return np.arange(len(self.folds))
        return np.flatnonzero(self.folds != part.fold)

    def trained_rows(self, member: str) -> TrainedRows:
        """Return which rows a member's models have seen."""
        digests = self.table.row_digests(self.columns[member], self.files.get(member))
        return TrainedRows(digests, self.folds)

    def digest(self, part: Part, member: str) -> str:
        """Return a digest of everything in the tables that a member's training on these rows depends on.

        For the built-in way these are the cells that the member reads, of these rows alone; for a command, which
        may read any column, the whole files.
        """
        rows = self.rows_of(part)
        hashed = blake2b(repr((self.first.labels, self.first.activation)).encode(), digest_size=32)
        if member in self.commands:
            hashed.update("".join(self._file_digests).encode() + rows.tobytes())
        for array in (self.trained_rows(member).digests[rows], *self._learned(rows).values()):
            hashed.update(array.tobytes())
        return hashed.hexdigest()

    @cached_property
    def _file_digests(self) -> list[str]:
        return [file_sha256(source.data.path) for source in self.tables]

    def _learned(self, rows: Rows) -> dict[str, Any]:
        """Return the ``targets``, ``weights`` and, if there are any, ``groups`` of rows: an array each."""
        arrays = {"targets": self.targets[rows], "weights": self.weights[rows]}
        return arrays if self.groups is None else {**arrays, "groups": self.groups[rows]}

    def write_folds(self, path: Path) -> None:
        """Write the id and the fold of each row of the training table as CSV."""
        ids = self.first.table.ids
        with atomic_path(path) as temporary:
            write_csv(temporary, [ID_COLUMN, "fold"], [ids, pa.array(self.folds[: len(ids)])])

    def write_rows(self, part: Part, path: Path) -> None:
        """Write a part for the built-in way: an npz file of its ``rows`` and of what is learned of each."""
        rows = self.rows_of(part)
        with atomic_path(path) as temporary, temporary.open("wb") as stream:
            np.savez(stream, rows=rows, **self._learned(rows))


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
    with problems.at():
        also = {name: f"training.folds.{key}" for key, name in training.folds.columns.items()}
        tables.append(read_labelled_table(data, config, views, activation, training.labels, also))
        folds, groups = divide(tables[0], training.folds)
    for number, extra in enumerate(training.extra or ()):
        with problems.at(loaded.document.where(("training", "extra", number))):
            keys = extra.as_data(data)
            table = read_labelled_table(keys, config, views, activation, extra.labels, weight=extra.weight)
            tables.append(table)
    problems.raise_any()
    columns = member_columns(views, trained)
    joined = tables[0].table.only([*dict.fromkeys(chain.from_iterable(columns.values()))])
    for other in tables[1:]:
        joined = joined.followed_by(other.table, other.data.path)
    extra_rows = np.arange(joined.rows - len(folds))
    result = TrainingData(
        tables=tuple(tables),
        table=joined,
        folds=np.append(folds, np.full_like(extra_rows, IN_ALL_FOLDS)),
        groups=None if groups is None else np.append(groups, -1 - extra_rows),  # a group for each
        columns=columns,
        files=member_files(kinds, data.path.parent),
        commands=frozenset(name for name, train in trained.items() if train is not None and train.command),
        file_states={path: state for path, state in states.items() if state is not None},
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
    path = data.first.data.path
    if data.first.activation == "softmax":
        for label, values in zip(data.first.labels, data.targets.T, strict=True):
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
