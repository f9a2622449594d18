"""Define the settings of a pooled_cls worker."""

from __future__ import annotations

from dataclasses import dataclass

from ensemble.members.huggingface.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class PooledSpec(ModelSpec):
    """Add the head's file, the ``steps`` of ``Head`` and keys of ``PooledSettings`` to those of a text model."""

    head: str
    head_steps: tuple[tuple[str, str], ...]
    head_layer_norm_eps: float
    pooling_mode: str
