"""A checkpoint's weights -> the model on its devices; refuses a head that nobody has trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.modeling_layers import GenericForSequenceClassification

from ensemble.members.huggingface.loading.adapter import AdapterFiles, attach_adapter, open_adapter, some
from ensemble.members.huggingface.loading.checks import check_unexpected_keys
from ensemble.members.huggingface.loading.device_map import check_placement, input_device, placement_options
from ensemble.members.huggingface.loading.precision import (
    capability,
    check_cap,
    is_of_attention,
    model_dtype,
)
from ensemble.members.huggingface.loading.quantization import (
    is_bitsandbytes,
    keep_whole,
    quantization_config,
    unpacked_gguf,
)
from ensemble.members.huggingface.spec import ModelSpec, choose_attention, is_soft_capped

_LONGEST_REASON = 300


def load_model(spec: ModelSpec, on_gpu: bool, notes: list[str]) -> Any:
    """Load the model onto the devices this process can see, its adapter with it.

    Args:
        on_gpu: whether the lease holds a GPU that torch can use.
        notes: takes sentences for the user.

    Raises:
        ValueError: weights are missing (a head that would be random) or have no place in the model, layers do not
            fit, the adapter is not for this base, or a setting does not exist.
        OSError: the checkpoint's files cannot be read.
    """
    dtype = model_dtype(spec, capability(on_gpu), notes)
    options: dict[str, Any] = {**placement_options(spec, on_gpu), **spec.model_kwargs}
    options["attn_implementation"] = spec.attn_implementation or _chosen_attention(spec)
    if spec.quantization_config is not None:
        options["quantization_config"] = quantization_config(spec.quantization_config, dtype)
    adapter: AdapterFiles | None = None
    if spec.adapter_name_or_path is not None:
        adapter = open_adapter(spec.adapter_name_or_path, spec.allow_pickle)
        options["config"], taken = _config_for_adapter(spec, adapter)
        options = {key: value for key, value in options.items() if key not in taken}
        options["ignore_mismatched_sizes"] = True  # the base's own head, where the adapter brings another
    options.setdefault("ignore_mismatched_sizes", True)  # and then refused below, by name
    if spec.gguf_file is not None:
        options |= {"gguf_file": spec.gguf_file, **unpacked_gguf()}
    try:
        model, info = _from_pretrained(spec, dtype=dtype, **options)
    except (ImportError, ValueError) as error:
        # What was chosen and not asked for, such as for code that the checkpoint brings along, may not be there.
        chosen = options["attn_implementation"]
        if "attn_implementation" in spec.asked or chosen == "eager" or not is_of_attention(error):
            raise
        notes.append(f"eager attention, as this model has no {chosen}")
        model, info = _from_pretrained(spec, dtype=dtype, **{**options, "attn_implementation": "eager"})
    check_cap(spec, model)
    check_placement(model, spec, on_gpu, notes)
    _run_first_hooks(model)
    # With ignore_mismatched_sizes a head of another shape is thrown away and drawn anew.
    if adapter is None and info["mismatched_keys"]:
        name, stored, wanted = next(iter(info["mismatched_keys"]))
        raise ValueError(
            f"{spec.model_name_or_path}: its config.json does not fit its weights: {name} is {list(stored)} in the "
            f"file and {list(wanted)} by config.json; they are of two models"
        )
    is_quantized = getattr(model, "hf_quantizer", None) is not None
    check_unexpected_keys(spec, sorted(info["unexpected_keys"]), is_quantized)
    missing = sorted({*info["missing_keys"], *(str(key[0]) for key in info["mismatched_keys"])})
    if adapter is not None:
        return attach_adapter(model, adapter, missing, spec, notes)
    if missing:
        raise ValueError(
            f"{spec.model_name_or_path} has no weights for {some(missing)}; they would be random. "
            "Name a checkpoint that was trained for sequence classification, or its adapter"
        )
    return model


def _chosen_attention(spec: ModelSpec) -> str:
    """The choice where the plan could not read the architecture."""
    config = _config(spec)
    return choose_attention(is_soft_capped(config.to_dict()), supports_sdpa=True, flash_suits=False)


def _from_pretrained(spec: ModelSpec, **options: Any) -> tuple[Any, Any]:
    try:
        with _named(spec):
            return AutoModelForSequenceClassification.from_pretrained(  # type: ignore[no-any-return]
                spec.model_name_or_path,
                revision=spec.revision or "main",
                trust_remote_code=spec.trust_remote_code,
                # None: pickles where there are no safetensors. torch then reads tensors of them and nothing else.
                use_safetensors=None if spec.allow_pickle else True,
                output_loading_info=True,
                **options,
            )
    except OSError as error:
        if spec.allow_pickle or "safetensors" not in str(error):
            raise
        raise ValueError(
            f"{spec.model_name_or_path} has no safetensors weights where transformers looks for them; name a "
            "checkpoint or revision that has, or set allow_pickle: true if you trust its pytorch_model.bin"
        ) from error


@contextmanager
def _named(spec: ModelSpec) -> Iterator[None]:
    """Names the checkpoint where transformers fails on numbers that no model can have, in any of many ways.

    Raises:
        ValueError: with the reason.
    """
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, ZeroDivisionError) as error:
        reason = " ".join(str(error).split())
        if is_of_attention(error) or reason.startswith(spec.model_name_or_path):
            raise
        raise ValueError(
            f"{spec.model_name_or_path}: transformers cannot make a model of its config.json and weights "
            f"({type(error).__name__}: {reason[:_LONGEST_REASON]}); copy config.json again"
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


def _config(spec: ModelSpec, **options: Any) -> Any:
    with _named(spec):
        return AutoConfig.from_pretrained(
            spec.model_name_or_path,
            revision=spec.revision or "main",
            trust_remote_code=spec.trust_remote_code,
            **({} if spec.gguf_file is None else {"gguf_file": spec.gguf_file}),
            **options,
        )


def _config_for_adapter(spec: ModelSpec, adapter: AdapterFiles) -> tuple[Any, set[str]]:
    """The base's config with the adapter's number of labels, its head left out of the base's quantization.

    Returns:
        The config, and those of ``model_kwargs`` that are its own keys and now in it.
    """
    config, left = _config(spec, return_unused_kwargs=True, **spec.model_kwargs)
    if config.num_labels != len(spec.label_order):
        config.num_labels = len(spec.label_order)
    carried = getattr(config, "quantization_config", None)
    if isinstance(carried, dict) and is_bitsandbytes(carried) and (heads := adapter.whole_modules()):
        config.quantization_config = keep_whole(carried, heads)
    return config, set(spec.model_kwargs) - set(left)
