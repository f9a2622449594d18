"""Read predictions of several members for the same rows, with the truth if there is one.

Predictions come from CSV files or from a run's directory.  A million rows of ten members with three labels take
240 MB.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.errors import ConfigError, DataError, EnsembleError
from ensemble.common.protocol import Activation
from ensemble.common.shards import file_sha256, read_bits
from ensemble.common.text import nearest_or_all, plural, quoted
from ensemble.config.document import Document, apply_overrides, expand, parse
from ensemble.config.load import data_config
from ensemble.config.schema import CalibrationConfig, DataConfig
from ensemble.data.formats import column_names
from ensemble.data.ids import ID_COLUMN, all_ids, match_ids, refuse_repeated_ids
from ensemble.data.input_file import missing_column
from ensemble.data.predictions_csv import PredictionFile, file_stem, guessed_id_column
from ensemble.data.table import DistinctCells, InputTable, TableNeeds, Truth, distinct_cells, read_table
from ensemble.merging.blocks import RowCheck
from ensemble.merging.calibration import calibrator
from ensemble.merging.methods.base import Values
from ensemble.merging.metrics import Folds, LabelledRows, Metric
from ensemble.merging.post_process import AllowedLabels, PostProcess, RowRules
from ensemble.pipeline.member_views import needs_of
from ensemble.pipeline.prediction_files import (
    ROWS_ADVICE,
    activation_of_one_label,
    named_files,
    read_as_written,
    read_columns,
)
from ensemble.pipeline.prepared import common_activation
from ensemble.pipeline.results import ENSEMBLE_ROW
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import RunReport
from ensemble.pipeline.training_dir import TrainingDir

LABEL_COLUMN: Final = "label"
_FOLD_COLUMN: Final = "fold"
_FOLDS_UNKNOWN: Final = (
    "ranks rows against each other; so that the rows of each fold's model are ranked by themselves, give fit "
    "and compare --folds-from (a table with columns id and fold), or keep out-of-fold predictions in a folder oof "
    "beside training/folds.csv"
)
_ADVICE: Final = "remove the file and run the config again, which computes it again"
T = TypeVar("T")


@dataclass(frozen=True)
class Predictions:
    """Hold predictions of the same rows by several members.

    Attributes:
        ids: text, [rows], unique.
        labels: the columns of each member.
        members: by name, float64 [rows, labels], each column contiguous; NaN in rows that the member does not have.
        activations: by member, what its values are: "softmax" for probabilities that sum to 1, "sigmoid" for one
            from 0 to 1 of each label, "none" for any numbers (regression).
        truth: of exclusive labels ("softmax") each row's label by number, int64 [rows], or how likely each label
            is, float64 [rows, labels], rows that sum to 1; of the others float64 [rows, labels]; None if unknown.
        ensemble: the merged values of a run, [rows, labels]; None for files, and if a run has merged nothing.
        post: the labels that are possible in each row, and the rules, as a run merged them; for files all and none.
        folds: which rows were predicted by models of their own, as files in ``oof/`` are: the fold of each row,
            int64 [rows]; None: not known, or one model for all rows.
        groups: the cells of the columns that divide the rows into groups, by column.
        truth_data: the table with the truth; None if that is unknown.
        made_elsewhere: whether some come from files, which may have folds that are not known.
        remarks: sentences for the user: which rows are left out, why there is no truth.
    """

    ids: pa.ChunkedArray
    labels: tuple[str, ...]
    members: dict[str, Values]
    activations: dict[str, Activation]
    truth: Truth | None = None
    ensemble: Values | None = None
    remarks: tuple[str, ...] = ()
    post: PostProcess = field(default_factory=PostProcess)
    folds: Folds | None = None
    groups: Mapping[str, DistinctCells] = field(default_factory=dict)
    truth_data: DataConfig | None = None
    made_elsewhere: bool = False

    @property
    def rows(self) -> int:
        return len(self.ids)

    @property
    def activation(self) -> Activation:
        """Return what all members are together; see ``common_activation``."""
        return common_activation(self.activations.values())

    @property
    def labelled(self) -> LabelledRows:
        """Return what is known of the rows to score all members by; a DataError says that there is no truth."""
        if self.truth is None:
            raise DataError(
                "no true labels: --labels names the file that has them, or data.label_column the column"
            )
        return LabelledRows(
            self.truth, self.activation, self.post.possible, self.folds, self.groups, self.labels
        )

    def with_groups(self, columns: Iterable[str | None]) -> Predictions:
        """Return the same with the groups that columns of the table with the truth divide its rows into."""
        data = self.truth_data
        if data is None:
            return self
        named = [column for column in columns if column is not None]
        cells = {name: _cells_of(data.path, self.ids, data.id_column, name, "group") for name in named}
        return replace(self, groups=cells)

    def with_folds(self, path: Path, id_column: str | None, metrics: Iterable[Metric]) -> Predictions:
        """Return the same with the folds that a table has, for metrics that rank rows; see ``read_folds``.

        Raises:
            ConfigError: no metric ranks rows.
        """
        if all(metric.kind != "ranks" for metric in metrics):
            raise ConfigError(
                "--folds-from: is for metrics that compare rows with each other; add --metric auc, or leave it out"
            )
        return replace(self, folds=read_folds(path, self.ids, id_column))

    def ranking_remarks(self, metrics: Iterable[Metric]) -> list[str]:
        """Return a sentence on each metric that ranks all rows, if several models may have predicted them."""
        if self.folds is not None or not self.made_elsewhere:
            return []
        return [f"{metric.name} {_FOLDS_UNKNOWN}" for metric in metrics if metric.kind == "ranks"]

    def taken(self, rows: npt.NDArray[np.int64]) -> Predictions:
        """Return the rows of these numbers, in this order."""
        return replace(
            self,
            ids=self.ids.take(pa.array(rows)),
            members={name: taken(values, rows) for name, values in self.members.items()},
            truth=None if self.truth is None else self.truth[rows],
            ensemble=None if self.ensemble is None else taken(self.ensemble, rows),
            post=self.post.taken(rows),
            folds=None if self.folds is None else self.folds[rows],
            groups={column: cells.taken(rows) for column, cells in self.groups.items()},
        )

    def as_merged(
        self, calibrations: Mapping[str, CalibrationConfig | None], keeps_impossible: bool = False
    ) -> Predictions:
        """Return the same with the members' values as a merge takes them; members without a calibration have none.

        With ``keeps_impossible``, labels that are impossible in a row keep what members give to them.
        """
        members, post = dict(self.members), PostProcess() if keeps_impossible else self.post
        for name, values in members.items():
            activation = self.activations[name]
            calibrate = calibrator(calibrations.get(name), activation, self.labels)
            if calibrate is not None or post.allowed is not None:
                members[name] = values.copy(order="F")
                post.member(0, members[name], activation, calibrate)
        return replace(self, members=members)


def taken(values: Values, rows: npt.NDArray[np.int64]) -> Values:
    """Return the rows of these numbers, each column in one piece."""
    return np.take(values.T, rows, axis=1).T


def read_files(
    paths: Sequence[str | os.PathLike[str]] | Mapping[str, Path],
    id_column: str | None = None,
    labels: Path | None = None,
    label_column: str = LABEL_COLUMN,
    activation: Activation | None = None,
    may_lack_rows: bool = False,
    advice: str = "give the same rows in each file",
    columns: Sequence[str] = (),
) -> Predictions:
    """Read predictions, each file a member, joined by id in the first file's order.

    Args:
        paths: by the members' names, or see ``named_files``.
        id_column: in each file; None: see ``guessed_id_column``.
        labels, label_column, activation: see ``read_truth``; None as activation: of several labels "softmax", of a
            single one see ``activation_of_one_label``.
        may_lack_rows: whether files may lack rows that others have, or have NaN or empty cells there; the others'
            ids follow the first's.
        advice: what to do about rows that some files lack.
        columns: the labels to read; see ``read_columns``.
    """
    if activation is not None and activation not in get_args(Activation):
        hint = nearest_or_all(str(activation), get_args(Activation), "kind")
        raise ConfigError(f"--activation: {quoted(str(activation))} is unknown; {hint}")
    names = paths if isinstance(paths, Mapping) else named_files(paths)
    cells, label_names, remarks = read_columns(names, id_column, columns, label_column, "--label")

    def read(name: str) -> PredictionFile:
        file = cells.pop(name).take_numbers(label_names, may_lack_rows)
        if not len(file.ids):
            raise DataError(f"{file.path}: has no rows below its header; give the predictions of some rows")
        refuse_repeated_ids(file.path, file.ids, file.id_column)
        return file

    files = _for_each(names, read)
    first = next(iter(files.values()))
    if activation is None and len(label_names) == 1:
        activation = activation_of_one_label(files.values())
    activations = dict.fromkeys(files, activation or "softmax")
    ids = all_ids([file.ids for file in files.values()]) if may_lack_rows else first.ids
    members = _joined(files, ids, activations, may_lack_rows, str(first.path), advice, ROWS_ADVICE)
    folds = known_folds(names.values(), ids)
    predictions = Predictions(
        ids, label_names, members, activations, remarks=tuple(remarks), folds=folds, made_elsewhere=True
    )
    if labels is None:
        return predictions
    return read_truth(predictions, labels, label_column, id_column or first.id_column)


def known_folds(paths: Iterable[Path], ids: pa.ChunkedArray) -> Folds | None:
    """Return the fold of each row, [rows], if out-of-fold predictions are among the paths; else None.

    ``training/folds.csv`` says it of ``oof/<member>.csv``, and of ``training/oof``, the directory of their run.
    """
    files = set[Path]()
    for path in paths:
        trainings = TrainingDir(path.absolute().parent.parent)
        is_out_of_fold = path.absolute() in (trainings.oof(file_stem(path)), trainings.oof_run)
        if is_out_of_fold and trainings.folds.is_file():
            files.add(trainings.folds)
    return common_folds(read_folds(file, ids, ID_COLUMN, may_lack=True) for file in sorted(files))


def common_folds(folds: Iterable[Folds | None]) -> Folds | None:
    """Return the folds of rows that several trainings divide: rows are in one if they are in one of each training.

    Folds that are None, or -1 in all rows, are left out; None: there are no others.
    """
    known = [of_training for of_training in folds if of_training is not None and (of_training >= 0).any()]
    if not known:
        return None
    return np.unique(np.array(known), axis=1, return_inverse=True)[1].reshape(-1).astype(np.int64)


def read_folds(
    path: Path, ids: pa.ChunkedArray, id_column: str | None = None, may_lack: bool = False
) -> Folds:
    """Return the fold of each row, [rows], from the column ``fold`` of a table in any input format.

    Args:
        id_column: of the predictions; the table's may have another name.
        may_lack: whether the table may lack rows, which are in fold -1.

    Raises:
        DataError: the table lacks a column, or rows, or has rows without a fold.
    """
    return _cells_of(path, ids, id_column, _FOLD_COLUMN, "fold", may_lack).numbers


def _cells_of(
    path: Path, ids: pa.ChunkedArray, id_column: str | None, column: str, use: str, may_lack: bool = False
) -> DistinctCells:
    """Return a table's cells in a column, in the order of ``ids``, with the number -1 for rows that it lacks."""
    header = column_names(path)
    if id_column is None or id_column not in header:
        id_column = guessed_id_column(header, (column,))
    table = read_table(path, TableNeeds(id_column, also={column: f"the {use}s"}))
    rows = _rows_of(ids, path, table, f"the {use} of each row is needed", may_lack)
    cells = distinct_cells(path, table, column)
    return replace(cells, numbers=np.where(rows < 0, -1, cells.numbers[rows]))


