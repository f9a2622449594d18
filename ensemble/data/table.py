"""The input table: read it, check it, publish it to the workers.

Everything that would stop a run later (a row without an id, broken JSON in row 17,000, an unknown label) is
found here, before any model is loaded, and reported all at once.  Formats: ``formats.py``.  What the workers see
of the published file: ``published_table.py``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ensemble.common.digests import digest_of
from ensemble.common.errors import DataError
from ensemble.common.protocol import Activation
from ensemble.common.text import did_you_mean, listed, plural, quoted
from ensemble.data.csv_file import text_as_numbers
from ensemble.data.digests import RowDigests, row_digests, rows_digest
from ensemble.data.formats import read_contents
from ensemble.data.ids import repeated_ids
from ensemble.data.input_file import (
    Contents,
    Wanted,
    cell_texts,
    is_binary,
    is_json_field,
    is_text,
    missing_column,
    shown_type,
)
from ensemble.data.json_cells import TemplateProblem, parse_json_cell
from ensemble.data.row_files import FileCells, LookedAt, file_digests, look_for_files

PUBLISHED_ROWS_PER_BATCH = 65_536
# Rows that are Python objects at a time.
_PYTHON_ROWS = 8_192
_SHOWN = 3
# Stands for a column of digests of files; no column of a table is called so.
_FILES = "\0files"
# What a row of probabilities may miss 1 by: thirds are often written with two digits.
_SUM_TOLERANCE = 0.02
# Each row's label: its index in the config's labels, int64 [rows]; or how likely each is, float64 [rows, labels].
Truth: TypeAlias = npt.NDArray[np.int64] | npt.NDArray[np.float64]


@dataclass(frozen=True)
class TableNeeds:
    """What a run asks of its table.

    Attributes:
        id_column: names the rows; never null, empty or repeated.
        label_column: the true label of each row, or None.
        label_columns: instead, the column of each label with its probability, in the labels' order; or none.
        labels: the labels that may stand in it.
        columns: every column that some member reads, as text or in a template.
        json_columns: those that a template parses with ``fromjson``.
        text_columns: those that are used directly as text.
        limit: use only the first so many rows; at least 1.
        read_by: for a message, the key that asks for a column.
        also: columns that are read beside these, and what they are for, in a few words.
        truth_as: what ``label_columns`` hold: "softmax" for probabilities that sum to 1 and are scaled to it,
            "sigmoid" for one from 0 to 1 in each of them, "none" for any numbers.
    """

    id_column: str
    label_column: str | None
    labels: tuple[str, ...]
    columns: tuple[str, ...]
    json_columns: tuple[str, ...]
    text_columns: tuple[str, ...]
    limit: int | None
    label_columns: tuple[str, ...] = ()
    truth_as: Activation = "softmax"
    read_by: Mapping[str, str] = dataclasses.field(default_factory=dict)
    also: Mapping[str, str] = dataclasses.field(default_factory=dict)


class InputTable:
    """A table that passed every check; made by :func:`read_table`.

    Attributes:
        rows: number of rows.
        ids: shape (rows,), strings (large strings above 2 GB of text), in file order.
        truth: see ``Truth``; None if there is none.
        null_texts: for each of ``TableNeeds.columns``, its null or empty cells; in a JSON column also those
            that hold an empty list or, anywhere inside, a null.
        null_turns: of these the cells that hold a null inside a list or an object.
    """

    def __init__(
        self,
        columns: pa.Table,
        ids: pa.ChunkedArray,
        truth: Truth | None,
        null_texts: dict[str, int],
        null_turns: Mapping[str, int] | None = None,
    ) -> None:
        self.rows = len(ids)
        self.ids = ids
        self.truth = truth
        self.null_texts = null_texts
        self.null_turns = null_turns or {}
        self._columns = columns
        self._text_lengths: dict[str, npt.NDArray[np.int64]] = {}
        self._digests: dict[str, str] = {}
        self._row_digests: dict[tuple[tuple[str, ...], FileCells | None], RowDigests] = {}
        self._file_digests: dict[FileCells, pa.Array] = {}

    @property
    def remarks(self) -> list[str]:
        """What the user should know of its texts, a sentence each."""
        remarks = []
        for column, count in self.null_texts.items():
            with_nulls = self.null_turns.get(column, 0)
            if (empty := count - with_nulls) and is_text(self._columns.schema.field(column).type):
                remarks.append(f"{plural(empty, 'empty text')} in {column!r}, read as an empty string")
            elif empty:
                remarks.append(f"{plural(empty, 'empty cell')} in {column!r}")
            if with_nulls:
                remarks.append(
                    f"{plural(with_nulls, 'row')} with null turns in {column!r}, read as empty texts"
                )
        return remarks

    def text_lengths(self, columns: Sequence[str]) -> npt.NDArray[np.int64]:
        """UTF-8 bytes per row, summed over ``columns``: shape (rows,), a cheap stand-in for tokens.

        Nested values count by their JSON text, numbers by their decimal form, nulls as 0.  Each column is measured
        once, before ``forget_columns``; the result is not to be changed.
        """
        for name in columns:
            if name not in self._text_lengths:
                found, start = np.empty(self.rows, np.int64), 0
                for text in map(cell_texts, self._columns.column(name).chunks):
                    found[start : start + len(text)] = pc.fill_null(pc.binary_length(text), 0).to_numpy()
                    start += len(text)
                self._text_lengths[name] = found
        if len(columns) == 1:
            return self._text_lengths[columns[0]]
        return sum((self._text_lengths[name] for name in columns), start=np.zeros(self.rows, dtype=np.int64))

    @property
    def text_bytes(self) -> npt.NDArray[np.int64]:
        """UTF-8 bytes per row of all that some member reads: shape (rows,)."""
        return self.text_lengths(self._columns.column_names)

    @property
    def column_bytes(self) -> int:
        """What the published table takes on disk, and in memory until ``forget_columns``."""
        return int(self._columns.nbytes)

    def digest(self, columns: Sequence[str], files: FileCells | None = None) -> str:
        """What the ids and these columns hold, in order; each column is read once, before ``forget_columns``.

        Args:
            files: one of the columns, with the files that its cells name, which are read, too.
        """
        assert self._columns.num_rows == self.rows or self._digests.keys() >= set(columns)
        cells = rows_digest(self.ids, self._columns, columns, self._digests)
        return cells if files is None else digest_of([cells, self._digests_of(files).to_pylist()])

    def row_digests(self, columns: Sequence[str], files: FileCells | None = None) -> RowDigests:
        """A digest of each row's cells in these columns, [rows, 2]; made once, before ``forget_columns``.

        Args:
            files: as for ``digest``.
        """
        names = tuple(columns)
        if (names, files) not in self._row_digests:
            assert self._columns.num_rows == self.rows or not names
            if files is not None:
                table = self._columns.append_column(_FILES, self._digests_of(files))
                digests = row_digests(table, [*names, _FILES])
            else:
                digests = (
                    row_digests(self._columns, names) if names else np.zeros((self.rows, 2), dtype="<u8")
                )
            self._row_digests[names, files] = digests
        return self._row_digests[names, files]

    def look_for_files(self, files: FileCells) -> LookedAt:
        """Look whether some of the files are there that a column names."""
        return look_for_files(self._columns.column(files.column), files)

    def row_files(self, files: FileCells) -> list[str]:
        """The files that a column names, each once, whether they are there or not; before ``forget_columns``."""
        paths = map(files.path, self._columns.column(files.column).unique().to_pylist())
        return [str(path) for path in paths if path is not None]

    def _digests_of(self, files: FileCells) -> pa.Array:
        if files not in self._file_digests:
            self._file_digests[files] = file_digests(self._columns.column(files.column), files)
        return self._file_digests[files]

    def derived(
        self,
        numbers: npt.NDArray[np.int64],
        ids: pa.ChunkedArray,
        change: Callable[[pa.Field, pa.ChunkedArray], pa.Array | pa.ChunkedArray],
    ) -> InputTable:
        """A table without labels of its rows by number, in that order and as often as they are named.

        Args:
            numbers: of its rows, from 0, [rows of the new table].
            ids: of the new table's rows, unique text.
            change: makes a column's new cells, of the same type, from those that the numbers name.
        """
        taken = pa.array(numbers)
        columns = [
            change(field, column.take(taken))
            for field, column in zip(self._columns.schema, self._columns.columns, strict=True)
        ]
        return InputTable(pa.table(columns, schema=self._columns.schema), ids, None, {})

    def python_rows(self, columns: Sequence[str]) -> Iterator[dict[str, object]]:
        """Each row's cells in some columns, as templates will see them; few are in memory at a time."""
        table = self._columns.select(columns)
        marked = [column.name for column in table.schema if is_json_field(column)]
        for batch in table.to_batches(max_chunksize=_PYTHON_ROWS):
            for row in batch.to_pylist():
                for name in marked:
                    row[name] = _loaded_cell(row[name])
                yield row

    def types(self, columns: Iterable[str]) -> dict[str, str]:
        """What some of its columns hold, in a word; of a name that is no column of it nothing."""
        schema = self._columns.schema
        fields = [schema.field(name) for name in columns if name in schema.names]
        return {
            one.name: "text"
            if is_text(one.type) and not is_json_field(one)
            else "lists and the like"
            if is_json_field(one)
            else shown_type(one.type)
            for one in fields
        }

    def only(self, columns: Sequence[str]) -> InputTable:
        """The same rows with these of its columns."""
        nulls = {name: count for name, count in self.null_texts.items() if name in columns}
        return InputTable(self._columns.select(columns), self.ids, self.truth, nulls, self.null_turns)

    def forget_columns(self) -> None:
        """Free the texts, once they are published; ids, truth and counts stay."""
        self._columns = self._columns.schema.empty_table()

    def head(self, count: int) -> list[dict[str, object]]:
        """The first ``count`` rows, each a dict of column to value, as templates will see them."""
        rows: list[dict[str, object]] = self._columns.slice(0, count).to_pylist()
        if not self._columns.num_columns:
            return [{} for _ in range(min(count, self.rows))]
        for name in [column.name for column in self._columns.schema if is_json_field(column)]:
            for row in rows:
                row[name] = _loaded_cell(row[name])
        return rows

    def publish(self, path: Path, with_ids: bool = False) -> None:
        """Writes the columns as an uncompressed Arrow IPC file, ready to be memory-mapped.

        Record batches hold at most 65,536 rows.  The schema's metadata names the number of rows, which a
        table without columns could not tell otherwise.

        Args:
            path: written in place; making that atomic is the caller's business.
            with_ids: the rows' ids, too, as a last column that is marked as such.

        Raises:
            OSError: the file cannot be written.
        """
        columns = self._columns
        if with_ids:
            ids = pa.field("id", self.ids.type, metadata={b"ensemble": b"ids"})
            columns = pa.table([*columns.columns, self.ids], schema=pa.schema([*columns.schema, ids]))
        schema = columns.schema.with_metadata({b"ensemble.rows": str(self.rows).encode()})
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for batch in columns.to_batches(max_chunksize=PUBLISHED_ROWS_PER_BATCH):
                writer.write_batch(batch)


