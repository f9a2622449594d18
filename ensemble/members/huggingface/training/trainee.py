"""Load what is trained: the base model, a head with the config's labels, and an adapter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoConfig

from ensemble.common.files import write_text
from ensemble.common.protocol import Activation
from ensemble.common.text import listed
from ensemble.members.huggingface.checkpoint.adapter_files import LABELS_FILE, is_head
from ensemble.members.huggingface.checkpoint.labels import activation_of
from ensemble.members.huggingface.loading.checks import check_unexpected_keys, is_unused
from ensemble.members.huggingface.loading.device_map import last_device
from ensemble.members.huggingface.loading.kernels import AMPERE, capability, choose_kernels, set_tf32
from ensemble.members.huggingface.loading.model import from_pretrained, load_with_attention
from ensemble.members.huggingface.spec import (
    BACKBONE,
    CAPPED_BLOCKS,
    CLASSIFIER,
    FLEX,
    HEAD_FILE,
    LANGUAGE_MODEL,
    ModelSpec,
    choose_attention,
    is_soft_capped,
)

# Explicit, so that releases of peft with other defaults train the same adapter.
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "bias": "none", "target_modules": "all-linear"}
# peft's names of what a model of each class is for.
PEFT_TASKS = {CLASSIFIER: "SEQ_CLS", LANGUAGE_MODEL: "CAUSAL_LM", BACKBONE: "FEATURE_EXTRACTION"}
_NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
# peft keeps modules of these names whole in each adapter of a classifier.
_HEADS_OF_PEFT = ("classifier", "score")
# A backbone's own head is a module of it while both are trained.
_HEAD = "head_beside_backbone"


@dataclass(frozen=True)
class Trainee:
    """Hold a model that is ready to be trained.

    Attributes:
        model: with its adapter, if it gets one.
        base: the same without the adapter.
        dtype: of the base's weights as they are stored, which a whole model is saved in.
        precision: the mixed precision of the training, "bf16" or "fp16"; empty: none.
        label_order: for each of the head's outputs, the number of the config's label.
        head: of a backbone, dropout and a linear layer, which is a module of ``base``; None: the base has one.
        notes: sentences for the user.
    """

    model: Any
    base: Any
    dtype: torch.dtype
    precision: str
    activation: Activation
    label_order: list[int]
    notes: list[str]
    head: nn.Sequential | None = None

    @property
    def has_adapter(self) -> bool:
        return self.model is not self.base

    def save(self, folder: Path) -> None:
        """Write the model, or the adapter, as a member loads it, and beside it a head of its own."""
        config = self.base.config
        if self.head is not None:
            save_file(self.head[-1].state_dict(), folder / HEAD_FILE)
            delattr(self.base, _HEAD)
        if not self.has_adapter:
            self.base.to(self.dtype)  # as the base is stored
        elif self.head is None and config.problem_type is not None:  # peft stores no names of labels
            labels = {"id2label": config.id2label, "problem_type": config.problem_type}
            write_text(folder / LABELS_FILE, json.dumps(labels))
        self.model.save_pretrained(folder)


def load_trainee(
    spec: ModelSpec,
    method: str,
    lora: Mapping[str, Any],
    problem_type: str | None,
    checkpointing: bool,
    head_dropout: float = 0.0,
) -> Trainee:
    """Load the base model in the precision of its method and its device; a backbone gets a head.

    A whole model is trained in float32, on GPUs in mixed precision.  The base of an adapter is in half precision
    there, and the adapter and a backbone's head in float32.

    Raises:
        ValueError: the base cannot be trained for this member, or ``lora`` is not for it.
    """
    on_gpu = torch.cuda.is_available()
    gpus = torch.cuda.device_count() if on_gpu else 0
    spec = replace(spec, gpus=gpus, quantization_config=_bits(spec, method))
    least = capability(on_gpu)
    set_tf32(spec, least, [])
    choose_kernels(least)
    half = "float16" if least is not None and least < AMPERE else "bfloat16"
    is_mixed = on_gpu and spec.dtype != "float32"
    precision = ""
    if is_mixed:
        precision = "bf16" if half == "bfloat16" else "fp16"
    dtype = getattr(torch, half) if is_mixed and method != "full" else torch.float32
    config = from_pretrained(AutoConfig, spec, **spec.model_kwargs)
    stored_dtype = getattr(config, "dtype", None) or torch.float32
    activation: Activation = "softmax"
    notes: list[str] = []
    is_new_head, label_order = False, list(range(len(spec.labels)))
    if spec.auto_class in (CLASSIFIER, BACKBONE):
        # The base's own problem_type is about other labels, and the table was not read by it.
        activation = activation_of(problem_type, len(spec.labels))
    if spec.auto_class == CLASSIFIER:
        is_new_head, label_order = _set_labels(config, spec, activation, notes)
    model, info = _load(spec, config, dtype, on_gpu)
    absent = sorted({*info["missing_keys"], *(str(key[0]) for key in info["mismatched_keys"])})
    lost = [key for key in absent if not is_unused(replace(spec, auto_class=BACKBONE), key)]
    if lost:
        raise ValueError(
            f"base_model: {spec.model_name_or_path} has no weights for {listed(lost, 4, str)}; copy it again"
        )
    if is_new_head:
        _reset_head(model, len(label_order))
    for part in (model.config, model.config.get_text_config()):
        part.use_cache = False
        if hasattr(part, "reference_compile"):  # ModernBERT compiles itself if Triton is installed
            part.reference_compile = False
    trained = model
    if method == "qlora":
        from peft import prepare_model_for_kbit_training

        trained = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if checkpointing:
        _enable_checkpointing(model, notes)
    if method != "full":
        trained = _with_adapter(trained, spec, lora, absent)
    head = None
    if spec.auto_class == BACKBONE:
        head = _new_head(model, len(label_order), head_dropout)
        model.add_module(_HEAD, head)  # now, so that no adapter is put into it
    for parameter in trained.parameters():
        if parameter.requires_grad:  # the optimizer adds small steps, which half precision would round away
            parameter.data = parameter.data.float()
    return Trainee(
        model=trained,
        base=model,
        dtype=stored_dtype,
        precision=precision,
        activation=activation,
        label_order=label_order,
        notes=notes,
        head=head,
    )


def _bits(spec: ModelSpec, method: str) -> dict[str, Any] | None:
    """Return the quantization that an adapter is trained over: the member's own 4 bits, or nf4."""
    if method != "qlora":
        return None
    own = spec.quantization_config or {}
    return own if own.get("load_in_4bit") else _NF4


