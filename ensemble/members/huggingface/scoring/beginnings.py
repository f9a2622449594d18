"""Find the tokens that rows begin with alike, so that each beginning is computed once.

All rows of a chunk may share an instruction, and a row that is read once for each of its choices has the same
tokens before them.  Keys and values of such tokens are kept, and the rest of each row runs behind them.  The
numbers equal those of whole rows but for rounding, as matrix products have other shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache

from ensemble.members.huggingface.scoring.encode import Encoded
from ensemble.members.huggingface.scoring.forward import Integers
from ensemble.members.huggingface.scoring.key_values import KeysAndValues, cache_behind

# Fewer tokens or rows are not worth a separate pass.
MIN_TOKENS, MIN_ROWS = 32, 4
# Beginnings of a multiple of so many tokens share a pass without padding.
_STEP = 8
_NO_TOKENS: Integers = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Beginnings:
    """Say what the rows of a chunk begin with.

    Attributes:
        shared: the tokens that rows share, int64 [tokens].
        skipped: how many tokens of each row are computed before it: the shared ones, and those of its group, int64
            [rows].
        widths: the tokens that each row adds to a batch, int64 [rows].
    """

    shared: Integers
    skipped: Integers
    widths: Integers


@dataclass(frozen=True)
class Kept:
    """Hold beginnings that are computed already, all of the same length.

    Attributes:
        tokens: int64 [beginnings, tokens].
        layers: keys and values of each layer.
        total: the sums of their last hidden states, float32 [beginnings, numbers]; None where nobody needs them.
    """

    tokens: Integers
    layers: Sequence[KeysAndValues]
    total: torch.Tensor | None


@dataclass(frozen=True)
class Behind:
    """Hold what the rows of a batch run behind.

    Attributes:
        parts: the beginning that all of them share, and those of their groups; empty: the rows are whole.
        groups: the number of each row's beginning among those of the groups, int64 [rows]; None: there are none.
    """

    parts: Sequence[Kept] = ()
    groups: Integers | None = None

    @property
    def tokens(self) -> int:
        return sum(part.tokens.shape[1] for part in self.parts)

    def saved_tokens(self, rows: int) -> int:
        """Return how many tokens of the batch no pass had to compute."""
        own = 0 if self.groups is None else self.parts[-1].tokens.size
        return rows * self.tokens - own

    def cache(self) -> Cache | None:
        """Return a cache for a pass; None where the rows are whole."""
        return cache_behind([part.layers for part in self.parts], self.groups) if self.parts else None


def find_beginnings(encoded: Encoded, places: Integers) -> Beginnings:
    """Find what rows share; ``places`` are the tokens that a head reads, which are in each row's own pass."""
    # Copies of a row are not computed, so they are not worth a pass, and have no say in what a chunk's rest shares.
    every = np.arange(len(places))
    computed = every if encoded.first is None else np.flatnonzero(encoded.first == every)
    shared = shared_tokens(encoded, computed, places)
    skipped = np.where(_begins_with(encoded, places, shared), len(shared), 0)
    widths = encoded.lengths - skipped
    if encoded.groups is None:
        return Beginnings(shared, skipped, widths)
    candidates = computed[(encoded.lengths > 0)[computed] & (skipped == len(shared))[computed]]
    borders = np.flatnonzero(np.diff(encoded.groups[candidates])) + 1
    for rows in np.split(candidates, borders):
        if len(rows) < 2:
            continue
        count = len(_common(encoded, rows, int(places[rows].min()))) - len(shared)
        count -= count % _STEP
        if count >= MIN_TOKENS:
            skipped[rows] += count
            # A batch of such widths has room for the pass over the beginnings, too, and keeps a group together.
            widths[rows] = max((encoded.lengths - skipped)[rows].max(), -(-count // len(rows)))
    return Beginnings(shared, skipped, widths)


def shared_tokens(encoded: Encoded, rows: Integers, places: Integers) -> Integers:
    """Return the tokens that rows begin with; none if they are too few."""
    rows = rows[encoded.lengths[rows] > 0]
    lengths = encoded.lengths[rows]
    # Rows that were cut have the maximal length, and may have lost their beginning: they count only where there are
    # too few others.
    shorter = rows[lengths < lengths.max(initial=0)]
    rows = shorter if len(shorter) >= MIN_ROWS else rows
    if len(rows) < MIN_ROWS:
        return _NO_TOKENS
    shared = _common(encoded, rows, int(places[rows].min()))
    return shared if len(shared) >= MIN_TOKENS else _NO_TOKENS


def _begins_with(encoded: Encoded, places: Integers, tokens: Integers) -> npt.NDArray[np.bool_]:
    """Return which rows begin with the tokens, before the token that is read, bool [rows]."""
    count = len(tokens)
    return np.array(
        [
            place >= count and np.array_equal(ids[:count], tokens)
            for place, ids in zip(places.tolist(), encoded.inputs["input_ids"], strict=True)
        ],
        dtype=bool,
    )


def _common(encoded: Encoded, rows: Integers, count: int) -> Integers:
    """Return the tokens, at most so many, that all of these rows begin with."""
    beginnings = np.stack([encoded.inputs["input_ids"][row][:count] for row in rows.tolist()])
    differs = (beginnings != beginnings[0]).any(axis=0)
    return np.asarray(beginnings[0][: differs.argmax() if differs.any() else count])
