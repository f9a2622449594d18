"""Test copies between the GPUs of a spread model, which are silently wrong on some machines.

With an IOMMU or access control services (ACS) between consumer cards, peer-to-peer copies may deliver zeros or old
contents of memory (accelerate issue 4036, pytorch issues 84803 and 87363, transformers issues 26096 and 47942).
Probabilities would be silently wrong, so copies are tested before the first pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import torch

# The attribute of a loaded model whose copies between GPUs go through the host's memory.
THROUGH_HOST = "copies_through_host"
_SIZES = (1 << 10, 1 << 20, 64 << 20)  # bytes
_COPIES = 3
# A product of two such matrices keeps a GPU busy while a copy is asked for.
_BUSY_WIDTH = 2048


def wrong_pairs(devices: Sequence[torch.device]) -> list[tuple[torch.device, torch.device]]:
    """Copy random bytes between each two devices, in both directions, and compare them on the host.

    Each size is copied three times back to back with other bytes, so that no copy is right by what lay there; the
    second copy is asked for while the source computes.

    Returns:
        the pairs, source first, between which a copy was wrong.
    """
    if len(devices) < 2:
        return []
    bits = torch.randint(256, (_COPIES, max(_SIZES)), dtype=torch.uint8)
    return [
        pair
        for pair in permutations(devices, 2)
        if not all(_delivers(*pair, bits[:, :size].contiguous()) for size in _SIZES)
    ]


def _delivers(source: torch.device, target: torch.device, bits: torch.Tensor) -> bool:
    sent = [values.to(source) for values in bits]
    factor = torch.ones(_BUSY_WIDTH, _BUSY_WIDTH, device=source)
    received = []
    for number, values in enumerate(sent):
        if number == 1:
            factor @ factor
        received.append(values.to(target))
    return all(torch.equal(values.cpu(), original) for values, original in zip(received, bits, strict=True))


def through_host(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to another GPU by way of the host's pinned memory."""
    staged = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=value.device.type == "cuda")
    staged.copy_(value)
    return staged.to(device)


def check_copies(model: Any, notes: list[str]) -> None:
    """Try the copies between a model's GPUs; where one is wrong, mark the model and leave a note."""
    devices = {weight.device for weight in model.parameters() if weight.device.type not in ("cpu", "meta")}
    wrong = wrong_pairs(sorted(devices, key=str))
    if wrong:
        setattr(model, THROUGH_HOST, True)
        pairs = ", ".join(f"{source} to {target}" for source, target in wrong)
        notes.append(
            f"copies between GPUs deliver wrong bytes ({pairs}), so they go through the host's memory, which is "
            "slower; the usual cause is an IOMMU or ACS: see your BIOS, or use num_gpus: 1 if the model fits"
        )