def read_table(path: Path, needs: TableNeeds) -> InputTable:
    """Reads and checks the table.

    Raises:
        DataError: with every problem found.  A broken structure (see ``formats.read_contents``) is reported
            alone, because nothing after it can be counted on.
    """
    columns = tuple(dict.fromkeys([*needs.columns, *needs.also]))
    wanted = tuple(dict.fromkeys([*columns, *needs.label_columns]))
    contents = read_contents(path, Wanted(needs.id_column, needs.label_column, wanted, needs.limit))
    if contents.rows == 0:
        raise DataError(f"{path}: empty table: there is a header or a schema, but no row")
    roles = {name: f"column for {use}:" for name, use in needs.also.items()}
    roles |= dict.fromkeys(needs.columns, "text column") | dict.fromkeys(needs.label_columns, "label column")
    if needs.label_column is not None:
        roles[needs.label_column] = "label column"
    roles[needs.id_column] = "id column"
    names = contents.names
    readers = needs.read_by
    label_key = "label_columns" if needs.label_column is None else "label_column"
    way_out = {"label column": f"; for a table without true labels, --set data.{label_key}=null"}
    missing = [
        missing_column(path, roles[name], name, names, readers.get(name)) + way_out.get(roles[name], "")
        for name in roles
        if name not in names
    ]
    problems = [*contents.problems, *missing]
    if contents.ids is not None:
        problems += _id_problems(path, needs.id_column, contents.ids)
    truth: Truth | None = None
    if contents.labels is not None:
        numbers = pc.index_in(contents.labels, value_set=pa.array(needs.labels, contents.labels.type))
        problems += _label_problems(path, needs, contents, numbers)
        truth = pc.fill_null(numbers, -1).to_numpy().astype(np.int64)
    elif needs.label_columns and not set(needs.label_columns) - set(names):
        truth, wrong = _probabilities(path, needs, contents)
        problems += wrong
    held = [name for name in contents.columns.column_names if name in columns]
    contents = replace(contents, columns=contents.columns.select(held))
    problems += _type_problems(path, needs, contents)
    null_texts, null_turns, json_problems = _cell_facts(path, needs, contents)
    problems += json_problems
    if problems or contents.ids is None:
        raise DataError(problems)
    return InputTable(contents.columns, contents.ids, truth, null_texts, null_turns)


