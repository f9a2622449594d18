"""Predictions of several members for the same rows, in memory, with the truth where it is known.

From CSV files, or from a run's directory.  A million rows of ten members with three labels are 240 MB.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ensemble.common.errors import DataError, EnsembleError, MergeError
from ensemble.common.protocol import Activation
from ensemble.common.text import listed, plural, quoted
from ensemble.config.document import Document
from ensemble.config.overrides import apply_overrides, expand
from ensemble.config.schema import DataConfig
from ensemble.config.values import as_label
from ensemble.config.yamlfile import parse
from ensemble.data.csv_file import read_header
from ensemble.data.formats import read_contents
from ensemble.data.input_file import Wanted, first_ids, malloc_for_arrow, missing_column
from ensemble.data.predictions_csv import read_numbers
from ensemble.data.table import TableNeeds, Truth, read_table
from ensemble.merging.row_checks import RowCheck
from ensemble.pipeline.reuse import rows_merged
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import RunReport

ID_COLUMN: Final = "id"
LABEL_COLUMN: Final = "label"
# What the sum of a row that a run has written may miss 1 by.
_SUM_TOLERANCE = 1e-3
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
    remarks: what the user should know: rows left out, why there is no truth, a sentence each.
    """

    ids: pa.ChunkedArray
    labels: tuple[str, ...]
    members: dict[str, Values]
    activations: dict[str, Activation]
    truth: Truth | None
    ensemble: Values | None = None
    remarks: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        return len(self.ids)

    @property
    def activation(self) -> Activation:
        """Of all members together: "softmax" only where it is each one's."""
        found = set(self.activations.values())
        return "none" if "none" in found else "sigmoid" if "sigmoid" in found else "softmax"


