"""Define the keys of predictions that were made elsewhere."""

# No "from __future__ import annotations": pydantic would evaluate every annotation from its text again.

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from ensemble.config import MemberConfig
from ensemble.config.document import Problem
from ensemble.config.values import Column, File, LabelMap, Sha256, same_label_problems


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
