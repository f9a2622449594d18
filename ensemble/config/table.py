"""Define the keys of a table: its file, its ids and its true labels."""

# No "from __future__ import annotations": pydantic would evaluate every annotation from its text again.

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, Tag

from ensemble.config.document import Problem
from ensemble.config.strict import StrictConfig
from ensemble.config.values import Column, File, LabelMap, Labels, mapping_or_text, same_label_problems


class AllowedLabelsTable(StrictConfig):
    """Another table, which lists the labels that are possible in all rows with the same key."""

    path: File = Field(examples=["questions.csv"])  # in any format of data.path
    key: Column = Field(examples=["question_id"])  # column of both tables; in this one each key stands once
    column: Column = Field(examples=["labels"])  # its column with JSON lists of labels

    def __str__(self) -> str:
        return f"{self.column} of {self.path}"


ColumnOrTable = Annotated[
    Annotated[Column, Tag("text")] | Annotated[AllowedLabelsTable, Tag("mapping")],
    Discriminator(mapping_or_text),
]


class DataConfig(StrictConfig):
    """The table to predict. A relative path starts at the working directory."""

    # A CSV, TSV, Parquet or JSON lines file, gzipped or not, or the address of one, such as s3://bucket/test.csv.
    path: File = Field(examples=["test.csv"])
    id_column: Column = "id"  # column of the ids, which are kept byte for byte
    label_column: Column | None = None  # the true labels, for metrics
    # Or one column per label with its true probability, such as 0 or 1; a mapping if their names differ.
    label_columns: Labels | LabelMap | None = None
    skip_unlabelled: bool = False  # leave out rows whose label is empty, in place of refusing them
    # Column with a JSON list of the labels that are possible in a row, others get 0; or that of another table.
    allowed_labels: ColumnOrTable | None = None

    older_keys: ClassVar[Mapping[str, str]] = {
        "path": "file csv input input_path test",
        "id_column": "id id_col",
        "label_column": "label label_col target target_column",
        "label_columns": "label_cols targets target_columns",
    }
    alternatives: ClassVar[tuple[tuple[str, str], ...]] = (("label_column", "label_columns"),)

    def truth_columns(self, labels: Sequence[str]) -> tuple[str, ...]:
        """Return the column of ``label_columns`` for each of the config's labels; empty if there are none."""
        if not self.label_columns:
            return ()
        if not isinstance(self.label_columns, dict):
            return tuple(labels)
        column_by_label = {label: column for column, label in self.label_columns.items()}
        return tuple(column_by_label.get(label, label) for label in labels)

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        if self.label_column is not None and len(labels) == 1:
            yield (
                ("label_column",),
                "holds one of several labels, but there is a single label here; name the column of its numbers "
                "with label_columns: {column: label}",
            )
        if self.label_columns is None:
            return
        if self.label_column is not None:
            yield ("label_columns",), "data.label_column is given as well; keep one of the two"
        yield from broken_label_columns(self.label_columns, labels)


def broken_label_columns(
    label_columns: Sequence[str] | Mapping[str, str], labels: Sequence[str]
) -> Iterator[Problem]:
    """Yield labels that ``label_columns`` lacks or has twice, and those that are none."""
    columns: dict[Any, str] = dict(enumerate(label_columns))
    advice = " (of a column with another name: {column: label})"
    if isinstance(label_columns, Mapping):
        columns, advice = {**label_columns}, ""
    problems = [*same_label_problems("label_columns", columns, labels, advice)]
    yield from problems
    if not problems and len(columns) < len(labels):
        yield ("label_columns",), "has no column for some of the labels; name one for each"