def _rows_of(
    ids: pa.ChunkedArray, path: Path, table: InputTable, advice: str, may_lack: bool = False
) -> npt.NDArray[np.int64]:
    """Return the row of a table that has each id of the predictions, [ids]; -1: the table may lack it."""
    places = match_ids(
        path, table.ids, ids, may_lack=may_lack, may_have_others=True, table="the predictions", advice=advice
    )
    rows = np.full(len(ids), -1)
    rows[places[places >= 0]] = np.flatnonzero(places >= 0)
    return rows


def _for_each(names: Iterable[str], make: Callable[[str], T]) -> dict[str, T]:
    """Return what ``make`` returns for each name; raise DataError with the problems of all."""
    results, problems = dict[str, T](), list[str]()
    for name in names:
        try:
            results[name] = make(name)
        except EnsembleError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    return results


def _joined(
    files: Mapping[str, PredictionFile],
    ids: pa.ChunkedArray,
    activations: Mapping[str, Activation],
    may_lack_rows: bool,
    table: str,
    advice: str,
    rows_advice: str,
) -> dict[str, Values]:
    """Return each file's values in the order of ``ids``, checked; the advice is for ids, and for rows."""

    def join(name: str) -> Values:
        file = files[name]
        values, _ = file.join(ids, may_lack=may_lack_rows, table=table, advice=advice)
        path = str(file.path)
        check = RowCheck(path, activations[name], ids, may_lack_rows, rows_advice, file.labels)
        check.look(0, values)
        check.refuse()
        return values

    return _for_each(files, join)


