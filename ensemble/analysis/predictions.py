"""Predictions of several members for the same rows, in memory, with the truth where it is known.

From CSV files, or from a run's directory.  A million rows of ten members with three labels are 240 MB.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from ensemble.common.errors import ConfigError, DataError, EnsembleError, MergeError
from ensemble.common.protocol import SUM_TOLERANCE, Activation
from ensemble.common.text import listed, nearest_or_all, plural, quoted
from ensemble.config.check import data_config
from ensemble.config.document import Document
from ensemble.config.overrides import apply_overrides, expand
from ensemble.config.schema import CalibrationConfig, DataConfig
from ensemble.config.yamlfile import parse
from ensemble.data.csv_file import read_header
from ensemble.data.formats import read_contents
from ensemble.data.input_file import Wanted, first_ids, malloc_for_arrow, missing_column
from ensemble.data.predictions_csv import (
    ID_COLUMN,
    demand_as_written,
    guessed_id_column,
    read_numbers,
    repeated_ids,
    repeated_text,
)
from ensemble.data.table import TableNeeds, Truth, read_table
from ensemble.merging.blocks import block_spans
from ensemble.merging.calibration import calibrator
from ensemble.merging.row_checks import RowCheck
from ensemble.merging.rules import RowRules
from ensemble.pipeline.prediction_files import ROWS_ADVICE, file_columns, named_files
from ensemble.pipeline.reuse import rows_merged, rule_rows
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import RunReport

LABEL_COLUMN: Final = "label"
_ADVICE: Final = "remove the file and run the config again, which computes it again"
Values: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Predictions:
    """Attributes:
    ids: of the rows, text, [rows], unique.
    labels: the columns of each member.
    members: by name, float64 [rows, labels], each column in one piece; a row of NaN is one that the member does
        not have.
    activations: by member name, what its values are: "softmax" for probabilities that sum to 1, "sigmoid" for one
        from 0 to 1 of each label, "none" for any numbers (regression).
    truth: of exclusive labels ("softmax") each row's label by number, int64 [rows], or how likely each label is,
        float64 [rows, labels], rows that sum to 1; of the others float64 [rows, labels]; None if it is not known.
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
        """Of all members together: "softmax" only where it is each one's."""
        found = set(self.activations.values())
        return "none" if "none" in found else "sigmoid" if "sigmoid" in found else "softmax"


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
    """Reads CSVs of predictions, each a member, joined by id in the first file's order.

    Args:
        paths: by the members' names, or see ``named_files``.
        id_column: in each file; None: see ``guessed_id_column``.
        labels: the table of the truth, in any input format.
        label_column: of that table; where it is not there, a column per label holds 0 and 1 or how likely it is.
        activation: what the values are; None: of several labels "softmax", of a single one "sigmoid" where all
            values are from 0 to 1, else "none".
        columns: the labels; None: all columns but the ids, which must be the same ones in each file.
        may_lack_rows: each may lack rows that others have, or have NaN or empty cells there; the others' ids follow
            the first's.
        advice: what to do where some lack rows and may not.

    Raises:
        ConfigError: there is no such kind of values; see also ``named_files``.
        DataError: with every problem of the first kind that there is: files that cannot be read, that have other
            columns or ids, or rows that are no probabilities; a truth that does not fit them.
    """
    if activation is not None and activation not in get_args(Activation):
        hint = nearest_or_all(str(activation), get_args(Activation), "kind")
        raise ConfigError(f"--activation: {quoted(str(activation))} is unknown; {hint}")
    names = paths if isinstance(paths, Mapping) else named_files(paths)
    first_name = next(iter(names))
    id_columns, label_names = file_columns(names, id_column, columns or (), label_column)
    found: dict[str, tuple[pa.ChunkedArray, Values]] = {}
    problems: list[str] = []
    with malloc_for_arrow():
        for name, path in names.items():
            try:
                ids, values = read_numbers(path, id_columns[name], label_names, may_lack_rows)
                if not len(ids):
                    raise DataError(
                        f"{path}: has no rows below its header; give the predictions of some rows"
                    )
                if len(repeated := repeated_ids(ids)):
                    raise DataError(repeated_text(path, repeated, id_column or id_columns[name]))
                found[name] = ids, np.asfortranarray(values)
                if not may_lack_rows:
                    first, _ = found[next(iter(found))]
                    _refuse_other_rows(names[first_name], first, path, ids, advice)
            except EnsembleError as error:
                problems += error.problems
        if problems:
            raise DataError(problems)
        ids = _all_ids([own for own, _ in found.values()])
        members = {
            name: np.asfortranarray(_joined(names[name], own, values, ids, "", may_lack_rows=True))
            for name, (own, values) in found.items()
        }
        found.clear()
    if activation is None:
        is_single = len(label_names) == 1
        activation = _told_by([*members.values()]) if is_single else "softmax"
    for values, path in zip(members.values(), names.values(), strict=True):
        problems += _row_problems(RowCheck(str(path), activation, ids, may_lack_rows, ROWS_ADVICE), values)
    if problems:
        raise DataError(problems)
    truth, remarks = None, list[str]()
    if labels is not None:
        truth, left_out = read_truth(
            labels, ids, label_names, activation, label_column, id_column or id_columns[first_name]
        )
        remarks += left_out
    return Predictions(
        ids, label_names, members, dict.fromkeys(members, activation), truth, None, tuple(remarks)
    )


