"""What a worker of this kind is told beside what all are told that run checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from ensemble.members.huggingface.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class CausalSpec(ModelSpec):
    """The keys are those of ``CausalSettings``."""

    label_tokens: dict[str, str]
    single_token: bool
    length_normalize: str
    apply_chat_template: bool
    system_instruction: str | None
