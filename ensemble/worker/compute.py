"""A chunk's token ids -> logits, in batches that fit.

On an out-of-memory error the rows run again in halves; rows that overflow half precision run again in float32.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from ensemble.worker.batching import MemoryLimit, make_batches
from ensemble.worker.predict import Classifier
from ensemble.worker.prompt import Encoded

# Illegal accesses and failed assertions on the device; before torch 2.8 they have no type of their own.
_DEVICE_ERRORS: tuple[type[Exception], ...] = tuple(
    kind for kind in (getattr(torch, "AcceleratorError", None),) if kind is not None
)
Report = Callable[[int, int, int], None]
Mode = Callable[[], AbstractContextManager[None]]
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
    recomputed_rows: int


class RowTooLargeError(ValueError):
    """One row alone does not fit into memory; ``row`` is its place in the chunk, ``tokens`` its length.

    ``in_float32`` tells whether it had run before in half precision, without a finite result.
    """

    def __init__(self, row: int, tokens: int, in_float32: bool = False) -> None:
        super().__init__(f"a row of {tokens} tokens does not fit into memory alone")
        self.row = row
        self.tokens = tokens
        self.in_float32 = in_float32


class BatchSizes:
    """How large batches may be: what the user or the default says, less what memory has taught since.

    Args:
        token_budget: padded tokens a batch may hold.
        batch_size: rows a batch, where the user fixed it; then the token budget does not count.
        equal_lengths: only rows of the same length share a batch.
        memory: what a batch may take; None where that is not known, or where the user fixed the size.
    """

    def __init__(
        self,
        token_budget: int,
        batch_size: int | None,
        equal_lengths: bool = False,
        memory: MemoryLimit | None = None,
    ) -> None:
        self.batch_size = batch_size
        self._token_budget = token_budget
        self._equal_lengths = equal_lengths
        self._memory = memory
        # What errors teach: bytes where it is known how many a batch takes, otherwise padded tokens.
        self._allowed = token_budget if memory is None else memory.available_bytes
        self._largest = self._allowed
        self._good_batches = 0

    def tokens_at(self, width: int) -> int:
        """Padded tokens that a batch may hold now, in rows of ``width`` tokens."""
        budget, memory = self._limits()
        return budget if memory is None else min(budget, memory.tokens_at(width))

    def shrink(self, rows: int, padded_tokens: int, width: int) -> None:
        """A batch of this size did not fit: the next ones are half as large."""
        self._good_batches = 0
        if self.batch_size is not None:
            self.batch_size = max(1, rows // 2)
        cost = padded_tokens if self._memory is None else self._memory.cost(padded_tokens, width)
        self._allowed = max(1, int(cost // 2))
        self._largest = min(self._largest, max(1, int(cost * _BELOW_FAILURE)))

    def grow(self) -> bool:
        """A batch fitted; True when enough of them did for the limit to have grown now."""
        if self.batch_size is not None or self._allowed >= self._largest:
            return False
        self._good_batches += 1
        if self._good_batches < _GROW_AFTER_BATCHES:
            return False
        self._good_batches = 0
        self._allowed = min(self._largest, max(self._allowed + 1, int(self._allowed * _GROWTH)))
        return True

    def for_float32(self) -> BatchSizes:
        """The same for activations of twice the size; what it learns does not come back here."""
        size = None if self.batch_size is None else max(1, self.batch_size // 2)
        budget, memory = self._limits()
        if memory is not None:
            memory = replace(memory, available_bytes=max(1, memory.available_bytes // 2))
        return BatchSizes(max(1, budget // 2), size, self._equal_lengths, memory)

    def cut(
        self, lengths: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
    ) -> deque[npt.NDArray[np.int64]]:
        """Batches of these rows, the one that takes most first."""
        budget, memory = self._limits()
        batches = make_batches(lengths[rows], budget, self.batch_size, self._equal_lengths, memory)
        return deque(rows[batch] for batch in batches)

    def _limits(self) -> tuple[int, MemoryLimit | None]:
        if self._memory is None:
            return self._allowed, None
        return self._token_budget, replace(self._memory, available_bytes=self._allowed)


def compute(
    classifier: Classifier,
    encoded: Encoded,
    sizes: BatchSizes,
    report: Report,
    in_float32: Mode | None = None,
) -> Computed:
    """Run the model over every row of a chunk.

    Args:
        sizes: shrinks where memory runs out, and stays so for the next chunk.
        report: called after each batch with rows, tokens and padded tokens so far.
        in_float32: while entered, the model computes in float32: then the rows whose logits came out NaN or
            infinite run again.  None: they stay so.

    Raises:
        RowTooLargeError: a single row does not fit.
        ValueError: rows should run again in float32, and the model does not bear it.
    """
    rows = np.arange(len(encoded.lengths))
    computed = _run(classifier, encoded, sizes, rows, report)
    if in_float32 is None:
        return computed
    bad = np.flatnonzero(~torch.isfinite(computed.logits).all(dim=1).cpu().numpy())
    if not len(bad):
        return computed
    tokens = int(encoded.lengths.sum())

    def report_again(rows_again: int, tokens_again: int, padded_tokens: int) -> None:
        report(len(rows), tokens, computed.padded_tokens + padded_tokens)

    try:
        with in_float32():
            again = _run(classifier, encoded, sizes.for_float32(), bad, report_again)
    except RowTooLargeError as error:
        raise RowTooLargeError(error.row, error.tokens, in_float32=True) from error
    except _DEVICE_ERRORS:  # the process is done for, whatever the type of its numbers
        raise
    except RuntimeError as error:
        raise ValueError(
            f"{len(bad)} rows overflowed half precision, and this model does not run in float32 ({error}); "
            "set dtype: bfloat16 or float32"
        ) from error
    logits = computed.logits.clone()
    logits[torch.from_numpy(bad).to(logits.device)] = again.logits
    return Computed(
        logits=logits,
        padded_tokens=computed.padded_tokens + again.padded_tokens,
        batches=computed.batches + again.batches,
        oom_events=computed.oom_events + again.oom_events,
        recomputed_rows=len(bad),
    )


def _run(
    classifier: Classifier,
    encoded: Encoded,
    sizes: BatchSizes,
    chosen: npt.NDArray[np.int64],
    report: Report,
) -> Computed:
    """Run the model over the chosen rows; the logits are in their order."""
    lengths = encoded.lengths
    waiting = sizes.cut(lengths, chosen)
    order: list[npt.NDArray[np.int64]] = []
    logits: list[torch.Tensor] = []
    tried_alone: set[int] = set()
    rows = tokens = padded_tokens = oom_events = 0
    while waiting:
        batch = waiting.popleft()
        width = int(lengths[batch].max())
        padded = width * len(batch)
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
            sizes.shrink(len(batch), padded, width)
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
    # ``chosen`` ascends, so that sorting by row number restores its order.
    place = torch.from_numpy(np.argsort(np.concatenate(order))).to(logits[0].device)
    return Computed(torch.cat(logits)[place], padded_tokens, len(order), oom_events, 0)


def _try(classifier: Classifier, encoded: Encoded, batch: npt.NDArray[np.int64]) -> torch.Tensor | None:
    try:
        return classifier.logits(encoded, batch)
    except torch.OutOfMemoryError:
        return None
    except RuntimeError as error:
        # cuBLAS makes its workspace past torch's allocator, and says so in an error of its own.
        if "CUBLAS_STATUS_ALLOC_FAILED" in str(error):
            return None
        raise
