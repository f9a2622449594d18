"""Keep how a model's batches are made, so that its other workers and resumed runs make the same ones (PURE)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ensemble.common.gpus import Device
from ensemble.common.protocol import BatchChoice, Ready
from ensemble.common.text import gib


@dataclass(frozen=True)
class BatchRecord:
    """Hold what a model's workers have chosen so far.

    Attributes:
        rooms: the bytes that a batch may take beside the weights, by names and memory of a worker's devices.
        in_float32: whether chunks start in float32.
    """

    rooms: Mapping[str, int] = field(default_factory=dict)
    in_float32: bool = False

    def choice(self, devices: Sequence[Device]) -> BatchChoice:
        """Return how a worker on these devices makes its batches."""
        return BatchChoice(self.rooms.get(_key(devices)), self.in_float32)

    def with_worker(self, devices: Sequence[Device], ready: Ready) -> BatchRecord:
        """Return the record with a new worker's room, if there is none yet or the recorded room does not fit."""
        recorded = self.rooms.get(_key(devices))
        fits = recorded is not None and ready.max_room_bytes is not None and recorded <= ready.max_room_bytes
        return self if fits else self._with_room(devices, ready.room_bytes)

    def with_chunk(self, devices: Sequence[Device], choice: BatchChoice) -> BatchRecord:
        """Return the record after a chunk: the room may have shrunk, and rows may have overflowed."""
        record = self._with_room(devices, choice.room_bytes)
        return replace(record, in_float32=self.in_float32 or choice.in_float32)

    def _with_room(self, devices: Sequence[Device], room_bytes: int | None) -> BatchRecord:
        """Return the record with a room, unless a smaller one is on record; None: the worker has no limit."""
        if room_bytes is None:
            return self
        key = _key(devices)
        return replace(self, rooms={**self.rooms, key: min(room_bytes, self.rooms.get(key, room_bytes))})


def room_text(devices: Sequence[Device], before: BatchRecord, after: BatchRecord, ready: Ready) -> str:
    """Return a note if a worker's room is smaller than the recorded one, or could be much larger; else empty."""
    recorded, room = before.choice(devices).room_bytes, after.choice(devices).room_bytes
    if recorded is None or room is None:
        return ""
    name = devices[0].name if devices else "the CPU"
    if room < recorded:
        return (
            f"batches had {gib(recorded)} beside the weights on {name}, more than is free now, and go on with "
            f"{gib(room)}: last digits of rows may differ, in half precision the third or fourth"
        )
    if ready.room_bytes is not None and ready.room_bytes >= 2 * recorded:
        return (
            f"batches keep the {gib(recorded)} beside the weights that they began with on {name}, although "
            f"{gib(ready.room_bytes)} is free: slower; set max_num_batched_tokens, or run with --fresh"
        )
    return ""


def _key(devices: Sequence[Device]) -> str:
    return " + ".join(sorted(f"{device.name} ({device.total_bytes} bytes)" for device in devices)) or "cpu"
