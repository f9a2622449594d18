"""PURE: what a run.json, its log and its probabilities say about a check, as rows of the table: (text, verdict).

Nothing is ``ok`` because nothing was measured: outside of a rehearsal that is ``FAILED``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.gpu.figures import planned_and_allocated
from bench.gpu.place import GIB, Failed

Row = tuple[str, str]
# How far the plan may be from the measured peak, either way.
_PLAN_TOLERANCE = 0.15
# A row must be this much closer to itself than to another one for a comparison to say anything.
_CLOSER = 0.6


@dataclass(frozen=True)
class Apart:
    """How far two runs' probabilities are apart: [rows, labels] each.

    ``mean`` and ``largest`` are between the same rows, ``strangers`` is the mean between each row and the next:
    rows that are all alike would hide every mistake.
    """

    mean: float
    largest: float
    strangers: float

    @classmethod
    def of(cls, item: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> Apart:
        if item.shape != other.shape or len(item) < 2:
            raise Failed(f"predictions of shape {item.shape} and {other.shape} cannot be compared")
        same = np.abs(item - other)
        return cls(float(same.mean()), float(same.max()), float(np.abs(item - np.roll(other, 1, 0)).mean()))

    def verdict(self, mean: float | None = None, largest: float | None = None) -> str:
        """ok where rows stay within the limits that are given, and are much closer to themselves than to others."""
        good = self.mean < _CLOSER * self.strangers
        good &= mean is None or self.mean <= mean
        good &= largest is None or self.largest <= largest
        return "ok" if good else "FAILED"

    def __str__(self) -> str:
        return (
            f"mean {self.mean:.1e}, largest {self.largest:.1e} apart ({self.strangers:.1e} from another row)"
        )


def against_plan(report: Mapping[str, Any], is_rehearsal: bool) -> Iterator[Row]:
    """One row for each member: what a device was planned to hold at most, and what torch held of it.

    Both are per device, and neither counts CUDA's context.
    """
    for member in report["members"]:
        name = member["name"]
        planned, measured = planned_and_allocated(member)
        if planned is None:
            yield f"{name}: run.json has no forecast of it, so there is nothing to compare with", "FAILED"
            continue
        if not measured:
            yield f"{name}: no peak was measured", "skipped" if is_rehearsal else "FAILED"
            continue
        ratio = planned / measured
        text = f"{name}: planned {planned / GIB:.2f}, measured {measured / GIB:.2f} GiB, {ratio:.2f}"
        yield text, "ok" if abs(ratio - 1) <= _PLAN_TOLERANCE else "FAILED"


def follows_turing_rules(member: Mapping[str, Any], is_rehearsal: bool) -> Iterator[Row]:
    """One row for each worker of a member that was left to choose, on a GPU of compute capability 7.5.

    bfloat16 is only emulated there, and the kernels of flash-attention 2 do not run.
    """
    for worker in member["workers"]:
        ready = worker["ready"]
        good = ready["dtype"] == "float16" and ready["attn_implementation"] != "flash_attention_2"
        good &= any("bfloat16 is only emulated" in note for note in ready["notes"])
        text = f"{load_and_speed({'workers': [worker]})}; {'; '.join(ready['notes']) or 'no notes'}"
        yield text, "ok" if good else "skipped" if is_rehearsal else "FAILED"


def load_and_speed(member: Mapping[str, Any]) -> str:
    """What a member's first worker took to load, how fast it was, and what it held."""
    worker = member["workers"][0]
    ready, closed = worker["ready"], worker["closed"]
    speed = worker["counters"]["tokens"] / max(worker["counters"]["predict_seconds"], 1e-9)
    peak = closed["peak_gpu_memory_bytes"] or closed["peak_memory_bytes"] or 0
    return (
        f"{ready['dtype']}, {ready['attn_implementation']}, load {worker['load_seconds']:.1f} s, "
        f"{speed:,.0f} tokens/s, peak {peak / GIB:.2f} GiB"
    )
