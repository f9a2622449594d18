"""The first allocation on a GPU, which expandable segments break on machines without virtual memory management.

WSL2 and some vGPU profiles lack it (pytorch issue 192330, xgboost issue 12217). torch says "CUDA driver error" at
the first tensor, and names no setting.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_BYTES = 64 << 20
_ERROR = "CUDA driver error"


def try_allocation(
    notes: list[str], allocate: Callable[[], object], switch_off: Callable[[], object]
) -> None:
    """Allocate some memory; where that fails as expandable segments do, switch these off, and leave a note.

    Args:
        allocate: allocates and fills memory on each GPU, such as :func:`fill_each_gpu`.
        switch_off: turns expandable segments off in this process.
    """
    try:
        allocate()
    except RuntimeError as error:
        if _ERROR not in str(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        switch_off()
        allocate()
        notes.append(
            "expandable_segments: off, since memory cannot be allocated with it here, as on WSL2 and some vGPUs; "
            "set it to false to be rid of this note"
        )


def fill_each_gpu() -> None:
    """Allocate and fill some memory on every GPU that this process sees, and wait for it."""
    for index in range(torch.cuda.device_count()):
        torch.zeros(_BYTES, dtype=torch.uint8, device=torch.device("cuda", index))
        torch.cuda.synchronize(index)


def switch_off_expandable_segments() -> None:
    """Turn torch's expandable segments off for allocations from now on."""
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
