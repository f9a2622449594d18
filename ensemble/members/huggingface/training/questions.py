"""Say what the installed transformers and peft make of a training's settings, without any weights.

One short process answers for all members of a config: see ``members/questions.py`` and ``training_from_base.py``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, get_type_hints

import transformers
from accelerate import init_empty_weights
from pydantic import TypeAdapter, ValidationError
from torch import nn

from ensemble.common.text import did_you_mean, listed
from ensemble.common.torch_errors import one_line
from ensemble.members.huggingface.checkpoint.adapter_files import unshared_settings
from ensemble.members.huggingface.loading.describe import answer_questions
from ensemble.members.huggingface.training.trainee import LORA

# What they say depends on the device, which this process does not use.
_UNUSED = {"output_dir": "unused", "use_cpu": True}
# peft's type names a pattern of values as if it was one, and its layers refuse others.
_IN_WORDS = "init_lora_weights"
_OF_DEVICE = ("bf16", "fp16", "tf32", "bf16_full_eval", "fp16_full_eval")


def main() -> None:
    """Answer questions about trainings."""
    answer_questions(describe)


def describe(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``problems``, each beginning with its key below ``train``, and the number of ``trainable`` parameters.

    The number is None for a training without an adapter, or where a problem keeps the adapter from being made.
    """
    arguments, lora = question["training_arguments"], question["lora_config"]
    problems = [*_argument_problems("training_arguments", transformers.TrainingArguments, arguments, _UNUSED)]
    if lora is None:
        return {"problems": problems, "trainable": None}
    from peft import LoraConfig, get_peft_model

    of_lora = [*_argument_problems("lora_config", LoraConfig, lora, {})]
    trainable = None
    is_refused = bool(of_lora) or any(unshared_settings(lora, is_averaged=False))
    model = None if is_refused else _without_weights(question["folder"], question["auto_class"])
    if model is not None:
        of_lora += _missing_targets(model, lora)
    if model is not None and not of_lora:
        try:
            adapter = LoraConfig(**{**LORA, "task_type": question["peft_task"], **lora})
            trainable = get_peft_model(model, adapter).get_nb_trainable_parameters()[0]
        except (ValueError, TypeError) as error:
            of_lora.append(f"lora_config: peft cannot add this adapter to the base: {one_line(error)}")
    return {"problems": [*problems, *of_lora], "trainable": trainable}


def _without_weights(folder: str, auto_class: str) -> Any:
    """Return the base on the meta device; None if it cannot be made, which the check of the base explains."""
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        with init_empty_weights():
            return getattr(transformers, auto_class).from_config(config)
    except Exception:  # any: files of any content
        return None


def _argument_problems(
    key: str, kind: Any, arguments: Mapping[str, Any], others: Mapping[str, Any]
) -> Iterator[str]:
    """Yield keys that the dataclass of a library does not have, and values that it does not take."""
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    hints = get_type_hints(kind)
    is_sound = True
    for name, value in arguments.items():
        sentence = ""
        if name not in names:
            sentence = f"the installed {kind.__name__} has no such key{did_you_mean(name, names)}"
        else:
            if name == _IN_WORDS:
                continue
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
