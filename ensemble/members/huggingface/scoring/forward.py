"""What a model gets of a chunk -> logits, in batches that fit.

On an out-of-memory error the rows run again in halves; a row that does not fit alone is left out.  Rows that
overflow half precision run again in float32; once most of a chunk did, chunks start there.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ensemble.common.protocol import Counters
from ensemble.common.torch_errors import Verdict, classify, is_out_of_memory, one_line
from ensemble.members.huggingface.scoring.batching import MemoryLimit, make_batches

Report = Callable[[int, int, int], None]
Mode = Callable[[], AbstractContextManager[None]]
# Batches without an error before a budget that was cut is tried a little larger, and how much larger.
_GROW_AFTER_BATCHES = 32
_GROWTH = 1.25
# Never again closer than this to a size that did not fit: the error would come back at every attempt.
_BELOW_FAILURE = 0.9
# Passes that a GPU has been given and has not finished, of which each GPU that a model is spread over works on one:
# enough never to run dry, few enough that what is said of the progress is true.
_MAX_QUEUED = 4
# A chunk of fewer rows tells nothing of the others: it may be what is left of one that failed as a whole.
_MIN_TELLING_ROWS = 16


class Encoding(Protocol):
    """What a model gets of some rows, as far as it matters here."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens, or what else counts a row's work, int64 [rows]; 0 where there is nothing to compute."""

    @property
    def first(self) -> npt.NDArray[np.int64] | None:
        """For each row the first one that is the same, int64 [rows]; None where no two are."""

    @property
    def problems(self) -> Mapping[int, str]:
        """Why rows of length 0 have nothing to compute, by their places."""


E = TypeVar("E", bound=Encoding, contravariant=True)


class Scorer(Protocol[E]):
    """A loaded model that gives a row the same numbers whatever its neighbours in the batch."""

    @property
    def last_device(self) -> torch.device:
        """Where a forward pass ends."""

    @property
    def stages(self) -> int:
        """Devices that a pass goes through, one after the other, each while others work on the passes around it."""

    def skipped_tokens(self, encoded: E) -> npt.NDArray[np.int64]:
        """Of how much of each row's length a pass without a mask need not compute, int64 [rows]."""

    def logits(
        self,
        encoded: E,
        rows: npt.NDArray[np.int64],
        with_mask: bool = False,
        timing: AbstractContextManager[None] | None = None,
    ) -> torch.Tensor:
        """A forward pass over rows as a batch; see ``Classifier.logits``."""