def _row(index: int, ids: pa.ChunkedArray | None) -> str:
    name = None if ids is None else ids[index].as_py()
    return f"row {index + 1:,}" + ("" if name is None else f" (id {quoted(name)})")


def _id_problems(path: Path, column: str, ids: pa.ChunkedArray) -> Iterator[str]:
    where = f"{path}: id column {quoted(column)}"
    blank, rows = _first(pc.fill_null(pc.equal(ids, ""), True))
    if blank:
        shown_rows = ", ".join(f"{row + 1:,}" for row in rows)
        yield f"{where}: {plural(blank, 'row')} without an id, first: row {shown_rows}; give every row an id"
    names = repeated_ids(ids)
    names = names.filter(pc.fill_null(pc.not_equal(names, ""), False))
    if not len(names):
        return
    shown = []
    for name in names[:_SHOWN].to_pylist():
        count, rows = _first(pc.equal(ids, name))
        shown_rows = ", ".join(f"{row + 1:,}" for row in rows)
        shown.append(f"{quoted(name)} in row {shown_rows}" + (", ..." if count > _SHOWN else ""))
    yield f"{where}: {plural(len(names), 'id')} more than once: {'; '.join(shown)}; ids must be unique"


def _first(mask: pa.ChunkedArray) -> tuple[int, list[int]]:
    """How often ``mask`` (shape (rows,), booleans, null counting as false) is true, and the first few indices."""
    count = pc.sum(mask).as_py() or 0
    return count, pc.indices_nonzero(pc.fill_null(mask, False))[:_SHOWN].to_pylist() if count else []


