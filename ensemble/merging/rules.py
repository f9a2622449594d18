"""Apply the rules of the config to the rows that their conditions select.

Rules count after the merge, in the order of the config:

* ``set`` gives labels a fixed value. If labels are exclusive, the others share the rest of 1 in proportion.
* ``mask`` sets labels to 0. If labels are exclusive, the others are scaled to a sum of 1.

If all the others are 0, they get equal parts, except labels that are masked. A condition is a template that gives
true or false.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ensemble.common.errors import DataError
from ensemble.common.protocol import Activation
from ensemble.config.schema import RuleConfig
from ensemble.data.json_cells import TemplateProblem
from ensemble.data.table import InputTable, row_text
from ensemble.data.template import PromptTemplate, compile_template
from ensemble.merging.methods.base import MergeMethod, Values

_Mask = npt.NDArray[np.bool_]
_TRUE, _FALSE = ("true", "1"), ("false", "0", "")
_ADVICE = "a condition gives true or false, as in {{ a == b }}"
_SHOWN_CHARACTERS = 60


class RowRules:
    """Apply the rules of a run to the rows that they select, bool [rules, rows of the table]."""

    def __init__(self, rules: Sequence[RuleConfig], labels: Sequence[str], rows: _Mask) -> None:
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
        """Return the same rules for these rows of the table, in this order."""
        return RowRules(self.rules, self._labels, self.rows[:, rows])

    @property
    def has_set(self) -> _Mask:
        """Return which rows a rule with ``set`` selects, bool [rows]."""
        is_set = np.array([bool(rule.set) for rule in self.rules])
        return np.asarray(self.rows[is_set].any(axis=0))

    def apply(self, start: int, values: Values, exclusive: bool, only: _Mask | None = None) -> None:
        """Change the rows of a block that begins at ``start``, float64 [rows, labels], in place.

        A row of NaN stays NaN, unless a rule sets all of its labels. If ``only``, bool [rows], is given, the other
        rows stay. For ``exclusive`` see ``are_exclusive``.
        """
        is_masked: _Mask = np.zeros(values.shape, dtype=np.bool_)
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
        is_masked: _Mask = np.zeros((stop - start, len(self._labels)), dtype=np.bool_)
        for number, rows in self._selections(start, stop):
            is_fixed = ~np.isnan(self._rule_values[number])
            is_masked[np.ix_(rows, is_fixed)] = self._rule_values[number, is_fixed] == 0
        return start + np.flatnonzero(is_masked.all(axis=1))

    def _selections(
        self, start: int, stop: int, only: _Mask | None = None
    ) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """Yield the number of each rule that selects rows of the block, and these rows' numbers in the block."""
        for number, is_selected in enumerate(self.rows[:, start:stop]):
            rows = np.flatnonzero(is_selected if only is None else is_selected & only)
            if len(rows):
                yield number, rows


def _share(values: Values, others: _Mask, remainder: float) -> None:
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


def compile_condition(source: str) -> PromptTemplate:
    """Compile a condition; raise TemplateProblem as ``compile_template`` does, or if it reads no column."""
    compiled = compile_template(source)
    if not compiled.columns:
        raise TemplateProblem(f"reads no column of the table; {_ADVICE}")
    return compiled


def rows_that_meet(table: InputTable, condition: PromptTemplate) -> npt.NDArray[np.bool_]:
    """Return for which rows the condition is true, bool [rows].

    Raises:
        DataError: the condition fails for a row, or gives neither true nor false.
    """
    is_met = np.zeros(table.rows, dtype=np.bool_)
    for row, cells in enumerate(table.python_rows(condition.columns)):
        try:
            is_met[row] = _as_bool(condition.render(cells))
        except TemplateProblem as problem:
            raise DataError(f"{row_text(row, table.ids)}: {problem}") from None
    return is_met


def _as_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    excerpt = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
    raise TemplateProblem(f"gives {excerpt!r}; {_ADVICE}")
