"""Read the input table, check it, and publish it to the workers.

What would stop a run later (a row without an id, broken JSON in row 17,000, an unknown label) is found here, before
any model is loaded, and reported all at once. ``formats.py`` reads the files, workers use ``published_table.py``.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ensemble.common.errors import DataError
from ensemble.common.protocol import Activation
from ensemble.common.text import did_you_mean, listed, plural, quoted
from ensemble.data.csv_file import text_as_numbers
from ensemble.data.digests import RowDigests, row_digests, rows_digest
from ensemble.data.file_rows import FileRows
from ensemble.data.formats import read_contents
from ensemble.data.ids import repeated_ids
from ensemble.data.input_file import (
    Contents,
    Wanted,
    cell_texts,
    column_texts,
    is_binary,
    is_json_field,
    is_text,
    missing_column,
    shown_type,
)
from ensemble.data.json_cells import TemplateProblem, parse_json_cell, python_rows
from ensemble.data.row_files import FileCells, file_digests, look_for_files

_SHOWN = 3
# Names of the columns of files' digests and of ids; no column of a table has them.
_FILES = "\0files"
_IDS = "\0ids"
# By how much a row of probabilities may miss 1: thirds are often written with two digits.
_SUM_TOLERANCE = 0.02
# Each row's label: its index in the config's labels, int64 [rows]; or how likely each is, float64 [rows, labels].
Truth: TypeAlias = npt.NDArray[np.int64] | npt.NDArray[np.float64]


@dataclass(frozen=True)
class TableNeeds:
    """Define what a run needs of its table.

    Attributes:
        label_column: the column with the true label of each row.
        label_columns: instead, a column for each label with its probability, in the labels' order.
        columns: every column that some member reads, as text or in a template.
        json_columns: those that a template parses with ``fromjson``; ``text_columns`` are used directly as text.
        read_by: the key that needs a column, by column, for messages.
        also: other columns to read, and in a few words what they are for.
        truth_as: what ``label_columns`` have: "softmax" for probabilities that sum to about 1 and are scaled to it,
            "sigmoid" for numbers from 0 to 1, "none" for any numbers.
        unequal_sums: what to do about probabilities that do not sum to 1, with a semicolon before it.
        may_lack_truth: whether the run can do without true labels, which messages then say.
        skip_unlabelled: whether rows are left out whose label, or all of whose label columns, are empty.
        inputs: columns that come from other members' predictions, and the key that asks for each.
    """

    id_column: str
    label_column: str | None = None
    labels: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    json_columns: tuple[str, ...] = ()
    text_columns: tuple[str, ...] = ()
    limit: int | None = None
    label_columns: tuple[str, ...] = ()
    truth_as: Activation = "softmax"
    unequal_sums: str = ""
    may_lack_truth: bool = True
    skip_unlabelled: bool = False
    read_by: Mapping[str, str] = dataclasses.field(default_factory=dict)
    also: Mapping[str, str] = dataclasses.field(default_factory=dict)
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class _Column:
    """Say what a column is read for: ``title`` in messages, and whether the table that is read has it, too.

    ``advice`` is what to do if there is no such column, with a semicolon before it.
    """

    name: str
    title: str
    is_kept: bool = False
    advice: str = ""


def _columns(needs: TableNeeds) -> Iterator[_Column]:
    """Yield each column for each of its uses, the most important use last."""
    for name in needs.columns:
        yield _Column(name, "text column", is_kept=True)
    for name, use in needs.also.items():
        yield _Column(name, f"column for {use}:", is_kept=True)
    key = "label_columns" if needs.label_column is None else "label_column"
    advice = f"; for a table without true labels, --set data.{key}=null" if needs.may_lack_truth else ""
    for name in filter(None, [needs.label_column, *needs.label_columns]):
        yield _Column(name, "label column", advice=advice)
    yield _Column(needs.id_column, "id column")


@dataclass(eq=False, repr=False)
class InputTable:
    """Hold a table that passed every check; :func:`read_table` makes it.

    Attributes:
        columns: the cells that members read; none after ``forget_columns``.
        ids: shape (rows,), strings (large strings above 2 GB of text), in file order.
        truth: see ``Truth``; None if there is none.
        null_texts: by column, the number of null or empty cells; in a JSON column also of those with an empty list
            or with a null inside.
        null_turns: by column, the number of cells with a null inside a list or an object.
        file_rows: the numbers of these rows in the file, rising, int64 [rows]; None: all of the file's first rows.
        file_remarks: sentences for the user: odd cells, labels in another spelling, and rows that are left out.
    """

    columns: pa.Table
    ids: pa.ChunkedArray
    truth: Truth | None
    null_texts: Mapping[str, int]
    null_turns: Mapping[str, int] = dataclasses.field(default_factory=dict)
    file_rows: npt.NDArray[np.int64] | None = None
    file_remarks: tuple[str, ...] = ()
    # What is computed once, and not of a table that is made of this one.
    _text_lengths: dict[str, npt.NDArray[np.int64]] = dataclasses.field(init=False, default_factory=dict)
    _digests: dict[tuple[tuple[str, ...], FileCells | None], str] = dataclasses.field(
        init=False, default_factory=dict
    )
    _row_digests: dict[tuple[tuple[str, ...], FileCells | None, bool], RowDigests] = dataclasses.field(
        init=False, default_factory=dict
    )
    _file_digests: dict[FileCells, pa.Array] = dataclasses.field(init=False, default_factory=dict)

    @property
    def rows(self) -> int:
        return len(self.ids)

    @property
    def remarks(self) -> list[str]:
        """Return sentences for the user about labels and empty texts."""
        remarks = [*self.file_remarks]
        for column, count in self.null_texts.items():
            with_nulls = self.null_turns.get(column, 0)
            if count - with_nulls:
                remarks.append(f"{plural(count - with_nulls, 'empty cell')} in {column!r}")
            if with_nulls:
                remarks.append(
                    f"{plural(with_nulls, 'row')} with null turns in {column!r}, read as empty texts"
                )
        return remarks

    def text_lengths(self, columns: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return UTF-8 bytes per row, summed over ``columns``, [rows]; the caller must not change the result."""
        for name in columns:
            if name not in self._text_lengths:
                lengths = [
                    pc.fill_null(pc.binary_length(cell_texts(chunk)), 0).to_numpy().astype(np.int64)
                    for chunk in self.columns.column(name).chunks
                ]
                self._text_lengths[name] = np.concatenate([np.zeros(0, np.int64), *lengths])
        if len(columns) == 1:
            return self._text_lengths[columns[0]]
        return sum((self._text_lengths[name] for name in columns), start=np.zeros(self.rows, dtype=np.int64))

    @property
    def text_bytes(self) -> npt.NDArray[np.int64]:
        """Return UTF-8 bytes per row of all columns that members read: shape (rows,)."""
        return self.text_lengths(self.columns.column_names)

    @property
    def column_bytes(self) -> int:
        """Return the size of the published table on disk, and in memory until ``forget_columns``."""
        return int(self.columns.nbytes)

    def digest(self, columns: Sequence[str], files: FileCells | None = None) -> str:
        """Return a digest of the ids and these columns, made once; ``files`` names one, whose files count, too."""
        key = (tuple(columns), files)
        if key not in self._digests:
            self._digests[key] = rows_digest(self.ids, columns, self.row_digests(columns, files))
        return self._digests[key]

    def row_digests(
        self, columns: Sequence[str], files: FileCells | None = None, with_ids: bool = False
    ) -> RowDigests:
        """Return a digest of each row's cells in these columns, uint64 [rows, 2].

        Args:
            files: as for ``digest``.
            with_ids: whether a row's id counts, too.
        """
        key = (tuple(columns), files, with_ids)
        if key not in self._row_digests:
            assert self.columns.num_rows == self.rows or not columns
            table, names = self.columns, list(columns)
            if files is not None:
                if files not in self._file_digests:
                    self._file_digests[files] = file_digests(table.column(files.column), files)
                table, names = table.append_column(_FILES, self._file_digests[files]), [*names, _FILES]
            if with_ids:
                # A table without columns does not know its rows.
                table = table.append_column(_IDS, self.ids) if names else pa.table({_IDS: self.ids})
                names.append(_IDS)
            self._row_digests[key] = row_digests(table, names) if names else np.zeros((self.rows, 2), "<u8")
        return self._row_digests[key]

    def look_for_files(self, files: FileCells) -> tuple[int, list[tuple[int, Path | None]]]:
        """Check for some of the files that a column names whether they exist; see ``row_files.look_for_files``."""
        return look_for_files(self.columns.column(files.column), files)

    def row_files(self, files: FileCells) -> list[str]:
        """Return the files that a column names, each once, existing or not; call it before ``forget_columns``."""
        paths = map(files.path, self.columns.column(files.column).unique().to_pylist())
        return [str(path) for path in paths if path is not None]

    def derived(self, numbers: npt.NDArray[np.int64], ids: pa.ChunkedArray) -> InputTable:
        """Return a table without labels that has this table's rows by number, repeats allowed, with new ids."""
        return InputTable(self.columns.take(pa.array(numbers)), ids, None, {})

    def followed_by(self, other: InputTable, path: Path) -> InputTable:
        """Return a table without labels of these rows and then those of ``other``, in this table's types.

        The other table has the same columns, and may have the same ids; ``path`` is its file.

        Raises:
            DataError: a cell does not fit the type of its column here.
        """
        joined = FileRows(np.arange(self.rows), [(path, other.columns)]).joined_to(self.columns)
        ids = pa.chunked_array([*self.ids.chunks, *pc.cast(other.ids, self.ids.type).chunks], self.ids.type)
        nulls = {name: count + other.null_texts.get(name, 0) for name, count in self.null_texts.items()}
        turns = {name: count + other.null_turns.get(name, 0) for name, count in self.null_turns.items()}
        return InputTable(joined, ids, None, nulls, turns)

    def python_rows(
        self, columns: Sequence[str], numbers: npt.NDArray[np.int64] | None = None
    ) -> Iterator[dict[str, object]]:
        """Return the cells of rows (None: of all) as templates will see them; few are in memory at a time."""
        table = self.columns.select(columns)
        return _python_rows(table if numbers is None else table.take(pa.array(numbers)))

    def texts(self, column: str) -> pa.ChunkedArray:
        """Return the cells of a column as large strings, [rows]; nulls stay."""
        return column_texts(self.columns.column(column))

    def types(self, columns: Collection[str]) -> dict[str, str]:
        """Return in a word what columns hold, by column; names that are no column are left out."""
        types: dict[str, str] = {}
        for field in self.columns.schema:
            if field.name in columns:
                types[field.name] = "text" if is_text(field.type) else shown_type(field.type)
                if is_json_field(field):
                    types[field.name] = "lists and the like"
        return types

    def only(self, columns: Sequence[str]) -> InputTable:
        """Return the same rows with only these columns."""
        nulls = {name: self.null_texts[name] for name in columns}
        return replace(self, columns=self.columns.select(columns), null_texts=nulls)

    def forget_columns(self) -> None:
        """Free the columns' memory once they are published; ids, truth and counts stay."""
        self.columns = self.columns.schema.empty_table()

    def head(self, count: int) -> list[dict[str, object]]:
        """Return the first ``count`` rows, each a dict of column to value, as templates will see them."""
        if not self.columns.num_columns:
            return [{}] * min(count, self.rows)
        return list(_python_rows(self.columns.slice(0, count)))

    def publish(self, path: Path, with_ids: bool = False) -> None:
        """Write the columns, and with ``with_ids`` the ids, as an Arrow IPC file, ready to be memory-mapped.

        The schema's metadata has the number of rows, because a table without columns cannot tell it.
        """
        columns = self.columns
        if with_ids:
            ids = pa.field("id", self.ids.type, metadata={b"ensemble": b"ids"})
            columns = pa.table([*columns.columns, self.ids], schema=pa.schema([*columns.schema, ids]))
        schema = columns.schema.with_metadata({b"ensemble.rows": str(self.rows).encode()})
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for batch in columns.to_batches(max_chunksize=65_536):
                writer.write_batch(batch)


