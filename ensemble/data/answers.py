"""Turn a row's values into the answer that a submission asks for: labels, yes or no, or a number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.errors import DataError
from ensemble.common.text import listed
from ensemble.data.json_cells import TemplateProblem
from ensemble.data.table import InputTable
from ensemble.data.template import PromptTemplate, compile_template

# What a format calls the label or number.
ANSWER: Final = "answer"
_BLOCK_CELLS = 2**22  # that are sorted at a time
# Digits behind the point of values and thresholds: the last bits of a sum depend on how many rows are multiplied at
# a time, and 2/3 and 1/3 of 1 and 2 shall be 4/3.
DIGITS: Final = 12


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Choose the answer of each row, and write it.

    Attributes:
        texts: what is written for each label; unused with ``numbers``.
        top: how many labels are the answer.
        above: the probability from which on a label is an answer, of each label; inf: it never is one; empty: see
            ``top``.
        at_least: how many labels are answers where fewer are ``above``.
        none: what is written where no label is an answer.
        numbers: the possible answers, if these are numbers: one for each label, or any for a single label; no two
            are equal.
        thresholds: means of these numbers by probability, or a single label's values, at which the next higher
            number begins; rising.
        template: makes the text of a label or number; None: it is written as it is.
    """

    texts: tuple[str, ...]
    top: int = 1
    above: tuple[float, ...] = ()
    at_least: int = 0
    none: str = ""
    separator: str = " "
    numbers: tuple[float, ...] = ()
    thresholds: tuple[float, ...] = ()
    template: PromptTemplate | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns of the table that the template reads."""
        return tuple(name for name in self.template.columns if name != ANSWER) if self.template else ()

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """Return the numbers of the labels that may be ``above``."""
        return np.flatnonzero(np.isfinite(self.above))

    def decisions(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        """Return which labels are above, or added to these up to ``at_least``, bool [rows, labels].

        A label of probability 0, such as one that a rule masks, is never an answer.
        """
        is_answer, thresholds = np.empty(values.shape, np.bool_), np.round(self.above, DIGITS)
        step = max(1, _BLOCK_CELLS // values.shape[1])
        for start in range(0, len(values), step):
            block = np.where(np.isfinite(thresholds), values[start : start + step], 0.0)
            is_above = block.round(DIGITS) >= thresholds
            if self.at_least:
                order = np.argsort(-np.where(is_above, np.inf, block), axis=1, kind="stable")
                np.put_along_axis(is_above, order[:, : self.at_least], values=True, axis=1)
            is_answer[start : start + step] = is_above & (block > 0)
        return is_answer

    def choices(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Return which labels, or which of ``numbers``, are each row's answer, int64 [rows, top or labels].

        The likeliest label comes first, of equal ones the first in the labels' order. A label of probability 0,
        such as one that a rule masks, is no answer: -1 stands in its place, except in a row of zeros. Of ``labels``
        that may be above, each has a column, with -1 where it is no answer.

        Args:
            values: float64 [rows, labels].
        """
        if self.above:
            return np.where(self.decisions(values)[:, self.labels], self.labels, -1)
        if self.numbers:
            means = values[:, 0] if values.shape[1] == 1 else values @ np.array(self.numbers)
            thresholds = np.round(self.thresholds, DIGITS)
            ranks = np.searchsorted(thresholds, means.round(DIGITS), side="right")
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
        written = whole_numbers(self.numbers) or [*self.texts, self.none]
        if self.template is None and choices.shape[1] == 1:
            column = pa.array(written).take(pa.array(choices[:, 0] % len(written)))
            return column.cast(pa.int64()) if {*written} == {"0", "1"} else column
        texts = [str(answer) for answer in written]
        table_rows: Iterable[Mapping[str, object]] = [{}] * len(values)
        if table is not None and self.columns:
            table_rows = table.python_rows(self.columns, rows)
        cells = []
        for number, row, chosen in zip(rows.tolist(), table_rows, choices.tolist(), strict=True):
            parts = [texts[choice] for choice in chosen if choice >= 0] or [self.none]
            try:
                if self.template is not None:
                    parts = [text and self.template.render({**row, ANSWER: text}) for text in parts]
            except TemplateProblem as problem:
                raise DataError(f"format: row {number + 1:,}: {problem}") from None
            cells.append(self.separator.join(parts))
        return pa.array(cells, pa.string())


def scored_together(answers: Mapping[str, Answer]) -> dict[str, Answer]:
    """Return the answers whose scores are told; columns of one label each are one answer with all their labels."""
    of_one = {name: answer for name, answer in answers.items() if len(answer.labels) == 1}
    if len({int(answer.labels[0]) for answer in of_one.values()}) < max(2, len(of_one)):
        return dict(answers)
    thresholds = np.min([answer.above for answer in of_one.values()], axis=0).tolist()
    others = {name: answer for name, answer in answers.items() if name not in of_one}
    return others | {listed([*of_one], show=str): Answer(texts=(), above=tuple(thresholds))}


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
