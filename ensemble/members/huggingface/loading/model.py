"""A checkpoint's weights -> the model on its devices; refuses a head that nobody has trained."""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.utils import quantization_config as settings_of_transformers

from ensemble.members.footprint import Capability
from ensemble.members.huggingface.loading.adapter import AdapterFiles, attach_adapter, open_adapter, some
from ensemble.members.huggingface.loading.checks import check_unexpected_keys, is_unused
from ensemble.members.huggingface.loading.device_map import check_placement, input_device, placement_options
from ensemble.members.huggingface.loading.precision import model_dtype
from ensemble.members.huggingface.loading.quantization import (
    compute_notes,
    is_bitsandbytes,
    keep_whole,
    quantization_config,
)
from ensemble.members.huggingface.spec import (
    BACKBONE,
    CLASSIFIER,
    IMAGE_CLASSIFIER,
    LANGUAGE_MODEL,
    WITH_LABELS,
    CheckpointSpec,
    cap_problem,
    choose_attention,
    choose_compute_dtype,
    is_soft_capped,
)

_MAX_REASON = 300
_TRAINED = {
    CLASSIFIER: "that was trained for sequence classification",
    LANGUAGE_MODEL: "that was trained for language modelling",
    IMAGE_CLASSIFIER: "that was trained for image classification",
    BACKBONE: "whose weights have the names that transformers' own save_pretrained gives them",
}
# What transformers' refusals speak of; names of modules, such as "attention.self", are not among it.
_OF_ATTENTION = re.compile(
    "attention implementation|attn_implementation|flash_attn|flash ?attention|flex attention", re.IGNORECASE
)


def load_model(spec: CheckpointSpec, least: Capability | None, notes: list[str]) -> Any:
    """Load the model onto the devices this process can see, its adapter with it.

    Args:
        least: the compute capability of the least capable GPU; None on a CPU.
        notes: takes sentences for the user.

    Raises:
        ValueError: weights are missing (a head that would be random) or have no place in the model, layers do not
            fit, the adapter is not for this base, or a setting does not exist, such as an attention that the
            model, the device or the installed packages do not have.
        OSError: the checkpoint's files cannot be read.
    """
    name, on_gpu = spec.model_name_or_path, least is not None
    auto_class = getattr(transformers, spec.auto_class)
    dtype = model_dtype(spec, least, notes)
    options: dict[str, Any] = {**placement_options(spec, on_gpu), **spec.model_kwargs}
    if spec.quantization_config is not None:
        options["quantization_config"] = quantization_config(spec.quantization_config, dtype)
    gguf: dict[str, Any] = {} if spec.gguf_file is None else {"gguf_file": spec.gguf_file}
    adapter: AdapterFiles | None = None
    if spec.adapter_name_or_path is not None:
        adapter = open_adapter(spec.adapter_name_or_path, spec.allow_pickle)
        # The base's config with the adapter's number of labels, its head left out of the base's quantization.
        config, left = _from_pretrained(
            AutoConfig, spec, return_unused_kwargs=True, **gguf, **spec.model_kwargs
        )
        if spec.auto_class in WITH_LABELS:
            config.num_labels = len(spec.label_order)
        carried = getattr(config, "quantization_config", None)
        if isinstance(carried, dict) and is_bitsandbytes(carried) and (heads := adapter.whole_modules()):
            config.quantization_config = keep_whole(carried, heads)
        # Those of model_kwargs that are the config's own keys are in it now.
        options = {
            key: value for key, value in options.items() if key in left or key not in spec.model_kwargs
        }
        options["config"] = config
    if gguf:
        options |= gguf
        # Newer releases leave its weights packed where they find kernels on the hub; adapters have no layers for
        # those. Older releases have no such setting and always unpack.
        if (kind := getattr(settings_of_transformers, "GgufConfig", None)) is not None:
            options["quantization_config"] = kind(dequantize=True)
    attention = spec.attn_implementation
    if attention is None:  # the plan could not read the architecture
        is_capped = is_soft_capped(_from_pretrained(AutoConfig, spec, **gguf).to_dict())
        attention = choose_attention(is_capped, supports_sdpa=True, flash_suits=False)
    options |= {
        "dtype": dtype,
        "attn_implementation": attention,
        # A head of another shape is thrown away and drawn anew; that is refused below, by name, unless the adapter
        # brings another.
        "ignore_mismatched_sizes": True,
        # None: pickles where there are no safetensors. torch then reads tensors of them and nothing else.
        "use_safetensors": None if spec.allow_pickle else True,
        "output_loading_info": True,
    }
    try:
        model, info = _from_pretrained(auto_class, spec, **options)
    except (ImportError, ValueError) as error:
        if not _OF_ATTENTION.search(str(error)):
            raise
        if "attn_implementation" in spec.asked:
            # What follows is advice to ask for support of the architecture, and calls of transformers to try.
            reason = str(error).split(" Please ")[0].strip().rstrip(".")
            raise ValueError(
                f"attn_implementation: {attention} cannot be used ({reason}); leave the key out, and the best one "
                "for model and device is used"
            ) from error
        if attention == "eager":
            raise
        # What was chosen and not asked for, such as for code that the checkpoint brings along, may not be there.
        options["attn_implementation"] = "eager"
        model, info = _from_pretrained(auto_class, spec, **options)
        if hasattr(model.config.get_text_config(), "num_attention_heads"):  # convolutions have none at all
            notes.append(f"eager attention, as this model has no {attention}")
    # Some releases of transformers leave out the cap on a model's scores and say nothing.
    taken = getattr(model.config.get_text_config(), "_attn_implementation", None)
    if (problem := cap_problem(taken, name)) and is_soft_capped(model.config.to_dict()):
        raise ValueError(problem)
    check_placement(model, spec, on_gpu, notes)
    _run_first_hooks(model)
    if adapter is None and info["mismatched_keys"]:
        key, stored, wanted = next(iter(info["mismatched_keys"]))
        raise ValueError(
            f"{name}: its config.json does not fit its weights: {key} is {list(stored)} in the file and "
            f"{list(wanted)} by config.json; they are of two models"
        )
    is_quantized = getattr(model, "hf_quantizer", None) is not None
    check_unexpected_keys(spec, info["unexpected_keys"], is_quantized)
    missing = sorted({*info["missing_keys"], *(str(key[0]) for key in info["mismatched_keys"])})
    missing = [key for key in missing if not is_unused(spec, key)]
    if is_quantized and model.hf_quantizer.pre_quantized:
        _set_compute_dtype(model, spec, least, notes)
    else:
        notes += compute_notes(spec.quantization_config, least)
    if adapter is not None:
        return attach_adapter(model, adapter, missing, spec, notes)
    if missing:
        fitting = _TRAINED.get(spec.auto_class, "that was trained for this")
        raise ValueError(
            f"{name} has no weights for {some(missing)}; they would be random. Name a checkpoint {fitting}, or its "
            "adapter"
        )
    return model