def _label_problems(
    path: Path, needs: TableNeeds, contents: Contents, truth: pa.ChunkedArray
) -> Iterator[str]:
    unknown, rows = _first(pc.is_null(truth))
    if not unknown or contents.labels is None:
        return
    shown = []
    for row in rows:
        label = contents.labels[row].as_py()
        value = f"{quoted(label)}{did_you_mean(label, needs.labels)}" if label else "has no label"
        shown.append(f"{_row(row, contents.ids)}: {value}")
    count = plural(unknown, "row")
    where = f"{path}: label column {quoted(str(needs.label_column))}: {count} without a known label"
    yield f"{where}; {'; '.join(shown)}; the labels are {listed(needs.labels)}"


def _probabilities(
    path: Path, needs: TableNeeds, contents: Contents
) -> tuple[npt.NDArray[np.float64], list[str]]:
    """The label columns as float64 [rows, labels], as ``truth_as`` has them; and what is wrong with them."""
    columns = {name: contents.columns.column(name) for name in needs.label_columns}
    problems = [
        f"{path}: label column {quoted(name)} holds {shown_type(column.type)} values; write it as numbers"
        for name, column in columns.items()
        if pa.types.is_nested(column.type) or is_binary(column.type)
    ]
    values = np.zeros((contents.rows, len(columns)))
    if problems:
        return values, problems
    for index, column in enumerate(columns.values()):
        values[:, index] = _as_numbers(column)
    is_number = np.isfinite(values)
    with np.errstate(invalid="ignore"):  # infinite values
        sums = values.sum(axis=1)
        is_off = np.abs(sums - 1) > _SUM_TOLERANCE
    is_odd, is_negative = ~is_number.all(axis=1), (values < 0).any(axis=1)
    advice = "each row holds the probability of each label"
    wrong = {"without a number in each of them": is_odd}
    if needs.truth_as != "none":
        wrong["with a value below 0"] = is_negative & ~is_odd
    if needs.truth_as == "softmax":
        wrong["whose values do not sum to 1"] = is_off & ~is_odd & ~is_negative
    elif needs.truth_as == "sigmoid":
        wrong["with a value above 1"] = (values > 1).any(axis=1) & ~is_odd
    else:
        advice = "each row holds a number for each label"
    where = f"{path}: label columns {listed(needs.label_columns)}"
    for what, mask in wrong.items():
        if len(rows := np.flatnonzero(mask)):
            shown = "; ".join(
                f"{_row(row, contents.ids)}: "
                + ", ".join(
                    quoted("" if (cell := cells[row].as_py()) is None else str(cell))
                    for cells in columns.values()
                )
                for row in rows[:_SHOWN].tolist()
            )
            problems.append(f"{where}: {plural(len(rows), 'row')} {what}; {shown}; {advice}")
    is_scaled = needs.truth_as == "softmax" and not problems
    return values / sums[:, None] if is_scaled else values, problems