def read_table(path: Path, needs: TableNeeds) -> InputTable:
    """Read and check the table.

    Raises:
        DataError: with every problem. A broken structure (see ``formats.read_contents``) is reported alone,
            because later row numbers are not reliable.
    """
    kept = tuple(dict.fromkeys(column.name for column in _columns(needs) if column.is_kept))
    read = tuple(dict.fromkeys([*kept, *needs.label_columns]))
    contents = read_contents(path, Wanted(needs.id_column, needs.label_column, read, needs.limit))
    if contents.rows == 0:
        raise DataError(f"{path}: empty table: there is a header or a schema, but no row")
    names = contents.names
    uses = {column.name: column for column in _columns(needs)}
    missing = [
        missing_column(path, column.title, name, names, needs.read_by.get(name)) + column.advice
        for name, column in uses.items()
        if name not in names
    ]
    problems = [*contents.problems, *missing]
    problems += [
        f"{path}: column {quoted(name)} has the name of predictions that {key} reads; rename it"
        for name, key in needs.inputs.items()
        if name in names
    ]
    if contents.ids is not None:
        problems += _id_problems(path, needs.id_column, contents.ids)
    truth: Truth | None = None
    remarks = [*contents.remarks]
    is_labelled = _labelled_rows(needs, contents)
    if not is_labelled.any():
        columns_text = listed([*filter(None, [needs.label_column]), *needs.label_columns])
        problems.append(f"{path}: no row has a label in {columns_text}; name another column")
    if contents.labels is not None:
        numbers, label_remarks = _label_numbers(path, needs, contents.labels)
        remarks += label_remarks
        problems += _label_problems(path, needs, contents, numbers, is_labelled)
        truth = pc.fill_null(numbers, -1).to_numpy().astype(np.int64)
    elif needs.label_columns and not set(needs.label_columns) - set(names):
        truth, label_problems = _probabilities(path, needs, contents, is_labelled)
        problems += label_problems
    present = [name for name in contents.columns.column_names if name in kept]
    contents = replace(contents, columns=contents.columns.select(present))
    problems += _type_problems(path, needs, contents)
    null_texts, null_turns, json_problems = _cell_facts(path, needs, contents)
    problems += json_problems
    if problems or contents.ids is None:
        raise DataError(problems)
    table = InputTable(contents.columns, contents.ids, truth, null_texts, null_turns)
    if not is_labelled.all():
        rows, labelled = np.flatnonzero(is_labelled), pa.array(is_labelled)
        left_out = plural(contents.rows - len(rows), "row")
        remarks.append(f"{path}: {left_out} without a label left out, as data.skip_unlabelled says")
        contents = replace(
            contents, columns=contents.columns.filter(labelled), ids=contents.ids.filter(labelled)
        )
        null_texts, null_turns, _ = _cell_facts(path, needs, contents)  # of the rows that are left
        truth = None if truth is None else truth[rows]
        table = InputTable(contents.columns, contents.ids, truth, null_texts, null_turns, rows)
    return replace(table, file_remarks=tuple(remarks))


