"""Define the child side of a member kind, which is all that a worker process knows of the kind.

A spec names a kind's child side (see ``load_child``).  Importing its module must cost next to nothing: what is slow
to import comes with ``import_libraries``.
"""

# ruff: noqa: B027  most kinds need none of what is empty here
from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from ensemble.common.protocol import BatchChoice, CommonSpec, Counters, Ready

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ensemble.data.published_table import PublishedTable


class Child(Protocol):
    """Define the child side of a kind: a module, or an object."""

    def import_libraries(self) -> Mapping[str, str]:
        """Import what predicting takes and return the versions of what was imported, by name.

        pandas, too, where it is needed: pyarrow does without it if it comes later (``common.python_process``).
        """

    def make_predictor(self, common: CommonSpec, settings: Mapping[str, Any], table: PublishedTable) -> Task:
        """Do everything that needs no device; ``settings`` are the kind's own, as JSON gives them.

        ``table`` is None where ``common.table_path`` is empty, as it is for jobs without rows alone.
        """


def load_child(kind: str) -> Child:
    """Import a kind's child side: ``kind`` is its module.

    It is ``module:predictor`` for a module that serves several kinds and has ``child_of``, which makes a child side
    of the predictor's dotted path.
    """
    module_name, _, predictor = kind.partition(":")
    module = importlib.import_module(module_name)
    return cast(Child, module.child_of(predictor) if predictor else module)


class Report(Protocol):
    """Report that a step such as a batch is done, and how many rows and tokens are computed by now.

    False: the run is stopped, and no further batch is wanted (``Prediction.is_partial``). A kind that goes on all
    the same may lose its chunk.
    """

    def __call__(self, rows: int, tokens: int = 0, padded_tokens: int = 0) -> bool | None: ...


@dataclass(frozen=True)
class Prediction:
    """Hold the predictions of some rows.

    Attributes:
        values: probabilities in the config's order of labels, float64 [rows, labels]; those of bad rows do not
            count.
        bad_rows: why rows cannot be computed, by their positions among these.
        counters: the work done; chunks, rows, bad rows and the whole time are counted by the worker.
        choice: how the next batches would be made.
        is_partial: whether it ended early, as ``Report`` asked for: rows of NaN are not done then, and not bad.
        advice: what is probably wrong, and what to do about it, where a row's values are not finite or no
            probabilities; such a row is a bad one, too.
    """

    values: npt.NDArray[np.float64]
    bad_rows: Mapping[int, str] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    advice: str = ""
    choice: BatchChoice = field(default_factory=BatchChoice)
    is_partial: bool = False


class Task(ABC):
    """Do what a worker is for, once it is loaded.

    What ``make_predictor`` and ``load`` read of ``CommonSpec.files`` is of the states named there: the worker
    checks them afterwards, and again before it keeps any prediction.
    """

    # Returns whether the run is stopped, for steps of minutes; asking is no sign of life.
    is_stopped: Callable[[], bool] = staticmethod(lambda: False)

    @abstractmethod
    def load(self) -> Ready:
        """Load onto the devices, which are free now; the worker fills in ``load_seconds``.

        Raises:
            ValueError: it cannot be used, with the reason and what to do, in a sentence for the user.
        """

    def check_device(self) -> None:
        """Raise an error if an earlier one has left the devices unusable for this process."""

    def peak_gpu_memory_bytes(self) -> int | None:
        """Return the peak of the memory reserved on the GPU that used most; None on a CPU."""
        return None

    def peak_gpu_allocated_bytes(self) -> int | None:
        """Return the peak of the memory that tensors took on the GPU that used most; None on a CPU."""
        return None

    def close(self) -> None:
        """Release what the predictor holds, after its last rows."""


class Predictor(Task):
    """Load a model, and then predict rows."""

    @abstractmethod
    def predict(self, rows: npt.NDArray[np.int64], report: Report) -> Prediction:
        """Predict rows of the table, by their numbers, and return when the devices have finished them.

        Raises:
            MemberError: all rows would fail, in any process.
            Exception: any other error, of which nobody knows the row; see ``common.torch_errors.classify``.
        """

    def use_job(self, job: int) -> None:
        """Read rows as this job does from now on; jobs are numbered as in ``CommonSpec.jobs``.

        The table already gives the cells that the job reads.
        """

    def follow(self, choice: BatchChoice) -> None:
        """Make the next batches as the model's other workers make them."""


class Runner(Task):
    """Do jobs that compute no rows."""

    @abstractmethod
    def run(self, job: int, report: Report) -> Counters:
        """Do a job, by its number, and return what was counted.

        Raises:
            MemberError: it would fail in any process.
            ChildProcessError: it may be done in another try.
        """
