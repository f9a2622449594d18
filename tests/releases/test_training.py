"""Gradients of a training's step against plain torch, which runs row by row: for each family and each release.

Trainer multiplies the gradient of a classifier by the number of micro-batches; and losses, padding and activation
checkpointing change between releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints import make_texts
from tests.releases.families import FAMILIES, make_family
from tests.sampling import one_in
from tests.training.made import LABEL_TOKENS, LABELS, make_spec, soft_targets, without_dropout

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("default")]
TEXTS = make_texts(11, seed=2, longest=24)
TARGETS, WEIGHTS = soft_targets(11, 3), np.linspace(0.25, 1.0, 11)
Gradients = dict[str, torch.Tensor]
# Of all families, those that are language models, too.
CAUSAL = [
    *(
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "llama",
        "ministral",
        "mistral",
        "mixtral",
        "phi3",
        "qwen2",
        "qwen2_moe",
    ),
    *(
        "qwen3",
        "smollm3",
        "stablelm",
        "starcoder2",
        "bloom",
        "falcon",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "gpt_neox",
    ),
    *("gptj", "mpt", "opt", "persimmon", "phi"),
]

WITH_DECODER = ["bart", "mbart", "t5", "umt5"]  # behind an encoder


def our_gradients(spec: Mapping[str, Any], micro_batch: int, checkpointing: bool = False) -> Gradients:
    """Of one step over all rows, by the trainer's own step."""
    from ensemble.members.huggingface.training.arguments import training_arguments
    from ensemble.members.huggingface.training.steps import StepTrainer, make_plan
    from ensemble.members.huggingface.training.trainer import TrainerSpec, Training

    training = Training(TrainerSpec(**{**spec, "gradient_checkpointing": checkpointing}))
    trainee = training.trainee
    plan = make_plan(training.examples, np.arange(len(TEXTS)), spec["train"], micro_batch, spec["seed"])
    assert len(plan.steps[0]) == len(TEXTS)
    arguments = training_arguments({}, trainee, "adamw_torch", Path(spec["out"]), len(plan.steps), 0)
    trainer = StepTrainer(trainee.model, plan, arguments)
    batches = plan.micro_batches(plan.steps[0])
    assert len(batches) > 1 or micro_batch > 1
    trainer.training_step(trainee.model, batches)
    return {name: value.grad for name, value in trainee.base.named_parameters() if value.grad is not None}


def check_same(got: Gradients, expected: Gradients, what: str) -> None:
    largest = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        mine = got.get(name)
        if mine is None:
            mine = torch.zeros_like(value)
        difference = float((mine - value).abs().max())
        assert difference <= 1e-5 * max(1.0, largest), f"{what}: {name} is {difference} off, of {largest}"


def check_all_ways(spec: Mapping[str, Any], expected: Gradients) -> None:
    check_same(our_gradients(spec, 1000), expected, "one batch")
    check_same(our_gradients(spec, 1), expected, "unequal micro-batches")
    check_same(our_gradients(spec, 2, checkpointing=True), expected, "with checkpointing")


@pytest.mark.parametrize("family", one_in(12, FAMILIES))
def test_micro_batches_of_classifiers_equal_plain_rows(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    base = without_dropout(make_family(tmp_path / "base", family, LABELS))
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForSequenceClassification.from_pretrained(base, attn_implementation="eager").train()
    total = torch.zeros(())
    for text, target, weight in zip(TEXTS, TARGETS, WEIGHTS, strict=True):
        ids = tokenizer(text or "", return_tensors="pt")["input_ids"]
        if not ids.shape[1]:
            ids = torch.tensor([[tokenizer.bos_token_id]])
        loss = torch.nn.functional.cross_entropy(
            model(input_ids=ids).logits, torch.tensor(target[None]).float()
        )
        total = total + float(weight) * loss / len(TEXTS)
    total.backward()  # type: ignore[no-untyped-call]
    expected = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    spec = make_spec(tmp_path / "made", base, TEXTS, TARGETS, WEIGHTS, train={"effective_batch_size": 11})
    check_all_ways(spec, expected)


@pytest.mark.parametrize("family", one_in(20, [name for name in FAMILIES if name not in WITH_DECODER]))
def test_micro_batches_of_heads_equal_plain_rows(family: str, tmp_path: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    from ensemble.members.huggingface.training.trainer import TrainerSpec, Training

    base = without_dropout(make_family(tmp_path / "base", family, LABELS))
    member = {"task_type": "pooled_cls", "pooling_mode": "mean", "head_dropout": 0.0}
    train = {"effective_batch_size": 11}
    spec = make_spec(tmp_path / "made", base, TEXTS, TARGETS, WEIGHTS, member=member, train=train)
    head = Training(TrainerSpec(**spec)).trainee.head
    assert head is not None
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModel.from_pretrained(base, attn_implementation="eager").train()
    model.head_beside_backbone = head
    total = torch.zeros(())
    for text, target, weight in zip(TEXTS, TARGETS, WEIGHTS, strict=True):
        ids = tokenizer(text or "", return_tensors="pt")["input_ids"]
        if not ids.shape[1]:
            ids = torch.tensor([[tokenizer.bos_token_id]])
        logits = head(model(input_ids=ids).last_hidden_state.mean(1))
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(target[None]).float())
        total = total + float(weight) * loss / len(TEXTS)
    total.backward()  # type: ignore[no-untyped-call]
    expected = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    check_all_ways(spec, expected)


@pytest.mark.parametrize("family", one_in(12, CAUSAL))
def test_micro_batches_of_language_models_equal_plain_rows(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = without_dropout(make_family(tmp_path / "base", family, LABELS))
    model = AutoModelForCausalLM.from_config(_causal_config(base), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.15)
    model.save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").train()
    tokenizer = AutoTokenizer.from_pretrained(base)
    label_ids = [_behind_colon(tokenizer, LABEL_TOKENS[label]) for label in LABELS]
    assert sorted(len(ids) > 1 for ids in label_ids)[-1]
    total = torch.zeros(())
    for text, target, weight in zip(TEXTS, TARGETS, WEIGHTS, strict=True):
        prompt = tokenizer(f"{text} is")["input_ids"]
        for ids, share in zip(label_ids, target, strict=True):
            if share:
                logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0]
                scores = logits[len(prompt) - 1 : -1].log_softmax(-1)
                likelihood = scores[torch.arange(len(ids)), torch.tensor(ids)].sum()
                total = total - float(share * weight) * likelihood / len(TEXTS)
    total.backward()  # type: ignore[no-untyped-call]
    expected = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    member = {"task_type": "causal_lm", "label_tokens": LABEL_TOKENS, "text_column": None}
    member["prompt_template"] = "{{ text }} is"
    spec = make_spec(
        tmp_path / "made", base, TEXTS, TARGETS, WEIGHTS, member=member, train={"effective_batch_size": 11}
    )
    check_all_ways(spec, expected)


def _causal_config(base: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(base)


def _behind_colon(tokenizer: Any, text: str) -> list[int]:
    before = tokenizer(":", add_special_tokens=False)["input_ids"]
    ids: list[int] = tokenizer(":" + text, add_special_tokens=False)["input_ids"]
    assert ids[: len(before)] == before
    return ids[len(before) :]
