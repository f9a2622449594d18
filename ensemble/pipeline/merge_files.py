"""CSVs of predictions -> one CSV: what ``merge`` does, without a config, a table or a run directory.

The rows are those of the first file, in its order; of files that may all lack rows, those that any of them has.
What is asked for goes through the same checks as a config whose members are all ``csv``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ensemble.common.errors import ConfigError, DataError, EnsembleError, MergeError, OutputError
from ensemble.common.extensions import SettingsByName
from ensemble.common.files import atomic_path, output_file, unwritable_reason
from ensemble.common.protocol import Activation
from ensemble.common.text import did_you_mean, listed, plural, quoted
from ensemble.config import CalibrationConfig
from ensemble.config.document import Document, one_line
from ensemble.config.load import checked
from ensemble.config.overrides import variables_of
from ensemble.config.schema import RunConfig
from ensemble.config.values import MAX_NAME_CHARACTERS, AnyWeight, is_member_name
from ensemble.config.yamlfile import parse, read_text
from ensemble.data.csv_file import csv_cells, csv_lines, header_line, read_header, text_batches
from ensemble.data.input_file import first_ids, malloc_for_arrow, missing_column
from ensemble.data.predictions_csv import PredictionsReader, SpilledRows, read_by_id
from ensemble.members.base import OutputColumns
from ensemble.members.registry import KINDS, member_kind
from ensemble.merging.blocks import MergedMember, RowSource, merge_blocks
from ensemble.merging.calibration import calibrator
from ensemble.merging.methods import METHODS, merge_method
from ensemble.merging.methods.base import Members, MergeMethod, Values
from ensemble.merging.row_checks import RowCheck

_MAX_THREADS = 16
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
    """One to merge; see ``Inspection`` and ``MemberKind.may_lack_rows``."""

    name: str
    path: Path
    weight: AnyWeight
    activation: Activation
    calibration: CalibrationConfig | None
    partial: bool


def merge_files(
    files: Sequence[str],
    output: Path,
    overrides: Sequence[str] = (),
    weights: Path | None = None,
    weight: Mapping[str, str] | None = None,
    id_column: str = "id",
    labels: Sequence[str] = (),
    keys: Mapping[str, object] | None = None,
) -> Merged:
    """Merge CSVs of predictions, joined by their ids.

    Args:
        files: paths, each perhaps with a name before it (``a=runs/a/ensemble.csv``); else its name is the file's,
            without the ending.
        overrides: of a config of these members, such as ``ensemble.method=median``; they come last.
        weights: a YAML file with ``models`` and ``ensemble``, as ``fit`` writes it; it names all of the files.
        weight: of every file, as YAML, by name; they come after those of ``weights``.
        labels: the columns to merge; none: all but the ids, which must then be the same in every file.
        keys: of every member, such as ``activation`` and ``partial``.

    Raises:
        EnsembleError: with every problem found; nothing is written then.
    """
    paths = _named(files)
    target = _target(output, [*paths.values(), *([] if weights is None else [weights])])
    columns = _columns(paths, id_column, labels)
    given = [*_weight_overrides(weight or {}, [*paths]), *overrides]
    config = _config(paths, id_column, columns, keys or {}, weights, given)
    given_files = [*_files(config)]
    activations = tuple(one.activation for one in given_files)
    weights_of = tuple(one.weight for one in given_files)
    method = merge_method(config.ensemble, Members(tuple(paths), activations, config.labels, weights_of))
    if problems := [*_problems(given_files, method)]:
        raise ConfigError(problems)
    with malloc_for_arrow(), ExitStack() as opened:
        try:
            ids, sources = _sources(given_files, id_column, config.labels, _folder(target), opened)
            merged = _merge(given_files, method, ids, sources, id_column, target)
            return replace(merged, path=output)
        except MergeError as error:
            raise DataError(error.problems) from error


def _named(files: Sequence[str]) -> dict[str, Path]:
    """Each file by its name."""
    paths: dict[str, Path] = {}
    problems = []
    for given in files:
        name, equals, path = given.partition("=")
        if not equals or Path(given).exists():
            path, name = given, Path(given).name.removesuffix(".gz").rpartition(".")[0] or Path(given).name
        advice = f"name it yourself, as in a={path}"
        if other := next((known for known in paths if known.lower() == name.lower()), None):
            problems.append(f"{path}: has the same name as {paths[other]}; {advice}")
        elif not is_member_name(name):
            problems.append(
                f"{path}: {quoted(name)} cannot be a name (letters, digits, '.', '_' and '-', at most "
                f"{MAX_NAME_CHARACTERS}, and not 'ensemble'); {advice}"
            )
        else:
            paths[name] = Path(path)
    if problems:
        raise ConfigError(problems)
    return paths


def _target(output: Path, inputs: Sequence[Path]) -> Path:
    """Where the CSV is to be written; raises OutputError where it cannot or must not be."""
    target = output_file(output, inputs)
    if output.suffix.lower() in (".gz", ".tsv"):
        raise OutputError(f"{output}: a plain CSV is written; choose a name that ends in .csv")
    if reason := unwritable_reason(str(output), target.parent):
        raise OutputError(reason)
    return target


def _columns(paths: Mapping[str, Path], id_column: str, labels: Sequence[str]) -> tuple[str, ...]:
    """The columns to merge, in the first file's order."""
    headers: dict[Path, tuple[str, ...]] = {}
    problems: list[str] = []
    for path in paths.values():
        try:
            headers[path] = read_header(path)
        except EnsembleError as error:
            problems += error.problems
            continue
        needed = {id_column: "id column"} | dict.fromkeys(labels, "column of the label")
        problems += [
            missing_column(path, role, name, headers[path])
            for name, role in needed.items()
            if name not in headers[path]
        ]
    if problems:
        raise DataError(problems)
    first, *others = headers
    own = [name for name in headers[first] if name != id_column]
    if labels:
        return tuple(labels)
    if not own:
        raise DataError(f"{first}: has no column beside the ids; nothing to merge")
    for path in others:
        here = set(headers[path]) - {id_column}
        parts = [
            f"{listed(names)} only in {where}"
            for names, where in (
                ([one for one in own if one not in here], first),
                (sorted(here - set(own)), path),
            )
            if names
        ]
        if parts:
            shared = [one for one in own if one in here]
            advice = f", such as --label {shared[0]}" if shared else ""
            problems.append(
                f"{path}: its columns are not those of {first} ({', '.join(parts)}); name the columns to merge"
                f"{advice}"
            )
    if problems:
        raise DataError(problems)
    return tuple(own)


