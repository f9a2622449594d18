"""A chunk's token ids -> logits, in batches that fit: on an out-of-memory error the rows run again in halves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ensemble.worker.batching import make_batches
from ensemble.worker.predict import Classifier
from ensemble.worker.prompt import Encoded

Report = Callable[[int, int, int], None]
# Batches without an error before a budget that was cut is tried a little larger, and how much larger.
_GROW_AFTER_BATCHES = 32
_GROWTH = 1.25
# Never again closer than this to a size that did not fit: the error would come back at every attempt.
_BELOW_FAILURE = 0.9


@dataclass(frozen=True)
class Computed:
    """``logits`` is float32 [rows, labels] on the model's device, in the rows' order; the rest are counts."""

    logits: torch.Tensor
    padded_tokens: int
    batches: int
    oom_events: int


class RowTooLargeError(ValueError):
    """One row alone does not fit into memory; ``row`` is its place in the chunk, ``tokens`` its length."""

    def __init__(self, row: int, tokens: int) -> None:
        super().__init__(f"a row of {tokens} tokens does not fit into memory alone")
        self.row = row
        self.tokens = tokens


class BatchSizes:
    """How large batches may be: what the user or the default says, less what memory has taught since.

    Args:
        token_budget: padded tokens a batch may hold.
        batch_size: rows a batch, where the user fixed it; then the token budget does not count.
        equal_lengths: only rows of the same length share a batch.
    """

    def __init__(self, token_budget: int, batch_size: int | None, equal_lengths: bool = False) -> None:
        self._equal_lengths = equal_lengths
        self.token_budget = token_budget
        self.batch_size = batch_size
        self._largest = token_budget
        self._good_batches = 0

    def shrink(self, rows: int, padded_tokens: int) -> None:
        """A batch of this size did not fit: the next ones are half as large."""
        self._good_batches = 0
        if self.batch_size is not None:
            self.batch_size = max(1, rows // 2)
        self.token_budget = max(1, padded_tokens // 2)
        self._largest = min(self._largest, max(1, int(padded_tokens * _BELOW_FAILURE)))

    def grow(self) -> bool:
        """A batch fitted; True when enough of them did for the budget to have grown now."""
        if self.batch_size is not None or self.token_budget >= self._largest:
            return False
        self._good_batches += 1
        if self._good_batches < _GROW_AFTER_BATCHES:
            return False
        self._good_batches = 0
        self.token_budget = min(self._largest, max(self.token_budget + 1, int(self.token_budget * _GROWTH)))
        return True

    def cut(
        self, lengths: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
    ) -> deque[npt.NDArray[np.int64]]:
        """Batches of these rows, longest first."""
        batches = make_batches(lengths[rows], self.token_budget, self.batch_size, self._equal_lengths)
        return deque(rows[batch] for batch in batches)


def compute(classifier: Classifier, encoded: Encoded, sizes: BatchSizes, report: Report) -> Computed:
    """Run the model over every row of a chunk.

    Args:
        sizes: shrinks where memory runs out, and stays so for the next chunk.
        report: called after each batch with rows, tokens and padded tokens so far.

    Raises:
        RowTooLargeError: a single row does not fit.
    """
    lengths = encoded.lengths
    waiting = sizes.cut(lengths, np.arange(len(lengths)))
    order: list[npt.NDArray[np.int64]] = []
    logits: list[torch.Tensor] = []
    tried_alone: set[int] = set()
    rows = tokens = padded_tokens = oom_events = 0
    while waiting:
        batch = waiting.popleft()
        padded = int(lengths[batch].max()) * len(batch)
        result = _try(classifier, encoded, batch)
        if result is None:
            # Outside the except block: there the exception would still hold the tensors of the failed pass.
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.empty_cache()
            oom_events += 1
            if len(batch) == 1 and batch[0] in tried_alone:
                raise RowTooLargeError(int(batch[0]), int(lengths[batch[0]]))
            if len(batch) == 1:  # once more with the cache emptied, which may have been all that was wrong
                tried_alone.add(int(batch[0]))
            sizes.shrink(len(batch), padded)
            waiting = sizes.cut(lengths, np.concatenate([batch, *waiting]))
            continue
        order.append(batch)
        logits.append(result)
        rows += len(batch)
        tokens += int(lengths[batch].sum())
        padded_tokens += padded
        report(rows, tokens, padded_tokens)
        if sizes.grow() and waiting:
            waiting = sizes.cut(lengths, np.concatenate(waiting))
    place = torch.from_numpy(np.argsort(np.concatenate(order))).to(logits[0].device)
    return Computed(torch.cat(logits)[place], padded_tokens, len(order), oom_events)


def _try(classifier: Classifier, encoded: Encoded, batch: npt.NDArray[np.int64]) -> torch.Tensor | None:
    try:
        return classifier.logits(encoded, batch)
    except torch.OutOfMemoryError:
        return None
