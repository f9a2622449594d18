"""Define the interface of merge methods, which turn all members' values of a block of rows into merged rows.

docs/how-to/new-merge-method.md shows how to write one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.protocol import Activation
from ensemble.config import EnsembleConfig
from ensemble.config.values import AnyWeight, weight_numbers

Values = npt.NDArray[np.float64]
# The size of a block: large enough that Python takes little of the time, small enough for a core's cache.
_MAX_ROWS = 32_768
_MIN_ROWS = 256
_CELLS = 131_072


def block_spans(rows: int, labels: int) -> list[tuple[int, int]]:
    """Return where the blocks of a table start and stop."""
    step = max(_MIN_ROWS, min(_MAX_ROWS, _CELLS // labels))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


@dataclass(frozen=True)
class Members:
    """Describe the merged members, in the order of the blocks; ``labels`` are the config's.

    A member's activation is "softmax" for probabilities that sum to 1, "sigmoid" for any from 0 to 1, "none" for
    any number. Each of ``weights`` is a number, a mapping by label, or a tuple by length bin, as in the config.
    """

    names: tuple[str, ...]
    activations: tuple[Activation, ...]
    labels: tuple[str, ...]
    weights: tuple[AnyWeight, ...] = ()

    @property
    def are_exclusive(self) -> bool:
        """Return whether every member with a weight has exclusive labels."""
        weights = self.weights or (1.0,) * len(self.names)
        pairs = zip(self.activations, weights, strict=True)
        return all(activation == "softmax" for activation, weight in pairs if any(weight_numbers(weight)))

    def with_activation(self, activation: Activation) -> tuple[str, ...]:
        """Return the names of the members that have this activation."""
        pairs = zip(self.names, self.activations, strict=True)
        return tuple(name for name, of_member in pairs if of_member == activation)


@dataclass(frozen=True)
class Block:
    """Hold consecutive rows of the table. A method changes nothing in a block.

    Attributes:
        start: the number of the first row in the table, from 0.
        ids: strings, [rows].
        probabilities: float64 [members, rows, labels]; NaN in rows that a member lacks. The values of a member
            and label are contiguous.
        is_present: bool [members, rows]; False if a member did not reach the row.
        text_bytes: int64 [rows], UTF-8 bytes of all columns that members read: a stand-in for tokens.
    """

    start: int
    ids: pa.ChunkedArray
    probabilities: Values
    is_present: npt.NDArray[np.bool_]
    text_bytes: npt.NDArray[np.int64]


class MergeMethod(ABC):
    """Merge members; each object is for one merge and gets the table's blocks from the first to the last.

    Attributes:
        Settings: the keys below ``ensemble`` in the config, ``method`` among them; the class of ``settings``.
        needs_first_pass: whether ``look`` must see every block before ``merge`` sees the first.
        takes_raw_values: whether members may give raw values (regression).
        gives_probabilities: whether results are of the members' sort: probabilities, or raw values; False for
            shares of votes, ranks and the like, which have no log loss and which ``rules`` do not scale.
        takes_impossible: whether members keep what they give to labels that are impossible in a row
            (``data.allowed_labels``); False: they have 0 there. Merged values always have 0.
        fit_options: the options that ``fit CONFIG`` needs for this method; empty if it fits the method's weights.
    """

    Settings: ClassVar[type[EnsembleConfig]] = EnsembleConfig
    needs_first_pass: ClassVar[bool] = False
    takes_raw_values: ClassVar[bool] = True
    gives_probabilities: ClassVar[bool] = True
    takes_impossible: ClassVar[bool] = False
    fit_options: ClassVar[str] = "--set ensemble.method=mean"

    def __init__(self, settings: EnsembleConfig, members: Members) -> None:
        self.settings = settings
        self.members = members

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each problem of the settings, with its key; called before anything runs."""
        raw = self.members.with_activation("none")
        if raw and not self.takes_raw_values:
            yield (
                f"ensemble.method: {self.settings.method} is for probabilities, and raw values (regression) come "
                f"from {', '.join(raw)}; use mean"
            )

    def look(self, block: Block) -> None:  # noqa: B027 - most methods need no first pass
        """Collect from a block what ``merge`` needs of the whole table, such as ranks."""

    @abstractmethod
    def merge(self, block: Block, weights: Values) -> Values:
        """Merge the members' values of a block.

        Args:
            weights: float64 [members, rows or 1, labels or 1], to be broadcast to the probabilities: 1 if all
                rows, or all labels, have the same weights. Each is at least 0, and for each row and label some
                member's is above 0. They are not scaled to sum to 1, and ignore whether members have the row.

        Returns:
            float64 [rows, labels]; a row is NaN if for some label no member with a weight above 0 has it.
        """