def read_truth(
    path: Path,
    ids: pa.ChunkedArray,
    labels: tuple[str, ...],
    activation: Activation,
    label_column: str = LABEL_COLUMN,
    id_column: str | None = None,
) -> tuple[Truth, list[str]]:
    """Reads the truth of the rows ``ids``, see ``Predictions.truth``, from a table in any input format.

    Args:
        activation: of the predictions.
        label_column, id_column: see ``read_files``; an id column of another name than the predictions' is its own.

    Returns:
        the truth, and what was left out, a sentence each.

    Raises:
        DataError: it cannot be read, lacks rows, or does not fit labels and activation.
    """
    remarks: list[str] = []
    header = _header(path)
    own = id_column if id_column in header else None
    column = own or guessed_id_column(header, (label_column, *labels))
    source = _TruthSource(path, column, label_column, (), None)
    try:
        return _truth(source, ids, labels, activation, remarks, header), remarks
    except DataError as error:
        if own or column == ID_COLUMN:
            raise
        hint = f" (its ids are those of column {quoted(column)}; --id-column names another)"
        raise DataError([one + hint * (" id" in one) for one in error.problems]) from error


def read_truth_of(
    data: DataConfig, ids: pa.ChunkedArray, labels: tuple[str, ...], activation: Activation
) -> tuple[Truth, list[str]]:
    """Reads the truth that a config names, by ``label_column`` or ``label_columns``; else as ``read_truth``."""
    remarks: list[str] = []
    source = _TruthSource(data.path, data.id_column, data.label_column, data.truth_columns(labels), None)
    return _truth(source, ids, labels, activation, remarks), remarks


def calibrations_of(report: RunReport) -> dict[str, CalibrationConfig]:
    """Those by which a run has merged, by member name, of the members that have one.

    Raises:
        DataError: run.json says what is none.
    """
    try:
        found = {one.name: CalibrationConfig.model_validate(one.calibration) for one in report.members}
    except ValidationError as error:
        raise DataError("a member's calibration in run.json cannot be read; run the config again") from error
    return {name: one for name, one in found.items() if one != CalibrationConfig()}


def as_merged(predictions: Predictions, calibrations: Mapping[str, CalibrationConfig]) -> dict[str, Values]:
    """The members' values after their calibration, [rows, labels]; those without one are the same arrays."""
    found = dict(predictions.members)
    for name, values in predictions.members.items():
        calibrate = calibrator(calibrations.get(name), predictions.activations[name], predictions.labels)
        if calibrate is not None:
            found[name] = values.copy(order="F")
            for start, stop in block_spans(*values.shape):
                calibrate(found[name][start:stop])
    return found


