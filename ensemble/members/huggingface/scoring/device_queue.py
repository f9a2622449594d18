"""Token ids of some rows -> a padded batch on the model's device, and the queue of passes there.

A GPU works off what it is given while the host goes on: the next batches are padded and copied in the background
of the passes before them, as long as nothing here asks the device for an answer.  On a CPU a pass is over when its
call returns.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from ensemble.members.huggingface.scoring.encode import Encoded

# Passes that a GPU has been given and has not finished: enough never to run dry, few enough that what is said of
# the progress is true.
_MAX_QUEUED = 4


def padded(
    encoded: Encoded, rows: npt.NDArray[np.int64], pad_token_id: int, pad_left: bool = False
) -> dict[str, npt.NDArray[np.int64]]:
    """Rows as wide as the longest of them, and the mask of their own tokens.

    Returns:
        int64 [rows, width] for each input and for ``attention_mask``.
    """
    lengths = encoded.lengths[rows]
    width = int(lengths.max())
    positions = np.arange(width)
    own = positions >= width - lengths[:, None] if pad_left else positions < lengths[:, None]
    filled = {}
    for name, arrays in encoded.inputs.items():
        filled[name] = np.full(own.shape, pad_token_id if name == "input_ids" else 0, dtype=np.int64)
        filled[name][own] = np.concatenate([arrays[row] for row in rows.tolist()])
    return {**filled, "attention_mask": own.astype(np.int64)}


def unused_token(encoded: Encoded, rows: npt.NDArray[np.int64], vocabulary: int) -> int:
    """A token id that none of the rows holds."""
    ids = encoded.inputs["input_ids"]
    used = np.unique(np.concatenate([ids[row] for row in rows.tolist()]))
    gaps = np.flatnonzero(used != np.arange(len(used)))
    free = int(gaps[0]) if len(gaps) else len(used)
    assert free < vocabulary, "a batch that holds every token there is"
    return free


def on_device(array: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """A copy there; to a GPU from pinned memory, so that nobody waits for it."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Passes:
    """The forward passes of a chunk: how long they take, and that not too many of them queue on a GPU.

    Args:
        device: where a pass ends.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
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
        while len(self._queued) >= _MAX_QUEUED:
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
