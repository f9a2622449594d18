"""What the plan reads from transformers' source, against its classes."""

from __future__ import annotations

import pytest
from transformers import AutoConfig, AutoModelForSequenceClassification

from ensemble.members.huggingface.memory.estimate import scores_every_position, supports_sdpa


@pytest.mark.parametrize(
    "kind",
    [
        *(
            "bert",
            "roberta",
            "modernbert",
            "deberta-v2",
            "distilbert",
            "gpt2",
            "llama",
            "gemma2",
            "phi3",
            "xlnet",
        ),
        *("esm", "data2vec-text"),  # two and more models in a folder
        *("openai-gpt", "gemma3_text", "xlm-roberta"),  # folders of other names
    ],
)
def test_fused_attention_where_transformers_has_it(kind: str) -> None:
    classifier = AutoModelForSequenceClassification._model_mapping[type(AutoConfig.for_model(kind))]
    assert supports_sdpa(kind) == classifier._supports_sdpa


@pytest.mark.parametrize("kind", ["", "/etc", "no-such-kind"])
def test_a_kind_that_transformers_does_not_have_is_taken_for_a_new_one(kind: str) -> None:
    assert supports_sdpa(kind)


@pytest.mark.parametrize(
    ("kind", "every"), [("gpt2", True), ("opt", True), ("llama", False), ("bert", False)]
)
def test_which_kinds_compute_logits_at_every_position(kind: str, every: bool) -> None:
    """GPT-2's own forward pools after its head; the worker pools Llama's before, and BERT has a pooler."""
    assert scores_every_position(kind) is every