def _set_compute_dtype(model: Any, spec: CheckpointSpec, least: Capability | None, notes: list[str]) -> None:
    """Let 4-bit layers that were stored compute in a type that the device has."""
    stored = getattr(model.config, "quantization_config", None)
    stored = stored if isinstance(stored, dict) or stored is None else stored.to_dict()
    if name := spec.compute_dtype or choose_compute_dtype(stored, least):
        for module in model.modules():
            # bitsandbytes' Linear4bit casts its input to this type.
            if hasattr(module, "compute_dtype") and hasattr(module, "compute_type_is_set"):
                module.compute_dtype = getattr(torch, name)
        notes.append(
            f"4-bit layers compute in {name}: bfloat16, as the checkpoint says, is only emulated below compute "
            "capability 8.0"
        )


def _from_pretrained(kind: Any, spec: CheckpointSpec, **options: Any) -> Any:
    """What one of transformers' auto classes makes of the checkpoint; refusals of the attention as they are.

    Raises:
        ValueError: there are no safetensors, or numbers that no model can have, on which transformers fails in any
            of many ways.
    """
    name = spec.model_name_or_path
    try:
        return kind.from_pretrained(
            name,
            revision=spec.revision or "main",
            trust_remote_code=spec.trust_remote_code,
            **options,
        )
    except OSError as error:
        if spec.allow_pickle or "safetensors" not in str(error):
            raise
        raise ValueError(
            f"{name} has no safetensors weights where transformers looks for them; name a checkpoint or revision "
            "that has, or set allow_pickle: true if you trust its pytorch_model.bin"
        ) from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, ZeroDivisionError) as error:
        reason = " ".join(str(error).split())
        if _OF_ATTENTION.search(str(error)) or reason.startswith(name):
            raise
        raise ValueError(
            f"{name}: transformers cannot make a model of its config.json and weights ({type(error).__name__}: "
            f"{reason[:_MAX_REASON]}); copy config.json again"
        ) from error


def _run_first_hooks(model: Any) -> None:
    """One token through the whole model, where a hook waits for that.

    compressed-tensors unpacks its weights before the first pass of the whole model.  ``Classifier`` runs body and
    head of these models apart and would never set it off, and an adapter needs the weights as well.
    """
    if isinstance(model, GenericForSequenceClassification) and model._forward_pre_hooks:
        token = torch.ones((1, 1), dtype=torch.int64, device=input_device(model))
        with torch.no_grad():
            model.eval()(input_ids=token, attention_mask=token)
