"""What the plan hears of models from transformers, where a rule of its own would guess."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.checkpoints import described


@pytest.mark.parametrize(
    ("kind", "every"), [("gpt2", True), ("opt", True), ("llama", False), ("bert", False)]
)
def test_which_kinds_compute_logits_at_every_position(kind: str, every: bool, tmp_path: Path) -> None:
    """GPT-2's own forward pools after its head; the worker pools Llama's before, and BERT has a pooler."""
    AutoConfig.for_model(kind, num_hidden_layers=1).save_pretrained(tmp_path)
    assert described(tmp_path).scores_every_position is every


@pytest.mark.parametrize(("kind", "has_it"), [("bert", True), ("llama", True), ("xlnet", False)])
def test_fused_attention_where_transformers_has_it(kind: str, has_it: bool, tmp_path: Path) -> None:
    AutoConfig.for_model(kind, num_hidden_layers=1, n_layer=1).save_pretrained(tmp_path)
    assert described(tmp_path).supports_sdpa is has_it