def _as_numbers(column: pa.ChunkedArray) -> npt.NDArray[np.float64]:
    """Numbers of whatever type, or as text, as float64 [rows]: true is 1, false 0, and what is no number NaN."""
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return np.asarray(pc.cast(column, pa.float64()).to_numpy())
    text = pc.fill_null(pa.chunked_array([cell_texts(chunk) for chunk in column.chunks]), "")
    numbers, is_text = text_as_numbers(text)
    if is_text.any():  # as pandas' get_dummies writes them
        lower = pc.utf8_lower(pc.utf8_trim_whitespace(text)).to_numpy(zero_copy_only=False)
        numbers = np.where(lower == "true", 1.0, np.where(lower == "false", 0.0, numbers))
    return numbers


def _type_problems(path: Path, needs: TableNeeds, contents: Contents) -> Iterator[str]:
    """Columns used as plain text whose values are lists, structs or bytes."""
    for name in dict.fromkeys(needs.text_columns):
        if name not in contents.columns.column_names:
            continue
        field, column = contents.columns.schema.field(name), contents.columns.column(name)
        advice = "read it in a prompt_template, or write it as text"
        if pa.types.is_nested(field.type):
            yield f"{path}: column {quoted(name)} holds {shown_type(field.type)} values, not text; {advice}"
        elif is_binary(field.type):
            yield f"{path}: column {quoted(name)} holds bytes, not text; write the file with it cast to string"
        elif is_json_field(field):
            nested, rows = _first(pc.match_substring_regex(column, r"^[\[{]"))
            if nested:
                place = f"{plural(nested, 'row')}, first {_row(rows[0], contents.ids)}"
                yield f"{path}: column {quoted(name)} holds lists or objects in {place}; {advice}"


def _cell_facts(
    path: Path, needs: TableNeeds, contents: Contents
) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """``InputTable``'s ``null_texts`` and ``null_turns``, and what is wrong with cells that a template parses."""
    null_texts: dict[str, int] = {}
    null_turns: dict[str, int] = {}
    problems: list[str] = []
    for field in contents.columns.schema:
        column = contents.columns.column(field.name)
        if field.name not in needs.json_columns:
            null_texts[field.name] = int(column.null_count)
            if is_text(column.type):
                # JSON text spells the empty text with its quotes.
                blank = '""' if is_json_field(field) else ""
                null_texts[field.name] += pc.sum(pc.equal(column, blank)).as_py() or 0
            continue
        empty, with_nulls, broken, shown = 0, 0, 0, ""
        for row, cell in enumerate(_python_cells(column, is_json_field(field))):
            try:
                value = parse_json_cell(cell)
            except TemplateProblem as problem:
                broken += 1
                if broken <= _SHOWN:
                    shown += f"; {_row(row, contents.ids)}: {problem}"
                continue
            if isinstance(cell, str):  # most are cleared without being parsed again
                cell = json.loads(cell) if "null" in cell else None
            empty += value in ([], "", {})
            with_nulls += _holds_null(cell)
        null_texts[field.name] = empty + with_nulls
        null_turns[field.name] = with_nulls
        if broken:
            problems.append(
                f"{path}: column {quoted(field.name)}: broken JSON in {plural(broken, 'row')}{shown}"
            )
    return null_texts, null_turns, problems


def _holds_null(value: object) -> bool:
    items = list(value.values()) if isinstance(value, dict) else value
    return isinstance(items, list) and any(item is None or _holds_null(item) for item in items)


def _python_cells(column: pa.ChunkedArray, is_json: bool) -> Iterator[object]:
    """The cells as templates will see them, a few thousand in memory at a time."""
    for chunk in column.chunks:
        for start in range(0, len(chunk), _PYTHON_ROWS):
            for cell in chunk.slice(start, _PYTHON_ROWS).to_pylist():
                yield _loaded_cell(cell) if is_json else cell


def _loaded_cell(cell: object) -> object:
    return json.loads(cell) if isinstance(cell, str) else cell
