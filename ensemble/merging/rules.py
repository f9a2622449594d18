"""Rules: what is known of some rows whatever the members say, and what that makes of their probabilities.

They count after the merge, in the order of the config, each for the rows that its condition is true for:

* ``set`` gives labels a value of their own.  Of exclusive labels the others share what is left of 1, in the
  proportion that they had.
* ``mask`` makes labels impossible: 0.  Of exclusive labels the others are scaled to a sum of 1.

Where the others had nothing to share by, they get equal parts, without those that are masked.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ensemble.common.protocol import Activation
from ensemble.config.schema import RuleConfig
from ensemble.merging.methods.base import MergeMethod, Values

_Mask = npt.NDArray[np.bool_]


class RowRules:
    """The rules of a run and the rows that they are for.

    Args:
        labels: of the config.
        rows: bool [rules, rows of the table].
    """

    def __init__(self, rules: Sequence[RuleConfig], labels: Sequence[str], rows: _Mask) -> None:
        self.rules = tuple(rules)
        self.rows = rows
        self._labels = labels
        self._given = np.full((len(self.rules), len(labels)), np.nan)
        self._masked = np.zeros(self._given.shape, dtype=np.bool_)
        for number, rule in enumerate(self.rules):
            for label, value in (rule.set or {}).items():
                self._given[number, labels.index(label)] = value
            for label in rule.mask or ():
                self._masked[number, labels.index(label)] = True

    @classmethod
    def are_exclusive(cls, activation: Activation, method: type[MergeMethod]) -> bool:
        """Whether rules keep a row's sum at 1: where members give exclusive labels, and the merge probabilities."""
        return activation == "softmax" and method.gives_probabilities

    def taken(self, rows: npt.NDArray[np.int64]) -> RowRules:
        """The same rules for these rows of the table, in this order."""
        return RowRules(self.rules, self._labels, self.rows[:, rows])

    @property
    def has_set(self) -> _Mask:
        """The rows that a rule with ``set`` is for, bool [rows]."""
        is_set = np.array([bool(rule.set) for rule in self.rules])
        return np.asarray(self.rows[is_set].any(axis=0))

    def apply(self, start: int, values: Values, exclusive: bool, only: _Mask | None = None) -> None:
        """Change a block's rows in place.

        Args:
            start: the number of its first row in the table.
            values: float64 [rows, labels]; a row of NaN stays one, unless a rule sets all of it.
            exclusive: whether rows are probabilities that sum to 1; see ``are_exclusive``.
            only: the rows to change, bool [rows]; None: all.
        """
        masked: _Mask = np.zeros(values.shape, dtype=np.bool_)
        for number, places in self._hits(start, start + len(values), only):
            own, forbidden = values[places], masked[places]
            given, others = self._forbid(number, forbidden)
            own[:, ~others] = given[~others]
            if exclusive:
                _share(own, others & ~forbidden, max(0.0, 1.0 - float(given[~others].sum())))
            own[np.isnan(own).any(axis=1)] = np.nan
            values[places], masked[places] = own, forbidden

    def without_labels(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The rows from ``start`` to ``stop`` in which rules mask every label, by their numbers in the table."""
        masked: _Mask = np.zeros((stop - start, self._given.shape[1]), dtype=np.bool_)
        for number, places in self._hits(start, stop, None):
            forbidden = masked[places]
            self._forbid(number, forbidden)
            masked[places] = forbidden
        return start + np.flatnonzero(masked.all(axis=1))

    def _hits(self, start: int, stop: int, only: _Mask | None) -> list[tuple[int, npt.NDArray[np.int64]]]:
        hits = self.rows[:, start:stop] if only is None else self.rows[:, start:stop] & only
        return [(number, places) for number, own in enumerate(hits) if len(places := np.flatnonzero(own))]

    def _forbid(self, number: int, forbidden: _Mask) -> tuple[npt.NDArray[np.float64], _Mask]:
        """Note in bool [rows, labels] what a rule masks; returns its values, NaN where it has none, and where."""
        given = np.where(self._masked[number], 0.0, self._given[number])
        named = ~np.isnan(given)
        forbidden[:, named] = given[named] == 0
        return given, ~named


def _share(own: Values, others: _Mask, left: float) -> None:
    """Give the other labels, bool [rows, labels], what is left of 1, in place; then let each row sum to 1."""
    parts = np.where(others, own, 0.0)
    sums = parts.sum(axis=1, keepdims=True)
    counts = others.sum(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.where(sums == 0, others / counts, parts / sums)
    rest = np.where(others, left * shares if left else 0.0, 0.0)
    is_named = ~others
    own[:] = np.where(is_named, own, rest)
    with np.errstate(invalid="ignore", divide="ignore"):
        own /= own.sum(axis=1, keepdims=True)
