"""Plan a training: the rows of each step, and those that only early stopping looks at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ensemble.members.huggingface.training.arguments import step_count
from ensemble.members.huggingface.training.examples import Examples, MicroBatch, Rows

# Rows are sorted by length within so many steps.
_WINDOW_STEPS = 32


@dataclass(frozen=True)
class Plan:
    """Hold the rows of each step over all epochs; ``token_budget`` is of a micro-batch, padding included."""

    examples: Examples
    steps: Sequence[Rows]
    steps_per_epoch: int
    token_budget: int

    def micro_batches(self, rows: Rows) -> list[MicroBatch]:
        parts = self.examples.micro_batches(rows, self.token_budget)
        return [self.examples.batch(sequences) for sequences in parts]

    def tokens(self) -> npt.NDArray[np.int64]:
        """Return the tokens of the first steps, by their number, int64 [steps + 1, 2]: without and with padding."""
        tokens = [self.examples.tokens(rows, self.token_budget) for rows in self.steps]
        return np.cumsum([(0, 0), *tokens], axis=0)

    def epochs(self, step: int) -> int:
        """Return the epochs that have ended with this step; the training's end ends an epoch, too."""
        return step // self.steps_per_epoch if step < len(self.steps) else -(-step // self.steps_per_epoch)

    def ends_epoch(self, step: int) -> bool:
        return self.epochs(step) > self.epochs(step - 1)


def make_plan(examples: Examples, rows: Rows, train: Mapping[str, Any], micro_batch: int, seed: int) -> Plan:
    """Return the steps over all epochs, for these rows to train on.

    Args:
        train: of the member, as in the config.
        micro_batch: rows at a time on the device if all were as long as the longest.
    """
    size, lengths = train["effective_batch_size"], examples.lengths
    steps_per_epoch = math.ceil(len(rows) / size)
    count = step_count(train["training_arguments"], steps_per_epoch)
    steps: list[Rows] = []
    for epoch in range(math.ceil(count / steps_per_epoch)):
        steps += [rows[some] for some in epoch_steps(lengths[rows], size, seed, epoch)]
    return Plan(examples, steps[:count], steps_per_epoch, micro_batch * int(lengths.max()))


def epoch_steps(lengths: Rows, batch_size: int, seed: int, epoch: int) -> list[Rows]:
    """Return the rows of each step of an epoch, so that rows of similar lengths share a step.

    The same arguments give the same steps: a training that goes on within an epoch sees the rows that are left.
    The very first step has the longest row, so that a device that is too small shows it at once.
    """
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(len(lengths))
    steps: list[Rows] = []
    for start in range(0, len(order), _WINDOW_STEPS * batch_size):
        rows = order[start : start + _WINDOW_STEPS * batch_size]
        rows = rows[np.argsort(-lengths[rows], kind="stable")]
        steps += [rows[first : first + batch_size] for first in range(0, len(rows), batch_size)]
    shuffled = [steps[number] for number in generator.permutation(len(steps))]
    if epoch == 0:
        longest = max(range(len(shuffled)), key=lambda number: int(lengths[shuffled[number]].max()))
        shuffled[0], shuffled[longest] = shuffled[longest], shuffled[0]
    return shuffled


def divide(
    group_of_row: npt.NDArray[Any], has_label: npt.NDArray[np.bool_], share: float, seed: int
) -> tuple[Rows, Rows]:
    """Return the rows for early stopping, a share of all, and those to train on; rows of a group stay together.

    Each label has its share of the slice, and at least one row to train on; a group counts for its rarest label.

    Args:
        has_label: bool [rows, labels]; a row may have several labels, or none.

    Raises:
        ValueError: every group is the only one with some label.
    """
    groups = np.unique(group_of_row, return_inverse=True)[1]
    # A last label, of every row, is the commonest.
    rows, labels = np.nonzero(np.column_stack([has_label, np.ones(len(groups), np.bool_)]))
    pairs = np.unique(np.stack([labels, groups[rows]]), axis=1)  # a label and a group that has it
    order = np.argsort(np.bincount(labels), kind="stable")
    rarity = np.empty_like(order)
    rarity[order] = np.arange(len(order))
    rarest = np.full(groups.max() + 1, len(order))
    np.minimum.at(rarest, pairs[1], rarity[pairs[0]])
    is_only_one = np.bincount(pairs[0])[pairs[0]] == 1
    free = np.setdiff1d(np.arange(len(rarest)), pairs[1, is_only_one])
    if not len(free):
        raise ValueError(
            "early_stopping: no rows can be held back that are not all rows of a label; add rows, or groups"
        )
    shuffled = np.random.default_rng(seed).permutation(free)
    shuffled = shuffled[np.argsort(rarest[shuffled], kind="stable")]
    count = min(max(1, round(share * len(rarest))), len(free))
    is_held = np.zeros(len(rarest), np.bool_)
    is_held[shuffled[((np.arange(count) + 0.5) * len(free) / count).astype(np.int64)]] = True
    for label in np.unique(pairs[0]):
        with_label = pairs[1, pairs[0] == label]
        if is_held[with_label].all():
            is_held[with_label[0]] = False
    return np.flatnonzero(is_held[groups]), np.flatnonzero(~is_held[groups])