def row_text(index: int, ids: pa.ChunkedArray | None) -> str:
    """Return a row's number, from 1, and its id if it has one, for a message."""
    name = None if ids is None else ids[index].as_py()
    return f"row {index + 1:,}" + ("" if name is None else f" (id {quoted(name)})")


def _id_problems(path: Path, column: str, ids: pa.ChunkedArray) -> Iterator[str]:
    where = f"{path}: id column {quoted(column)}"
    blank, rows = _first(pc.fill_null(pc.equal(ids, ""), True))
    if blank:
        shown_rows = ", ".join(f"{row + 1:,}" for row in rows)
        yield f"{where}: {plural(blank, 'row')} without an id, first: row {shown_rows}; give every row an id"
    repeated = repeated_ids(ids)
    repeated = repeated.filter(pc.fill_null(pc.not_equal(repeated, ""), False))
    if len(repeated):
        shown = []
        for name in repeated[:_SHOWN].to_pylist():
            count, rows = _first(pc.equal(ids, name))
            shown.append(f"{quoted(name)} in row {', '.join(f'{row + 1:,}' for row in rows)}")
            shown[-1] += ", ..." if count > len(rows) else ""
        more = "; ..." if len(repeated) > _SHOWN else ""
        count_text = f"{plural(len(repeated), 'id')} more than once"
        yield f"{where}: {count_text}: {'; '.join(shown)}{more}; ids must be unique"


