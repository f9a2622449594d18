"""How many tokens a batch may hold: sizes timed on the rows of a worker's first chunk, and the fastest one kept; or
as many as keep several GPUs busy.

A row's last digits can depend on the rows it shares a batch with, and the same work shall give the same bytes
whoever does it, however often it was interrupted.  So what a clock says must never decide twice.  The choice is
written into the member's work folder before any row is computed by it, the first one to write it is right, and
replicas, retries and resumed runs on the same hardware with the same versions take what stands there.  Passes that
are timed are thrown away: with the budget on record the batches of a chunk are those of its rows alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ensemble.common.digests import digest_of
from ensemble.common.files import TEMPORARY, sync_directory
from ensemble.common.shards import token_budget_path, token_budgets
from ensemble.common.torch_errors import is_out_of_memory
from ensemble.members.footprint import BATCHES_PER_STAGE, MIN_STAGE_TOKENS
from ensemble.members.huggingface.scoring.batching import MemoryLimit
from ensemble.members.huggingface.scoring.forward import BatchSizes, E, Scorer

# Tried in this order, each as long as it pays: so many times the default, and half of it where twice did not pay.
_FACTORS = (2, 4)
# A larger batch takes more memory and makes longer ends of chunks, and clocks are never quite right.
_WORTH_CHANGING = 1.03
# A chunk has this many batches of the largest size that is tried, or its end would cost more than the size gains.
_BATCHES_PER_CHUNK = 3
# Room that a size must leave: what is free differs a little from process to process, and the same batches are to be
# cut in all of them.
_ROOM_TO_SPARE = 1.1
# Timing takes about nine budgets of tokens, and as many again only where a larger one has been found faster.  It
# must not take more than a fiftieth of a replica's work.
_TIMED_BUDGETS, _WORTH_TIMING = 9, 50

Time = Callable[[int], float | None]


@dataclass(frozen=True)
class Choice:
    """``token_budget`` and the real tokens per second of each one that was timed, in the order of their sizes."""

    token_budget: int
    tokens_per_second: Mapping[int, float]

    def text(self, default: int) -> str:
        """What the user is told; empty where nothing was timed."""
        if len(self.tokens_per_second) < 2:
            return ""
        speeds = ", ".join(
            f"{speed:,.0f} with {budget:,}" for budget, speed in self.tokens_per_second.items()
        )
        kept = "the default" if self.token_budget == default else "the fastest"
        return f"batches of {self.token_budget:,} tokens, {kept} of those timed (tokens/s: {speeds})"


def choose(default: int, is_allowed: Callable[[int], bool], time_of: Time) -> Choice:
    """The fastest of a few budgets.

    Args:
        is_allowed: whether a budget can be tried.
        time_of: real tokens per second with a budget; None where such batches do not fit after all.
    """
    speeds: dict[int, float] = {}
    best = default

    def is_better(budget: int) -> bool:
        if not is_allowed(budget) or (speed := time_of(budget)) is None:
            return False
        speeds[budget] = speed
        return speed > _WORTH_CHANGING * speeds[best]

    if not is_allowed(default) or (first := time_of(default)) is None:
        return Choice(default, {})
    speeds[default] = first
    for factor in _FACTORS:
        if not is_better(factor * default):
            break
        best = factor * default
    if best == default and is_better(default // 2):
        best = default // 2
    # Once more, since the clock of a device that was idle rises in its first seconds.
    if best != default and (again := time_of(default)) is not None:
        speeds[default] = max(speeds[default], again)
        if speeds[best] <= _WORTH_CHANGING * speeds[default]:
            best = default
    return Choice(best, dict(sorted(speeds.items())))


def tokens_per_second(
    scorer: Scorer[E], encoded: E, sizes: BatchSizes, tokens: int, step: Callable[[], None]
) -> float | None:
    """How fast batches of these sizes are: real tokens, by the time from an idle device to an idle device.

    Args:
        tokens: padded tokens that are timed at least, where there are as many; one batch comes before, untimed.
        step: called after each pass.

    Returns:
        None where a batch did not fit into memory.
    """
    lengths = encoded.lengths
    rows = np.flatnonzero(lengths > 0)
    batches = sizes.cut(lengths, rows, scorer.skipped_tokens(encoded))

    def run(count: int) -> bool:
        """Whether they fit."""
        queued = []
        try:
            for batch in list(batches)[:count]:
                queued.append(scorer.logits(encoded, batch))
                step()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        finally:
            is_complete = len(queued) == min(count, len(batches))
            queued.clear()
        if scorer.last_device.type == "cuda":
            torch.cuda.synchronize(scorer.last_device)
            if not is_complete:
                torch.cuda.empty_cache()
        return is_complete

    padded = np.cumsum([len(batch) * int(lengths[batch].max()) for batch in batches])
    count = min(len(batches), int(np.searchsorted(padded, tokens)) + 1)
    if not run(1):
        return None
    began = time.perf_counter()
    if not run(count):
        return None
    seconds = time.perf_counter() - began
    return sum(int(lengths[batch].sum()) for batch in list(batches)[:count]) / max(seconds, 1e-9)


class TokenBudget(ABC):
    """The budget of a member's batches, chunk by chunk; by nothing but a chunk's rows and what is on record.

    Args:
        default: padded tokens a batch may hold.
    """

    def __init__(self, default: int) -> None:
        self._tokens = self._told = self._default = default
        self._note, self._seconds = "", 0.0

    @abstractmethod
    def for_chunk(self, scorer: Scorer[E], encoded: E, step: Callable[[], None]) -> int:
        """Padded tokens that batches of this chunk may hold; the same for every worker that gets these rows.

        Args:
            step: called after each forward pass.

        Raises:
            RuntimeError: from a forward pass; not for want of memory.
        """

    def news(self) -> tuple[int | None, str, float]:
        """The budget where it is not what was told before, how it was found, and the seconds that this took."""
        found = None if self._tokens == self._told else self._tokens, self._note, self._seconds
        self._told, self._note, self._seconds = self._tokens, "", 0.0
        return found


class StageBudget(TokenBudget):
    """That of a model over several GPUs: so small that a chunk has enough batches to keep all of them busy.

    A GPU begins the next batch while those behind it compute this one (``loading.spread``).  Of n batches on p GPUs
    each stands still for p - 1 of n + p - 1 steps, at the chunk's beginning or its end.

    Args:
        stages: GPUs that a batch passes through.
    """

    def __init__(self, default: int, stages: int) -> None:
        super().__init__(default)
        self._stages = stages

    def for_chunk(self, scorer: Scorer[E], encoded: E, step: Callable[[], None]) -> int:
        share = int(encoded.lengths.sum()) // (BATCHES_PER_STAGE * self._stages)
        self._tokens = max(min(MIN_STAGE_TOKENS, self._default), min(self._default, share))
        return self._tokens


class TimedBudget(TokenBudget):
    """The default until one is on record or has been timed.

    Args:
        folder: the member's work folder, which its replicas share.
        default: padded tokens a batch may hold.
        memory: what a batch may take; None: not known, and then no size above the default is tried.
        hardware: whatever else two workers must have in common to take over each other's choice, as JSON has it.
        found: what earlier workers have found, by a digest of the hardware, for workers that see no such folder.
        expected_tokens: that each replica computes, about; too few are not worth timing.

    """

    def __init__(
        self,
        folder: Path,
        default: int,
        memory: MemoryLimit | None,
        hardware: object,
        found: Mapping[str, int],
        expected_tokens: int,
    ) -> None:
        super().__init__(default)
        self._memory = memory
        self._hardware = digest_of([hardware, default])[:16]
        self._found = found.get(self._hardware)
        self._path = token_budget_path(folder, self._hardware)
        self._is_settled = False
        self._may_time = expected_tokens >= _WORTH_TIMING * _TIMED_BUDGETS * default

    def for_chunk(self, scorer: Scorer[E], encoded: E, step: Callable[[], None]) -> int:
        # By its rows alone: what is left of a chunk that failed, or a table's end, cannot tell sizes apart.
        if int(encoded.lengths.sum()) < _BATCHES_PER_CHUNK * _FACTORS[0] * self._default:
            return self._default
        if not self._is_settled:
            found = self._found or self._recorded()
            if found is None and self._may_time:
                began = time.perf_counter()
                found = self._record(self._timed(scorer, encoded, step))
                self._seconds = time.perf_counter() - began
            self._tokens = found or self._default
            self._is_settled = True
        return self._tokens

    def _timed(self, scorer: Scorer[E], encoded: E, step: Callable[[], None]) -> Choice:
        longest, total = int(encoded.lengths.max()), int(encoded.lengths.sum())
        room = self._memory.tokens_at(longest) if self._memory is not None else self._default * _ROOM_TO_SPARE

        def is_allowed(budget: int) -> bool:
            fits = _ROOM_TO_SPARE * budget <= room and longest <= budget
            return fits and _BATCHES_PER_CHUNK * budget <= total

        def time_of(budget: int) -> float | None:
            sizes = BatchSizes(budget, None, memory=self._memory)
            return tokens_per_second(scorer, encoded, sizes, _FACTORS[0] * self._default, step)

        return choose(self._default, is_allowed, time_of)

    def _recorded(self) -> int | None:
        return token_budgets(self._path.parent).get(self._hardware)

    def _record(self, choice: Choice) -> int | None:
        """The budget on record, which is this one where none was there before.

        None where nothing can be recorded: then no other worker would know, and all take the default.
        """
        # As old as the choice, so whoever sees the name sees all of it; a link does not replace another.
        temporary = self._path.with_name(f".{self._path.name}{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}")
        document = {"token_budget": choice.token_budget, "tokens_per_second": choice.tokens_per_second}
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(json.dumps(document))
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(temporary, self._path)
                self._note = choice.text(self._default)
            sync_directory(self._path.parent)
        except OSError:
            return None
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        return self._recorded()
