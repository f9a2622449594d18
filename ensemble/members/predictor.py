"""The child side of a member kind: what a worker process needs of it, and all that it knows of it.

A spec names the module that is a kind's child side.  It has the functions of ``Child``, and importing it must
cost next to nothing: what is slow to import comes with ``import_libraries``.
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
    """The module of a kind's child side."""

    def import_libraries(self) -> Mapping[str, str]:
        """Import what predicting takes; returns the versions of what was imported, by name.

        pandas, too, where it is needed: pyarrow does without it if it comes later (``common.python_process``).
        """

    def make_predictor(
        self, common: CommonSpec, settings: Mapping[str, Any], table: PublishedTable
    ) -> Predictor:
        """Everything that needs no device; ``settings`` are the kind's own, as JSON gives them."""


class Report(Protocol):
    """Tells that a step is done, such as a batch, and how much of the rows at hand is computed by now."""

    def __call__(self, rows: int, tokens: int = 0, padded_tokens: int = 0) -> None: ...


@dataclass(frozen=True)
class Prediction:
    """What came of some rows.

    Attributes:
        values: probabilities in the config's order of labels, float64 [rows, labels]; those of bad rows do not
            count.
        bad_rows: rows that cannot be computed, by their places among these, with the reasons.
        counters: what it took; chunks, rows, bad rows and the whole time are counted by the worker.
        advice: what is probably wrong, and what to do about it, where a row's values are not finite or no
            probabilities; such a row is a bad one, too.
    """

    values: npt.NDArray[np.float64]
    bad_rows: Mapping[int, str] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    advice: str = ""


class Predictor(ABC):
    """A member that can be loaded and then predicts rows.

    What ``make_predictor`` and ``load`` read of ``CommonSpec.files`` is of the states named there: the worker
    checks them afterwards, and again before it keeps any prediction.
    """

    @abstractmethod
    def load(self) -> Ready:
        """The devices are there: load onto them; ``load_seconds`` is filled in by the worker.

        Raises:
            ValueError: it cannot be used, with the reason and what to do, in a sentence for the user.
        """

    @abstractmethod
    def predict(self, rows: npt.NDArray[np.int64], report: Report) -> Prediction:
        """Predict rows of the table, by their numbers; returns when the devices have nothing left to do for them.

        Raises:
            MemberError: no rows would fare better, nor would another process.
            Exception: whatever else it is, which row is to blame is not known; see
                ``common.torch_errors.classify``.
        """

    def check_device(self) -> None:
        """Raise what an error before has left behind, if this process can compute nothing any more."""

    def peak_gpu_memory_bytes(self) -> int | None:
        """The most that was ever held on one of the GPUs; None on a CPU."""
        return None

    def close(self) -> None:
        """There is nothing left to do."""