def _first(mask: pa.ChunkedArray) -> tuple[int, list[int]]:
    """Return how often ``mask`` (booleans, shape (rows,); null is false) is true, and the first few indices."""
    count = pc.sum(mask).as_py() or 0
    if not count:
        return 0, []
    return count, pc.indices_nonzero(pc.fill_null(mask, False))[:_SHOWN].to_pylist()


def plain_label(label: str) -> str:
    """Return a label as it was before pandas turned its column, for a missing value in it, into floats or objects.

    ``1.0`` is ``1``, and ``True`` is ``true``; other labels are returned as they are.
    """
    whole = re.fullmatch(r"(-?[0-9]+)\.0*", label)
    if whole is not None:
        return whole[1]
    return label.lower() if label.lower() in ("true", "false") else label


def _label_numbers(
    path: Path, needs: TableNeeds, labels: pa.ChunkedArray
) -> tuple[pa.ChunkedArray, list[str]]:
    """Return the number of each row's label, null for an unknown one, [rows]; and remarks about spellings."""
    number_of = {label: number for number, label in enumerate(needs.labels)}
    plain, taken = [*map(plain_label, needs.labels)], []
    for text in labels.unique().to_pylist():
        if text and text not in number_of and plain.count(plain_label(text)) == 1:
            number_of[text] = plain.index(plain_label(text))
            taken.append(f"{quoted(text)} is {quoted(needs.labels[number_of[text]])}")
    places = pc.index_in(labels, value_set=pa.array([*number_of], labels.type))
    numbers = pc.take(pa.array([*number_of.values()]), places)
    where = f"{path}: label column {quoted(str(needs.label_column))}"
    remark = f"{where}: spelled as pandas does after a missing value: {listed(taken, _SHOWN, str)}"
    return numbers, [remark] if taken else []


