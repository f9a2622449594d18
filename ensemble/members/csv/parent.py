"""Predictions that were made elsewhere, as a member: a CSV with an id and one column per label, joined by id.

The file must hold every row of the table, each once, or with ``partial`` some of them; ids that the table does not
have are left out and counted, and so are columns that are neither the id nor a label.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pyarrow as pa

from ensemble.common.digests import FileDigests
from ensemble.common.errors import DataError
from ensemble.common.text import quoted, shown_path
from ensemble.config import MemberConfig
from ensemble.data.csv_file import read_header
from ensemble.data.input_file import missing_column
from ensemble.data.predictions_csv import guessed_id_column, read_by_id
from ensemble.members.base import Assigned, Draft, Given, Inspection, MemberKind, OutputColumns
from ensemble.members.csv.settings import CsvSettings

_NEEDED = "a row is needed for each of them, or partial: true"


@dataclass(frozen=True)
class CsvInspection(Inspection):
    """``id_column`` is the one of the file."""

    id_column: str


class CsvPredictions(MemberKind[CsvSettings, CsvInspection]):
    """Predictions that were made elsewhere."""

    Settings: ClassVar[type[MemberConfig]] = CsvSettings
    needs_worker: ClassVar[bool] = False
    activation_key: ClassVar[str] = "activation"

    @classmethod
    def draft(cls, source: str, id_column: str) -> Draft | None:
        path = Path(source)
        if not path.is_file() or not {".csv", ".tsv"} & {suffix.lower() for suffix in path.suffixes[-2:]}:
            return None
        names = read_header(path)
        own = guessed_id_column(names, usual=id_column)
        settings = {"task_type": "csv", "path": source} | ({} if own == id_column else {"id_column": own})
        labels = tuple(name for name in names if name != own)
        return Draft(settings, labels, are_named=True, reads_text=False)

    @property
    def may_lack_rows(self) -> bool:
        return self.settings.partial

    def sources(self) -> tuple[str, ...]:
        return (str(self.settings.path),)

    def inspect(self, columns: OutputColumns) -> CsvInspection:
        path, id_column = self.settings.path, self.settings.id_column or columns.id_column
        names = read_header(path)
        roles = dict.fromkeys(columns.labels, "column of the label") | {id_column: "id column"}
        problems = [missing_column(path, roles[name], name, names) for name in roles if name not in names]
        if id_column in columns.labels:
            problems.append(f"{path}: id_column: {quoted(id_column)} is a label; name the column of the ids")
        if problems:
            raise DataError(problems)
        return CsvInspection(
            activation=self.settings.activation,
            label_order=tuple(range(len(columns.labels))),
            summary=f"predictions in {shown_path(path)}",
            warnings=(),
            id_column=id_column,
        )

    def fingerprint(self, inspected: CsvInspection, assigned: Assigned) -> Mapping[str, object]:
        return {"id_column": inspected.id_column, "activation": inspected.activation}

    def content(self, inspected: CsvInspection, files: FileDigests) -> Mapping[str, str]:
        return {"file": files.digest(self.settings.path)}

    def predictions(self, ids: pa.ChunkedArray, columns: OutputColumns) -> Given:
        path, id_column = self.settings.path, self.settings.id_column or columns.id_column
        may_lack = self.settings.partial
        values, ignored = read_by_id(path, id_column, columns.labels, ids, True, may_lack, advice=_NEEDED)
        return Given(values, ignored)
