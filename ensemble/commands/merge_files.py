"""Files of predictions -> one CSV: what ``merge`` does, without a config, a table or a run directory.

The rows are those of the first file, in its order; of files that may all lack rows, those that any of them has.
What is asked for goes through the same checks as a config whose members are all ``csv``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ensemble.common.errors import ConfigError, DataError, MergeError, OutputError
from ensemble.common.extensions import SettingsByName
from ensemble.common.files import atomic_path, output_file, remove_temporary_files, unwritable_reason
from ensemble.common.protocol import Activation
from ensemble.common.text import did_you_mean, listed, quoted
from ensemble.config import CalibrationConfig
from ensemble.config.check import check_documents
from ensemble.config.document import Document, Loc, one_line, place
from ensemble.config.overrides import apply_overrides, variables_of
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

_MAX_THREADS = 16
# What may be said of a file beside its path.
_MODEL_KEYS = ("weight", "calibration", "activation", "partial", "values", "task_type")
_NO_SUCH_KEY = (
    f"a merge of files has no such key; it has ensemble.*, and {listed(_MODEL_KEYS[:-1])} of each file; "
    "for more name the files in a config (task_type: csv) and use run"
)
_ALLOW = "--partial merges rows that some files lack from the others"


@dataclass(frozen=True)
class Merged:
    """What was written; ``rows_of`` counts the rows that each file gave, by its name."""

    path: Path
    method: str
    labels: tuple[str, ...]
    rows: int
    weights: dict[str, AnyWeight]
    rows_of: dict[str, int]


@dataclass(frozen=True)
class _File:
    """One to merge; see ``Inspection`` and ``MemberKind.may_lack_rows``.

    ``predictions`` gives all of its values where they are not what stands in the columns of the labels.
    """

    name: str
    path: Path
    id_column: str
    weight: AnyWeight
    activation: Activation
    calibration: CalibrationConfig | None
    partial: bool
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
        weights: a YAML file with ``models`` and ``ensemble``, as ``fit`` writes it; it names all of the files.
        id_column, labels: see ``file_columns``; the ids' column of the first file is that of the output.
        weight: of every file, as YAML, by name; they come after those of ``weights``.
        keys: of every member, such as ``activation`` and ``partial``.

    Raises:
        EnsembleError: with every problem found; nothing is written then.
    """
    paths = named_files(files)
    target = _target(output, [*paths.values(), *([] if weights is None else [weights])])
    id_columns, columns = file_columns(paths, id_column, labels, choose="--label")
    given = [*_weight_overrides(weight or {}, [*paths]), *overrides]
    config = _config(paths, id_columns, columns, keys or {}, weights, given)
    given_files = [*_files(config, id_columns)]
    activations = tuple(one.activation for one in given_files)
    weights_of = tuple(one.weight for one in given_files)
    method = merge_method(config.ensemble, Members(tuple(paths), activations, config.labels, weights_of))
    if problems := [*_problems(given_files, method)]:
        raise ConfigError(problems)
    remove_temporary_files(target)
    ids, values = _read(given_files, config.labels)
    try:
        merged = _merge(given_files, method, ids, values, config.data.id_column, target)
    except MergeError as error:
        raise DataError(error.problems) from error
    return replace(merged, path=output)


def _target(output: Path, inputs: Sequence[Path]) -> Path:
    """Where the CSV is to be written; raises OutputError where it cannot or must not be."""
    target = output_file(output, inputs)
    if not is_plain_csv(output) or output.suffix.lower() == ".gz":
        raise OutputError(f"{output}: a plain CSV is written; choose a name that ends in .csv")
    if reason := unwritable_reason(str(output), target.parent):
        raise OutputError(reason)
    return target


def _config(
    paths: Mapping[str, Path],
    id_columns: Mapping[str, str],
    labels: Sequence[str],
    keys: Mapping[str, object],
    weights: Path | None,
    overrides: Sequence[str],
) -> RunConfig:
    """A config whose members are the files."""
    models = [
        {"name": name, "task_type": "csv", "path": str(path), "id_column": id_columns[name], **keys}
        for name, path in paths.items()
    ]
    data: dict[str, Any] = {
        "data": {"path": models[0]["path"], "id_column": models[0]["id_column"]},
        "labels": [*labels],
        "models": models,
        "output_dir": ".",
    }
    names = [one_line(str(path)) for path in (weights,) if path is not None]
    documents = [Document(_plain(data), {}, ("the command", *names))]
    if weights is not None:
        given = parse(read_text(weights), weights, documents[0].files, 1)
        _demand_all(weights, given, [*paths])
        documents.append(given)
    variables = [dict(os.environ), *variables_of([weights] if weights is not None else [], os.environ)]
    kinds = {"csv": KINDS.load("csv").Settings}
    apart = Document(deepcopy(documents[0].data), {})
    apply_overrides(apart, overrides)
    problems = [f"{text}: {_NO_SUCH_KEY}" for text, loc in apart.overrides.values() if not _applies(loc)]
    if weights is not None:
        problems += [f"{weights}: {place(loc)}: {_NO_SUCH_KEY}" for loc in _keys(given) if not _applies(loc)]
    if problems:
        raise ConfigError([*dict.fromkeys(problems)])
    return check_documents(documents, variables, overrides, SettingsByName(lambda: METHODS), kinds)[1]


def _keys(given: Document) -> Iterator[Loc]:
    """The keys of a file of weights that say something of the merge."""
    for key, value in given.data.items():
        if key == "fitted_on":
            continue
        if key == "models":
            for number, one in enumerate(value if isinstance(value, list) else []):
                yield from (
                    ((key, number, name) for name in one if name != "name") if isinstance(one, dict) else ()
                )
        else:
            yield (key,)


