"""Change members' values before the merge and merged ones after it, in the one order that all commands share.

    a member's values    calibration, then 0 for labels that are impossible in a row
    merged values        0 for impossible labels, then rules, then 0 for impossible labels once more

Members' predictions stay as they are on disk. Merged values get zeros, too, because some methods give more than 0
where every member gives 0; and once more after the rules, so that no rule makes a label possible. Labels that are
possible in a row keep their proportions; where all of them have 0, they get equal parts.

Rules count in the order of the config:

* ``set`` gives labels a fixed value. If labels are exclusive, the others share the rest of 1 in proportion.
* ``mask`` sets labels to 0. If labels are exclusive, the others are scaled to a sum of 1.

If all the others are 0, they get equal parts, except labels that are masked. A condition is a template that gives
true or false.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ensemble.common.errors import DataError
from ensemble.common.protocol import Activation
from ensemble.common.text import did_you_mean, listed, plural, quoted
from ensemble.config.schema import RuleConfig
from ensemble.data.ids import places_among
from ensemble.data.json_cells import TemplateProblem, parse_json_cell
from ensemble.data.table import InputTable, TableNeeds, Truth, read_table, row_text
from ensemble.data.template import PromptTemplate, is_true
from ensemble.merging.calibration import Calibrator
from ensemble.merging.methods.base import MergeMethod, Values
from ensemble.merging.metrics import Flags

_SHOWN_ROWS = 3


class AllowedLabels:
    """Hold which labels are possible in each row, at least one: ``flags``, bool [rows, labels], from ``source``."""

    def __init__(self, flags: Flags, source: str) -> None:
        self.flags = flags
        self.source = source

    @property
    def text(self) -> str:
        """Return in words how many labels are possible in a row, and where they stand."""
        counts = self.flags.sum(axis=1)
        span = " to ".join(f"{count:,}" for count in sorted({counts.min(), counts.max()}))
        return f"{span} of {plural(self.flags.shape[1], 'label')} possible in a row, by {self.source}"

    def taken(self, rows: npt.NDArray[np.int64]) -> AllowedLabels:
        """Return the same for these rows of the table, in this order."""
        return AllowedLabels(self.flags[rows], self.source)

    def impossible_truths(self, truth: Truth) -> npt.NDArray[np.int64]:
        """Return the rows for which a true label is none of the possible ones; see ``LabelledRows``."""
        if truth.ndim == 1:
            return np.flatnonzero(~self.flags[np.arange(len(truth)), truth.astype(np.int64)])
        return np.flatnonzero(((truth > 0) & ~self.flags).any(axis=1))

    def apply(self, start: int, values: Values, exclusive: bool, only: Flags | None = None) -> None:
        """Set impossible labels of a block that begins at ``start``, float64 [rows, labels], to 0, in place.

        Rows of ``exclusive`` labels are scaled to a sum of 1. A row stays as it is, bit for bit, if all of its
        labels are possible, if it is NaN, or if ``only``, bool [rows], is given and lacks it.
        """
        flags = self.flags[start : start + len(values)]
        is_changed = ~flags.all(axis=1) & ~np.isnan(values).any(axis=1)
        if only is not None:
            is_changed &= only
        rows = np.flatnonzero(is_changed)
        possible = flags[rows]
        kept = np.where(possible, values[rows], 0.0)
        if exclusive:
            sums = kept.sum(axis=1, keepdims=True)
            with np.errstate(invalid="ignore"):  # 0 / 0
                kept = np.where(sums > 0, kept / sums, possible / possible.sum(axis=1, keepdims=True))
        values[rows] = kept


class RowRules:
    """Apply the rules of a run to the rows that they select, bool [rules, rows of the table]."""

    def __init__(self, rules: Sequence[RuleConfig], labels: Sequence[str], rows: Flags) -> None:
        self.rules = tuple(rules)
        self.rows = rows
        self._labels = labels
        # The values that each rule gives to labels, 0 for a masked one and NaN for those that it leaves.
        self._rule_values = np.full((len(self.rules), len(labels)), np.nan)
        for number, rule in enumerate(self.rules):
            for label, value in (rule.set or {}).items():
                self._rule_values[number, labels.index(label)] = value
            for label in rule.mask or ():
                self._rule_values[number, labels.index(label)] = 0.0

    @classmethod
    def are_exclusive(cls, activation: Activation, method: type[MergeMethod]) -> bool:
        """Return whether rules keep a row's sum at 1: labels are exclusive, and the merge gives probabilities."""
        return activation == "softmax" and method.gives_probabilities

    def taken(self, rows: npt.NDArray[np.int64]) -> RowRules:
        return RowRules(self.rules, self._labels, self.rows[:, rows])

    @property
    def has_set(self) -> Flags:
        """Return which rows a rule with ``set`` selects, bool [rows]."""
        is_set = np.array([bool(rule.set) for rule in self.rules])
        return np.asarray(self.rows[is_set].any(axis=0))

    def apply(self, start: int, values: Values, exclusive: bool, only: Flags | None = None) -> None:
        """Change the rows of a block that begins at ``start``, float64 [rows, labels], in place.

        A row of NaN stays NaN, unless a rule sets all of its labels. If ``only``, bool [rows], is given, the other
        rows stay. For ``exclusive`` see ``are_exclusive``.
        """
        is_masked: Flags = np.zeros(values.shape, dtype=np.bool_)
        for number, rows in self._selections(start, start + len(values), only):
            rule_values = self._rule_values[number]
            is_fixed = ~np.isnan(rule_values)
            is_masked[np.ix_(rows, is_fixed)] = rule_values[is_fixed] == 0
            changed = values[rows]
            changed[:, is_fixed] = rule_values[is_fixed]
            if exclusive:
                remainder = max(0.0, 1.0 - float(rule_values[is_fixed].sum()))
                _share(changed, ~is_fixed & ~is_masked[rows], remainder)
            changed[np.isnan(changed).any(axis=1)] = np.nan
            values[rows] = changed

    def without_labels(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the rows from ``start`` to ``stop`` in which rules mask every label, as numbers in the table."""
        is_masked: Flags = np.zeros((stop - start, len(self._labels)), dtype=np.bool_)
        for number, rows in self._selections(start, stop):
            is_fixed = ~np.isnan(self._rule_values[number])
            is_masked[np.ix_(rows, is_fixed)] = self._rule_values[number, is_fixed] == 0
        return start + np.flatnonzero(is_masked.all(axis=1))

    def _selections(
        self, start: int, stop: int, only: Flags | None = None
    ) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """Yield the number of each rule that selects rows of the block, and these rows' numbers in the block."""
        for number, is_selected in enumerate(self.rows[:, start:stop]):
            rows = np.flatnonzero(is_selected if only is None else is_selected & only)
            if len(rows):
                yield number, rows


def _share(values: Values, others: Flags, remainder: float) -> None:
    """Share the remainder of 1 among the other labels, bool [rows, labels], in place; then scale rows to 1."""
    parts = np.where(others, values, 0.0)
    sums = parts.sum(axis=1, keepdims=True)
    counts = others.sum(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.where(sums == 0, others / counts, parts / sums)
    shared = np.where(others, remainder * shares if remainder else 0.0, 0.0)
    values[:] = np.where(others, shared, values)
    with np.errstate(invalid="ignore", divide="ignore"):
        values /= values.sum(axis=1, keepdims=True)


@dataclass(frozen=True)
class PostProcess:
    """Change blocks of rows, float64 [rows, labels], in place; a block begins at the row ``start`` of the table.

    Attributes:
        allowed: the labels that are possible in each row; None: all.
        rules: for the merged rows that they select; None: there are none.
    """

    allowed: AllowedLabels | None = None
    rules: RowRules | None = None

    @property
    def possible(self) -> Flags | None:
        """Return whether each label is possible in each row, bool [rows, labels]; None: all are."""
        return None if self.allowed is None else self.allowed.flags

    def taken(self, rows: npt.NDArray[np.int64]) -> PostProcess:
        """Return the same for these rows of the table, in this order."""
        return PostProcess(
            None if self.allowed is None else self.allowed.taken(rows),
            None if self.rules is None else self.rules.taken(rows),
        )

    def member(
        self,
        start: int,
        values: Values,
        activation: Activation,
        calibrate: Calibrator | None = None,
        keeps_impossible: bool = False,
    ) -> Values:
        """Calibrate a member's values, set labels that are impossible in a row to 0, and return what is scored.

        With ``keeps_impossible``, as ``MergeMethod.takes_impossible`` says of what is merged, only a copy, which is
        returned, gets the zeros.
        """
        if calibrate is not None:
            calibrate(values)
        if self.allowed is not None:
            if keeps_impossible:
                values = values.copy(order="K")
            self.allowed.apply(start, values, activation == "softmax")
        return values

    def merged(self, start: int, values: Values, exclusive: bool, only: Flags | None = None) -> None:
        """Apply the rules to merged rows, and keep labels that are impossible in a row at 0.

        If ``only``, bool [rows], is given, the other rows stay. For ``exclusive`` see ``RowRules.are_exclusive``.
        """
        if self.allowed is not None:
            self.allowed.apply(start, values, exclusive, only)
        if self.rules is not None:
            self.rules.apply(start, values, exclusive, only)
            if self.allowed is not None:
                self.allowed.apply(start, values, exclusive, only)


def allowed_in_column(path: Path, table: InputTable, column: str, labels: Sequence[str]) -> Flags:
    """Return the labels that the JSON lists in a column of the table name; ``path`` is the table's.

    Raises:
        DataError: a cell is no list, is empty, or names something that is no label.
    """
    number_of = {label: number for number, label in enumerate(labels)}
    flags = np.zeros((table.rows, len(labels)), dtype=np.bool_)
    wrong: list[str] = []
    for row, cells in enumerate(table.python_rows([column])):
        names = parse_json_cell(cells[column])
        problem = "" if names else "names no label; every row needs one"
        if not isinstance(names, list):
            problem, names = "is no JSON list of labels", []
        for name in names:
            # A whole number is a label as well, as in the config.
            label = name if isinstance(name, str) else json.dumps(name, ensure_ascii=False)
            if label in number_of:
                flags[row, number_of[label]] = True
            else:
                problem = f"{quoted(label)} is no label{did_you_mean(label, labels)}"
        if problem:
            wrong.append(f"{row_text(row, table.ids)}: {problem}")
    _refuse(f"{path}: column {quoted(column)}", wrong, f"the labels are {listed(labels)}")
    return flags


def allowed_by_key(
    table: InputTable, key: str, path: Path, column: str, labels: Sequence[str], table_path: Path
) -> Flags:
    """Return the labels that another table, the one at ``path``, names for each row's cell in the column ``key``.

    Raises:
        DataError: the other table cannot be read, has a key twice or lacks one, or see ``allowed_in_column``.
    """
    others = read_table(path, TableNeeds(id_column=key, columns=(column,), json_columns=(column,)))
    flags, keys = allowed_in_column(path, others, column, labels), table.texts(key)
    places = places_among(keys, others.ids)
    missing = [
        f"{row_text(row, table.ids)}: {quoted(keys[row].as_py() or '')}"
        for row in np.flatnonzero(places < 0).tolist()
    ]
    _refuse(f"{table_path}: column {quoted(key)}", missing, f"{path} has no such keys; add them there")
    return np.asarray(flags[places])


def _refuse(where: str, rows: Sequence[str], advice: str) -> None:
    """Raise DataError about the rows, a text each, if there are any; show the first of them."""
    if rows:
        more = f" (and {len(rows) - _SHOWN_ROWS:,} more)" if len(rows) > _SHOWN_ROWS else ""
        raise DataError(
            f"{where}: {plural(len(rows), 'row')}: {'; '.join(rows[:_SHOWN_ROWS])}{more}; {advice}"
        )


def rows_that_meet(table: InputTable, condition: PromptTemplate) -> Flags:
    """Return for which rows the condition is true, bool [rows].

    Raises:
        DataError: the condition fails for a row, or gives neither true nor false.
    """
    is_met = np.zeros(table.rows, dtype=np.bool_)
    for row, cells in enumerate(table.python_rows(condition.columns)):
        try:
            is_met[row] = is_true(condition.render(cells))
        except TemplateProblem as problem:
            raise DataError(f"{row_text(row, table.ids)}: {problem}") from None
    return is_met
