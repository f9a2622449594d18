"""PURE: what to run where.  RunConfig + facts about table, checkpoints and devices -> Plan.

No disk, no clock, no environment: the same arguments give the same plan, so that it can be tested as arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ensemble.config import ModelConfig, RunConfig
from ensemble.devices import Device
from ensemble.errors import DeviceError

# A chunk is what is lost when a worker dies and what two devices can differ by at the end.  One MiB of text is
# about 250,000 tokens: three to five minutes of a 9B model on a T4, under a minute of a small one on two cores.
CHUNK_BYTES = 1 << 20
CHUNK_MAX_ROWS = 4096
# Small tables are cut into about 16 chunks, but none so small that it holds only a batch or two: rows are in
# order of their bytes, and it takes some batches to put them into order of their tokens without padding.
CHUNKS_WANTED = 16
CHUNK_MIN_BYTES = 1 << 16
# What a row costs beyond its text, in bytes of text: template, special tokens, bookkeeping.
ROW_OVERHEAD_BYTES = 32


@dataclass(frozen=True)
class Chunk:
    """Rows ``order[start:stop]`` of a member; ``cost`` is its share of the member's work, relative."""

    index: int
    start: int
    stop: int
    cost: float


@dataclass(frozen=True)
class MemberPlan:
    """How one member runs: on ``gpus`` devices per replica (0: the CPU), ``replicas`` at most at a time.

    ``order`` holds row numbers, longest text first, int64 [rows]; chunks are slices of it.
    """

    index: int
    model: ModelConfig
    gpus: int
    replicas: int
    chunks: tuple[Chunk, ...]
    order: npt.NDArray[np.int64] = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        return self.model.name


@dataclass(frozen=True)
class Plan:
    members: tuple[MemberPlan, ...]
    warnings: tuple[str, ...] = ()


def make_plan(
    config: RunConfig, lengths: Mapping[str, npt.NDArray[np.int64]], devices: Sequence[Device]
) -> Plan:
    """Decide replicas and chunks for every member.

    Args:
        config: the run.
        lengths: per member name, bytes of text per row, [rows].
        devices: the GPUs this process may use.

    Raises:
        DeviceError: a member wants more GPUs than there are; every such member is named.
    """
    problems: list[str] = []
    warnings: list[str] = []
    members: list[MemberPlan] = []
    gpu_count = len(devices)
    for index, model in enumerate(config.models):
        gpus = min(1, gpu_count) if model.num_gpus is None else model.num_gpus
        if gpus > gpu_count:
            problems.append(_too_many_gpus(index, model, gpu_count))
            continue
        if gpus > 1 and any(device.uuid.startswith("MIG-") for device in devices):
            problems.append(
                f"models[{index}].num_gpus: {model.name} asks for {gpus}, but CUDA gives a process one MIG slice "
                f"at most; set num_gpus: 1, or switch MIG off"
            )
            continue
        order, chunks = cut_chunks(lengths[model.name])
        replicas, warning = _replicas(index, model, gpus, gpu_count)
        warnings += warning
        members.append(
            MemberPlan(
                index=index,
                model=model,
                gpus=gpus,
                replicas=min(replicas, len(chunks)),
                chunks=chunks,
                order=order,
            )
        )
    if problems:
        raise DeviceError(problems)
    return Plan(tuple(members), tuple(warnings))


def cut_chunks(lengths: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], tuple[Chunk, ...]]:
    """Row order, longest first, and its slices.

    The cut depends on the table alone, not on devices or replicas, so that any number of them computes the
    same batches.

    Args:
        lengths: bytes of text per row, [rows].
    """
    order = np.argsort(-lengths, kind="stable")
    costs = (lengths[order] + ROW_OVERHEAD_BYTES).astype(np.float64)
    cumulative = np.concatenate([[0.0], np.cumsum(costs)])
    total, rows = float(cumulative[-1]), len(order)
    target = min(float(CHUNK_BYTES), max(float(CHUNK_MIN_BYTES), total / CHUNKS_WANTED))
    chunks: list[Chunk] = []
    start = 0
    while start < rows:
        within = int(np.searchsorted(cumulative, cumulative[start] + target, side="right")) - 1
        stop = min(max(within, start + 1), start + CHUNK_MAX_ROWS, rows)
        if total - cumulative[stop] < target / 4 and rows - start <= CHUNK_MAX_ROWS:
            stop = rows  # no crumb at the end
        chunks.append(Chunk(len(chunks), start, stop, float(cumulative[stop] - cumulative[start]) / total))
        start = stop
    return order, tuple(chunks)


def _replicas(index: int, model: ModelConfig, gpus: int, gpu_count: int) -> tuple[int, Sequence[str]]:
    if model.replicas == "auto":
        return (gpu_count // gpus if gpus else 1), ()
    room = gpu_count // gpus if gpus else model.replicas
    if model.replicas > room:
        return room, (
            f"models[{index}].replicas: {model.name} asks for {model.replicas} of {gpus} GPU each, but there "
            f"is room for {room} at a time; running {room}",
        )
    return model.replicas, ()


def _too_many_gpus(index: int, model: ModelConfig, gpu_count: int) -> str:
    there = f"{gpu_count} GPU{'s' if gpu_count != 1 else ''}"
    return (
        f"models[{index}].num_gpus: {model.name} asks for {model.num_gpus}, but {there} can be used here; "
        f"lower it, make more visible (CUDA_VISIBLE_DEVICES), or set num_gpus: 0 for the CPU"
    )
