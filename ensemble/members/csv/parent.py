"""Read predictions that were made elsewhere: a file with an id and one column per label, joined by id.

The file must hold every row of the table once, or with ``partial`` some of them.  Ids that the table does not have
are ignored and counted; other columns are ignored.
"""

# No "from __future__ import annotations": pydantic would evaluate every annotation from its text again.

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field

from ensemble.common.activations import sigmoid, softmax
from ensemble.common.digests import FileDigests
from ensemble.common.errors import DataError
from ensemble.common.shards import file_sha256
from ensemble.common.text import quoted, shown_path
from ensemble.config import MemberConfig
from ensemble.config.document import Problem
from ensemble.config.values import Column, File, LabelMap, Sha256, same_label_problems
from ensemble.data.formats import column_names, known_format
from ensemble.data.input_file import missing_column, without_pandas_index
from ensemble.data.predictions_csv import demand_as_written, guessed_id_column, read_predictions
from ensemble.members.base import Assigned, Draft, ExternalPredictions, Inspection, MemberKind, OutputColumns

_ROWS_ADVICE = "a row is needed for each of them, or partial: true"
_COLUMNS_ADVICE = "columns: {COLUMN: LABEL} says which column is for a label of another name"


class CsvSettings(MemberConfig):
    """A file with an id and a column for each of the config's labels: CSV, TSV, Parquet or JSON lines."""

    task_type: Literal["csv"] = "csv"
    path: File = Field(examples=["mate.csv"])  # every row of the table once; further ones are left out
    id_column: Column | None = None  # names each row; None: data.id_column
    columns: LabelMap = Field(default_factory=dict)  # the file's column -> label, where they differ
    activation: Literal["softmax", "sigmoid", "none"] = "softmax"  # what the values are; none: any numbers
    # logits: they become probabilities by softmax or sigmoid, as activation says.
    values: Literal["probabilities", "logits"] = "probabilities"
    partial: bool = False  # whether it may lack rows, which the other members then decide
    sha256: Sha256 | None = None  # SHA-256 of the file; a file with another one is refused

    older_keys: ClassVar[Mapping[str, str]] = {
        "path": "file csv predictions model_name_or_path",
        "id_column": "id id_col",
        "columns": "label_map label_columns",
        "activation": "problem_type",
        "values": "logits from_logits",
        "partial": "allow_missing may_lack_rows",
        "sha256": "checksum digest hash",
    }

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        yield from same_label_problems("columns", self.columns, labels)
        if self.values == "logits" and self.activation == "none":
            yield ("values",), "logits become probabilities by activation: softmax or sigmoid, not none"


@dataclass(frozen=True)
class CsvInspection(Inspection):
    """Add the id column of the file."""

    id_column: str


class CsvPredictions(MemberKind[CsvSettings, CsvInspection]):
    """Describe predictions that were made elsewhere."""

    Settings: ClassVar[type[MemberConfig]] = CsvSettings
    needs_worker: ClassVar[bool] = False
    activation_key: ClassVar[str] = "activation"
    rows_advice: ClassVar[str] = "correct the file, or say with values: logits or activation what they are"

    @classmethod
    def draft(cls, source: str, id_column: str) -> Draft | None:
        path = Path(source)
        if not path.is_file() or known_format(path) is None:
            return None
        names = without_pandas_index(column_names(path))
        file_id_column = guessed_id_column(names, usual=id_column)
        settings = {"task_type": "csv", "path": source}
        if file_id_column != id_column:
            settings["id_column"] = file_id_column
        labels = tuple(name for name in names if name != file_id_column)
        return Draft(settings, labels, are_named=True, reads_text=False, labels_are_columns=True)

    @property
    def may_lack_rows(self) -> bool:
        return self.settings.partial

    def sources(self) -> tuple[str, ...]:
        return (str(self.settings.path),)

    def inspect(self, columns: OutputColumns) -> CsvInspection:
        path, id_column = self.settings.path, self.settings.id_column or columns.id_column
        names, column_by_label = column_names(path), self._column_by_label(columns.labels)
        self._demand_sha256()
        demand_as_written(path)
        roles = {
            column: "column of the label" if column == label else f"column for the label {quoted(label)}:"
            for label, column in column_by_label.items()
        }
        roles[id_column] = "id column"
        named_in_config = {*self.settings.columns, id_column}
        problems = [
            missing_column(path, role, name, names)
            + ("" if name in named_in_config else f"; {_COLUMNS_ADVICE}")
            for name, role in roles.items()
            if name not in names
        ]
        problems += [
            f"{path}: columns: none is left for the label {quoted(label)}, as the column of that name is for "
            f"{quoted(self.settings.columns[label])}; name another"
            for label, column in column_by_label.items()
            if self.settings.columns.get(column, label) != label
        ]
        if id_column in column_by_label.values():
            problems.append(f"{path}: id_column: {quoted(id_column)} is a label; name the column of the ids")
        if problems:
            raise DataError(problems)
        return CsvInspection(
            activation=self.settings.activation,
            label_order=tuple(range(len(columns.labels))),
            summary=f"{'logits' if self._are_logits else 'predictions'} in {shown_path(path)}",
            id_column=id_column,
        )

    def fingerprint(self, inspected: CsvInspection, assigned: Assigned) -> Mapping[str, object]:
        keys = self.settings.model_dump(include={"activation", "columns"})
        return {"id_column": inspected.id_column, "are_logits": self._are_logits, **keys}

    def content(self, inspected: CsvInspection, files: FileDigests) -> Mapping[str, str]:
        return {"file": files.digest(self.settings.path)}

    def predictions(self, ids: pa.ChunkedArray, columns: OutputColumns) -> ExternalPredictions:
        may_lack = self.settings.partial
        file = read_predictions(
            self.settings.path,
            self.settings.id_column or columns.id_column,
            [*self._column_by_label(columns.labels).values()],
            may_lack,
        )
        values, ignored = file.join(ids, may_lack=may_lack, may_have_others=True, advice=_ROWS_ADVICE)
        return ExternalPredictions(self.as_probabilities(values), ignored)

    def as_probabilities(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Turn the file's values, [rows, labels], into probabilities if they are logits."""
        if not self._are_logits:
            return values
        if self.settings.activation == "sigmoid":
            return sigmoid(values)
        is_number = np.isfinite(values.max(axis=1))  # the check of probabilities reports the others
        values[is_number] = softmax(values[is_number])
        return values

    @property
    def _are_logits(self) -> bool:
        return self.settings.values == "logits"

    def _column_by_label(self, labels: tuple[str, ...]) -> dict[str, str]:
        renamed = {label: column for column, label in self.settings.columns.items()}
        return {label: renamed.get(label, label) for label in labels}

    def _demand_sha256(self) -> None:
        path = self.settings.path
        if self.settings.sha256 is None:
            return
        expected = self.settings.sha256.lower()
        actual = file_sha256(path)
        if actual != expected:
            raise DataError(
                f"{path}: sha256: the file's is {actual}, not {expected}; get the file that was meant, or "
                "change the key"
            )
