"""Merge files of predictions into one CSV, without a table and a run directory.

The rows are those of the first file that has all rows, in its order; if every file may lack rows, those that any of
them has. The files go through the same checks as a config whose members are all ``csv``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from ensemble.common.errors import ConfigError, DataError, MergeError, OutputError
from ensemble.common.extensions import SettingsByName
from ensemble.common.files import (
    atomic_path,
    cannot_write,
    output_file,
    remove_temporary_files,
    unwritable_reason,
)
from ensemble.common.protocol import Activation
from ensemble.common.text import did_you_mean, listed, quoted
from ensemble.config import CalibrationConfig
from ensemble.config.check import check_documents
from ensemble.config.document import Document, Loc, one_line
from ensemble.config.schema import RunConfig
from ensemble.config.values import AnyWeight
from ensemble.config.yamlfile import parse, read_text
from ensemble.data.csv_file import csv_cells, csv_lines, header_line
from ensemble.data.formats import is_plain_csv
from ensemble.data.ids import all_ids, refuse_repeated_ids
from ensemble.data.predictions_csv import read_predictions
from ensemble.members.base import ExternalPredictions, OutputColumns
from ensemble.members.registry import KINDS, member_kind
from ensemble.merging.blocks import MergedMember, merge_blocks
from ensemble.merging.calibration import calibrator
from ensemble.merging.methods import METHODS, merge_method
from ensemble.merging.methods.base import Members, MergeMethod, Values
from ensemble.merging.row_checks import RowCheck
from ensemble.pipeline.prediction_files import ROWS_ADVICE, file_columns, named_files

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
    method: str
    labels: tuple[str, ...]
    rows: int
    weights: dict[str, AnyWeight]
    rows_of: dict[str, int]


@dataclass(frozen=True)
class _File:
    """Hold a file to merge, with the settings of its member."""

    name: str
    path: Path
    id_column: str
    weight: AnyWeight
    activation: Activation
    calibration: CalibrationConfig | None
    partial: bool
    # Returns the values if the columns hold something else, such as logits.
    predictions: Callable[[pa.ChunkedArray], ExternalPredictions] | None


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
        files: see ``named_files``.
        overrides: of a config of these members, such as ``ensemble.method=median``; they come last.
        weights: a YAML file with ``models`` and ``ensemble``, as ``fit`` writes it; it names all files.
        weight: of every file, as YAML, by name; they come after those of ``weights``.
        id_column: see ``file_columns``; the first file's column is that of the output.
        labels: see ``file_columns``.
        keys: of every member, such as ``activation`` and ``partial``.

    Raises:
        EnsembleError: with every problem; no file is written.
    """
    paths = named_files(files)
    target = output_file(output, [*paths.values(), *([] if weights is None else [weights])])
    if not is_plain_csv(output) or output.suffix.lower() == ".gz":
        raise OutputError(f"{output}: a plain CSV is written; choose a name that ends in .csv")
    reason = unwritable_reason(str(output), target.parent)
    if reason is not None:
        raise OutputError(reason)
    id_columns, columns = file_columns(paths, id_column, labels, choose="--label")
    if weight:
        _demand_all("--weight", [*weight], [*paths])
    weight_overrides = [f"models.{name}.weight={text}" for name, text in (weight or {}).items()]
    config = _config(paths, id_columns, columns, keys or {}, weights, [*weight_overrides, *overrides])
    merged_files = [_file(config, index, id_columns) for index in range(len(paths))]
    activations = tuple(file.activation for file in merged_files)
    all_weights = tuple(file.weight for file in merged_files)
    method = merge_method(config.ensemble, Members(tuple(paths), activations, config.labels, all_weights))
    problems = _problems(merged_files, method)
    if problems:
        raise ConfigError(problems)
    remove_temporary_files(target)
    ids, values = _read(merged_files, config.labels)
    try:
        rows_of = _write(merged_files, method, ids, values, config.data.id_column, target)
    except MergeError as error:
        raise DataError(error.problems) from error
    return Merged(
        path=output,
        method=config.ensemble.method,
        labels=config.labels,
        rows=len(ids),
        weights={file.name: file.weight for file in merged_files},
        rows_of=rows_of,
    )


def _config(
    paths: Mapping[str, Path],
    id_columns: Mapping[str, str],
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
            "path": _literal(str(path)),
            "id_column": _literal(id_columns[name]),
            **keys,
        }
        for name, path in paths.items()
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
            _demand_all(f"{path}: models", [name for name in names if isinstance(name, str)], [*paths])
        documents.append(overlay)
    kinds = {"csv": KINDS.load("csv").Settings}
    document, checked = check_documents(
        documents, os.environ, overrides, SettingsByName(lambda: METHODS), kinds
    )
    outermost = (loc for loc in document.lines if not _applies(loc) and (len(loc) < 2 or _applies(loc[:-1])))
    problems = [f"{document.where(loc)}: {_NO_SUCH_KEY}" for loc in outermost]
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