def read_truth(predictions: Predictions, path: Path, label_column: str, id_column: str | None) -> Predictions:
    """Return predictions with the truth that a table in any input format has, and remarks on what was left out.

    Args:
        label_column: if the table has none, a column per label holds 0 and 1 or how likely it is.
        id_column: of the predictions; the table's may have another name.
    """
    header = column_names(path)
    is_named = id_column in header
    column = id_column if is_named else guessed_id_column(header, (label_column, *predictions.labels))
    data = DataConfig.model_construct(path=path, id_column=str(column), label_column=label_column)
    try:
        return read_truth_of(predictions, data)
    except DataError as error:
        if is_named or column == ID_COLUMN:
            raise
        hint = f" (its ids are those of column {quoted(str(column))}; --id-column names another)"
        problems = [problem + hint if " id" in problem else problem for problem in error.problems]
        raise DataError(problems) from error


def read_truth_of(predictions: Predictions, data: DataConfig, limit: int | None = None) -> Predictions:
    """Return predictions with the truth in the columns that a config names; see ``read_truth``."""
    labels, activation = predictions.labels, predictions.activation
    column, columns = _truth_columns(data, labels, activation)
    needs = needs_of(data, labels, activation, limit)
    table = read_table(data.path, replace(needs, label_column=column, label_columns=columns))
    assert table.truth is not None
    rows = _rows_of(predictions.ids, data.path, table, "the truth of each row is needed")
    remarks = [*predictions.remarks, *table.file_remarks]
    if others := table.rows - predictions.rows:
        remarks.append(f"{plural(others, 'row')} of {data.path} left out, of ids without predictions")
    truth: Truth = table.truth[rows]
    if truth.ndim == 2 and activation == "softmax" and bool(np.isin(truth, (0.0, 1.0)).all()):
        truth = np.asarray(truth.argmax(axis=1), np.int64)
    return replace(predictions, truth=truth, remarks=tuple(remarks), truth_data=data)