def read_run(
    run_dir: Path,
    truth: Literal["needed", "if there", "no"] = "if there",
    label_column: str | None = None,
) -> Predictions:
    """Reads the members' complete predictions and the ensemble from the directory of a run, as they stand there.

    Rows that a member has and the run has not merged, as its ``when`` does not ask for them, count as not there.

    Args:
        truth: from the table of the run's config; "needed": without it there is nothing to do.  "if there": why it
            could not be had, if the config names it, is a remark.
        label_column: of that table, in place of what the config names.

    What a member's values are is taken from run.json; where that is from before it said so, they tell it.

    Raises:
        DataError: this is no directory of a run, there are no predictions in it, they are not what a run writes, or
            the truth is needed and cannot be had.
    """
    rundir, remarks, problems = RunDir(run_dir), list[str](), list[str]()
    report = RunReport.read(rundir.run_json)
    paths = {one.name: rundir.predictions(one.name) for one in report.members}
    # What stands there of a member that is not complete is an earlier run's, perhaps with other settings.
    complete = [one.name for one in report.members if one.status == "complete"]
    if missing := [name for name, path in paths.items() if name not in complete or not path.exists()]:
        remarks.append(f"{run_dir}: no complete predictions of {', '.join(missing)}; left out")
    paths = {name: path for name, path in paths.items() if name not in missing}
    if not paths:
        raise DataError(f"{run_dir}: no member's predictions are complete; run its config to the end first")
    header = read_header(next(iter(paths.values())))
    id_column, labels = header[0], header[1:]
    found: dict[Path, tuple[pa.ChunkedArray, Values]] = {}
    with malloc_for_arrow():
        for path in [*([rundir.ensemble] if rundir.ensemble.exists() else []), *paths.values()]:
            try:
                if path != rundir.ensemble:
                    demand_as_written(path)
                found[path] = read_numbers(path, id_column, labels)
            except EnsembleError as error:
                problems += error.problems
        if problems:
            raise DataError(problems)
        _refuse_fewer_rows(report, {name: (path, len(found[path][0])) for name, path in paths.items()})
        # Members may have only some rows, in the table's order; what was merged has all of them.
        merged_rows = {path: rundir.merged_rows(name) for name, path in paths.items()}
        longest = max(found, key=lambda path: len(found[path][0]))
        ids = found[rundir.ensemble if rundir.ensemble in found else longest][0]
        for path, (own, values) in found.items():
            if path in merged_rows:
                values[~rows_merged(merged_rows[path], len(values))] = np.nan
            whole = _joined(path, own, values, ids, "", path != rundir.ensemble)
            found[path] = own, np.asfortranarray(whole)
    members = {name: found[path][1] for name, path in paths.items()}
    told = {one.name: one.activation for one in report.members}
    guessed = _activations(members)
    activations = {name: told[name] or guessed[name] for name in members}
    for name, values in members.items():
        problems += _row_problems(RowCheck(str(paths[name]), activations[name], ids, True, _ADVICE), values)
    if problems:
        raise DataError(problems)
    merged = found[rundir.ensemble][1] if rundir.ensemble in found else None
    rules: RowRules | None = None
    if report.rules and merged is not None:
        places = rule_rows(rundir.rule_rows, [one.rows for one in report.rules], len(ids))
        if places is None:
            remarks.append(f"{run_dir}: which rows its rules were for is not known; run the config again")
        else:
            rules = RowRules([one.config for one in report.rules], labels, places)
    predictions = Predictions(ids, labels, members, activations, None, merged)
    known: Truth | None = None
    if truth != "no":
        try:
            if (source := _truth_of_run(run_dir, report, labels, label_column)) is not None:
                known = _truth(source, ids, labels, predictions.activation, remarks)
            elif truth == "needed":
                raise DataError(
                    f"{run_dir}: its config names no true labels; set data.label_column or data.label_columns"
                )
        except EnsembleError as error:
            if truth == "needed":
                raise DataError(error.problems) from error
            remarks += [f"no truth: {problem}" for problem in error.problems]
    return Predictions(ids, labels, members, activations, known, merged, tuple(remarks), rules)


def _refuse_fewer_rows(report: RunReport, found: Mapping[str, tuple[Path, int]]) -> None:
    """Raises DataError where files, by member, have fewer rows than the run has merged, or must have had."""
    settings = run_settings(report)
    models, defaults = settings.get("models"), settings.get("defaults")
    common = defaults if isinstance(defaults, dict) else {}
    given = [common | one for one in models if isinstance(one, dict)] if isinstance(models, list) else []
    may_lack = {one.get("name") for one in given if one.get("partial") or one.get("when")}
    problems = []
    for name, (path, rows) in found.items():
        needed = report.merged_rows.get(name, 0 if name in may_lack else report.rows)
        if rows < needed:
            problems.append(
                f"{path}: has {plural(rows, 'row')}, and run.json says {needed:,}; remove the file and run the "
                "config again, which computes it again"
            )
    if problems:
        raise DataError(problems)


