"""Write the submission, with the columns and rows of a sample file, in its order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.errors import DataError
from ensemble.common.text import did_you_mean, listed, plural, quoted
from ensemble.data.answers import Answer
from ensemble.data.csv_file import (
    csv_cells,
    csv_lines,
    header_line,
    read_header,
    read_text_csv,
    text_as_numbers,
)
from ensemble.data.formats import format_of_predictions
from ensemble.data.ids import places_among
from ensemble.data.input_file import Wanted, check_names, first_ids, missing_column
from ensemble.data.parquet import write_parquet
from ensemble.data.table import InputTable

_SHOWN = 20
_WRITE_ROWS, _WRITE_CELLS = 65_536, 2**24
_OTHER_TABLE = (
    "for a table that is not to be submitted, such as train.csv, write no submission: --set submission=null, or "
    "remove the key"
)


def read_sample(path: Path, id_column: str, labels: Sequence[str], columns_map: Mapping[str, str]) -> Sample:
    """Read a sample submission (CSV or TSV), except its values, which :meth:`Sample.values` reads.

    Raises:
        DataError: the file cannot be read, or has no column ``id_column``.
    """
    columns = read_header(path)
    check_names(path, columns, columns)
    if id_column not in columns:
        raise DataError(missing_column(path, "id column", id_column, columns))
    ids = read_text_csv(path, [id_column]).column(0)
    return Sample(path, id_column, columns, ids, tuple(labels), dict(columns_map))


@dataclass(frozen=True)
class Sample:
    """Hold a sample submission: all its columns, and its ids as strings, [rows], both in file order.

    ``labels`` are those that are predicted, ``columns_map`` has the label of each column whose name is no label,
    ``answers`` say how the columns with answers are made, and ``table`` has the cells that these read.
    """

    path: Path
    id_column: str
    columns: tuple[str, ...]
    ids: pa.ChunkedArray
    labels: tuple[str, ...]
    columns_map: Mapping[str, str]
    answers: Mapping[str, Answer] = field(default_factory=dict)
    table: InputTable | None = None

    def problems(self, ids: pa.ChunkedArray, limited: bool) -> tuple[str, ...]:
        """Return why no submission of a table with these ids could be written; called before anything runs.

        ``limited``: the table has only the first rows, so that it may lack ids of the sample.
        """
        problems = []
        decided = f"{{answer: {{above: {{{quoted(self.labels[-1])}: 0.5}}}}}}"
        others = [name for name in self.columns if name != self.id_column]
        if not others:
            problems.append(
                f"has no column besides {quoted(self.id_column)}; a column per label to submit is needed"
            )
        with_labels = self._label_columns
        unknown_columns = [name for name in with_labels if self._label(name) not in self.labels]
        for name in unknown_columns[:_SHOWN]:
            label = self._label(name)
            mapped = f" is mapped to {quoted(label)}, which" if name in self.columns_map else ""
            hint = f"{did_you_mean(label, self.labels)}; map it to one of {listed(self.labels)}, or for the label "
            hint += f"itself to {{answer: label}}, for 0 and 1 to {decided}"
            problems.append(f"column {quoted(name)}{mapped} is not a label{hint}")
        problems += [
            f"has no column {quoted(name)}{did_you_mean(name, others)}, though it is mapped to {content}"
            for content, names in (("a label", self.columns_map), ("an answer", self.answers))
            for name in names
            if name not in others
        ]
        problems += [
            f"column {quoted(name)} holds 0 and 1, and is none of the labels; name its label in "
            f"submission.columns: {decided}"
            for name, answer in self.answers.items()
            if name in others and len(answer.labels) > 1 and "0" not in self.labels
            if {*read_text_csv(self.path, [name]).column(0).unique().to_pylist()} == {"0", "1"}
        ]
        counts_by_label = Counter(map(self._label, with_labels))
        problems += [
            f"label {quoted(label)} would stand in {count} columns; fix submission.columns"
            for label, count in counts_by_label.items()
            if label in self.labels and count > 1
        ]
        places = places_among(self.ids, ids)
        counts = np.bincount(places[places >= 0], minlength=len(ids))
        repeated, missing = ids.filter(pa.array(counts > 1)), ids.filter(pa.array(counts == 0))
        unknown = self.ids.filter(pa.array(places < 0))
        if len(repeated):
            problems.append(f"{plural(len(repeated), 'id')} more than once: {first_ids(repeated)}")
        if len(unknown) and not limited:
            problems.append(f"{plural(len(unknown), 'id')} not in the input table: {first_ids(unknown)}")
        if len(missing):
            is_other = 2 * len(missing) > len(ids)
            problems.append(_lacks(missing) + (f"; {_OTHER_TABLE}" if is_other else ""))
        return tuple(f"{self.path}: {problem}" for problem in problems)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Return a sentence for the user about labels that are not submitted, unless one of two is."""
        submitted = {self._label(name) for name in self._label_columns}
        others = [label for label in self.labels if label not in submitted]
        if not others or self.answers or len(self.labels) == 2:
            return ()
        return (f"{self.path}: has no column for {listed(others)}, whose probabilities are not submitted",)

    def value_problems(self) -> tuple[str, ...]:
        """Return why the sample's values cannot replace predictions: cells that are no finite number."""
        return self._read_values()[2]

    def values(self, ids: pa.ChunkedArray) -> npt.NDArray[np.float64]:
        """Return the sample's values for some of its ids, float64 [rows, labels], read from its file.

        Labels without a column share the rest of 1 in equal parts, at least 0.

        Raises:
            DataError: the file cannot be read, a cell is no finite number, or an id is missing.
        """
        file_ids, by_label, problems = self._read_values()
        if problems:
            raise DataError(problems)
        rows = places_among(ids, file_ids)
        missing = ids.filter(pa.array(rows < 0))
        if len(missing):
            raise DataError(f"{self.path}: {_lacks(missing)}")
        values = np.zeros((len(rows), len(self.labels)), order="F")
        for index, label in enumerate(self.labels):
            if label in by_label:
                values[:, index] = by_label[label][rows]
        without_column = [index for index, label in enumerate(self.labels) if label not in by_label]
        if without_column:
            shares = np.maximum(1.0 - values.sum(axis=1), 0.0) / len(without_column)
            values[:, without_column] = shares[:, None]
        return values

    def write(
        self,
        path: Path,
        ids: pa.ChunkedArray,
        probabilities: npt.NDArray[np.float64],
        as_parquet: bool = False,
    ) -> None:
        """Write exactly the sample's columns, in the sample's order of columns and rows.

        Args:
            ids: without ``problems``, [rows]; rows of the sample with other ids are left out.
            probabilities: [rows, labels].
            as_parquet: write Parquet, with ids as text; else CSV.
        """
        if as_parquet:
            write_parquet(path, self.columns, self._blocks(ids, probabilities))
            return
        with path.open("wb") as stream:
            stream.write(header_line(self.columns))
            for columns in self._blocks(ids, probabilities):
                stream.write(csv_lines([csv_cells(column) for column in columns]))

    def is_in(self, path: Path, ids: pa.ChunkedArray) -> bool:
        """Return whether a file has the columns and rows, in their order, that ``write`` gives it for these ids."""
        try:
            contents = format_of_predictions(path).read(path, Wanted(self.id_column, None, (), None))
        except DataError:
            return False
        if contents.names != self.columns or contents.ids is None:
            return False
        written_ids = self.ids.filter(pa.array(places_among(self.ids, ids) >= 0))
        return np.array_equal(places_among(contents.ids, written_ids), np.arange(len(written_ids)))

    def _blocks(
        self, ids: pa.ChunkedArray, probabilities: npt.NDArray[np.float64]
    ) -> Iterator[list[pa.Array]]:
        """Yield the cells by column for some rows at a time, so that the table is not copied as a whole."""
        places = places_among(self.ids, ids)
        is_written = places >= 0
        written_ids, rows = self.ids.filter(pa.array(is_written)), places[is_written]
        step = max(1, min(_WRITE_ROWS, _WRITE_CELLS // len(self.labels)))
        for start in range(0, len(rows), step):
            block = rows[start : start + step]
            block_ids = pa.concat_arrays(written_ids.slice(start, len(block)).chunks)
            columns = []
            for name in self.columns:
                if name == self.id_column:
                    columns.append(block_ids)
                elif name in self.answers:
                    columns.append(self.answers[name].cells(probabilities[block], self.table, block))
                else:
                    columns.append(pa.array(probabilities[block, self.labels.index(self._label(name))]))
            yield columns

    @property
    def _label_columns(self) -> list[str]:
        """Return the columns that hold labels' probabilities."""
        return [name for name in self.columns if name != self.id_column and name not in self.answers]

    def _label(self, column: str) -> str:
        return self.columns_map.get(column, column)

    def _read_values(self) -> tuple[pa.ChunkedArray, dict[str, npt.NDArray[np.float64]], tuple[str, ...]]:
        """Return ids, numbers by label, and the problems of cells that are no numbers; all in file order."""
        names = [name for name in self._label_columns if self._label(name) in self.labels]
        # The ids are read again, because the file's order may have changed.
        table = read_text_csv(self.path, [self.id_column, *names])
        by_label, problems = {}, []
        for name in names:
            numbers, _ = text_as_numbers(table.column(name))
            by_label[self._label(name)] = numbers
            bad = np.flatnonzero(~np.isfinite(numbers))
            if len(bad):
                cell = table.column(name)[int(bad[0])].as_py()
                problems.append(
                    f"{self.path}: column {quoted(name)}: {plural(len(bad), 'cell')} without a finite number, the "
                    f"first in row {bad[0] + 1:,}: {quoted(cell)}; fix the file, or choose fill: uniform or prior"
                )
        return table.column(0), by_label, tuple(problems)


def _lacks(ids: pa.ChunkedArray) -> str:
    return f"lacks {plural(len(ids), 'id')} of the input table: {first_ids(ids)}"
