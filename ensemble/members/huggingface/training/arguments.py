"""Make the arguments of transformers' Trainer: our defaults, the user's over them, and what Trainer must not do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from ensemble.members.huggingface.training.trainee import Trainee

_EPOCHS, _WARM_UP = 2.0, 0.05
# The rows, the saves, the loss's divisor and the report are not Trainer's, whatever the defaults of its release.
_OURS: Mapping[str, Any] = {
    "per_device_train_batch_size": 1,  # of whole effective batches
    "gradient_accumulation_steps": 1,
    "average_tokens_across_devices": False,
    "save_strategy": "no",
    "eval_strategy": "no",
    "logging_strategy": "no",
    "logging_nan_inf_filter": False,
    "report_to": "none",
    "push_to_hub": False,
    "disable_tqdm": True,
    "remove_unused_columns": False,
    "include_num_input_tokens_seen": "no",
    "auto_find_batch_size": False,
}
# These are the model's, before there is a Trainer.
_OF_MODEL = ("gradient_checkpointing", "activation_checkpointing")


def is_checkpointed(own: Mapping[str, Any]) -> bool:
    """Return whether the user's arguments ask for activation checkpointing, by either of its names."""
    return any(own.get(key) for key in _OF_MODEL)


def step_count(own: Mapping[str, Any], steps_per_epoch: int) -> int:
    """Return the steps of a training by the user's arguments."""
    steps = int(own.get("max_steps") or 0)
    return steps if steps > 0 else math.ceil(float(own.get("num_train_epochs", _EPOCHS)) * steps_per_epoch)


def training_arguments(
    own: Mapping[str, Any], trainee: Trainee, optim: str, folder: Path, steps: int, seed: int
) -> TrainingArguments:
    """Return Trainer's arguments: ``own`` are the user's, and its saves are in ``folder``.

    Defaults are explicit, so that releases with other ones train the same weights.
    """
    defaults: dict[str, Any] = {
        "learning_rate": 2e-4 if trainee.has_adapter else 2e-5,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.01,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "max_grad_norm": 1.0,
        "optim": optim,
    }
    if "warmup_ratio" not in own:
        defaults["warmup_steps"] = math.ceil(_WARM_UP * steps)
    if trainee.precision and not own.keys() & {"bf16", "fp16"}:
        defaults[trainee.precision] = True
    defaults |= {key: value for key, value in own.items() if key not in (*_OF_MODEL, "num_train_epochs")}
    use_cpu = not torch.cuda.is_available()
    ours = {**_OURS, "output_dir": str(folder), "max_steps": steps, "seed": seed, "use_cpu": use_cpu}
    return TrainingArguments(**{**defaults, **ours})
