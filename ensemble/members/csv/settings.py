"""The keys of predictions that were made elsewhere."""

# No "from __future__ import annotations": pydantic would evaluate every annotation from its text again.

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from ensemble.config import MemberConfig
from ensemble.config.values import Column, File


class CsvSettings(MemberConfig):
    """A CSV with an id and, for each of the config's labels, a column of that name.

    Raises:
        ValidationError: a value is of the wrong type or out of range.
    """

    task_type: Literal["csv"] = "csv"
    path: File = Field(examples=["mate.csv"])  # every row of the table once; further ones are left out
    id_column: Column | None = None  # names each row; None: data.id_column
    activation: Literal["softmax", "sigmoid", "none"] = "softmax"  # what the values are; none: any numbers
    partial: bool = False  # whether it may lack rows of the table, which the other members then decide

    older_keys: ClassVar[Mapping[str, str]] = {
        "path": "file csv predictions model_name_or_path",
        "id_column": "id id_col",
        "activation": "problem_type",
        "partial": "allow_missing may_lack_rows",
    }