@dataclass(frozen=True)
class _TruthSource:
    """Where the truth stands; either column or columns; both are looked for where ``columns`` is empty."""

    path: Path
    id_column: str
    column: str | None
    columns: tuple[str, ...]
    limit: int | None


def run_settings(report: RunReport) -> dict[str, object]:
    """A run's config as plain data with its overrides, ``${NAME}`` as it was written; secrets were never in it."""
    return _document(report).data


def _document(report: RunReport) -> Document:
    document = parse(report.config, Path("config of the run"))
    apply_overrides(document, report.overrides)
    return document


def _truth_of_run(
    run_dir: Path, report: RunReport, labels: tuple[str, ...], label_column: str | None
) -> _TruthSource | None:
    """None where the config names none; ``label_column`` takes the place of what it names."""
    document = _document(report)
    variables = {**os.environ, "CONFIG_DIR": str(run_dir.absolute())}
    data = data_config(document, expand(document, variables))
    if label_column is not None:
        data = data.model_copy(update={"label_column": label_column, "label_columns": None})
    if data.label_column is None and data.label_columns is None:
        return None
    path = report.table_path()
    limit = document.data.get("limit")
    columns = data.truth_columns(labels)
    return _TruthSource(
        path, data.id_column, data.label_column, columns, limit if isinstance(limit, int) else None
    )


def _truth(
    source: _TruthSource,
    ids: pa.ChunkedArray,
    labels: tuple[str, ...],
    activation: Activation,
    remarks: list[str],
    header: tuple[str, ...] | None = None,
) -> Truth:
    """The truth of the rows ``ids``, in their order; ``remarks`` takes what was left out.

    Args:
        header: of the source, where it is known.
    """
    column, columns = source.column, source.columns
    header = _header(source.path) if header is None else header
    if columns:
        column = None
    elif column in header and len(labels) == 1:
        column, columns = None, (str(column),)
    elif set(labels) <= {*header} and column not in header and column != LABEL_COLUMN:
        raise DataError(
            f"{missing_column(source.path, 'label column', str(column), header)}; leave --label-column out "
            "to take the labels' own columns"
        )
    elif set(labels) <= {*header} and not (column in header and activation == "softmax"):
        column, columns = None, labels
    elif column in header and activation != "softmax":
        raise DataError(
            f"{source.path}: {quoted(str(column))} holds one label a row, and those of the predictions are not "
            "exclusive; give the truth in a column per label"
        )
    elif column not in header:
        missing = [label for label in labels if label not in header]
        columns_too = "a column per label" if len(missing) == len(labels) else f"one for {listed(missing)}"
        raise DataError(
            f"{missing_column(source.path, 'label column', str(column), header)}; nor is there {columns_too}"
        )
    table = read_table(
        source.path,
        TableNeeds(source.id_column, column, labels, (), (), (), source.limit, columns, activation),
    )
    assert table.truth is not None
    places = places_of(ids, table.ids)
    if lacking := ids.filter(pa.array(places < 0)):
        raise DataError(
            f"{source.path}: {plural(len(lacking), 'id')} of the predictions missing ({first_ids(lacking)}); the "
            "truth of each row is needed"
        )
    if others := table.rows - len(ids):
        remarks.append(f"{plural(others, 'row')} of {source.path} left out, of ids without predictions")
    truth: Truth = table.truth[places]
    if truth.ndim == 2 and activation == "softmax" and bool(np.isin(truth, (0.0, 1.0)).all()):
        numbers: npt.NDArray[np.int64] = truth.argmax(axis=1)
        return numbers
    return truth


def _header(path: Path) -> tuple[str, ...]:
    """The columns of a table in any format."""
    return read_contents(path, Wanted("", None, (), 1)).names


