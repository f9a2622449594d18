"""Rows whose truth is known, as plain arrays make them."""

from __future__ import annotations

from typing import Any

from ensemble.common.protocol import Activation
from ensemble.merging.metrics import LabelledRows


def labelled(truth: Any, activation: Activation = "softmax", possible: Any = None) -> LabelledRows:
    """All labels are possible if nothing else is said, and one model predicted all rows."""
    return LabelledRows(truth, activation, possible, folds=None)
