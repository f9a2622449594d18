"""What a worker of this kind is told beside what all are told that run checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from ensemble.members.huggingface.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class PooledSpec(ModelSpec):
    """``head`` is the file's path, ``head_steps`` those of ``Head``; the others are keys of ``PooledSettings``."""

    head: str
    head_steps: tuple[tuple[str, str], ...]
    head_layer_norm_eps: float
    pooling_mode: str