@dataclass(frozen=True)
class Computed:
    """What came of a chunk.

    Attributes:
        rows: places in the chunk that have logits, ascending, int64 [rows].
        logits: theirs, float32 [rows, labels] on the host; [0, 0] where there are none.
        counters: of the forward passes; their ``rows`` have logits.
        too_large: places of rows that did not fit into memory even alone.
        too_large_in_float32: the same of rows that had to run again in float32; their logits are not finite.
        float32_error: why those that should have run again could not; empty where nothing was wrong.
        mostly_overflows: most rows overflowed half precision, and float32 gave numbers: the next chunk had better
            start there.
    """

    rows: npt.NDArray[np.int64]
    logits: torch.Tensor
    counters: Counters
    too_large: tuple[int, ...] = ()
    too_large_in_float32: tuple[int, ...] = ()
    float32_error: str = ""
    mostly_overflows: bool = False


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

    def set_budget(self, token_budget: int) -> None:
        """Padded tokens a batch may hold from now on; what errors have taught stays."""
        if self._memory is None and self._allowed == self._largest == self._token_budget:
            self._allowed = self._largest = token_budget
        self._token_budget = token_budget

    def shrink(self, rows: int, padded_tokens: int, width: int, skipped: int = 0) -> None:
        """A batch of this size did not fit: the next ones are half as large.

        Args:
            skipped: tokens of each row that were not computed, beside those of ``width``.
        """
        self._good_batches = 0
        if self.batch_size is not None:
            self.batch_size = max(1, rows // 2)
        cost: float = padded_tokens
        if self._memory is not None:
            cost = replace(self._memory, skipped=skipped).cost(padded_tokens, width)
        # A batch of one row can be more than was allowed: there is nothing to halve for the others then.
        self._allowed = min(self._allowed, max(1, int(cost // 2)))
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
        self,
        lengths: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64],
        skipped: npt.NDArray[np.int64],
    ) -> deque[npt.NDArray[np.int64]]:
        """Batches of these rows, of rows that are computed whole first; of each kind the one that takes most first.

        Args:
            skipped: of how many tokens each row's beginning is that need not be computed; rows of one batch have
                the same.
        """
        budget, memory = self._limits()
        batches: deque[npt.NDArray[np.int64]] = deque()
        for tokens in np.unique(skipped[rows]).tolist():
            alike = rows[skipped[rows] == tokens]
            limit = memory and replace(memory, skipped=tokens)
            cut = make_batches(lengths[alike] - tokens, budget, self.batch_size, self._equal_lengths, limit)
            batches += [alike[batch] for batch in cut]
        return batches

    def _limits(self) -> tuple[int, MemoryLimit | None]:
        if self._memory is None:
            return self._allowed, None
        return self._token_budget, replace(self._memory, available_bytes=self._allowed)


class DeviceQueue:
    """The forward passes of a chunk, which end on ``device``: what they take, and that not too many queue there.

    A GPU works off what it is given while the host goes on: the next batches are padded and copied in the
    background of the passes before them, as long as nothing here asks the device for an answer.  On a CPU a pass is
    over when its call returns.

    Args:
        stages: devices that work on a pass each at the same time, the last of them ``device``.
    """

    def __init__(self, device: torch.device, stages: int = 1) -> None:
        self._device = device
        self._most = max(_MAX_QUEUED, stages + 1)
        self._seconds = 0.0
        self._queued: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """A pass within; one that fails is not counted.

        Raises:
            RuntimeError: an earlier pass has failed on the GPU.
        """
        if self._device.type != "cuda":
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        while len(self._queued) >= self._most:
            self._finish_one()
        stream = torch.cuda.current_stream(self._device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record(stream)
        yield
        end.record(stream)
        self._queued.append((start, end))

    def finish(self) -> float:
        """Wait for all of them; the seconds that the device spent in them."""
        while self._queued:
            self._finish_one()
        return self._seconds

    def _finish_one(self) -> None:
        start, end = self._queued.popleft()
        end.synchronize()
        self._seconds += start.elapsed_time(end) / 1000


def compute(
    classifier: Scorer[E],
    encoded: E,
    sizes: BatchSizes,
    report: Report,
    in_float32: Mode | None = None,
    starts_in_float32: bool = False,
) -> Computed:
    """Run the model over every row of a chunk that has tokens; rows with the same ones only once.

    Args:
        sizes: shrinks where memory runs out, and stays so for the next chunk.
        report: called after each forward pass, also one that failed, with rows, tokens and padded tokens so far; on
            a GPU when the device has been given the pass.
        in_float32: while entered, the model computes in float32: then the rows whose logits came out NaN or
            infinite run again.  None: they stay so.
        starts_in_float32: all rows run so at once, with ``sizes`` for it; in half precision only those that do
            not fit into memory.

    Raises:
        RuntimeError: from the forward pass; not for want of memory.
    """
    first = np.arange(len(encoded.lengths)) if encoded.first is None else encoded.first
    copies = np.bincount(first, minlength=len(first))
    chosen = np.flatnonzero((copies > 0) & (encoded.lengths > 0))
    bad = np.empty(0, dtype=np.int64)
    if starts_in_float32 and in_float32 is not None:
        computed = _run_in_float32(classifier, encoded, sizes, chosen, copies, report, in_float32)
    else:
        computed = _run(classifier, encoded, sizes, chosen, copies, report)
        bad = computed.rows[~_is_finite(computed.logits)]
    if in_float32 is not None and len(bad):
        before = computed.counters

        def report_again(rows: int, tokens: int, padded_tokens: int) -> None:
            report(before.rows, before.tokens, before.padded_tokens + padded_tokens)

        try:
            with in_float32():
                again = _run(
                    classifier, encoded, sizes.for_float32(), bad, copies, report_again, with_mask=True
                )
        except RuntimeError as error:
            if classify(error) is Verdict.SUSPECT:
                raise
            computed = replace(computed, float32_error=one_line(error))
        else:
            if len(again.rows):
                computed.logits[torch.from_numpy(np.searchsorted(computed.rows, again.rows))] = again.logits
            # Their rows and tokens are counted already.
            counters = before + replace(again.counters, rows=0, tokens=0, recomputed_rows=again.counters.rows)
            computed = replace(
                computed,
                counters=counters,
                too_large_in_float32=again.too_large,
                mostly_overflows=len(computed.rows) >= _MIN_TELLING_ROWS
                and 2 * int(_is_finite(again.logits).sum()) > len(computed.rows),
            )
    # Row i has the logits, or the fate, of row first[i].
    rows = np.flatnonzero(np.isin(first, computed.rows))
    sources = torch.from_numpy(np.searchsorted(computed.rows, first[rows]))
    return replace(
        computed,
        rows=rows,
        logits=computed.logits[sources],
        counters=computed.counters + Counters(repeated_rows=len(rows) - len(computed.rows)),
        too_large=tuple(np.flatnonzero(np.isin(first, computed.too_large)).tolist()),
        too_large_in_float32=tuple(np.flatnonzero(np.isin(first, computed.too_large_in_float32)).tolist()),
    )


def _run_in_float32(
    classifier: Scorer[E],
    encoded: E,
    sizes: BatchSizes,
    chosen: npt.NDArray[np.int64],
    copies: npt.NDArray[np.int64],
    report: Report,
    in_float32: Mode,
) -> Computed:
    """Run the model over the chosen rows in float32; those that do not fit into memory so, in half precision."""
    with in_float32():
        full = _run(classifier, encoded, sizes, chosen, copies, report, with_mask=True)
    before = replace(full.counters, float32_rows=full.counters.rows)
    if not full.too_large:
        return replace(full, counters=before)

    def report_rest(rows: int, tokens: int, padded_tokens: int) -> None:
        report(before.rows + rows, before.tokens + tokens, before.padded_tokens + padded_tokens)

    rest = _run(classifier, encoded, sizes, np.array(full.too_large), copies, report_rest)
    found = np.concatenate([full.rows, rest.rows])
    order = np.argsort(found)
    # Logits of no rows have no columns.
    logits = torch.cat([part.logits for part in (full, rest) if len(part.rows)] or [full.logits])
    return Computed(
        rows=found[order],
        logits=logits[torch.from_numpy(order)],
        counters=before + rest.counters,
        too_large=rest.too_large,
        too_large_in_float32=tuple(rest.rows[~_is_finite(rest.logits)].tolist()),
    )


def _is_finite(logits: torch.Tensor) -> npt.NDArray[np.bool_]:
    """Which rows are numbers throughout, bool [rows]."""
    return np.asarray(torch.isfinite(logits).all(dim=1).numpy())


def _run(
    classifier: Scorer[E],
    encoded: E,
    sizes: BatchSizes,
    chosen: npt.NDArray[np.int64],
    copies: npt.NDArray[np.int64],
    report: Report,
    with_mask: bool = False,
) -> Computed:
    """Run the model over the chosen rows, each of which stands for ``copies`` rows."""
    lengths = encoded.lengths
    # What comes with a mask is computed whole.
    skipped = np.zeros_like(lengths) if with_mask else classifier.skipped_tokens(encoded)
    batches = sizes.cut(lengths, chosen, skipped)
    done = [np.empty(0, dtype=np.int64)]
    logits: list[torch.Tensor] = []
    too_large: set[int] = set()
    tried_alone: set[int] = set()
    counters = Counters()
    queue = DeviceQueue(classifier.last_device, classifier.stages)
    size_before = sizes.batch_size
    while batches:
        batch = batches.popleft()
        width = int(lengths[batch].max())
        padded = width * len(batch)
        result = None
        try:
            result = classifier.logits(encoded, batch, with_mask, queue.one())
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        if result is not None:
            size_before = sizes.batch_size
            done.append(batch)
            logits.append(result)
            rows, tokens = int(copies[batch].sum()), int(lengths[batch].sum())
            counters += Counters(rows=rows, tokens=tokens, padded_tokens=padded, batches=1)
            if sizes.grow() and batches:
                batches = sizes.cut(lengths, np.concatenate(batches), skipped)
        else:
            # Outside the except block: there the exception would still hold the tensors of the failed pass.
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.empty_cache()
            counters += Counters(oom_events=1)
            left = np.concatenate([batch, *batches])
            row = int(batch[0])
            if len(batch) == 1 and row in tried_alone:
                too_large.add(row)
                left = left[1:]
                sizes.batch_size = size_before  # it was this row that no size could fit
            else:
                # One row once more, with the cache emptied, which may have been all that was wrong.
                if len(batch) == 1:
                    tried_alone.add(row)
                tokens = int(skipped[row])
                sizes.shrink(len(batch), padded - tokens * len(batch), width - tokens, tokens)
            batches = sizes.cut(lengths, left, skipped)
        report(counters.rows, counters.tokens, counters.padded_tokens)
    found = np.concatenate(done)
    order = np.argsort(found)
    return Computed(
        rows=found[order],
        # One copy from the device per chunk: a copy per batch would wait for each of them.
        logits=torch.cat(logits).cpu()[torch.from_numpy(order)] if logits else torch.empty((0, 0)),
        counters=replace(counters, forward_seconds=queue.finish()),
        too_large=tuple(sorted(too_large)),
    )