def _set_labels(
    config: Any, spec: ModelSpec, activation: Activation, notes: list[str]
) -> tuple[bool, list[int]]:
    """Give the config the member's labels; return whether the head is new, and its ``label_order``.

    A base whose labels are the config's by name keeps its head, and its order.
    """
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ValueError(
            f"base_model: transformers has no classification head for {type(config).__name__} "
            f"({spec.model_name_or_path}); name another base, or train a head of its own with task_type: pooled_cls"
        )
    stored = [str(config.id2label[number]) for number in sorted(config.id2label)]
    labels = list(spec.labels)
    is_kept = sorted(stored) == sorted(labels)
    names = stored if is_kept else labels
    if not is_kept:
        notes.append(f"the head is new: the labels of {spec.model_name_or_path} are {', '.join(stored)}")
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}
    kinds = {"softmax": "single_label_classification", "sigmoid": "multi_label_classification"}
    config.problem_type = kinds.get(activation, "regression")
    return not is_kept, [labels.index(name) for name in names]


def _load(spec: ModelSpec, config: Any, dtype: torch.dtype, on_gpu: bool) -> tuple[Any, dict[str, Any]]:
    """Return the base with the attention that it was trained with, and how loading went."""
    attention = spec.attn_implementation
    if attention in (None, CAPPED_BLOCKS, FLEX):
        attention = choose_attention(is_soft_capped(config.to_dict()), supports_sdpa=True, flash_suits=False)
    if attention == CAPPED_BLOCKS:  # which has no backward pass that was ever checked
        attention = "eager"
    model, info = load_with_attention(spec, str(attention), dtype, on_gpu, {"config": config}, [])
    check_unexpected_keys(spec, info["unexpected_keys"], spec.quantization_config is not None)
    return model, info


def _reset_head(model: Any, labels: int) -> None:
    """Draw the layer that gives the labels anew: one of the same shape may have been trained for others."""
    for name, module in model.named_modules():
        is_output = isinstance(module, nn.Linear) and module.out_features == labels
        if is_output and is_head(f"{name}.weight"):
            nn.init.normal_(module.weight, std=getattr(model.config, "initializer_range", None) or 0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _new_head(backbone: Any, labels: int, dropout: float) -> nn.Sequential:
    """Return dropout and a linear layer over a backbone's hidden states, in float32 where its pass ends."""
    config = backbone.config.get_text_config()
    # Some OPT models end with a projection to the size of the embeddings.
    layer = nn.Linear(getattr(config, "word_embed_proj_dim", None) or config.hidden_size, labels)
    nn.init.normal_(layer.weight, std=getattr(config, "initializer_range", None) or 0.02)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(nn.Dropout(dropout), layer).to(last_device(backbone), torch.float32)


def _enable_checkpointing(model: Any, notes: list[str]) -> None:
    keys = {"use_reentrant": False}
    if not model.supports_gradient_checkpointing:
        notes.append(f"no activation checkpointing: {type(model).__name__} has none")
    elif hasattr(model, "activation_checkpointing_enable"):  # its name since transformers 5.20
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=keys)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=keys)


def _with_adapter(model: Any, spec: ModelSpec, lora: Mapping[str, Any], absent: Sequence[str]) -> Any:
    """Return the model with a LoRA adapter, which carries all weights that the base lacks and needs."""
    from peft import LoraConfig, get_peft_model

    is_classifier = spec.auto_class == CLASSIFIER
    settings = {**LORA, "task_type": PEFT_TASKS[spec.auto_class], **lora}
    new = {key.rpartition(".")[0] for key in absent if not is_unused(spec, key)}
    whole = [name for name in sorted(new) if name.split(".")[0] not in _HEADS_OF_PEFT]
    if is_classifier:
        whole = [*whole, *(name for name in _HEADS_OF_PEFT if hasattr(model, name))]
    settings["modules_to_save"] = [*dict.fromkeys([*(settings.get("modules_to_save") or ()), *whole])] or None
    try:
        config = LoraConfig(**settings)
        config.base_model_name_or_path = spec.model_name_or_path
        adapted = get_peft_model(model, config)
    except (ValueError, TypeError) as error:
        raise ValueError(f"lora_config: {' '.join(str(error).split())}") from error
    if isinstance(config.target_modules, set):  # so that the same training writes the same file
        config.target_modules = sorted(config.target_modules)
    return adapted
