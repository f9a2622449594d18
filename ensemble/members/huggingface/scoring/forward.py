"""Compute the logits of a chunk's encoded rows, in batches that fit into memory.

After an out-of-memory error the rows run again in batches of half the size; a row that does not fit even alone is
left out.  Rows that overflow half precision run again in float32.  If most rows of a chunk overflow, later chunks
start in float32.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ensemble.common.protocol import Counters
from ensemble.common.torch_errors import is_out_of_memory
from ensemble.members.footprint import BATCHES_PER_STAGE, MIN_STAGE_TOKENS
from ensemble.members.huggingface.loading.device_map import input_device, last_device
from ensemble.members.huggingface.loading.spread import Spread
from ensemble.members.huggingface.scoring.batching import MemoryLimit, make_batches
from ensemble.members.huggingface.scoring.packing import most_rows, pack

Report = Callable[[int, int, int], bool | None]
Mode = Callable[[], AbstractContextManager[None]]
Integers = npt.NDArray[np.int64]
# Unfinished passes in the queue of a GPU; each GPU of a spread model works on a different pass.
_MAX_QUEUED = 4
# A smaller chunk does not predict other chunks: it may be a part of a chunk that failed.
_MIN_TYPICAL_ROWS = 16


class Encoding(Protocol):
    """Define what the scorer needs of encoded rows.

    Attributes:
        lengths: tokens, or another measure of a row's work, int64 [rows].
        problems: the reason of each row of length 0, which has nothing to compute.
        first: for each row, the first row with the same tokens, int64 [rows]; None if all rows differ.
    """

    @property
    def lengths(self) -> Integers: ...
    @property
    def problems(self) -> Mapping[int, str]: ...
    @property
    def first(self) -> Integers | None: ...


E = TypeVar("E", bound=Encoding)


class Shortcut(Enum):
    """Name work that some models do not need; the warm-up tests which shortcuts a model allows."""

    LAST_TOKEN = "body and head run separately, the head only on each row's last token"
    NO_MASK = "batches have no attention mask, as no token sees the padding behind it"
    SHARED_PREFIX = (
        "tokens that rows begin with are computed once, and the rest runs behind their keys and values"
    )
    KEPT_PROMPT = "labels run behind the keys and values of their prompt, if the kind of member supports this"


class Scorer(ABC, Generic[E]):
    """Run a loaded model; a row gets the same numbers in any batch.

    Attributes:
        last_device: where a forward pass ends.
        stages: number of devices that a pass goes through in turn, while the other devices work on other passes.
        packed_tokens: of a batch whose rows stand one behind the other; 0: all batches are padded.
        possible: shortcuts that can be tried.
        taken: shortcuts that leave the model's numbers as they are.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device = input_device(model)
        self.last_device = last_device(model)
        self._spread = Spread(model)
        self.stages = self._spread.stages
        self.packed_tokens = 0
        self.possible: frozenset[Shortcut] = frozenset()
        self.taken: set[Shortcut] = set()

    def packs(self, encoded: E) -> int:
        """Return ``packed_tokens`` if these rows may stand one behind the other, and otherwise 0."""
        return 0

    def is_packed(self, encoded: E, rows: Integers) -> bool:
        """Return whether a pass without a mask computes these rows one behind the other."""
        return False

    def skipped_tokens(self, encoded: E) -> tuple[Integers, Integers]:
        """Return how many of each row's first tokens a pass without a mask can skip, and what is left of it.

        Returns:
            int64 [rows] both; the second are the tokens that the row adds to a batch.
        """
        return np.zeros_like(encoded.lengths), encoded.lengths

    def may_skip(self, encoded: E, rows: Integers) -> bool:
        """Return whether these rows could skip tokens if a chunk had no others."""
        return False

    def forget(self) -> None:
        """Drop what was computed with other weights than the model has now."""

    @abstractmethod
    def logits(self, encoded: E, rows: Integers, with_mask: bool = False) -> torch.Tensor:
        """Return logits of rows as a batch, float32 [batch, labels], on the device where the pass ends.

        Args:
            with_mask: whether to pass an attention mask even if the model needs none.
        """


@dataclass(frozen=True)
class Computed:
    """Hold the result of a chunk.

    Attributes:
        rows: positions in the chunk that have logits, ascending, int64 [rows].
        logits: of these rows, float32 [rows, labels] on the host; [0, 0] if there are none.
        too_large: positions of rows that did not fit into memory even alone.
        too_large_in_float32: the same for rows that need float32.
        mostly_overflows: whether most rows overflowed half precision and got finite logits in float32.
        is_partial: whether batches are left that were not wanted.
    """

    rows: Integers
    logits: torch.Tensor
    counters: Counters
    too_large: tuple[int, ...] = ()
    too_large_in_float32: tuple[int, ...] = ()
    mostly_overflows: bool = False
    is_partial: bool = False


