"""Which of Trainer's arguments are not the user's."""

from __future__ import annotations

import dataclasses

import pytest
from transformers import TrainingArguments

from ensemble.config.schema import OWNED, owned_keys
from ensemble.members.huggingface.training.arguments import _OURS


@pytest.mark.parametrize(
    "key",
    [
        *(
            "auto_find_batch_size",
            "train_sampling_strategy",
            "gradient_accumulation_steps",
            "output_dir",
            "seed",
        ),
        *(
            "save_steps",
            "eval_strategy",
            "report_to",
            "push_to_hub",
            "deepspeed",
            "fsdp",
            "dataloader_num_workers",
        ),
    ],
)
def test_keys_of_ours_are_refused_with_the_reason(key: str) -> None:
    ((name, reason),) = owned_keys([key, "learning_rate"])
    assert name == key
    assert reason.startswith("is not set here: ")
    assert reason.endswith("; drop it")


def test_keys_of_the_user_are_not_refused() -> None:
    keys = (
        "learning_rate num_train_epochs max_steps weight_decay optim lr_scheduler_type warmup_steps bf16 fp16"
    )
    assert list(owned_keys([*keys.split(), "tf32", "gradient_checkpointing", "neftune_noise_alpha"])) == []


def test_what_we_set_over_the_users_arguments_is_refused() -> None:
    assert {name for name, _ in owned_keys(_OURS)} == set(_OURS)
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    others = {
        "group_by_length",
        "train_sampling_strategy",
        "average_tokens_across_devices",
        "local_rank",
        "data_seed",
        "project",
    }
    unknown = [name for name in OWNED if not any(field.startswith(name) for field in fields | others)]
    assert unknown == []
