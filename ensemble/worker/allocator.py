"""Whether torch's CUDA allocator does what the config asks of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ensemble.protocol import WorkerSpec


def check_allocator(spec: WorkerSpec, notes: list[str]) -> None:
    """Note the allocator's settings that did not take effect; starts CUDA where it has not started."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":  # it has no settings to show
        notes.append(
            f"expandable_segments and max_split_size_mb have no effect on torch's {backend} allocator"
        )
        return
    snapshot = torch.cuda.memory._snapshot()
    notes += allocator_notes(spec, snapshot.get("allocator_settings", {}))


def allocator_notes(spec: WorkerSpec, settings: Mapping[str, Any]) -> list[str]:
    """What the allocator does not do as the config says, a sentence each.

    Args:
        settings: "allocator_settings" of torch.cuda.memory._snapshot() (torch/csrc/cuda/Module.cpp): among them
            expandable_segments as a bool, max_split_size in bytes (-1 for no limit), and the text that set them.
            What a release does not tell is not judged.
    """
    was_told = settings.get("PYTORCH_CUDA_ALLOC_CONF") or "nothing"
    because = (
        f"torch's allocator was told {was_told!r}; look at PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF in "
        "the environment, and whether this system supports it"
    )
    notes = []
    expandable = settings.get("expandable_segments")
    if expandable is not None and bool(expandable) != spec.expandable_segments:
        notes.append(
            f"expandable_segments: {str(spec.expandable_segments).lower()} did not take effect: {because}"
        )
    split_bytes = settings.get("max_split_size")
    if spec.max_split_size_mb is not None and split_bytes not in (None, spec.max_split_size_mb << 20):
        notes.append(f"max_split_size_mb: {spec.max_split_size_mb} did not take effect: {because}")
    return notes
