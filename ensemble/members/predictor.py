"""Define the child side of a member kind: what a worker process calls.

A spec names the module of a kind's child side.  That module has the functions of ``Child``, and importing it must
cost almost nothing: slow imports belong in ``import_libraries``.
"""

# ruff: noqa: B027  most kinds need none of what is empty here
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ensemble.common.protocol import CommonSpec, Counters, Ready

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ensemble.data.published_table import PublishedTable


class Child(Protocol):
    """State the functions of a kind's child module."""

    def import_libraries(self) -> Mapping[str, str]:
        """Import what predicting needs, and return the versions by package name.

        A kind that needs pandas must import it here: pyarrow ignores a later import (``common.python_process``).
        """

    def make_predictor(
        self, common: CommonSpec, settings: Mapping[str, Any], table: PublishedTable
    ) -> Predictor:
        """Make the predictor without a device; ``settings`` are those of ``MemberKind.worker_settings``."""


class Report(Protocol):
    """Report that a step is done, such as a batch, and how much of the current rows is computed so far."""

    def __call__(self, rows: int, tokens: int = 0, padded_tokens: int = 0) -> None: ...


@dataclass(frozen=True)
class Prediction:
    """Hold the result for some rows.

    Attributes:
        values: probabilities in the config's order of labels, float64 [rows, labels]; values of bad rows are
            ignored.
        bad_rows: the reason for each row that cannot be computed, by its index among these rows.
        counters: the worker adds chunks, rows, bad rows and the total time.
        advice: the probable cause and the remedy for rows whose values are not finite or no probabilities; these
            count as bad rows, too.
    """

    values: npt.NDArray[np.float64]
    bad_rows: Mapping[int, str] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    advice: str = ""


class Predictor(ABC):
    """Load a member and predict rows.

    ``make_predictor`` and ``load`` need not check whether ``CommonSpec.files`` have changed: the worker does
    afterwards, and again before it keeps any prediction.
    """

    @abstractmethod
    def load(self) -> Ready:
        """Load the member onto its devices; the worker fills in ``load_seconds``.

        Raises:
            ValueError: the member cannot be used; a sentence for the user with the reason and what to do.
        """

    @abstractmethod
    def predict(self, rows: npt.NDArray[np.int64], report: Report) -> Prediction:
        """Predict the table's rows of these numbers, and return when the devices have finished them.

        Raises:
            MemberError: other rows or another process would fail, too.
            Exception: any other error; the row that caused it is not known (``common.torch_errors.classify``).
        """

    def check_device(self) -> None:
        """Raise an error if an earlier one has left the device unusable for this process."""

    def peak_gpu_memory_bytes(self) -> int | None:
        """Return the peak memory on any one of the GPUs; None on a CPU."""
        return None

    def close(self) -> None:
        """Release what the predictor holds; called once there is no more work."""