def _truth_columns(
    data: DataConfig, labels: tuple[str, ...], activation: Activation
) -> tuple[str | None, tuple[str, ...]]:
    """Return the column of each row's label, or a column per label."""
    if columns := data.truth_columns(labels):
        return None, columns
    header, column = column_names(data.path), str(data.label_column)
    has_labels = {*labels} <= {*header}
    if column in header:
        if len(labels) == 1:
            return None, (column,)
        if activation == "softmax":
            return column, ()
        if has_labels:
            return None, labels
        raise DataError(
            f"{data.path}: {quoted(column)} holds one label a row, and those of the predictions are not exclusive; "
            "give the truth in a column per label"
        )
    if has_labels and column == LABEL_COLUMN:
        return None, labels
    advice = "nor is there a column per label"
    if has_labels:
        advice = "leave --label-column out to take the labels' own columns"
    raise DataError(f"{missing_column(data.path, 'label column', column, header)}; {advice}")


def calibrations_of(report: RunReport) -> dict[str, CalibrationConfig | None]:
    """Return the calibrations of a run's config, by member."""
    return {member.name: CalibrationConfig.model_validate(member.calibration) for member in report.members}


def read_run(run_dir: Path, with_truth: bool = True, label_column: str | None = None) -> Predictions:
    """Read the members' complete predictions and the ensemble from the directory of a run.

    A member's rows that the run did not merge, because ``when`` did not select them, count as missing. The truth
    comes from the table of the run's config; if it cannot be read, a remark says why. ``label_column`` replaces the
    column that the config names.

    Raises:
        DataError: this is no directory of a run, there are no predictions in it, or they are not what a run writes.
    """
    rundir, remarks = RunDir(run_dir), list[str]()
    report = RunReport.read(rundir.run_json)
    # Predictions of a member that is not complete are an earlier run's, perhaps with other settings.
    complete = [
        member
        for member in report.members
        if member.status == "complete" and rundir.predictions(member.name).exists()
    ]
    if missing := [member.name for member in report.members if member not in complete]:
        remarks.append(f"{run_dir}: no complete predictions of {', '.join(missing)}; left out")
    if not complete:
        raise DataError(f"{run_dir}: no member's predictions are complete; run its config to the end first")
    activations = {member.name: member.activation for member in complete}
    id_column, *labels = column_names(rundir.predictions(next(iter(activations))))

    def read(name: str) -> PredictionFile:
        path = rundir.ensemble if name == ENSEMBLE_ROW else rundir.predictions(name)
        file = read_as_written(path, id_column, labels)
        rows, merged = len(file.ids), report.merged_rows.get(name, 0)
        if rows < merged:
            raise DataError(f"{path}: has {plural(rows, 'row')}, and run.json says {merged:,}; {_ADVICE}")
        is_merged = read_bits(rundir.merged_rows(name), 1, rows)
        if is_merged is not None:
            file.values[~is_merged[0]] = np.nan
        return file

    files = _for_each(activations, read)
    # A member may have only some of the rows, the ensemble has all.
    whole = max(files.values(), key=lambda file: len(file.ids))
    ensemble: Values | None = None
    if rundir.ensemble.exists():
        whole = read(ENSEMBLE_ROW)
        ensemble = whole.values
    refuse_repeated_ids(whole.path, whole.ids)
    members = _joined(files, whole.ids, activations, True, str(whole.path), _ADVICE, _ADVICE)
    allowed: AllowedLabels | None = None
    if report.allowed_labels is not None and ensemble is not None:
        flags = read_bits(rundir.allowed_labels, len(labels), len(whole.ids))
        if flags is None or file_sha256(rundir.allowed_labels) != report.allowed_labels.sha256:
            raise DataError(f"{rundir.allowed_labels}: is not what the run wrote; run the config again")
        allowed = AllowedLabels(flags.T, report.allowed_labels.source)
    rules: RowRules | None = None
    if report.rules and ensemble is not None:
        is_for = read_bits(rundir.rule_rows, len(report.rules), len(whole.ids))
        if is_for is None or is_for.sum(axis=1).tolist() != [rule.rows for rule in report.rules]:
            remarks.append(f"{run_dir}: which rows its rules were for is not known; run the config again")
        else:
            rules = RowRules([rule.config for rule in report.rules], tuple(labels), is_for)
    given_files = [Path(path) for member in complete for path in member.given_files]
    predictions = Predictions(
        ids=whole.ids,
        labels=tuple(labels),
        members=members,
        activations=activations,
        ensemble=ensemble,
        remarks=tuple(remarks),
        post=PostProcess(allowed, rules),
        folds=known_folds([run_dir, *given_files], whole.ids),
        made_elsewhere=bool(given_files),
    )
    if not with_truth:
        return predictions
    try:
        return _with_truth_of_run(predictions, report, label_column)
    except EnsembleError as error:
        problems = [f"no truth: {problem}" for problem in error.problems]
        return replace(predictions, remarks=(*remarks, *problems))


def _with_truth_of_run(predictions: Predictions, report: RunReport, label_column: str | None) -> Predictions:
    """Return predictions with the truth of the run's table, if its config names any."""
    document = _document(report)
    data = data_config(document, expand(document, os.environ)).labelled_by(label_column)
    if not data.has_truth:
        return predictions
    data, limit = data.model_copy(update={"path": report.table_path()}), document.data.get("limit")
    predictions = read_truth_of(predictions, data, limit if isinstance(limit, int) else None)
    return predictions.with_groups(metric.group for metric in report.metrics)


def run_settings(report: RunReport) -> dict[str, object]:
    """Return a run's config as plain data with its overrides, ``${NAME}`` as it was written, so without secrets."""
    return _document(report).data


def _document(report: RunReport) -> Document:
    document = parse(report.config, Path("config of the run"))
    apply_overrides(document, report.overrides)
    return document
