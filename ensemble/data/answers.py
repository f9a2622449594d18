"""Turn a row's values into the answer that a submission asks for: labels, or a number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.errors import DataError
from ensemble.data.json_cells import TemplateProblem
from ensemble.data.table import InputTable
from ensemble.data.template import PromptTemplate, compile_template

# What a format calls the label or number.
ANSWER: Final = "answer"
_BLOCK_CELLS = 2**22  # that are sorted at a time
# Digits behind the point of means and thresholds: the last bits of a sum depend on how many rows are multiplied at
# a time, and 2/3 and 1/3 of 1 and 2 shall be 4/3.
_DIGITS = 12


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Choose the answer of each row, and write it.

    Attributes:
        texts: what is written for each label; unused with ``numbers``.
        top: how many labels are the answer.
        numbers: the possible answers, if these are numbers: one for each label, or any for a single label; no two
            are equal.
        thresholds: means of these numbers by probability, or a single label's values, at which the next higher
            number begins; rising.
        template: makes the text of a label or number; None: it is written as it is.
    """

    texts: tuple[str, ...]
    top: int = 1
    separator: str = " "
    numbers: tuple[float, ...] = ()
    thresholds: tuple[float, ...] = ()
    template: PromptTemplate | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns of the table that the template reads."""
        return tuple(name for name in self.template.columns if name != ANSWER) if self.template else ()

    def choices(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Return which labels, or which of ``numbers``, are each row's answer, int64 [rows, top].

        The likeliest label comes first, of equal ones the first in the labels' order. A label of probability 0,
        such as one that a rule masks, is no answer: -1 stands in its place, except in a row of zeros.

        Args:
            values: float64 [rows, labels].
        """
        if self.numbers:
            means = values[:, 0] if values.shape[1] == 1 else values @ np.array(self.numbers)
            thresholds = np.round(self.thresholds, _DIGITS)
            ranks = np.searchsorted(thresholds, means.round(_DIGITS), side="right")
            return np.asarray(np.argsort(self.numbers)[ranks][:, None])
        if self.top == 1:
            return np.asarray(values.argmax(axis=1)[:, None])
        choices = np.empty((len(values), self.top), np.int64)
        step = max(1, _BLOCK_CELLS // values.shape[1])
        for start in range(0, len(values), step):
            block = values[start : start + step]
            likeliest = np.argsort(-block, axis=1, kind="stable")[:, : self.top]
            is_impossible = np.take_along_axis(block, likeliest, axis=1) == 0
            is_impossible[:, 0] = False
            choices[start : start + step] = np.where(is_impossible, -1, likeliest)
        return choices

    def cells(
        self, values: npt.NDArray[np.float64], table: InputTable | None, rows: npt.NDArray[np.int64]
    ) -> pa.Array:
        """Return the answers as a column, [rows]: numbers, or text.

        Args:
            values: float64 [rows, labels].
            table: has ``columns``; None if there are none.
            rows: the numbers of the rows in the table, int64 [rows].

        Raises:
            DataError: the template fails for a row.
        """
        choices = self.choices(values)
        written = whole_numbers(self.numbers) or self.texts
        if self.template is None and choices.shape[1] == 1:
            return pa.array(written).take(pa.array(choices[:, 0]))
        texts = [str(answer) for answer in written]
        table_rows: Iterable[Mapping[str, object]] = [{}] * len(values)
        if table is not None and self.columns:
            table_rows = table.python_rows(self.columns, rows)
        cells = []
        for number, row, chosen in zip(rows.tolist(), table_rows, choices.tolist(), strict=True):
            parts = [texts[choice] for choice in chosen if choice >= 0]
            try:
                if self.template is not None:
                    parts = [self.template.render({**row, ANSWER: text}) for text in parts]
            except TemplateProblem as problem:
                raise DataError(f"format: row {number + 1:,}: {problem}") from None
            cells.append(self.separator.join(parts))
        return pa.array(cells, pa.string())


def compile_format(source: str) -> PromptTemplate:
    """Compile the format of an answer; raise TemplateProblem for a mistake, or if it leaves the answer out."""
    compiled = compile_template(source)
    if ANSWER not in compiled.columns:
        raise TemplateProblem("lacks {{ answer }}, so that no answer would be written")
    return compiled


def halfway(numbers: tuple[float, ...]) -> tuple[float, ...]:
    """Return the thresholds that round to the nearest of these numbers."""
    return tuple((low + high) / 2 for low, high in pairwise(sorted(numbers)))


def are_numbers(labels: Sequence[str]) -> bool:
    """Return whether labels are numbers, no two of them equal."""
    try:
        numbers = np.array([*map(float, labels)])
    except ValueError:
        return False
    return bool(np.isfinite(numbers).all()) and len(np.unique(numbers)) == len(labels)


def numbers_of(labels: Sequence[str]) -> tuple[float, ...]:
    """Return the labels as numbers if they are such, else their places in the config from 0 on."""
    return tuple(map(float, labels if are_numbers(labels) else range(len(labels))))


def whole_numbers(numbers: tuple[float, ...]) -> list[int] | list[float]:
    """Return the numbers as integers if all are whole, so that they are written without a point."""
    if all(number.is_integer() for number in numbers):
        return [int(number) for number in numbers]
    return [*numbers]
