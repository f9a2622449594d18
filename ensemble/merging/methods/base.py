"""What a merge method is: all members' probabilities of a block of rows in, one row of values for each out.

docs/extending.md shows how to write one.
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


@dataclass(frozen=True)
class Members:
    """Who is merged, in the order of the blocks; ``labels`` are the config's.

    A member's activation is "softmax" for probabilities that sum to 1, "sigmoid" for any from 0 to 1, "none" for
    any number.  ``weights`` are as the config has them: a number, a mapping by label, or a tuple by length bin.
    """

    names: tuple[str, ...]
    activations: tuple[Activation, ...]
    labels: tuple[str, ...]
    weights: tuple[AnyWeight, ...] = ()

    @property
    def are_exclusive(self) -> bool:
        """Whether every member with a weight says of the labels that a row has one of them."""
        weights = self.weights or (1.0,) * len(self.names)
        pairs = zip(self.activations, weights, strict=True)
        return all(activation == "softmax" for activation, weight in pairs if any(weight_numbers(weight)))

    def with_activation(self, activation: Activation) -> tuple[str, ...]:
        """The names of the members that have it."""
        pairs = zip(self.names, self.activations, strict=True)
        return tuple(name for name, own in pairs if own == activation)


@dataclass(frozen=True)
class Block:
    """Rows of the table that follow each other.  A method reads a block and changes nothing in it.

    Attributes:
        start: the number of its first row in the table, from 0.
        ids: strings, [rows].
        probabilities: float64 [members, rows, labels]; NaN in the rows that a member lacks.  The values of one
            member and label lie in one piece.
        is_present: bool [members, rows]; False where a member did not reach the row.
        text_bytes: int64 [rows], UTF-8 bytes of all that some member reads of the row: a stand-in for tokens.
    """

    start: int
    ids: pa.ChunkedArray
    probabilities: Values
    is_present: npt.NDArray[np.bool_]
    text_bytes: npt.NDArray[np.int64]


class MergeMethod(ABC):
    """One merge of one run: made once, given the table's blocks from the first to the last.

    Attributes:
        Settings: the keys below ``ensemble`` in the config, ``method`` among them; ``settings`` is one of these.
        needs_first_pass: ``look`` is to see every block before ``merge`` sees the first; all files are read twice.
        gives_probabilities: of probabilities, or of raw values such; False where results are shares of votes,
            ranks or the like, of which log loss says nothing, and which ``rules`` do not scale.
        fit_options: what the command ``fit CONFIG`` needs beside a config of this method; empty where it finds
            weights for the method itself.
    """

    Settings: ClassVar[type[EnsembleConfig]] = EnsembleConfig
    needs_first_pass: ClassVar[bool] = False
    gives_probabilities: ClassVar[bool] = True
    fit_options: ClassVar[str] = "--set ensemble.method=mean"

    def __init__(self, settings: EnsembleConfig, members: Members) -> None:
        self.settings = settings
        self.members = members

    def problems(self) -> Iterator[str]:
        """What does not go together, found before anything runs; each sentence names its key."""
        return iter(())

    def problems_of_raw_values(self) -> Iterator[str]:
        """The problem that members give raw values, for a method that needs probabilities."""
        if raw := self.members.with_activation("none"):
            yield (
                f"ensemble.method: {self.settings.method} is for probabilities, and raw values (regression) come "
                f"from {', '.join(raw)}; use mean"
            )

    def look(self, block: Block) -> None:  # noqa: B027 - most methods need no first pass
        """Take from a block what ``merge`` needs to know of the whole table, such as ranks."""

    @abstractmethod
    def merge(self, block: Block, weights: Values) -> Values:
        """The merged values of a block's rows.

        Args:
            weights: float64 [members, rows or 1, labels or 1], to be broadcast to the probabilities: 1 where all
                rows, or all labels, have the same.  Each is at least 0, and for each row and label that of some
                member is more; not scaled to sum to 1, and whatever it is where a member lacks a row.

        Returns:
            float64 [rows, labels]; NaN in all of a row if for some label no member with a weight above 0 has it.
        """
