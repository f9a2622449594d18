"""Describe the memory that a replica of a member takes on a device; kinds fill this in, the planner reads it.

This file only calculates; each kind decides how it gets its numbers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

# Padded tokens of a batch where a config sets none; more do not make a GPU faster, and a CPU is fastest with fewer.
GPU_TOKEN_BUDGET = 16384
CPU_TOKEN_BUDGET = 2048
# The least batches of a chunk for each GPU over which a member is spread: while the last GPU computes a batch, the
# GPUs before it compute the next ones, but at the beginning and end of a chunk they wait for each other.
BATCHES_PER_STAGE = 8
# A batch of fewer tokens costs a GPU more time than waiting does.
MIN_STAGE_TOKENS = 2048
# The share of a device that stays free: for fragments, wrong estimates, and programs that start later.
RESERVE_SHARE = 0.05
# A GPU's compute capability, such as (8, 0).
Capability = tuple[int, int]


def coarse_room(room_bytes: int) -> int:
    """Round a room down to its first four binary digits, by less than an eighth.

    Free memory differs by some MiB between processes, GPUs and drivers.  A room that does not follow these
    differences cuts the same batches.
    """
    step = 1 << max(0, room_bytes.bit_length() - 4)
    return room_bytes - room_bytes % step


@dataclass(frozen=True)
class Weights:
    """Hold the size of a loaded model.

    Attributes:
        parameters: a packed weight counts as all the weights that it stands for.
        largest_layer_bytes: of the largest block that stays on one device.
        embedding_parameters: those that are only looked up.
    """

    parameters: int
    bytes: int
    largest_layer_bytes: int
    embedding_parameters: int = 0


@dataclass(frozen=True)
class Activation:
    """Calculate the peak memory of a forward pass without the weights.

    Attributes:
        fixed_bytes: whatever the batch.
        bytes_per_kept_token: of keys and values of all layers, where those of a batch are kept.
    """

    bytes_per_token: float
    bytes_per_token_pair: float = 0.0
    bytes_per_row: float = 0.0
    fixed_bytes: int = 0
    bytes_per_kept_token: float = 0.0

    def per_token(self, width: int) -> float:
        """Return the bytes of a padded token in rows ``width`` tokens wide."""
        bytes_per_token = self.bytes_per_token + self.bytes_per_kept_token
        return bytes_per_token + self.bytes_per_token_pair * width + self.bytes_per_row / width

    def bytes(self, padded_tokens: int, width: int) -> int:
        """Return the bytes for a batch of ``padded_tokens``, with rows ``width`` tokens wide."""
        return self.fixed_bytes + math.ceil(padded_tokens * self.per_token(width))

    def max_tokens(self, available_bytes: int, width: int) -> int:
        """Return the most padded tokens that fit into ``available_bytes``, with rows ``width`` tokens wide."""
        return max(0, int((available_bytes - self.fixed_bytes) / self.per_token(width)))


@dataclass(frozen=True)
class Footprint:
    """Estimate a replica's memory from the checkpoint's files.

    Attributes:
        context_bytes: what CUDA takes on each device, or the process on a CPU.
        mapped_bytes: of files that count as the process's memory while weights are converted to another type; the
            system reclaims them where memory is short.
        attention: None: the worker chooses.
        width: tokens of the longest row.
    """

    weights: Weights
    activation: Activation
    context_bytes: int
    mapped_bytes: int
    dtype: str
    quantization: str
    attention: str | None
    width: int

    def resident_bytes(self, gpus: int) -> int:
        """Return the bytes per device before the first batch, on ``gpus`` devices (0: the CPU)."""
        share = self.weights.bytes if gpus < 2 else math.ceil(self.weights.bytes / gpus)
        # Layers are not split: a device can get almost a layer more than its share.
        uneven = self.weights.largest_layer_bytes if gpus > 1 else 0
        return min(self.weights.bytes, share + uneven) + self.context_bytes

    def peak_bytes(self, gpus: int, padded_tokens: int, width: int | None = None) -> int:
        """Return the bytes per device with a batch of ``padded_tokens``, by default of the longest rows."""
        batch = self.activation.bytes(padded_tokens, width or self.width)
        return self.resident_bytes(gpus) + max(batch, 0 if gpus else self.mapped_bytes)

    def token_budget(self, gpus: int, free_bytes: int) -> int:
        """Return the padded tokens that a batch of the longest rows may hold; 0 if not even one such row fits."""
        available = free_bytes - self.resident_bytes(gpus)
        if self.activation.max_tokens(available, self.width) < self.width:
            return 0
        fixed = self.activation.fixed_bytes
        tokens = self.activation.max_tokens(coarse_room(available - fixed) + fixed, self.width)
        max_tokens = GPU_TOKEN_BUDGET if gpus else CPU_TOKEN_BUDGET
        return max(self.width, min(max_tokens, tokens))


class MemoryEstimate(ABC):
    """Estimate a member's memory before it is loaded.

    Attributes:
        max_length: tokens of a row; longer rows are cut.
    """

    max_length: int

    @abstractmethod
    def footprint(self, gpus: int, capability: Capability | None) -> Footprint | None:
        """Return a replica's memory on ``gpus`` such devices (0: the CPU); None where too little is known."""

    def dtype(self, gpus: int, capability: Capability | None) -> str:
        """Return the type of the weights where there is no footprint; "auto": only a worker can tell."""
        return "auto"

    def attention(self, dtype: str, gpus: int, capability: Capability | None) -> str | None:
        """Return the attention for the workers; None: they choose."""
        return None

    def problem(self, capability: Capability | None) -> str:
        """Return why the member cannot run, key first; empty if it can.

        Args:
            capability: of the least capable GPU; None: the CPU, or not known.
        """
        return ""

    def smaller(self, capability: Capability | None) -> Iterator[tuple[str, Footprint]]:
        """Yield YAML keys with values that would make the member smaller, each with its memory on one GPU."""
        return iter(())

    def with_flash_attention(self) -> MemoryEstimate | None:
        """Return the estimate for devices where flash-attention 2 works; None: it makes no difference."""
        return None
