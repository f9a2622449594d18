"""Change members' values before the merge and merged ones after it, in the one order that all commands share.

    a member's values    calibration, then 0 for labels that are impossible in a row
    merged values        0 for impossible labels, then rules, then 0 for impossible labels once more

Merged values get these zeros, too, because some methods give more than 0 where every member gives 0; and once more
after the rules, so that no rule makes a label possible.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ensemble.common.protocol import Activation
from ensemble.merging.allowed_labels import AllowedLabels
from ensemble.merging.calibration import Calibrator
from ensemble.merging.methods.base import Values
from ensemble.merging.rules import RowRules


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
    def possible(self) -> npt.NDArray[np.bool_] | None:
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

    def merged(
        self, start: int, values: Values, exclusive: bool, only: npt.NDArray[np.bool_] | None = None
    ) -> None:
        """Apply the rules to merged rows, and keep labels that are impossible in a row at 0.

        If ``only``, bool [rows], is given, the other rows stay. For ``exclusive`` see ``RowRules.are_exclusive``.
        """
        if self.allowed is not None:
            self.allowed.apply(start, values, exclusive, only)
        if self.rules is not None:
            self.rules.apply(start, values, exclusive, only)
            if self.allowed is not None:
                self.allowed.apply(start, values, exclusive, only)
