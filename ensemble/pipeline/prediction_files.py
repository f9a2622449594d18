"""Files of predictions that a user names: which member each of them is, the column of its ids, and the labels.

``merge``, ``fit`` and ``compare`` go by the same rules.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from ensemble.common.errors import ConfigError, DataError, EnsembleError
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

# Of any problem with rows that are no probabilities.
ROWS_ADVICE: Final = "correct the file, or say what its values are with --activation"


def path_of(file: str | os.PathLike[str]) -> Path:
    """The path in ``NAME=file`` or ``file``."""
    _, equals, path = str(file).partition("=")
    return Path(path) if equals and not Path(file).exists() else Path(file)


def named_files(files: Sequence[str | os.PathLike[str]]) -> dict[str, Path]:
    """Each file by its member's name: what stands before ``=``, else the file's own name without its ending.

    Raises:
        ConfigError: a name that is taken, or that no member can have; or there is no file.
    """
    if not files:
        raise ConfigError("no predictions; name one CSV or more")
    paths: dict[str, Path] = {}
    problems = []
    for file in files:
        path = path_of(file)
        name = file_stem(path) if path == Path(file) else str(file).partition("=")[0]
        advice = f"name it yourself, as in a={path}"
        if other := next((known for known in paths if known.lower() == name.lower()), None):
            problems.append(f"{path}: has the same name as {paths[other]}; {advice}")
        elif not is_member_name(name):
            problems.append(
                f"{path}: {quoted(name)} cannot be a name (letters, digits, '.', '_' and '-', at most "
                f"{MAX_NAME_CHARACTERS}, and not 'ensemble'); {advice}"
            )
        else:
            paths[name] = path
    if problems:
        raise ConfigError(problems)
    return paths


def file_columns(
    paths: Mapping[str, Path],
    id_column: str | None,
    columns: Sequence[str] = (),
    truth_column: str | None = None,
    choose: str = "",
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The column of the ids in each file by its name, and the labels, in the first file's order.

    Args:
        id_column: None: see ``guessed_id_column``.
        columns: the labels; none: all columns but the ids, which must then be the same in every file.
        truth_column: one that is no prediction, where it stands beside others.
        choose: the option by which columns are chosen.

    Raises:
        DataError: with every problem of the first kind that there is.
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
        return ids, tuple(columns)
    own = {
        name: [one for one in without_pandas_index(header) if one != ids[name]]
        for name, header in headers.items()
    }
    own = {name: [one for one in found if one != truth_column] or found for name, found in own.items()}
    first = next(iter(paths))
    labels = own[first]
    if not labels:
        raise DataError(f"{paths[first]}: has no column beside its ids; a column per label is needed")
    for name, found in own.items():
        only = [one for one in labels if one not in found], [one for one in found if one not in labels]
        if any(only):
            where = zip((paths[first], paths[name]), only, strict=True)
            said = ", ".join(f"only {path} has {listed(those)}" for path, those in where if those)
            shared = next((one for one in labels if one in found), None)
            advice = f"name those to take, such as {choose} {shared}" if choose and shared else ""
            problems.append(
                f"{paths[name]}: has other label columns than {paths[first]}: {said}; "
                f"{advice or 'rename or remove them, or map them by columns in a config (task_type: csv)'}"
            )
    if problems:
        raise DataError(problems)
    return ids, tuple(labels)


def read_as_written(path: Path) -> PredictionFile:
    """Read predictions that a run wrote; see ``read_predictions`` and ``demand_as_written``."""
    demand_as_written(path)
    return read_predictions(path)
