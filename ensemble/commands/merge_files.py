"""Merge files of predictions into one CSV or Parquet file, without a table and a run directory.

The rows are those of the first file that has all rows, in its order; if every file may lack rows, those that any of
them has. The files go through the same checks as a config whose members are all ``csv``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from ensemble.common.errors import ConfigError, DataError, MergeError, OutputError
from ensemble.common.extensions import SettingsByName
from ensemble.common.files import (
    atomic_path,
    cannot_write,
    is_parquet,
    output_file,
    remove_temporary_files,
    unwritable_reason,
)
from ensemble.common.text import did_you_mean, listed, quoted
from ensemble.config.document import Document, Loc, one_line, parse, read_text
from ensemble.config.load import check_documents
from ensemble.config.schema import RunConfig
from ensemble.config.values import AnyWeight
from ensemble.data.csv_file import write_csv
from ensemble.data.formats import is_plain_csv
from ensemble.data.ids import all_ids, refuse_repeated_ids
from ensemble.data.parquet import write_parquet
from ensemble.data.predictions_csv import PredictionCells
from ensemble.members.registry import KINDS, member_kind
from ensemble.merging.blocks import MergedMember, RowCheck, merge_blocks
from ensemble.merging.calibration import calibrator
from ensemble.merging.methods import METHODS, merge_method
from ensemble.merging.methods.base import Members, MergeMethod, Values
from ensemble.merging.post_process import PostProcess
from ensemble.pipeline.prediction_files import (
    ROWS_ADVICE,
    activation_of_one_label,
    named_files,
    read_columns,
)

CsvFile: TypeAlias = Any  # a member of the kind csv
# Keys of a member that apply to a merge of files.
_MODEL_KEYS = ("weight", "calibration", "activation", "partial", "values", "task_type", "name")
_NO_SUCH_KEY = (
    f"a merge of files has no such key; it has ensemble.*, and {listed(_MODEL_KEYS[:5])} of each file; "
    "for more name the files in a config (task_type: csv) and use run"
)


@dataclass(frozen=True)
class Merged:
    """Describe what was written; ``rows_of`` counts the rows from each file, by its name."""

    path: Path
    remarks: tuple[str, ...]
    method: str
    labels: tuple[str, ...]
    rows: int
    weights: dict[str, AnyWeight]
    rows_of: dict[str, int]


def merge_files(
    files: Sequence[str],
    output: Path,
    overrides: Sequence[str] = (),
    weights: Path | None = None,
    weight: Mapping[str, str] | None = None,
    id_column: str | None = None,
    labels: Sequence[str] = (),
    keys: Mapping[str, object] | None = None,
) -> Merged:
    """Merge files of predictions, in any input format, joined by their ids.

    Args:
        files: see ``named_files``; ``id_column`` and ``labels``: see ``read_columns``.
        overrides: of a config of these members, such as ``ensemble.method=median``; they come last.
        weights: a YAML file with ``models`` and ``ensemble``, as ``fit`` writes it; it names all files.
        weight: of every file, as YAML, by name; they come after those of ``weights``.
        keys: of every member, such as ``activation`` and ``partial``; without ``activation`` files of one label
            have that of ``activation_of_one_label``.

    Raises:
        EnsembleError: with every problem; no file is written.
    """
    paths = named_files(files)
    target = output_file(output, [*paths.values(), *([] if weights is None else [weights])])
    is_csv = is_plain_csv(output) and output.suffix.lower() != ".gz"
    if not is_csv and not is_parquet(output):
        raise OutputError(
            f"{output}: a plain CSV or Parquet is written; choose a name that ends in .csv or .parquet"
        )
    reason = unwritable_reason(str(output), target.parent)
    if reason is not None:
        raise OutputError(reason)
    inputs, columns, remarks = read_columns(paths, id_column, labels, choose="--label")
    if weight:
        _demand_all("--weight", [*weight], [*paths])
    weight_overrides = [f"models.{name}.weight={text}" for name, text in (weight or {}).items()]
    keys = dict(keys or {})
    if len(columns) == 1 and "activation" not in keys:
        copies = [replace(file, columns=dict(file.columns)) for file in inputs.values()]
        keys["activation"] = activation_of_one_label(
            file.take_numbers(columns, may_lack=True) for file in copies
        )
    config = _config(inputs, columns, keys, weights, [*weight_overrides, *overrides])
    files_to_merge = [member_kind(model) for model in config.models]
    members = Members(
        names=tuple(paths),
        activations=tuple(file.settings.activation for file in files_to_merge),
        labels=config.labels,
        weights=tuple(model.weight for model in config.models),
    )
    method = merge_method(config.ensemble, members)
    problems = _problems(config, method)
    if problems:
        raise ConfigError(problems)
    remove_temporary_files(target)
    ids, values = _joined(files_to_merge, inputs, config.labels)
    try:
        merged, rows_of = _merge(config, files_to_merge, method, ids, values)
    except MergeError as error:
        raise DataError(error.problems) from error
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(cannot_write(str(target), target.parent, error)) from error
    with atomic_path(target) as temporary:
        names, cells = [config.data.id_column, *config.labels], [ids, *map(pa.array, merged.T)]
        write = write_csv if is_csv else write_parquet
        write(temporary, names, [cells])
    return Merged(
        path=output,
        remarks=tuple(remarks),
        method=config.ensemble.method,
        labels=config.labels,
        rows=len(ids),
        weights={model.name: model.weight for model in config.models},
        rows_of=rows_of,
    )


def _config(
    cells: Mapping[str, PredictionCells],
    labels: Sequence[str],
    keys: Mapping[str, object],
    weights: Path | None,
    overrides: Sequence[str],
) -> RunConfig:
    """Return a config whose members are the files."""
    models = [
        {
            "name": name,
            "task_type": "csv",
            "path": _literal(str(file.path)),
            "id_column": _literal(file.id_column),
            **keys,
        }
        for name, file in cells.items()
    ]
    data = {"path": models[0]["path"], "id_column": models[0]["id_column"]}
    config = {"data": data, "labels": [*map(_literal, labels)], "models": models, "output_dir": "."}
    sources = [] if weights is None else [weights]
    documents = [Document(config, ["the command", *(one_line(str(path)) for path in sources)])]
    for path in sources:
        overlay = parse(read_text(path), path, documents[0].sources, 1)
        members = overlay.data.get("models")
        names = [member.get("name") for member in members or () if isinstance(member, dict)]
        if names:
            _demand_all(f"{path}: models", [name for name in names if isinstance(name, str)], [*cells])
        documents.append(overlay)
    kinds = {"csv": KINDS.load("csv").Settings}
    document, checked = check_documents(documents, os.environ, overrides, SettingsByName(METHODS), kinds)
    foreign = [loc for loc in document.lines if not _applies(loc)]
    problems = [f"{document.where(loc)}: {_NO_SUCH_KEY}" for loc in foreign if loc[:-1] not in foreign]
    if problems:
        raise ConfigError([*dict.fromkeys(problems)])
    return checked


def _literal(text: str) -> str:
    return text.replace("${", "$${")


def _applies(loc: Loc) -> bool:
    """Return whether a key has a meaning in a merge of files."""
    if loc[0] == "models":
        return len(loc) < 3 or loc[2] in _MODEL_KEYS
    return loc[0] in ("ensemble", "fitted_on")


def _demand_all(where: str, names: Sequence[str], files: Sequence[str]) -> None:
    """Raise ConfigError unless weights are given for exactly these files."""
    problems = [
        f"{where}: no file is named {quoted(name)}{did_you_mean(name, files)}; the files are {listed(files)}"
        for name in names
        if name not in files
    ]
    missing = [name for name in files if name not in names]
    if missing:
        problems.append(f"{where}: nothing for {listed(missing)}; give a weight for each file")
    if problems:
        raise ConfigError(problems)


def _problems(config: RunConfig, method: MergeMethod) -> list[str]:
    """Return what does not go together."""
    problems = []
    raw = method.members.with_activation("none")
    if raw and len(raw) < len(config.models):
        problems.append(
            f"{listed(raw)}: raw values, and the others are probabilities; their mean means nothing"
        )
    for model in config.models:
        if model.calibration is not None and model.name in raw:
            problems.append(f"{model.name}: calibration is for probabilities, and these are raw values")
        if isinstance(model.weight, tuple):
            problems.append(
                f"{model.name}: weights by length bin need the texts, and these files have none; name the file in "
                "a config (task_type: csv) and use run"
            )
    return [*problems, *method.problems()]


def _joined(
    files: Sequence[CsvFile], cells: dict[str, PredictionCells], labels: Sequence[str]
) -> tuple[pa.ChunkedArray, list[Values]]:
    """Return the rows' ids and each file's values, [rows, labels], NaN where it lacks a row; empty ``cells``."""
    whole = next((file.settings.name for file in files if not file.may_lack_rows), None)
    table = "the files" if whole is None else str(cells[whole].path)
    for file in cells.values() if whole is None else [cells[whole]]:
        refuse_repeated_ids(file.path, file.ids, file.id_column)
    ids = all_ids([file.ids for file in cells.values()]) if whole is None else cells[whole].ids
    if not len(ids):
        raise DataError(f"{table}: there are no rows; nothing to merge")
    all_values = []
    for file in files:
        may_lack = file.may_lack_rows
        predictions = cells.pop(file.settings.name).take_numbers(labels, may_lack)
        advice = "" if may_lack else "--partial merges rows that some files lack from the others"
        values, _ = predictions.join(ids, may_lack=may_lack, table=table, advice=advice)
        all_values.append(file.as_probabilities(values))
    return ids, all_values


def _merge(
    config: RunConfig,
    files: Sequence[CsvFile],
    method: MergeMethod,
    ids: pa.ChunkedArray,
    values_of_files: Sequence[Values],
) -> tuple[Values, dict[str, int]]:
    """Return the merged values, [rows, labels], and how many rows each file gave."""
    merged = np.empty((len(ids), len(config.labels)), order="F")
    members = []
    for model, file, values in zip(config.models, files, values_of_files, strict=True):
        path, activation = str(file.settings.path), file.settings.activation
        check = RowCheck(path, activation, ids, file.may_lack_rows, ROWS_ADVICE, config.labels)
        calibrate = calibrator(model.calibration, activation, config.labels)
        members.append(MergedMember(model.name, model.weight, values, check, None, calibrate))
    text_bytes = np.zeros(len(ids), dtype=np.int64)
    for start, values in merge_blocks(method, members, ids, text_bytes, PostProcess()):
        merged[start : start + len(values)] = values
    empty = np.flatnonzero(np.isnan(merged).any(axis=1))
    if len(empty):
        first = ids[int(empty[0])].as_py()
        raise MergeError(f"no file with a weight above 0 has the id {quoted(first)}; add one that does")
    return merged, {member.name: member.check.reached for member in members}
