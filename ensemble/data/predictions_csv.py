"""Read files of predictions, join them to a table by ids, and check whether they were changed."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ensemble.common.errors import DataError
from ensemble.common.files import read_json, unreadable
from ensemble.common.shards import file_sha256
from ensemble.common.text import plural, quoted
from ensemble.data.csv_file import text_as_numbers
from ensemble.data.formats import FORMATS, column_names, format_of_predictions
from ensemble.data.ids import ID_COLUMN, match_ids
from ensemble.data.input_file import Wanted, is_text, missing_column, shown_type

_Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PredictionFile:
    """Hold the contents of a file of predictions, in its order: values are float64 [rows, labels], by columns."""

    path: Path
    id_column: str
    labels: tuple[str, ...]
    ids: pa.ChunkedArray
    values: _Values

    def join(
        self,
        ids: pa.ChunkedArray,
        *,
        may_lack: bool = False,
        may_have_others: bool = False,
        table: str = "the table",
        advice: str = "",
    ) -> tuple[_Values, int]:
        """Join the rows to those of a table; see ``match_ids``, which has the same arguments.

        Returns:
            float64 [ids, labels], in the order of ``ids``, NaN for those that the file may lack; and how many rows
            of the file were left out.
        """
        if self.ids.equals(ids):
            return self.values, 0
        places = match_ids(
            self.path,
            self.ids,
            ids,
            may_lack=may_lack,
            may_have_others=may_have_others,
            id_column=self.id_column,
            table=table,
            advice=advice,
        )
        values = np.full((len(ids), len(self.labels)), np.nan, order="F")
        is_in_table = places >= 0
        values[places[is_in_table]] = self.values[is_in_table]
        return values, int((~is_in_table).sum())


@dataclass(frozen=True)
class PredictionCells:
    """Hold columns of a file of predictions as they are written, by name, in the file's order."""

    path: Path
    id_column: str
    ids: pa.ChunkedArray
    columns: dict[str, pa.ChunkedArray]

    def take_numbers(self, labels: Sequence[str], may_lack: bool = False) -> PredictionFile:
        """Return columns as numbers, see ``read_predictions``; each is taken out, so that its memory is freed."""
        rows, columns = len(self.ids), [self.columns.pop(label) for label in labels]
        may_be_empty = _empty_rows(columns, rows) if may_lack else np.zeros(rows, np.bool_)
        values = np.empty((rows, len(labels)), order="F")
        for index, label in enumerate(labels):
            cells = columns.pop(0)
            numbers, is_no_number = _numbers(self.path, label, cells)
            values[:, index] = numbers
            is_wrong = is_no_number & ~may_be_empty
            if is_wrong.any():
                row = int(is_wrong.argmax())
                cell = cells[row].as_py()
                shown = "nothing" if cell in (None, "") else quoted(str(cell))
                raise DataError(
                    f"{self.path}: row {row + 1:,}: {shown} in column {quoted(label)} is no number; write a "
                    "number in every row"
                )
        return PredictionFile(self.path, self.id_column, tuple(labels), self.ids, values)


def file_stem(path: Path) -> str:
    """Return a file's name without the extension of an input format and without .gz, in upper or lower case."""
    endings = "|".join(re.escape(ending) for file_format in FORMATS for ending in file_format.extensions)
    return re.sub(rf"(?i)({endings})?(\.gz)?$", "", path.name) or path.name


def is_as_written(predictions: Path) -> bool | None:
    """Return whether predictions have the SHA-256 of the manifest beside them; None without a manifest."""
    manifest = read_json(predictions.with_suffix(".json"))
    if not isinstance(manifest.get("fingerprint"), dict):
        return None
    try:
        return file_sha256(predictions) == manifest.get("sha256")
    except OSError:
        return False


def demand_as_written(predictions: Path) -> None:
    """Raise DataError if predictions were changed after their run wrote them, or cannot be read.

    Files without a manifest may have any content.
    """
    if is_as_written(predictions) is False:
        try:
            predictions.open("rb").close()
        except OSError as error:
            raise DataError(unreadable(predictions, error)) from error
        raise DataError(
            f"{predictions}: is not the file that its run wrote, as {predictions.stem}.json beside it has another "
            "SHA-256; run the config again, which computes it anew, or copy the file to another folder to use it "
            "as it is"
        )


def guessed_id_column(names: Sequence[str], others: Collection[str] = (), usual: str = ID_COLUMN) -> str:
    """Return the probable id column: the usual one, else the first that is not among ``others``."""
    if usual in names:
        return usual
    return next((name for name in names if name not in others), names[0])


def read_predictions(
    path: Path, id_column: str | None = None, labels: Sequence[str] | None = None, may_lack: bool = False
) -> PredictionFile:
    """Read predictions in any format of tables; files with unknown extensions are CSV.

    Args:
        id_column: None: the first column.
        labels: the columns to read, in this order; None: all but the ids.
        may_lack: a row whose cells are all empty becomes a row of NaN.

    Raises:
        DataError: as ``read_contents`` does; also missing columns, rows without an id, cells that are no number.
    """
    if id_column is None or labels is None:
        names = column_names(path)
        id_column = id_column or names[0]
        labels = [name for name in names if name != id_column] if labels is None else labels
    return read_cells(path, id_column, labels).take_numbers(labels, may_lack)


def read_cells(path: Path, id_column: str, labels: Sequence[str]) -> PredictionCells:
    """Read columns of predictions as they are written; raises what ``read_predictions`` says of columns and ids."""
    wanted = Wanted(id_column, None, tuple(labels), None, numbers=tuple(labels))
    contents = format_of_predictions(path).read(path, wanted)
    roles = dict.fromkeys(labels, "column of the label") | {id_column: "id column"}
    missing = [
        missing_column(path, role, name, contents.names)
        for name, role in roles.items()
        if name not in contents.names
    ]
    problems = [*contents.problems, *missing]
    if problems:
        raise DataError(problems)
    ids = contents.ids
    assert ids is not None
    if ids.null_count:
        raise DataError(f"{path}: {plural(ids.null_count, 'row')} without an id; give every row an id")
    return PredictionCells(path, id_column, ids, {label: contents.columns.column(label) for label in labels})


def _empty_rows(columns: Sequence[pa.ChunkedArray], rows: int) -> npt.NDArray[np.bool_]:
    """Return which rows are empty in all columns, [rows]."""
    empty = np.ones(rows, np.bool_)
    for cells in columns:
        is_empty = pc.equal(pc.fill_null(cells, ""), "") if is_text(cells.type) else cells.is_null()
        empty &= is_empty.to_numpy()
    return empty


def _numbers(path: Path, label: str, cells: pa.ChunkedArray) -> tuple[_Values, npt.NDArray[np.bool_]]:
    """Return a column of any type as ``text_as_numbers`` does; raise DataError if it can hold no numbers."""
    if is_text(cells.type):
        return text_as_numbers(pc.fill_null(cells, ""))
    kinds = pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_null
    if not any(is_kind(cells.type) for is_kind in kinds):
        kind = shown_type(cells.type)
        raise DataError(f"{path}: column {quoted(label)} holds {kind} values; write it as numbers")
    return np.asarray(pc.cast(cells, pa.float64(), safe=False).to_numpy()), cells.is_null().to_numpy()
