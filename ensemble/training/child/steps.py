"""Plan the steps of a training: the order of rows, and the micro-batches of each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ensemble.members.huggingface.training.examples import Examples, MicroBatch, Rows

# Rows are sorted by length within so many steps.
_WINDOW_STEPS = 64


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

    def epochs(self, step: int) -> int:
        """Return the epochs that have ended with this step; the training's end ends an epoch, too."""
        return step // self.steps_per_epoch if step < len(self.steps) else -(-step // self.steps_per_epoch)

    def ends_epoch(self, step: int) -> bool:
        return self.epochs(step) > self.epochs(step - 1)


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
