"""Order the rows of a training."""

from __future__ import annotations

import numpy as np

from ensemble.members.huggingface.training.examples import Rows

# Rows are sorted by length within so many steps.
_WINDOW_STEPS = 32


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