@dataclass
class BatchSizes:
    """Keep the largest size of batches: the user's or the default size, reduced after out-of-memory errors.

    Attributes:
        batch_size: rows per batch if the user set it; then the token budget does not count.
        equal_lengths: whether only rows of the same length share a batch.
        memory: None if it is unknown, or if the user set the size.
        stages: GPUs that each chunk should keep busy.
    """

    token_budget: int
    batch_size: int | None
    equal_lengths: bool = False
    memory: MemoryLimit | None = None
    stages: int = 1

    def tokens_at(self, width: int) -> int:
        """Return how many padded tokens a batch may hold now, in rows of ``width`` tokens."""
        if self.memory is None:
            return self.token_budget
        return min(self.token_budget, self.memory.tokens_at(width))

    def shrink(self, rows: int, padded_tokens: int, width: int, skipped: int = 0) -> None:
        """Make the next batches half as large as a batch that did not fit; its rows skipped ``skipped`` tokens."""
        if self.batch_size is not None:
            self.batch_size = max(1, rows // 2)
        # A single row may exceed the limit; then the limit for other batches stays.
        if self.memory is None:
            self.token_budget = min(self.token_budget, max(1, padded_tokens // 2))
        else:
            cost = replace(self.memory, skipped=skipped).cost(padded_tokens, width)
            available = min(self.memory.available_bytes, max(1, int(cost // 2)))
            self.memory = replace(self.memory, available_bytes=available)

    def for_float32(self) -> BatchSizes:
        """Return sizes for activations of twice the bytes; later changes do not affect these sizes."""
        halves = BatchSizes(max(1, self.token_budget // 2), self.batch_size, self.equal_lengths)
        if self.batch_size is not None:
            halves.batch_size = max(1, self.batch_size // 2)
        if self.memory is not None:
            halves.memory = replace(self.memory, available_bytes=max(1, self.memory.available_bytes // 2))
        return halves

    def cut(
        self, widths: Integers, rows: Integers, skipped: Integers, packed_tokens: int = 0
    ) -> deque[Integers]:
        """Cut rows into batches of rows that skip equally many tokens; batches that skip the fewest come first.

        Args:
            widths: the tokens that each row adds to a batch, int64 [rows].
            packed_tokens: of a packed batch; a row that has no room in one comes into padded batches.
        """
        budget = self.token_budget
        if self.stages > 1:
            # Make enough batches to keep all GPUs of a spread model busy.
            share = int(widths[rows].sum()) // (BATCHES_PER_STAGE * self.stages)
            budget = max(min(MIN_STAGE_TOKENS, budget), min(budget, share))
        batches: deque[Integers] = deque()
        for tokens in np.unique(skipped[rows]).tolist():
            group = rows[skipped[rows] == tokens]
            room = packed_tokens - tokens
            packed, group = group[widths[group] <= room], group[widths[group] > room]
            if len(packed):
                rows_of_batch = most_rows(packed_tokens, self.memory)
                batches += [packed[batch] for batch in pack(widths[packed], room, rows_of_batch)]
            limit = None if self.memory is None else replace(self.memory, skipped=tokens)
            cut = make_batches(widths[group], budget, self.batch_size, self.equal_lengths, limit)
            batches += [group[batch] for batch in cut]
        return batches


def compute(
    classifier: Scorer[E],
    encoded: E,
    sizes: BatchSizes,
    report: Report,
    in_float32: Mode | None = None,
    starts_in_float32: bool = False,
) -> Computed:
    """Run the model over all rows of a chunk that have tokens, and only once over rows with the same tokens.

    Args:
        sizes: reduced when memory runs out, also for the next chunk.
        report: called after each forward pass, failed or not, with rows, tokens and padded tokens so far; where it
            returns False, the batches behind are left.
        in_float32: a context in which the model computes in float32.  Rows with NaN or infinite logits run again
            in this context.  None: these rows do not run again.
        starts_in_float32: whether all rows run only in float32; ``sizes`` must be for float32 then.
    """
    first = np.arange(len(encoded.lengths)) if encoded.first is None else encoded.first
    copies = np.bincount(first, minlength=len(first))
    rows = np.flatnonzero((copies > 0) & (encoded.lengths > 0))
    if in_float32 is not None and starts_in_float32:
        with in_float32():
            computed = _run(classifier, encoded, sizes, rows, copies, report, with_mask=True)
        counters = replace(computed.counters, float32_rows=computed.counters.rows)
        computed = replace(computed, counters=counters, too_large=(), too_large_in_float32=computed.too_large)
    else:
        computed = _run(classifier, encoded, sizes, rows, copies, report)
        overflows = computed.rows[~_is_finite(computed.logits)]
        if in_float32 is not None and len(overflows):
            before, halves = computed.counters, sizes.for_float32()

            def report_step(*_: int) -> None:
                report(before.rows, before.tokens, before.padded_tokens)

            with in_float32():
                repeated = _run(classifier, encoded, halves, overflows, copies, report_step, with_mask=True)
            computed = _with_repeated(computed, repeated)
    # Row i gets the result of row first[i]: its logits, or the reason why there are none.
    rows = np.flatnonzero(np.isin(first, computed.rows))
    return replace(
        computed,
        rows=rows,
        logits=computed.logits[torch.from_numpy(np.searchsorted(computed.rows, first[rows]))],
        counters=computed.counters + Counters(repeated_rows=len(rows) - len(computed.rows)),
        too_large=tuple(np.flatnonzero(np.isin(first, computed.too_large)).tolist()),
        too_large_in_float32=tuple(np.flatnonzero(np.isin(first, computed.too_large_in_float32)).tolist()),
    )


def _with_repeated(computed: Computed, repeated: Computed) -> Computed:
    """Return a chunk's result, in which rows that ran again in float32 have their new logits."""
    if len(repeated.rows):
        computed.logits[torch.from_numpy(np.searchsorted(computed.rows, repeated.rows))] = repeated.logits
    improved = int(_is_finite(repeated.logits).sum())
    # The first run has counted these rows and tokens.
    counters = replace(repeated.counters, rows=0, tokens=0, recomputed_rows=repeated.counters.rows)
    return replace(
        computed,
        counters=computed.counters + counters,
        too_large_in_float32=repeated.too_large,
        mostly_overflows=not computed.is_partial
        and len(computed.rows) >= _MIN_TYPICAL_ROWS
        and 2 * improved > len(computed.rows),
    )


def _is_finite(logits: torch.Tensor) -> npt.NDArray[np.bool_]:
    return np.asarray(torch.isfinite(logits).all(dim=1).numpy())


def _run(
    classifier: Scorer[E],
    encoded: E,
    sizes: BatchSizes,
    rows: Integers,
    copies: Integers,
    report: Report,
    with_mask: bool = False,
) -> Computed:
    """Run the model over rows of a chunk; row i stands for ``copies[i]`` rows with the same tokens."""
    began = time.perf_counter()
    lengths = encoded.lengths
    # Passes with a mask compute all tokens.
    skipped, widths = np.zeros_like(lengths), lengths
    if not with_mask:
        skipped, widths = classifier.skipped_tokens(encoded)
    packed_tokens = 0 if with_mask else classifier.packs(encoded)
    batches = sizes.cut(widths, rows, skipped, packed_tokens)
    done = [np.empty(0, dtype=np.int64)]
    logits: list[torch.Tensor] = []
    too_large: set[int] = set()
    tried_alone: set[int] = set()
    counters = Counters()
    queued: deque[torch.cuda.Event] = deque()
    size_before = sizes.batch_size
    # A run that goes on must cut the rows that are left into the same batches. Where a pass is spread over GPUs, or
    # rows share their first tokens, batches go by all rows of the chunk.
    can_stop = sizes.stages == 1 and not skipped.any()
    while batches:
        batch = batches.popleft()
        width = int(lengths[batch].max())
        is_packed = not with_mask and classifier.is_packed(encoded, batch)
        padded = int(lengths[batch].sum()) if is_packed else width * len(batch)
        result = None
        try:
            result = classifier.logits(encoded, batch, with_mask)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        if result is not None:
            wait_for_queue(queued, classifier.last_device, classifier.stages)
            size_before = sizes.batch_size
            done.append(batch)
            logits.append(result)
            counters += Counters(
                rows=int(copies[batch].sum()),
                tokens=int(lengths[batch].sum()),
                padded_tokens=padded,
                batches=1,
            )
        else:
            # Outside the except block, where the exception would keep the tensors of the failed pass alive.
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.empty_cache()
            counters += Counters(oom_events=1)
            remaining = np.concatenate([batch, *batches])
            row = int(batch[0])
            if is_packed:
                classifier.packed_tokens = packed_tokens = 0
            elif len(batch) == 1 and row in tried_alone:
                too_large.add(row)
                remaining = remaining[1:]
                sizes.batch_size = size_before  # the row does not fit with any batch size
            else:
                # A single row runs once more: with an empty cache it may fit.
                if len(batch) == 1:
                    tried_alone.add(row)
                width = int(widths[batch].max())
                sizes.shrink(len(batch), width * len(batch), width, int(skipped[row]))
            batches = sizes.cut(widths, remaining, skipped, packed_tokens)
        is_wanted = report(counters.rows, counters.tokens, counters.padded_tokens) is not False
        if is_wanted or not can_stop or not batches:
            continue
        if with_mask or not classifier.may_skip(encoded, np.concatenate(batches)):
            break
    computed_rows = np.concatenate(done)
    order = np.argsort(computed_rows)
    # One copy from the device per chunk: a copy per batch would wait for each batch.
    on_host = torch.cat(logits).cpu() if logits else torch.empty((0, 0))
    return Computed(
        rows=computed_rows[order],
        logits=on_host[torch.from_numpy(order)],
        counters=replace(counters, forward_seconds=time.perf_counter() - began),
        too_large=tuple(sorted(too_large)),
        is_partial=bool(batches),
    )


def wait_for_queue(queued: deque[torch.cuda.Event], device: torch.device, stages: int) -> None:
    """Wait until a GPU has few unfinished passes, so that the reported progress is true.

    Args:
        queued: end events of passes that may be unfinished; the latest pass's event is added.
    """
    if device.type != "cuda":
        return
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    queued.append(event)
    if len(queued) >= max(_MAX_QUEUED, stages + 1):
        queued.popleft().synchronize()