def _labelled_rows(needs: TableNeeds, contents: Contents) -> npt.NDArray[np.bool_]:
    """Return which rows have a label, or a cell in some label column; all, unless others are left out; [rows]."""
    cells = [] if contents.labels is None else [contents.labels]
    cells += [contents.columns[name] for name in needs.label_columns if name in contents.columns.column_names]
    if not needs.skip_unlabelled or not cells:
        return np.ones(contents.rows, np.bool_)
    has_text = [pc.not_equal(pc.utf8_trim_whitespace(column_texts(column)), "") for column in cells]
    flags = [pc.fill_null(column, False).to_numpy() for column in has_text]
    return np.asarray(np.logical_or.reduce(flags))


def _label_problems(
    path: Path,
    needs: TableNeeds,
    contents: Contents,
    truth: pa.ChunkedArray,
    is_labelled: npt.NDArray[np.bool_],
) -> Iterator[str]:
    unknown, rows = _first(pc.and_(pc.is_null(truth), pa.array(is_labelled)))
    if not unknown or contents.labels is None:
        return
    shown = []
    for row in rows:
        label = contents.labels[row].as_py()
        value = f"{quoted(label)}{did_you_mean(label, needs.labels)}" if label else "has no label"
        shown.append(f"{row_text(row, contents.ids)}: {value}")
    count = plural(unknown, "row")
    where = f"{path}: label column {quoted(str(needs.label_column))}: {count} without a known label"
    advice = f"the labels are {listed(needs.labels)}"
    if not any(contents.labels[row].as_py() for row in rows):
        advice += "; skip_unlabelled: true beside label_column in a config leaves out rows without a label"
    yield f"{where}; {'; '.join(shown)}; {advice}"


def _probabilities(
    path: Path, needs: TableNeeds, contents: Contents, is_labelled: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.float64], list[str]]:
    """Return the label columns as float64 [rows, labels], as ``truth_as`` says, and what is wrong with them."""
    columns = {name: contents.columns.column(name) for name in needs.label_columns}
    problems = [
        f"{path}: label column {quoted(name)} holds {shown_type(column.type)} values; write it as numbers"
        for name, column in columns.items()
        if pa.types.is_nested(column.type) or is_binary(column.type)
    ]
    if problems:
        return np.zeros((contents.rows, len(columns))), problems
    values = np.stack([_as_numbers(column) for column in columns.values()], axis=1)
    is_wrong = ~np.isfinite(values).all(axis=1)
    problem = "without a number for each label"
    with np.errstate(invalid="ignore"):  # infinite values
        sums = values.sum(axis=1)
        if needs.truth_as == "softmax":
            is_wrong |= (values < 0).any(axis=1) | ~(np.abs(sums - 1) <= _SUM_TOLERANCE)
            problem = "whose values are not probabilities that sum to 1"
        elif needs.truth_as == "sigmoid":
            is_wrong |= ((values < 0) | (values > 1)).any(axis=1)
            problem = "without a number from 0 to 1 for each label"
    rows = np.flatnonzero(is_wrong & is_labelled)
    if not len(rows):
        return values / sums[:, None] if needs.truth_as == "softmax" else values, []
    advice = needs.unequal_sums if needs.truth_as == "softmax" else ""
    shown = []
    for row in rows[:_SHOWN].tolist():
        cells = [column[row].as_py() for column in columns.values()]
        texts = [quoted("" if cell is None else str(cell)) for cell in cells]
        shown.append(f"{row_text(row, contents.ids)}: {', '.join(texts)}")
    where = f"{path}: label columns {listed(needs.label_columns)}"
    return values, [f"{where}: {plural(len(rows), 'row')} {problem}; {'; '.join(shown)}{advice}"]


