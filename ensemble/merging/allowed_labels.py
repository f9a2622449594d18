"""Rule out the labels that are impossible in a row, as ``data.allowed_labels`` says.

Members' predictions stay as they are on disk. Each member's values are changed after its calibration and before the
merge, and the merged values once more, because some methods give more than 0 where every member gives 0; they are
changed again after ``rules``, so that no rule makes a label possible. The possible labels keep their proportions;
where all of them have 0, they get equal parts.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ensemble.common.text import plural
from ensemble.merging.methods.base import Values
from ensemble.merging.scoring import Truth

_Flags: TypeAlias = npt.NDArray[np.bool_]


class AllowedLabels:
    """Hold which labels are possible in each row, at least one: ``flags``, bool [rows, labels], from ``source``."""

    def __init__(self, flags: _Flags, source: str) -> None:
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
        """Return the rows for which a true label is none of the possible ones; for ``truth`` see ``Scoring``."""
        if truth.ndim == 1:
            return np.flatnonzero(~self.flags[np.arange(len(truth)), truth.astype(np.int64)])
        return np.flatnonzero(((truth > 0) & ~self.flags).any(axis=1))

    def apply(self, start: int, values: Values, exclusive: bool, only: _Flags | None = None) -> None:
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
