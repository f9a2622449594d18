"""Predictions of several members for the same rows, in memory, with the truth where it is known.

From CSV files, or from a run's directory.  A million rows of ten members with three labels are 240 MB.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import ValidationError

from ensemble.common.errors import ConfigError, DataError, EnsembleError
from ensemble.common.protocol import Activation
from ensemble.common.text import nearest_or_all, plural, quoted
from ensemble.config.check import data_config
from ensemble.config.document import Document
from ensemble.config.overlays import apply_overrides, expand
from ensemble.config.schema import CalibrationConfig, DataConfig
from ensemble.config.yamlfile import parse
from ensemble.data.formats import column_names
from ensemble.data.ids import ID_COLUMN, all_ids, match_ids, refuse_repeated_ids
from ensemble.data.input_file import missing_column
from ensemble.data.predictions_csv import (
    PredictionFile,
    demand_as_written,
    guessed_id_column,
    read_predictions,
)
from ensemble.data.table import TableNeeds, Truth, read_table
from ensemble.merging.calibration import calibrator
from ensemble.merging.row_checks import RowCheck
from ensemble.merging.rules import RowRules
from ensemble.pipeline.prediction_files import ROWS_ADVICE, file_columns, named_files
from ensemble.pipeline.results import ENSEMBLE_ROW
from ensemble.pipeline.reuse import read_bits
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import RunReport

LABEL_COLUMN: Final = "label"
_ADVICE: Final = "remove the file and run the config again, which computes it again"
Values: TypeAlias = npt.NDArray[np.float64]
T = TypeVar("T")


@dataclass(frozen=True)
class Predictions:
    """Predictions of the same rows by several members.

    Attributes:
        ids: text, [rows], unique.
        labels: the columns of each member.
        members: by name, float64 [rows, labels], each column contiguous; NaN in rows that the member does not have.
        activations: by member, what its values are: "softmax" for probabilities that sum to 1, "sigmoid" for one
            from 0 to 1 of each label, "none" for any numbers (regression).
        truth: of exclusive labels ("softmax") each row's label by number, int64 [rows], or how likely each label
            is, float64 [rows, labels], rows that sum to 1; of the others float64 [rows, labels]; None if unknown.
        ensemble: what a run has merged, [rows, labels]; None for files, and of a run that has merged nothing.
        rules: what a run has changed of that, with the rows; None for files, and of a run without rules.
        remarks: what the user should know: rows left out, why there is no truth, a sentence each.
    """

    ids: pa.ChunkedArray
    labels: tuple[str, ...]
    members: dict[str, Values]
    activations: dict[str, Activation]
    truth: Truth | None
    ensemble: Values | None = None
    remarks: tuple[str, ...] = ()
    rules: RowRules | None = None

    @property
    def rows(self) -> int:
        return len(self.ids)

    @property
    def activation(self) -> Activation:
        """Return what all members are together: "softmax" only if each one is."""
        activations = set(self.activations.values())
        return "none" if "none" in activations else "sigmoid" if "sigmoid" in activations else "softmax"


def read_files(
    paths: Sequence[str | os.PathLike[str]] | Mapping[str, Path],
    id_column: str | None = None,
    labels: Path | None = None,
    label_column: str = LABEL_COLUMN,
    activation: Activation | None = None,
    columns: Sequence[str] | None = None,
    may_lack_rows: bool = False,
    advice: str = "give the same rows in each file",
) -> Predictions:
    """Read CSVs of predictions, each a member, joined by id in the first file's order.

    Args:
        paths: by the members' names, or see ``named_files``.
        id_column: in each file; None: see ``guessed_id_column``.
        labels: the table of the truth, in any input format.
        label_column: of that table; if it is missing, a column per label holds 0 and 1 or how likely it is.
        activation: what the values are; None: of several labels "softmax", of a single one "sigmoid" if all values
            are from 0 to 1, else "none".
        columns: the labels; None: all columns but the ids, which must be the same ones in each file.
        may_lack_rows: whether files may lack rows that others have, or have NaN or empty cells there; the others'
            ids follow the first's.
        advice: what to do about rows that some files lack.

    Raises:
        ConfigError: the activation is unknown; see also ``named_files``.
        DataError: with every problem of the first kind that there is: files that cannot be read, that have other
            columns or ids, or rows that are no probabilities; a truth that does not fit them.
    """
    if activation is not None and activation not in get_args(Activation):
        hint = nearest_or_all(str(activation), get_args(Activation), "kind")
        raise ConfigError(f"--activation: {quoted(str(activation))} is unknown; {hint}")
    names = paths if isinstance(paths, Mapping) else named_files(paths)
    first_name = next(iter(names))
    id_columns, label_names = file_columns(names, id_column, columns or (), label_column)

    def read(name: str) -> PredictionFile:
        file = read_predictions(names[name], id_columns[name], label_names, may_lack_rows)
        if not len(file.ids):
            raise DataError(f"{file.path}: has no rows below its header; give the predictions of some rows")
        refuse_repeated_ids(file.path, file.ids, id_column or id_columns[name])
        return file

    files = _for_each(names, read)
    ids = all_ids([file.ids for file in files.values()]) if may_lack_rows else files[first_name].ids

    def join(name: str) -> Values:
        table = str(names[first_name])
        return files[name].join(ids, may_lack=may_lack_rows, table=table, advice=advice)[0]

    members = _for_each(names, join)
    if activation is None and len(label_names) == 1:
        is_probability = all(np.nanmin(each) >= 0 and np.nanmax(each) <= 1 for each in members.values())
        activation = "sigmoid" if is_probability else "none"
    activations = dict.fromkeys(members, activation or "softmax")
    _check_rows(members, activations, ids, names, may_lack_rows, ROWS_ADVICE)
    predictions = Predictions(ids, label_names, members, activations, truth=None)
    if labels is None:
        return predictions
    truth, remarks = read_truth(
        labels,
        ids,
        label_names,
        predictions.activation,
        label_column,
        id_column or id_columns[first_name],
    )
    return Predictions(ids, label_names, members, activations, truth, remarks=tuple(remarks))


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


def _check_rows(
    members: Mapping[str, Values],
    activations: Mapping[str, Activation],
    ids: pa.ChunkedArray,
    paths: Mapping[str, Path],
    may_lack_rows: bool,
    advice: str,
) -> None:
    def check(name: str) -> None:
        row_check = RowCheck(str(paths[name]), activations[name], ids, may_lack_rows, advice)
        row_check.look(0, members[name])
        row_check.refuse()

    _for_each(members, check)


def read_truth(
    path: Path,
    ids: pa.ChunkedArray,
    labels: tuple[str, ...],
    activation: Activation,
    label_column: str = LABEL_COLUMN,
    id_column: str | None = None,
) -> tuple[Truth, list[str]]:
    """Read the truth of the rows ``ids``, see ``Predictions.truth``, from a table in any input format.

    Args:
        activation: of the predictions.
        label_column: see ``read_files``.
        id_column: of the predictions; the table's may have another name.

    Returns:
        the truth, and what was left out, a sentence each.

    Raises:
        DataError: it cannot be read, lacks rows, or does not fit labels and activation.
    """
    header = column_names(path)
    is_named = id_column in header
    column = id_column if is_named else guessed_id_column(header, (label_column, *labels))
    data = DataConfig.model_construct(path=path, id_column=str(column), label_column=label_column)
    try:
        return read_truth_of(data, ids, labels, activation)
    except DataError as error:
        if is_named or column == ID_COLUMN:
            raise
        hint = f" (its ids are those of column {quoted(str(column))}; --id-column names another)"
        problems = [problem + hint if " id" in problem else problem for problem in error.problems]
        raise DataError(problems) from error


def read_truth_of(
    data: DataConfig,
    ids: pa.ChunkedArray,
    labels: tuple[str, ...],
    activation: Activation,
    limit: int | None = None,
) -> tuple[Truth, list[str]]:
    """Read the truth from the columns that a config names; see ``read_truth``."""
    column, columns = _truth_columns(data, labels, activation)
    needs = TableNeeds(
        id_column=data.id_column,
        label_column=column,
        labels=labels,
        columns=(),
        json_columns=(),
        text_columns=(),
        limit=limit,
        label_columns=columns,
        truth_as=activation,
    )
    table = read_table(data.path, needs)
    assert table.truth is not None
    places = match_ids(
        data.path,
        table.ids,
        ids,
        may_have_others=True,
        table="the predictions",
        advice="the truth of each row is needed",
    )
    remarks = []
    if others := table.rows - len(ids):
        remarks.append(f"{plural(others, 'row')} of {data.path} left out, of ids without predictions")
    rows = np.flatnonzero(places >= 0)
    truth: Truth = table.truth[rows[np.argsort(places[rows])]]
    if truth.ndim == 2 and activation == "softmax" and bool(np.isin(truth, (0.0, 1.0)).all()):
        truth = np.asarray(truth.argmax(axis=1), np.int64)
    return truth, remarks


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
    missing = missing_column(data.path, "label column", column, header)
    if has_labels:
        raise DataError(f"{missing}; leave --label-column out to take the labels' own columns")
    raise DataError(f"{missing}; nor is there a column per label")


def as_merged(predictions: Predictions, report: RunReport) -> dict[str, Values]:
    """Return the members' values after the calibrations of their run, [rows, labels], as the run has merged them.

    Raises:
        DataError: a calibration in run.json cannot be read.
    """
    settings = {member.name: member.calibration for member in report.members}
    calibrated = dict(predictions.members)
    for name, values in predictions.members.items():
        try:
            calibration = CalibrationConfig.model_validate(settings[name])
        except ValidationError as error:
            raise DataError(
                "a member's calibration in run.json cannot be read; run the config again"
            ) from error
        calibrate = calibrator(calibration, predictions.activations[name], predictions.labels)
        if calibrate is not None:
            calibrated[name] = values.copy(order="F")
            calibrate(calibrated[name])
    return calibrated


def read_run(
    run_dir: Path,
    truth: Literal["needed", "if there", "no"] = "if there",
    label_column: str | None = None,
) -> Predictions:
    """Read the members' complete predictions and the ensemble from the directory of a run.

    Rows that a member has and the run has not merged, as its ``when`` did not select them, count as missing.

    Args:
        truth: whether to read it from the table of the run's config; "if there": if it cannot be read, a remark
            says why.
        label_column: of that table, in place of what the config names.

    Raises:
        DataError: this is no directory of a run, there are no predictions in it, they are not what a run writes, or
            the truth is needed and cannot be read.
    """
    rundir, remarks = RunDir(run_dir), list[str]()
    report = RunReport.read(rundir.run_json)
    # Predictions of a member that is not complete are an earlier run's, perhaps with other settings.
    complete = [member for member in report.members if member.status == "complete"]
    paths = {member.name: rundir.predictions(member.name) for member in complete}
    paths = {name: path for name, path in paths.items() if path.exists()}
    if missing := [member.name for member in report.members if member.name not in paths]:
        remarks.append(f"{run_dir}: no complete predictions of {', '.join(missing)}; left out")
    if not paths:
        raise DataError(f"{run_dir}: no member's predictions are complete; run its config to the end first")
    activations = dict[str, Activation]()
    for member in complete:
        if member.activation is None:
            raise DataError(f"{run_dir}: its run.json was written by an older version; run the config again")
        activations[member.name] = member.activation
    id_column, *labels = column_names(next(iter(paths.values())))

    def read(name: str) -> PredictionFile:
        path = paths.get(name, rundir.ensemble)
        demand_as_written(path)
        file = read_predictions(path, id_column, labels)
        needed = report.merged_rows.get(name, 0)
        if len(file.ids) < needed:
            raise DataError(
                f"{path}: has {plural(len(file.ids), 'row')}, and run.json says {needed:,}; {_ADVICE}"
            )
        return file

    files = _for_each(paths, read)
    # A member may have only some of the rows, the ensemble has all.
    whole = max(files.values(), key=lambda file: len(file.ids))
    ensemble: Values | None = None
    if rundir.ensemble.exists():
        whole = read(ENSEMBLE_ROW)
        ensemble = whole.values
    refuse_repeated_ids(whole.path, whole.ids)
    ids = whole.ids

    def join(name: str) -> Values:
        file = files[name]
        is_merged = read_bits(rundir.merged_rows(name), 1, len(file.ids))
        if is_merged is not None:
            file.values[~is_merged[0]] = np.nan
        return file.join(ids, may_lack=True, table=str(whole.path), advice=_ADVICE)[0]

    members = _for_each(files, join)
    activations = {name: activations[name] for name in members}
    _check_rows(members, activations, ids, paths, may_lack_rows=True, advice=_ADVICE)
    rules: RowRules | None = None
    if report.rules and ensemble is not None:
        is_for = read_bits(rundir.rule_rows, len(report.rules), len(ids))
        if is_for is None or is_for.sum(axis=1).tolist() != [rule.rows for rule in report.rules]:
            remarks.append(f"{run_dir}: which rows its rules were for is not known; run the config again")
        else:
            rules = RowRules([rule.config for rule in report.rules], tuple(labels), is_for)
    true: Truth | None = None
    predictions = Predictions(ids, tuple(labels), members, activations, None, ensemble, rules=rules)
    if truth != "no":
        try:
            true, more_remarks = _truth_of_run(run_dir, report, predictions, label_column, truth == "needed")
            remarks += more_remarks
        except EnsembleError as error:
            if truth == "needed":
                raise DataError(error.problems) from error
            remarks += [f"no truth: {problem}" for problem in error.problems]
    return Predictions(ids, tuple(labels), members, activations, true, ensemble, tuple(remarks), rules)


def _truth_of_run(
    run_dir: Path, report: RunReport, predictions: Predictions, label_column: str | None, is_needed: bool
) -> tuple[Truth | None, list[str]]:
    """Return the truth and remarks as ``read_truth`` does; None if the config names none and it is not needed."""
    document = _document(report)
    data = data_config(document, expand(document, os.environ))
    if label_column is not None:
        data = data.model_copy(update={"label_column": label_column, "label_columns": None})
    if data.label_column is None and data.label_columns is None:
        if is_needed:
            raise DataError(
                f"{run_dir}: its config names no true labels; set data.label_column or data.label_columns"
            )
        return None, []
    data = data.model_copy(update={"path": report.table_path()})
    limit = document.data.get("limit")
    return read_truth_of(
        data,
        predictions.ids,
        predictions.labels,
        predictions.activation,
        limit if isinstance(limit, int) else None,
    )


def run_settings(report: RunReport) -> dict[str, object]:
    """Return a run's config as plain data with its overrides, ``${NAME}`` as it was written, so without secrets."""
    return _document(report).data


def _document(report: RunReport) -> Document:
    document = parse(report.config, Path("config of the run"))
    apply_overrides(document, report.overrides)
    return document