def _as_numbers(column: pa.ChunkedArray) -> npt.NDArray[np.float64]:
    """Return numbers of any type, or in text, as float64 [rows]: true is 1, false is 0, other cells are NaN."""
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return np.asarray(pc.cast(column, pa.float64()).to_numpy())
    text = pc.fill_null(column_texts(column), "")
    numbers, is_text = text_as_numbers(text)
    if is_text.any():  # as pandas' get_dummies writes them
        lower = pc.utf8_lower(pc.utf8_trim_whitespace(text)).to_numpy(zero_copy_only=False)
        numbers = np.where(lower == "true", 1.0, np.where(lower == "false", 0.0, numbers))
    return numbers


def _type_problems(path: Path, needs: TableNeeds, contents: Contents) -> Iterator[str]:
    """Yield a problem for each column used as plain text whose values are lists, structs or bytes."""
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
                place = f"{plural(nested, 'row')}, first {row_text(rows[0], contents.ids)}"
                yield f"{path}: column {quoted(name)} holds lists or objects in {place}; {advice}"


def _cell_facts(
    path: Path, needs: TableNeeds, contents: Contents
) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """Return ``InputTable``'s ``null_texts`` and ``null_turns``, and the problems of JSON cells."""
    null_texts: dict[str, int] = {}
    null_turns: dict[str, int] = {}
    problems: list[str] = []
    for field in contents.columns.schema:
        column = contents.columns.column(field.name)
        if field.name not in needs.json_columns:
            null_texts[field.name] = int(column.null_count)
            if is_text(column.type):
                # In JSON, an empty text has quotes.
                blank = '""' if is_json_field(field) else ""
                null_texts[field.name] += pc.sum(pc.equal(column, blank)).as_py() or 0
            continue
        empty, with_nulls, broken, shown = 0, 0, 0, ""
        for row, cells in enumerate(_python_rows(contents.columns.select([field.name]))):
            cell = cells[field.name]
            try:
                value = parse_json_cell(cell)
            except TemplateProblem as problem:
                broken += 1
                if broken <= _SHOWN:
                    shown += f"; {row_text(row, contents.ids)}: {problem}"
                continue
            if isinstance(cell, str):  # most need not be parsed again
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


def _python_rows(table: pa.Table) -> Iterator[dict[str, object]]:
    for batch in table.to_batches(max_chunksize=8_192):
        yield from python_rows(batch)


@dataclass(frozen=True)
class DistinctCells:
    """Hold a column's distinct cells, sorted, and the number of each row's cell among them, int64 [rows]."""

    name: str
    numbers: npt.NDArray[np.int64]
    values: tuple[str, ...]

    def taken(self, rows: slice | npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> DistinctCells:
        return replace(self, numbers=self.numbers[rows])


def distinct_cells(path: Path, table: InputTable, column: str) -> DistinctCells:
    """Return a column's distinct cells; if all of them are numbers, they are sorted as numbers.

    Args:
        path: of the table, for messages.

    Raises:
        DataError: a cell is empty.
    """
    cells = table.texts(column)
    empty = np.flatnonzero(pc.equal(pc.fill_null(cells, ""), "").to_numpy())
    if len(empty):
        first = row_text(int(empty[0]), table.ids)
        raise DataError(
            f"column {quoted(column)} of {path} is empty in {plural(len(empty), 'row')}, first: {first}; fill it "
            "in every row"
        )
    values = pa.array(sorted(cells.unique().to_pylist()), cells.type)
    numbers, is_text = text_as_numbers(values)
    if not is_text.any() and np.isfinite(numbers).all():
        values = values.take(pa.array(np.argsort(numbers, kind="stable")))
    places = pc.index_in(cells, value_set=values)
    return DistinctCells(column, np.asarray(places.to_numpy(), np.int64), tuple(values.to_pylist()))
