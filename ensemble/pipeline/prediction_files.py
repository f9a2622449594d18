"""Read files of predictions that a user names: the member's name, the id column, and the labels.

``merge``, ``fit`` and ``compare`` share these rules.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from ensemble.common.errors import ConfigError, DataError, EnsembleError
from ensemble.common.protocol import SUM_TOLERANCE, Activation
from ensemble.common.remote_files import address_of, local_path
from ensemble.common.text import listed, quoted
from ensemble.config.values import MAX_NAME_CHARACTERS, is_member_name
from ensemble.data.formats import column_names
from ensemble.data.input_file import missing_column, without_pandas_index
from ensemble.data.predictions_csv import (
    PredictionFile,
    demand_as_written,
    file_stem,
    guessed_id_column,
    read_predictions,
)

# Names of columns that hold a row's fold or true label beside its predictions.
_NO_LABELS: Final = {"fold", "kfold", "split", "target"}
# Of any problem with rows that are no probabilities.
ROWS_ADVICE: Final = (
    "correct the file, or name the columns of the labels with --label, if others are among them, or say what the "
    "values are with --activation"
)


def path_of(file: str | os.PathLike[str]) -> Path:
    """Return the path in ``NAME=file`` or ``file``."""
    _, equals, path = str(file).partition("=")
    is_named = equals and address_of(file) is None and not Path(file).exists()
    return Path(path) if is_named else Path(file)


def named_files(files: Sequence[str | os.PathLike[str]]) -> dict[str, Path]:
    """Return the files by their members' names: the text before ``=``, else the file name without its ending."""
    if not files:
        raise ConfigError("no predictions; name one CSV or more")
    paths: dict[str, Path] = {}
    problems = []
    for file in files:
        path = path_of(file)
        name = file_stem(path) if path == Path(file) else str(file).partition("=")[0]
        advice = f"name it yourself, as in a={path}"
        same = [other for other in paths if other.lower() == name.lower()]
        if same:
            problems.append(f"{path}: has the same name as {paths[same[0]]}; {advice}")
        elif not is_member_name(name):
            problems.append(
                f"{path}: {quoted(name)} cannot be a name (letters, digits, '.', '_' and '-', at most "
                f"{MAX_NAME_CHARACTERS}, and not 'ensemble'); {advice}"
            )
        else:
            paths[name] = local_path(path)  # copied in if it is at an address
    if problems:
        raise ConfigError(problems)
    return paths


def file_columns(
    paths: Mapping[str, Path],
    id_column: str | None,
    columns: Sequence[str] = (),
    truth_column: str | None = None,
    choose: str = "",
) -> tuple[dict[str, str], tuple[str, ...], list[str]]:
    """Return the column of the ids in each file, by its name; the labels, in the first file's order; and remarks.

    Args:
        id_column: None: see ``guessed_id_column``.
        columns: the labels; none: all columns except the ids and those that are no labels by their names and
            values, which a remark tells; they must then be the same in every file.
        truth_column: has the true labels; a file may have it beside its predictions.
        choose: the option that chooses columns, for messages.
    """
    headers: dict[str, tuple[str, ...]] = {}
    ids: dict[str, str] = {}
    problems: list[str] = []
    for name, path in paths.items():
        try:
            demand_as_written(path)
            headers[name] = column_names(path)
        except EnsembleError as error:
            problems += error.problems
            continue
        no_ids = [*columns, *([] if truth_column is None else [truth_column])]
        ids[name] = id_column or guessed_id_column(headers[name], no_ids)
        needed = {ids[name]: "id column"} | dict.fromkeys(columns, "column of the label")
        problems += [
            missing_column(path, role, column, headers[name])
            for column, role in needed.items()
            if column not in headers[name]
        ]
    if problems:
        raise DataError(problems)
    if columns:
        return ids, tuple(columns), []
    labels_by_name: dict[str, list[str]] = {}
    labels_of_any: set[str] = set()
    for name, header in headers.items():
        others = [column for column in without_pandas_index(header) if column != ids[name]]
        # If the truth column is the only one, it is a label.
        others = [column for column in others if column != truth_column] or others
        labels_by_name[name] = others
        try:
            labels_of_any |= {*others} - {*_spare_columns(paths[name], ids[name], others)}
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    columns_of_any = dict.fromkeys(column for others in labels_by_name.values() for column in others)
    left_out = [column for column in columns_of_any if column not in labels_of_any]
    for name, others in labels_by_name.items():
        labels_by_name[name] = [column for column in others if column in labels_of_any]
    first = next(iter(paths))
    labels = labels_by_name[first]
    if not labels:
        raise DataError(f"{paths[first]}: has no column beside its ids; a column per label is needed")
    for name, file_labels in labels_by_name.items():
        differences = []
        for file, ours, others in ((first, labels, file_labels), (name, file_labels, labels)):
            missing = [label for label in ours if label not in others]
            if missing:
                differences.append(f"only {paths[file]} has {listed(missing)}")
        if differences:
            shared = [label for label in labels if label in file_labels]
            advice = "rename or remove them, or map them by columns in a config (task_type: csv)"
            if choose and shared:
                advice = f"name those to take, such as {choose} {shared[0]}"
            problems.append(
                f"{paths[name]}: has other label columns than {paths[first]}: {', '.join(differences)}; {advice}"
            )
    if problems:
        raise DataError(problems)
    remark = f"columns left out, as no labels: {listed(left_out)}; --label takes any column"
    return ids, tuple(labels), [remark] if left_out else []


def _spare_columns(path: Path, id_column: str, columns: Sequence[str]) -> list[str]:
    """Return columns with names such as ``fold`` and whole numbers, unless rows sum to 1 only with them."""
    spare = [column for column in columns if column.lower() in _NO_LABELS]
    labels = [column for column in columns if column not in spare]
    if not spare or not labels:
        return []
    # A row that lacks its labels may have a fold.
    values, others = (
        read_predictions(path, id_column, part, may_lack=True).values for part in (labels, spare)
    )
    with np.errstate(invalid="ignore"):  # infinite values
        without = np.abs(values.sum(axis=1) - 1)
        of_all = np.abs(values.sum(axis=1) + others.sum(axis=1) - 1)
        has_shares = bool((others % 1 > 0).any())
    completes_sums = bool((without > SUM_TOLERANCE).any() and not (of_all > SUM_TOLERANCE).any())
    return [] if completes_sums or has_shares else spare


def activation_of_one_label(files: Iterable[PredictionFile]) -> Activation:
    """Return what files of a single label hold: "sigmoid" if all values are from 0 to 1, else "none"."""
    is_outside = [bool((file.values < 0).any() or (file.values > 1).any()) for file in files]
    return "none" if any(is_outside) else "sigmoid"


def read_as_written(path: Path) -> PredictionFile:
    """Read predictions that a run wrote; see ``read_predictions`` and ``demand_as_written``."""
    demand_as_written(path)
    return read_predictions(path)