def read_files(
    paths: Sequence[Path],
    id_column: str | None = None,
    labels: Path | None = None,
    label_column: str = LABEL_COLUMN,
    activation: Activation | None = None,
    columns: Sequence[str] | None = None,
    may_lack_rows: bool = False,
) -> Predictions:
    """Reads CSVs of predictions, each a member named as its file is, joined by id in the first file's order.

    Args:
        id_column: in each file; None: ``id``, where there is one, else the first column.
        labels: the table of the truth, in any input format.
        label_column: of that table; where it is not there, a column per label holds 0 and 1 or how likely it is.
        activation: what the values are; None: of several labels "softmax", of a single one "sigmoid" where all
            values are from 0 to 1, else "none".
        columns: the labels; None: all columns but the ids, which must be the same ones in each file.
        may_lack_rows: members after the first may have only some of its rows.

    Raises:
        DataError: with every problem of the first kind that there is: files that cannot be read, that have other
            columns or ids, or rows that are no probabilities; a truth that does not fit them.
    """
    names = _names_by_file(paths)
    id_columns, label_names = _columns(paths, id_column, label_column, columns)
    found: dict[str, tuple[pa.ChunkedArray, Values]] = {}
    problems: list[str] = []
    with malloc_for_arrow():
        for name, path in names.items():
            try:
                ids, values = read_numbers(path, id_columns[path], label_names)
                if not len(ids):
                    raise DataError(
                        f"{path}: has no rows below its header; give the predictions of some rows"
                    )
                if repeated := _repeated(ids):
                    raise DataError(f"{path}: {repeated}")
                if found:
                    first, _ = found[next(iter(found))]
                    values = _joined(path, ids, values, first, f"of {paths[0]} ", may_lack_rows)
                    ids = first
                found[name] = ids, np.asfortranarray(values)
            except EnsembleError as error:
                problems += error.problems
    if problems:
        raise DataError(problems)
    ids, _ = found[next(iter(found))]
    members = {name: values for name, (_, values) in found.items()}
    advice = "correct the file"
    if activation is None:
        advice += ", or say what its values are: sigmoid (one probability per label) or none (any numbers)"
        is_single = len(label_names) == 1
        activation = _told_by([*members.values()]) if is_single else "softmax"
    for values, path in zip(members.values(), names.values(), strict=True):
        problems += _row_problems(RowCheck(str(path), activation, ids, may_lack_rows, advice), values)
    if problems:
        raise DataError(problems)
    truth, remarks = None, list[str]()
    if labels is not None:
        truth, left_out = read_truth(
            labels, ids, label_names, activation, label_column, id_column or id_columns[paths[0]]
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
    own = id_column if id_column in _header(path) else None
    source = _TruthSource(path, own or _id_column(path, None), label_column, (), None)
    return _truth(source, ids, labels, activation, remarks), remarks


def read_run(run_dir: Path, truth: Literal["needed", "if there", "no"] = "if there") -> Predictions:
    """Reads the members' complete predictions and the ensemble from the directory of a run, as they stand there.

    Rows that a member has and the run has not merged, as its ``when`` does not ask for them, count as not there.

    Args:
        truth: from the table of the run's config; "needed": without it there is nothing to do.  "if there": why it
            could not be had, if the config names it, is a remark.

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
                found[path] = read_numbers(path, id_column, labels)
            except EnsembleError as error:
                problems += error.problems
        if problems:
            raise DataError(problems)
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
    activations = _activations(members)
    merged = found[rundir.ensemble][1] if rundir.ensemble in found else None
    predictions = Predictions(ids, labels, members, activations, None, merged)
    known: Truth | None = None
    if truth != "no":
        try:
            if (source := _truth_of_run(run_dir, report, labels)) is not None:
                known = _truth(source, ids, labels, predictions.activation, remarks)
            elif truth == "needed":
                raise DataError(
                    f"{run_dir}: its config names no true labels; set data.label_column or data.label_columns"
                )
        except EnsembleError as error:
            if truth == "needed":
                raise DataError(error.problems) from error
            remarks += [f"no truth: {problem}" for problem in error.problems]
    return Predictions(ids, labels, members, activations, known, merged, tuple(remarks))


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


def _truth_of_run(run_dir: Path, report: RunReport, labels: tuple[str, ...]) -> _TruthSource | None:
    """None where the config names none."""
    document = _document(report)
    variables = {**os.environ, "CONFIG_DIR": str(run_dir.absolute())}
    settings = expand(document, variables).get("data")
    given: Mapping[str, object] = settings if isinstance(settings, dict) else {}
    column = given.get("label_column")
    listed_columns = given.get("label_columns")
    if column is None and listed_columns is None:
        return None
    if isinstance(listed_columns, list):
        listed_columns = [as_label(one) for one in listed_columns]
    data = DataConfig.model_validate({**given, "label_columns": listed_columns})
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
) -> Truth:
    """The truth of the rows ``ids``, in their order; ``remarks`` takes what was left out."""
    column, columns = source.column, source.columns
    header = _header(source.path)
    if columns:
        column = None
    elif column in header and len(labels) == 1:
        column, columns = None, (str(column),)
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


def _names_by_file(paths: Sequence[Path]) -> dict[str, Path]:
    """The files by the names of their members.

    Raises:
        DataError: two would have the same name, or there is no file.
    """
    if not paths:
        raise DataError("no predictions; name one CSV or more")
    names = [path.name.removesuffix(".gz").removesuffix(".csv").removesuffix(".tsv") for path in paths]
    if twice := sorted(name for name, count in Counter(name.lower() for name in names).items() if count > 1):
        shown = ", ".join(
            str(path) for path, name in zip(paths, names, strict=True) if name.lower() == twice[0]
        )
        raise DataError(
            f"{shown}: a member is named as its file is, and these would have the same name; rename one"
        )
    return dict(zip(names, paths, strict=True))


def _columns(
    paths: Sequence[Path], id_column: str | None, label_column: str, columns: Sequence[str] | None
) -> tuple[dict[Path, str], tuple[str, ...]]:
    """The column of the ids in each file, and the labels, in the first file's order."""
    problems: list[str] = []
    headers: dict[Path, tuple[str, ...]] = {}
    id_columns: dict[Path, str] = {}
    for path in paths:
        try:
            headers[path] = read_header(path)
            id_columns[path] = _id_column(path, id_column)
        except EnsembleError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    own = {path: [name for name in header if name != id_columns[path]] for path, header in headers.items()}
    if columns is not None:
        for path, names in own.items():
            problems += [
                missing_column(path, "column of the label", name, names)
                for name in columns
                if name not in names
            ]
        labels = tuple(columns)
    else:
        # A truth that stands beside the predictions is no prediction.
        own = {path: [name for name in names if name != label_column] or names for path, names in own.items()}
        labels = tuple(own[paths[0]])
        for path, names in own.items():
            only = (
                [name for name in labels if name not in names],
                [name for name in names if name not in labels],
            )
            if any(only):
                where = zip((paths[0], path), only, strict=True)
                said = ", ".join(f"only {source} has {listed(those)}" for source, those in where if those)
                problems.append(
                    f"{path}: has other label columns than {paths[0]}: {said}; rename or remove them"
                )
        if not labels:
            problems.append(f"{paths[0]}: has no column beside its ids; a column per label is needed")
    if problems:
        raise DataError(problems)
    return id_columns, labels


def _header(path: Path) -> tuple[str, ...]:
    """The columns of a table in any format."""
    return read_contents(path, Wanted("", None, (), 1)).names


def _id_column(path: Path, given: str | None) -> str:
    names = _header(path)
    if given is not None and given not in names:
        raise DataError(missing_column(path, "id column", given, names))
    return given or (ID_COLUMN if ID_COLUMN in names else names[0])


def _repeated(ids: pa.ChunkedArray) -> str:
    """The sentence about ids that are there more than once; empty where there are none."""
    if pc.count_distinct(ids, mode="all").as_py() == len(ids):
        return ""
    counted = pc.value_counts(ids)
    twice = counted.field("values").filter(pc.greater(counted.field("counts"), 1))
    return f"{plural(len(twice), 'id')} more than once ({first_ids(twice)}); keep one row for each id"


def places_of(wanted: pa.ChunkedArray, ids: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Where each wanted id stands among ``ids``, -1 where it does not; [rows wanted]."""
    if wanted.type != ids.type:
        wanted, ids = pc.cast(wanted, pa.large_string()), pc.cast(ids, pa.large_string())
    if wanted.equals(ids):
        return np.arange(len(ids))
    found = pc.fill_null(pc.index_in(wanted, value_set=ids), -1)
    return np.asarray(found.to_numpy(), dtype=np.int64)


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
    if repeated := _repeated(own):
        raise DataError(f"{path}: {repeated}")
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
    return bool(np.nanmax(np.abs(sums - 1)) <= _SUM_TOLERANCE)


def _row_problems(check: RowCheck, values: Values) -> Sequence[str]:
    check.look(0, values)
    try:
        check.refuse()
    except MergeError as error:
        return error.problems
    return ()