def places_of(wanted: pa.ChunkedArray, ids: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Where each wanted id stands among ``ids``, -1 where it does not; [rows wanted]."""
    if wanted.type != ids.type:
        wanted, ids = pc.cast(wanted, pa.large_string()), pc.cast(ids, pa.large_string())
    if wanted.equals(ids):
        return np.arange(len(ids))
    found = pc.fill_null(pc.index_in(wanted, value_set=ids), -1)
    return np.asarray(found.to_numpy(), dtype=np.int64)


def _all_ids(given: Sequence[pa.ChunkedArray]) -> pa.ChunkedArray:
    """Each id once, in the order in which they come."""
    ids = given[0]
    for own in given[1:]:
        if not own.equals(ids) and (new := own.filter(pa.array(places_of(own, ids) < 0))):
            ids = pa.chunked_array([*ids.chunks, *pc.cast(new, ids.type).chunks], ids.type)
    return ids


def _refuse_other_rows(
    first: Path, first_own: pa.ChunkedArray, path: Path, own: pa.ChunkedArray, advice: str
) -> None:
    """Raises DataError where one of two files has ids that the other lacks, whichever it is."""
    if own.equals(first_own):
        return
    said = []
    for lacking, known, other, ids in ((path, own, first, first_own), (first, first_own, path, own)):
        missing = ids.filter(pa.array(places_of(ids, known) < 0))
        if len(missing) == len(ids):
            raise DataError(
                f"{path}: has no id of {first} at all; is it of another table, or another column the id?"
            )
        if len(missing):
            said.append(f"{lacking}: {plural(len(missing), 'id')} of {other} missing ({first_ids(missing)})")
    if said:
        raise DataError(f"{', and '.join(said)}; {advice}")


def _joined(
    path: Path,
    own: pa.ChunkedArray,
    values: Values,
    ids: pa.ChunkedArray,
    whose: str,
    may_lack_rows: bool,
) -> Values:
    """A file's rows in the order of ``ids``, rows of NaN for those that it lacks, [rows, labels]."""
    if own.equals(ids):
        return values
    if len(repeated := repeated_ids(own)):
        raise DataError(repeated_text(path, repeated))
    places, problems = places_of(ids, own), list[str]()
    is_there = places >= 0
    if len(own) and not is_there.any():
        raise DataError(f"{path}: has no id {whose}at all; is it of another table, or another column the id?")
    if not may_lack_rows and not is_there.all():
        lacking = ids.filter(pa.array(~is_there))
        problems.append(f"{path}: {plural(len(lacking), 'id')} {whose}missing ({first_ids(lacking)})")
    if int(is_there.sum()) < len(own):
        others = own.filter(pa.array(places_of(own, ids) < 0))
        problems.append(
            f"{path}: {plural(len(others), 'id')} that the others do not have ({first_ids(others)})"
        )
    if problems:
        raise DataError([f"{problem}; give the same rows in each file" for problem in problems])
    joined = np.full((len(ids), values.shape[1]), np.nan, order="F")
    joined[is_there] = values[places[is_there]]
    return joined


def _told_by(values: Sequence[Values]) -> Activation:
    """What values are, by themselves: exclusive probabilities, any probabilities, or numbers."""
    if not all(bool(np.nanmin(one) >= 0 and np.nanmax(one) <= 1) for one in values):
        return "none"
    is_exclusive = values[0].shape[1] > 1 and all(_sums_to_one(one) for one in values)
    return "softmax" if is_exclusive else "sigmoid"


def _activations(members: Mapping[str, Values]) -> dict[str, Activation]:
    """Of each by its own values; one without any row has that of the others."""
    found = {name: _told_by([values]) for name, values in members.items() if not np.isnan(values).all()}
    told: set[Activation] = set(found.values())
    others: Activation = "none" if "none" in told else "sigmoid" if "sigmoid" in told else "softmax"
    return {name: found.get(name, others) for name in members}


def _sums_to_one(values: Values) -> bool:
    sums = values.sum(axis=1)
    return bool(np.nanmax(np.abs(sums - 1)) <= SUM_TOLERANCE)


def _row_problems(check: RowCheck, values: Values) -> Sequence[str]:
    check.look(0, values)
    try:
        check.refuse()
    except MergeError as error:
        return error.problems
    return ()
