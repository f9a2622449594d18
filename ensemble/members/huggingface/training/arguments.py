"""Judge a training's arguments, and make those of transformers' Trainer: our defaults, the user's over them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn
from transformers import TrainingArguments

from ensemble.common.text import did_you_mean, listed
from ensemble.common.torch_errors import one_line
from ensemble.members.huggingface.checkpoint.adapter_files import unshared_settings
from ensemble.members.huggingface.training.trainee import LORA, PEFT_TASKS, Trainee

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
# What they say depends on the device, which this process does not use.
_UNUSED = {"output_dir": "unused", "use_cpu": True}
# peft's type names a pattern of values as if it was one, and its layers refuse others.
_IN_WORDS = "init_lora_weights"
_OF_DEVICE = ("bf16", "fp16", "tf32", "bf16_full_eval", "fp16_full_eval")


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


def judge_training(training: Mapping[str, Any], auto_class: str, model: Any) -> tuple[list[str], int | None]:
    """Return problems, each beginning with its key below ``train``, and the number of trainable parameters.

    The number is None for a training without an adapter, or where a problem keeps the adapter from being made.

    Args:
        training: its ``training_arguments`` and ``lora_config``; None: it has no adapter.
        model: the base without weights, to which an adapter may be added; None: it cannot be made.
    """
    arguments, lora = training["training_arguments"], training["lora_config"]
    problems = [*_argument_problems("training_arguments", TrainingArguments, arguments, _UNUSED)]
    if lora is None:
        return problems, None
    from peft import LoraConfig, get_peft_model

    of_lora = [*_argument_problems("lora_config", LoraConfig, lora, {})]
    trainable = None
    if model is not None and not of_lora and not any(unshared_settings(lora, is_averaged=False)):
        of_lora += _missing_targets(model, lora)
        if not of_lora:
            try:
                adapter = LoraConfig(**{**LORA, "task_type": PEFT_TASKS[auto_class], **lora})
                trainable = get_peft_model(model, adapter).get_nb_trainable_parameters()[0]
            except (ValueError, TypeError) as error:
                of_lora.append(f"lora_config: peft cannot add this adapter to the base: {one_line(error)}")
    return [*problems, *of_lora], trainable


def _argument_problems(
    key: str, kind: Any, arguments: Mapping[str, Any], others: Mapping[str, Any]
) -> Iterator[str]:
    """Yield keys that the dataclass of a library does not have, and values that it does not take."""
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    hints = get_type_hints(kind)
    is_sound = True
    for name, value in arguments.items():
        if name not in names:
            sentence = f"the installed {kind.__name__} has no such key{did_you_mean(name, names)}"
        elif name == _IN_WORDS:
            continue
        else:
            with suppress(ValidationError):
                # As JSON, which has lists for tuples and mappings for dataclasses, as YAML does.
                TypeAdapter(hints[name]).validate_json(json.dumps(value, default=str), strict=True)
                continue
            wanted = getattr(hints[name], "__name__", None) or hints[name]
            sentence = f"{value!r} is not of its type, {wanted}"
        is_sound = False
        yield f"{key}.{name}: {sentence}"
    if is_sound:
        try:
            kind(**{**arguments, **dict.fromkeys(_OF_DEVICE & arguments.keys(), False)}, **others)
        except Exception as error:  # any: they are a user's values
            yield f"{key}: {kind.__name__} does not take these values: {one_line(error)}"


def _missing_targets(model: nn.Module, lora_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield target modules that the base does not have; of a list peft notices only that none is there."""
    modules = dict(model.named_modules())
    linear = {name.rpartition(".")[2]: None for name, part in modules.items() if isinstance(part, nn.Linear)}
    targets = lora_config.get("target_modules")
    for target in targets if isinstance(targets, list) else ():
        if not any(name == target or name.endswith(f".{target}") for name in modules):
            yield (
                f"lora_config.target_modules: the base has no module {target!r}"
                f"{did_you_mean(str(target), linear)}; its linear layers are {listed([*linear], 12, str)}"
            )