def _file(config: RunConfig, index: int, id_columns: Mapping[str, str]) -> _File:
    model = config.models[index]
    kind = member_kind(model)
    columns = OutputColumns(config.data.id_column, config.labels)
    are_logits = model.model_dump(include={"values"}) == {"values": "logits"}
    return _File(
        name=model.name,
        path=Path(kind.sources()[0]),
        id_column=id_columns[model.name],
        weight=model.weight,
        activation=kind.inspect(columns).activation,
        calibration=model.calibration,
        partial=kind.may_lack_rows,
        predictions=partial(kind.predictions, columns=columns) if are_logits else None,
    )


def _problems(files: Sequence[_File], method: MergeMethod) -> list[str]:
    """Return what does not go together."""
    problems = []
    raw = method.members.with_activation("none")
    if raw and len(raw) < len(files):
        problems.append(
            f"{listed(raw)}: raw values, and the others are probabilities; their mean means nothing"
        )
    for file in files:
        if file.calibration is not None and file.name in raw:
            problems.append(f"{file.name}: calibration is for probabilities, and these are raw values")
        if isinstance(file.weight, tuple):
            problems.append(
                f"{file.name}: weights by length bin need the texts, and these files have none; name the file in a "
                "config (task_type: csv) and use run"
            )
    return [*problems, *method.problems()]


def _read(files: Sequence[_File], labels: Sequence[str]) -> tuple[pa.ChunkedArray, list[Values]]:
    """Return the ids of the rows and each file's values, [rows, labels]; NaN in rows that the file lacks."""
    whole = next((file for file in files if not file.partial), None)
    table = "the files" if whole is None else str(whole.path)
    ids = all_ids([_ids(file) for file in files]) if whole is None else _ids(whole)
    if not len(ids):
        raise DataError(f"{table}: there are no rows; nothing to merge")
    return ids, [_values(file, labels, ids, table) for file in files]


def _ids(file: _File) -> pa.ChunkedArray:
    ids = read_predictions(file.path, file.id_column, ()).ids
    refuse_repeated_ids(file.path, ids, file.id_column)
    return ids


def _values(file: _File, labels: Sequence[str], ids: pa.ChunkedArray, table: str) -> Values:
    predictions = read_predictions(file.path, file.id_column, labels, file.partial)
    advice = "" if file.partial else "--partial merges rows that some files lack from the others"
    values, _ = predictions.join(ids, may_lack=file.partial, table=table, advice=advice)
    return values if file.predictions is None else file.predictions(ids).values


def _write(
    files: Sequence[_File],
    method: MergeMethod,
    ids: pa.ChunkedArray,
    values_of_files: Sequence[Values],
    id_column: str,
    target: Path,
) -> dict[str, int]:
    """Merge block by block into a CSV; return how many rows each file gave."""
    labels = method.members.labels
    checks: list[RowCheck] = []

    def open_members() -> list[MergedMember]:
        checks[:] = [
            RowCheck(str(file.path), file.activation, ids, file.partial, ROWS_ADVICE) for file in files
        ]
        members = []
        for file, values, check in zip(files, values_of_files, checks, strict=True):
            calibrate = calibrator(file.calibration, file.activation, labels)
            members.append(MergedMember(file.name, file.weight, values, check, None, calibrate))
        return members

    def lines(start: int, values: Values) -> pa.Buffer:
        block_ids = pa.concat_arrays(ids.slice(start, len(values)).chunks)
        return csv_lines([csv_cells(block_ids), *(csv_cells(pa.array(column)) for column in values.T)])

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(cannot_write(str(target), target.parent, error)) from error
    text_bytes = np.zeros(len(ids), dtype=np.int64)
    # Two blocks are turned into text while the next one is merged.
    with (
        ThreadPoolExecutor(2, "merge") as pool,
        atomic_path(target) as temporary,
        temporary.open("wb") as stream,
    ):
        stream.write(header_line([id_column, *labels]))
        previous: Future[pa.Buffer] | None = None
        for start, values in merge_blocks(method, open_members, ids, text_bytes):
            empty = np.flatnonzero(np.isnan(values).any(axis=1))
            if empty.size:
                first = ids[start + int(empty[0])].as_py()
                raise MergeError(
                    f"no file with a weight above 0 has the id {quoted(first)}; add one that does"
                )
            text = pool.submit(lines, start, values)
            if previous is not None:
                stream.write(previous.result())
            previous = text
        if previous is not None:
            stream.write(previous.result())
    return {file.name: check.reached for file, check in zip(files, checks, strict=True)}