def _config(
    paths: Mapping[str, Path],
    id_column: str,
    labels: Sequence[str],
    keys: Mapping[str, object],
    weights: Path | None,
    overrides: Sequence[str],
) -> RunConfig:
    """A config whose members are the files."""
    models = [{"name": name, "task_type": "csv", "path": str(path), **keys} for name, path in paths.items()]
    data: dict[str, Any] = {
        "data": {"path": models[0]["path"], "id_column": id_column},
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
    return checked(documents, variables, overrides, SettingsByName(lambda: METHODS), kinds)[1]


def _files(config: RunConfig) -> Iterator[_File]:
    columns = OutputColumns(config.data.id_column, config.labels)
    for model in config.models:
        kind = member_kind(model)
        (source,) = kind.sources()
        activation = kind.inspect(columns).activation
        yield _File(model.name, Path(source), model.weight, activation, model.calibration, kind.may_lack_rows)


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


def _folder(output: Path) -> Path:
    """The folder in which the output will be, or the one above that there is."""
    folder = output.absolute().parent
    while not folder.is_dir():
        folder = folder.parent
    return folder


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


def _sources(
    files: Sequence[_File], id_column: str, labels: Sequence[str], folder: Path, opened: ExitStack
) -> tuple[pa.ChunkedArray, list[RowSource]]:
    """The ids of the rows, and where each member's rows come from."""
    whole = next((one for one in files if not one.partial), None)
    first = whole or files[0]
    ids = _ids(first, id_column)
    table = str(first.path) if whole else "the files"
    own: dict[str, pa.ChunkedArray] = {}
    if whole is None:
        for one in files[1:]:
            own[one.name] = _ids(one, id_column)
            new = own[one.name].filter(pc.invert(pc.is_in(own[one.name], value_set=ids)))
            ids = pa.chunked_array([*ids.chunks, *new.chunks], ids.type)
    if not len(ids):
        raise DataError(f"{table}: there are no rows; nothing to merge")
    sources: list[RowSource] = []
    for one in files:
        source: RowSource | None = None
        advice = _ALLOW if whole is not None and not one.partial else None
        if one.partial and one is not first:
            here = own.pop(one.name) if one.name in own else _ids(one, id_column)
            places = pc.index_in(here, value_set=ids)
            if places.null_count or not (np.diff(places.to_numpy()) > 0).all():  # in another order
                values, _ = read_by_id(one.path, id_column, labels, ids, False, True, table, advice)
                source = SpilledRows(values, folder)
        source = source or PredictionsReader(
            one.path, id_column, labels, ids, folder, len(files), one.partial, table, advice
        )
        opened.callback(source.close)
        sources.append(source)
    return ids, sources


def _ids(one: _File, id_column: str) -> pa.ChunkedArray:
    chunks = [batch.column(0) for batch in text_batches(one.path, [id_column])]
    ids = pa.chunked_array(chunks, pa.string())
    counts = pc.value_counts(ids)
    repeated = counts.filter(pc.greater(counts.field("counts"), 1)).field("values")
    if len(repeated):
        count = plural(len(repeated), "id")
        raise DataError(
            f"{one.path}: {count} more than once ({first_ids(repeated)}); keep one row for each id"
        )
    return ids


def _merge(
    files: Sequence[_File],
    method: MergeMethod,
    ids: pa.ChunkedArray,
    sources: Sequence[RowSource],
    id_column: str,
    output: Path,
) -> Merged:
    labels, merged = method.members.labels, list[MergedMember]()

    def open_members() -> list[MergedMember]:
        merged.clear()
        for one, source in zip(files, sources, strict=True):
            source.rewind()
            advice = "correct the file, or say what its values are with --activation"
            check = RowCheck(str(one.path), one.activation, ids, one.partial, advice)
            calibrate = calibrator(one.calibration, one.activation, labels)
            merged.append(MergedMember(one.name, one.weight, source, check, None, calibrate))
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
        for start, values in merge_blocks(method, open_members, ids, text_bytes, pool):
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
