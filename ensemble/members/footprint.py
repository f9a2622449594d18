"""What one replica of a member takes of a device: the terms in which kinds say it and the planner plans.

Arithmetic only; how a kind comes to its numbers is its own business.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

# Padded tokens a batch; more does not make a GPU faster, and a CPU is at its best with fewer.
GPU_TOKEN_BUDGET = 16384
CPU_TOKEN_BUDGET = 2048
# Batches that a chunk has at least for each GPU over which a member is spread: while the last one computes one of
# them, those before it compute the next ones, but at a chunk's beginning and end they wait for each other.
BATCHES_PER_STAGE = 8
# Fewer tokens than this in a batch cost a GPU more than waiting does.
MIN_STAGE_TOKENS = 2048
# Of a device, what is not planned with: fragments, estimates, and programs that come later.
RESERVE_SHARE = 0.05
# A GPU's compute capability, such as (8, 0).
Capability = tuple[int, int]
# Rows narrower than this count as if they were so wide in ``Activation.line``.
_MIN_WIDTH = 16


@dataclass(frozen=True)
class Weights:
    """What a loaded model holds.

    ``parameters`` counts packed weights as what they stand for; ``embedding_parameters`` of them are only looked
    up.  ``largest_layer_bytes`` is the largest block that stays on one device.
    """

    parameters: int
    bytes: int
    largest_layer_bytes: int
    embedding_parameters: int = 0


@dataclass(frozen=True)
class Stage:
    """A moment of the forward pass: the bytes alive per padded token, per pair of tokens of a row, and per row."""

    bytes_per_token: float
    bytes_per_token_pair: float
    bytes_per_row: float = 0.0


@dataclass(frozen=True)
class Activation:
    """The peak of a forward pass beside the weights: the worst of its stages.

    ``fixed_bytes`` does not depend on the batch.
    """

    stages: tuple[Stage, ...]
    fixed_bytes: int

    def bytes(self, padded_tokens: int, width: int) -> int:
        """For a batch of rows ``width`` tokens wide that hold ``padded_tokens`` together."""
        return self.fixed_bytes + math.ceil(padded_tokens * self._per_token(width))

    def max_tokens(self, available_bytes: int, width: int) -> int:
        """Padded tokens of a batch of rows ``width`` tokens wide that takes at most ``available_bytes``."""
        return max(0, int((available_bytes - self.fixed_bytes) / self._per_token(width)))

    def line(self, width: int) -> tuple[float, float]:
        """Bytes per token and per token pair, without the fixed ones: one line instead of the stages.

        Right for rows ``width`` tokens wide; never too low for narrower ones, since the worst of the stages
        is convex in the width and the line its chord.
        """
        if width <= _MIN_WIDTH:
            return self._per_token(width), 0.0
        narrow, wide = self._per_token(_MIN_WIDTH), self._per_token(width)
        slope = (wide - narrow) / (width - _MIN_WIDTH)
        # Falls where a row's own bytes weigh more than its pairs: then the narrowest rows decide.
        return (narrow - slope * _MIN_WIDTH, slope) if slope >= 0 else (narrow, 0.0)

    def _per_token(self, width: int) -> float:
        return max(
            stage.bytes_per_token + stage.bytes_per_token_pair * width + stage.bytes_per_row / width
            for stage in self.stages
        )


@dataclass(frozen=True)
class Footprint:
    """A replica's memory; all of it is an estimate from the checkpoint's files.

    ``width`` is the longest row to come, in tokens; ``context_bytes`` is what CUDA itself takes on each device,
    or the process on a CPU.  ``mapped_bytes`` of a file count as a process's memory while weights of another type
    are made of them; the system takes them back where memory is short.
    """

    weights: Weights
    activation: Activation
    context_bytes: int
    mapped_bytes: int
    dtype: str
    quantization: str
    attention: str
    width: int

    def resident_bytes(self, gpus: int) -> int:
        """Per device, before the first batch, on ``gpus`` devices (0: the CPU)."""
        share = self.weights.bytes if gpus < 2 else math.ceil(self.weights.bytes / gpus)
        # Layers are not cut: one device can have most of a layer more than its share.
        uneven = self.weights.largest_layer_bytes if gpus > 1 else 0
        return min(self.weights.bytes, share + uneven) + self.context_bytes

    def peak_bytes(self, gpus: int, padded_tokens: int, width: int | None = None) -> int:
        """Per device, with a batch of ``padded_tokens`` of rows as wide as the longest, or as ``width``."""
        batch = self.activation.bytes(padded_tokens, width or self.width)
        return self.resident_bytes(gpus) + max(batch, 0 if gpus else self.mapped_bytes)

    def token_budget(self, gpus: int, room_bytes: int) -> int:
        """Padded tokens of the longest rows that a batch may hold; 0 where not even one such row fits."""
        tokens = self.activation.max_tokens(room_bytes - self.resident_bytes(gpus), self.width)
        max_tokens = GPU_TOKEN_BUDGET if gpus else CPU_TOKEN_BUDGET
        return max(self.width, min(max_tokens, tokens)) if tokens >= self.width else 0


class MemoryEstimate(ABC):
    """What is known of a member's memory before it is loaded.

    Attributes:
        max_length: the tokens that a row may have; what is longer is cut.
    """

    max_length: int

    @abstractmethod
    def footprint(self, gpus: int, capability: Capability | None) -> Footprint | None:
        """What a replica takes on ``gpus`` such devices (0: the CPU); None where too little is known."""

    def dtype(self, gpus: int, capability: Capability | None) -> str:
        """The type of the weights there, where there is no footprint to say it; "auto": only a worker can tell."""
        return "auto"

    def attention(self, dtype: str, gpus: int, capability: Capability | None) -> str | None:
        """The attention that a worker is told to take there; None: its own choice."""
        return None

    def problem(self) -> str:
        """Why it cannot run on any device, key first; empty where it can."""
        return ""

    def smaller(self, capability: Capability | None) -> Iterator[tuple[str, Footprint]]:
        """Keys with values, as the YAML has them, that would make it smaller, and what it then takes on one GPU."""
        return iter(())

    def with_flash_attention(self) -> MemoryEstimate | None:
        """The same where flash-attention 2 works, which only a process with torch can tell; None: no difference."""
        return None
