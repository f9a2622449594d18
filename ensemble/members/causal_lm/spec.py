"""Define the settings of a causal_lm worker."""

from __future__ import annotations

from dataclasses import dataclass

from ensemble.members.huggingface.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class CausalSpec(ModelSpec):
    """Add the keys of ``CausalSettings`` to those of a text model."""

    label_tokens: dict[str, str]
    single_token: bool
    length_normalize: str
    apply_chat_template: bool
    system_instruction: str | None
