"""Read files of predictions that a user names, and say whether those of a run are by a config's settings.

``merge``, ``fit`` and ``compare`` share these rules.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from ensemble.common.digests import FileDigests, changed, digests_of
from ensemble.common.errors import ConfigError, DataError, EnsembleError
from ensemble.common.files import read_json
from ensemble.common.protocol import SUM_TOLERANCE, Activation
from ensemble.common.remote_files import address_of, local_path
from ensemble.common.text import listed, quoted
from ensemble.config import RunConfig
from ensemble.config.values import MAX_NAME_CHARACTERS, is_member_name
from ensemble.data.formats import column_names
from ensemble.data.input_file import without_pandas_index
from ensemble.data.predictions_csv import (
    PredictionCells,
    PredictionFile,
    demand_as_written,
    file_stem,
    guessed_id_column,
    read_cells,
    read_predictions,
)
from ensemble.jobs.causes import WEIGHTS, Causes, settings_of_job
from ensemble.jobs.job import compile_models, jobs_of
from ensemble.members.base import OutputColumns
from ensemble.members.registry import member_kind
from ensemble.pipeline.run_dir import RunDir

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


def read_columns(
    paths: Mapping[str, Path],
    id_column: str | None,
    columns: Sequence[str] = (),
    truth_column: str | None = None,
    choose: str = "",
) -> tuple[dict[str, PredictionCells], tuple[str, ...], list[str]]:
    """Read each file, by its name; return also the labels, in the first file's order; and remarks.

    Args:
        id_column: None: see ``guessed_id_column``.
        columns: the labels; none: all columns except the ids and those that are no labels by their names and
            values, which a remark tells; they must then be the same in every file.
        truth_column: has the true labels; a file may have it beside its predictions.
        choose: the option that chooses columns, for messages.
    """
    columns, files = tuple(dict.fromkeys(columns)), dict[str, PredictionCells]()
    problems: list[str] = []
    labels_of_any: set[str] = set()
    for name, path in paths.items():
        try:
            demand_as_written(path)
            header = column_names(path)
            ids = id_column or guessed_id_column(header, [*columns, *filter(None, [truth_column])])
            others = [column for column in without_pandas_index(header) if column != ids]
            # If the truth column is the only one, it is a label.
            others = [column for column in others if column != truth_column] or others
            files[name] = read_cells(path, ids, columns or others)
            if not columns:
                labels_of_any |= {*others} - {*_spare_columns(files[name])}
        except EnsembleError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    if columns:
        return files, columns, []
    columns_of_any = dict.fromkeys(column for file in files.values() for column in file.columns)
    left_out = [column for column in columns_of_any if column not in labels_of_any]
    labels_by_name = {
        name: [column for column in file.columns if column in labels_of_any] for name, file in files.items()
    }
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
    return files, tuple(labels), [remark] if left_out else []


def _spare_columns(file: PredictionCells) -> list[str]:
    """Return columns with names such as ``fold`` and whole numbers, unless rows sum to 1 only with them."""
    spare = [column for column in file.columns if column.lower() in _NO_LABELS]
    labels = [column for column in file.columns if column not in spare]
    if not spare or not labels:
        return []
    copy = replace(file, columns=dict(file.columns))
    # A row that lacks its labels may have a fold.
    values, others = (copy.take_numbers(part, may_lack=True).values for part in (labels, spare))
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


def read_as_written(
    path: Path, id_column: str | None = None, labels: Sequence[str] | None = None
) -> PredictionFile:
    """Read predictions that a run wrote; see ``read_predictions`` and ``demand_as_written``."""
    demand_as_written(path)
    return read_predictions(path, id_column, labels)


def changed_members(config: RunConfig, members: Collection[str], run_dir: Path) -> dict[str, list[str]]:
    """Return what has changed of each member since its predictions in a run's directory were made.

    These are settings, and what files hold, such as "weights". Members whose files are not on this machine are not
    compared, nor are the rows, as the run may be of a sample, nor what devices decide. Members whose predictions
    these read are compared, too.
    """
    rundir, files = RunDir(run_dir), FileDigests(config.hash_weights)
    members = {*members}
    for member in reversed(config.models):  # with the members whose predictions they read
        members |= {*member.input_names} if member.name in members else set()
    columns = OutputColumns.of(config.data, config.labels)
    by_member: dict[str, list[str]] = {}
    for member in config.models:
        if member.name not in members or member.training is not None:
            continue
        names: list[str] = []
        models = compile_models([member], config.labels)
        weights = digests_of({WEIGHTS: [job.weight for job in jobs_of(models, member.name)]})
        before = _causes_of(rundir, member.name)
        if before is not None and before.is_mean != bool(member.counted_views):
            by_member[member.name] = ["views"]
            continue
        if before is not None and before.is_mean:
            names += changed(weights, before.settings)
        with suppress(EnsembleError):  # a file is missing
            for model in models:
                inspected = model.kind.inspect(columns)
                for job in model.jobs:
                    kind, before = member_kind(job.settings), _causes_of(rundir, job.name)
                    if before is not None:
                        settings = settings_of_job(config, job, kind.fingerprint_anywhere(inspected))
                        names += changed(settings, before.settings)
                        names += changed(kind.content(inspected, files), before.content)
        if names:
            by_member[member.name] = [*dict.fromkeys(names)]
    return by_member


def _causes_of(rundir: RunDir, name: str) -> Causes | None:
    return Causes.from_dict(read_json(rundir.manifest(name)).get("fingerprint"))


def changed_sentence(by_member: Mapping[str, Sequence[str]]) -> str:
    """Return what ``changed_members`` returned as the beginning of a sentence."""
    members = " and ".join(f"{name} ({', '.join(keys)})" for name, keys in by_member.items())
    return f"the settings of {members} have changed since the predictions there were made"