def _applies(loc: Loc) -> bool:
    """Whether a key says something of a merge of files."""
    return loc[0] == "ensemble" or (loc[0] == "models" and len(loc) > 2 and loc[2] in _MODEL_KEYS)


def _files(config: RunConfig, id_columns: Mapping[str, str]) -> Iterator[_File]:
    columns = OutputColumns(config.data.id_column, config.labels)
    for model in config.models:
        kind = member_kind(model)
        (source,) = kind.sources()
        activation = kind.inspect(columns).activation
        ids = id_columns[model.name]
        are_logits = model.model_dump(include={"values"}) == {"values": "logits"}
        given = partial(kind.predictions, columns=columns) if are_logits else None
        yield _File(
            model.name,
            Path(source),
            ids,
            model.weight,
            activation,
            model.calibration,
            kind.may_lack_rows,
            given,
        )


def _plain(value: Any) -> Any:
    """What stands for itself, whatever it holds."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.replace("${", "$${") if isinstance(value, str) else value


def _demand_all(weights: Path, given: Document, names: Sequence[str]) -> None:
    """Raises ConfigError where the weights are of other members than the files."""
    models = given.data.get("models")
    found = [one.get("name") for one in models if isinstance(one, dict)] if isinstance(models, list) else []
    known = [name for name in found if isinstance(name, str)]
    problems = [f"{weights}: models: {_no_file(name, names)}" for name in known if name not in names]
    if known and (missing := [name for name in names if name not in known]):
        problems.append(f"{weights}: models: nothing is said of {listed(missing)}; add each, with its weight")
    if problems:
        raise ConfigError(problems)


def _no_file(name: str, names: Sequence[str]) -> str:
    return f"no file is named {quoted(name)}{did_you_mean(name, names)}; the files are {listed(names)}"


def _weight_overrides(weight: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """What puts weights into the config; raises ConfigError where they are of other members than the files."""
    problems = [
        f"--weight {name}={text}: {_no_file(name, names)}"
        for name, text in weight.items()
        if name not in names
    ]
    if weight and (missing := [name for name in names if name not in weight]):
        problems.append(f"--weight: none is given for {listed(missing)}; give one for each file")
    if problems:
        raise ConfigError(problems)
    return [f"models.{name}.weight={text}" for name, text in weight.items()]


@contextlib.contextmanager
def _folder_for(output: Path) -> Iterator[None]:
    """Make the folder of the output, and take it away where nothing comes of it."""
    folder = output.absolute().parent
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        for one in missing:
            with contextlib.suppress(OSError):
                one.rmdir()
        if isinstance(error, OSError):
            raise OutputError(f"{output}: cannot be written ({error.strerror or error})") from error
        raise


def _problems(files: Sequence[_File], method: MergeMethod) -> Iterator[str]:
    """What does not go together."""
    raw = method.members.with_activation("none")
    if raw and len(raw) < len(files):
        yield f"{listed(raw)}: raw values, and the others are probabilities; their mean means nothing"
    for one in files:
        if one.calibration is not None and one.name in raw:
            yield f"{one.name}: calibration is for probabilities, and these are raw values"
        if isinstance(one.weight, tuple):
            yield (
                f"{one.name}: weights by length bin need the texts, and these files have none; name the file in a "
                "config (task_type: csv) and use run"
            )
    yield from method.problems()


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
    read = read_predictions(file.path, file.id_column, labels, file.partial)
    values, _ = read.join(ids, may_lack=file.partial, table=table, advice="" if file.partial else _ALLOW)
    return values if file.predictions is None else file.predictions(ids).values


def _merge(
    files: Sequence[_File],
    method: MergeMethod,
    ids: pa.ChunkedArray,
    values_of_files: Sequence[Values],
    id_column: str,
    output: Path,
) -> Merged:
    labels, merged = method.members.labels, list[MergedMember]()

    def open_members() -> list[MergedMember]:
        merged.clear()
        for file, values in zip(files, values_of_files, strict=True):
            check = RowCheck(str(file.path), file.activation, ids, file.partial, ROWS_ADVICE)
            calibrate = calibrator(file.calibration, file.activation, labels)
            merged.append(MergedMember(file.name, file.weight, values, check, None, calibrate))
        return merged

    def lines(start: int, values: Values) -> pa.Buffer:
        own = pa.concat_arrays(ids.slice(start, len(values)).chunks)
        return csv_lines([csv_cells(own), *(csv_cells(pa.array(column)) for column in values.T)])

    threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS)
    text_bytes = np.zeros(len(ids), dtype=np.int64)
    with (
        _folder_for(output),
        ThreadPoolExecutor(threads, "merge") as pool,
        atomic_path(output) as temporary,
        temporary.open("wb") as stream,
    ):
        stream.write(header_line([id_column, *labels]))
        before: Future[pa.Buffer] | None = None
        for start, values in merge_blocks(method, open_members, ids, text_bytes):
            if (empty := np.flatnonzero(np.isnan(values).any(axis=1))).size:
                first = ids[start + int(empty[0])].as_py()
                raise MergeError(
                    f"no file with a weight above 0 has the id {quoted(first)}; add one that does"
                )
            text = pool.submit(lines, start, values)
            if before is not None:
                stream.write(before.result())
            before = text
        if before is not None:
            stream.write(before.result())
    return Merged(
        path=output,
        method=method.settings.method,
        labels=labels,
        rows=len(ids),
        weights={one.name: one.weight for one in files},
        rows_of={one.name: one.check.reached for one in merged},
    )
