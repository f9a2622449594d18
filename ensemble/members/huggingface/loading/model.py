"""Load a checkpoint's weights as a model on its devices; refuse an untrained head."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, BitsAndBytesConfig
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.quantizers.auto import AutoQuantizationConfig

from ensemble.common.files import read_json
from ensemble.common.text import listed
from ensemble.members.footprint import Capability
from ensemble.members.huggingface.checkpoint.quantization_methods import (
    BITSANDBYTES,
    UNQUANTIZED,
    capability_problem,
    compute_dtype_of,
    method_of,
)
from ensemble.members.huggingface.loading.adapter import (
    AdapterFiles,
    JobAdapters,
    attach_adapters,
    open_adapter,
)
from ensemble.members.huggingface.loading.average import average_adapters, average_checkpoints
from ensemble.members.huggingface.loading.capped_attention import register_capped_blocks
from ensemble.members.huggingface.loading.checks import check_unexpected_keys, is_unused
from ensemble.members.huggingface.loading.describe import config_advice
from ensemble.members.huggingface.loading.device_map import check_placement, input_device, placement_options
from ensemble.members.huggingface.loading.flex_attention import register_flex
from ensemble.members.huggingface.loading.kernels import AMPERE
from ensemble.members.huggingface.spec import (
    BACKBONE,
    CAPPED_BLOCKS,
    CLASSIFIER,
    FLEX,
    IMAGE_CLASSIFIER,
    LANGUAGE_MODEL,
    WITH_LABELS,
    AdapterSource,
    CheckpointSpec,
    cap_problem,
    choose_attention,
    choose_compute_dtype,
    choose_dtype,
    is_soft_capped,
)

_MAX_REASON = 300
_TRAINED = {
    CLASSIFIER: "that was trained for sequence classification",
    LANGUAGE_MODEL: "that was trained for language modelling",
    IMAGE_CLASSIFIER: "that was trained for image classification",
    BACKBONE: "whose weights have the names that transformers' own save_pretrained gives them",
}
# Words of transformers' errors about the attention; names of modules, such as "attention.self", do not match.
_ABOUT_ATTENTION = re.compile(
    "attention implementation|attn_implementation|flash_attn|flash ?attention|flex attention"
    f"|KeyError: '({CAPPED_BLOCKS}|{FLEX})'",
    re.IGNORECASE,
)


def load_model(
    spec: CheckpointSpec, least: Capability | None, notes: list[str]
) -> tuple[Any, JobAdapters | None]:
    """Load the model with its adapters onto the devices this process can see.

    Returns:
        and what switches between the adapters of jobs; None: all have the same adapter, or none.
    """
    name, on_gpu = spec.model_name_or_path, least is not None
    problem = capability_problem(spec.quantization_config, least)
    if problem:
        raise ValueError(problem)
    dtype = model_dtype(spec, least, notes)
    options = dict(spec.model_kwargs)
    sources = dict.fromkeys(spec.job_adapters)
    adapters = {source: _open_source(source, spec) for source in sources if source is not None}
    if adapters or spec.averaged_checkpoints:
        # Keys of model_kwargs that belong to the config are in it now.
        options["config"], unused = _config_for(adapters.values(), spec)
        for key in spec.model_kwargs.keys() - unused.keys():
            del options[key]
    if spec.averaged_checkpoints:
        options["state_dict"] = average_checkpoints(spec.averaged_checkpoints)
        notes.append(f"mean of {len(spec.averaged_checkpoints)} checkpoints")
    attention = spec.attn_implementation
    if attention is None:  # the plan could not read the architecture
        is_capped = is_soft_capped(from_pretrained(AutoConfig, spec).to_dict())
        attention = choose_attention(is_capped, supports_sdpa=True, flash_suits=False)
    if attention == CAPPED_BLOCKS:
        register_capped_blocks()
    elif attention == FLEX:
        register_flex()
    model, info = load_with_attention(spec, attention, dtype, on_gpu, options, notes)
    check_placement(model, spec, on_gpu, notes)
    _run_first_hooks(model)
    if not adapters and info["mismatched_keys"]:
        key, stored, expected = next(iter(info["mismatched_keys"]))
        raise ValueError(
            f"{name}: its config.json does not fit its weights: {key} is {list(stored)} in the file and "
            f"{list(expected)} by config.json; they are of two models"
        )
    quantizer = getattr(model, "hf_quantizer", None)
    check_unexpected_keys(spec, info["unexpected_keys"], quantizer is not None)
    missing = sorted({*info["missing_keys"], *(str(key[0]) for key in info["mismatched_keys"])})
    missing = [key for key in missing if not is_unused(spec, key)]
    if quantizer is not None and quantizer.pre_quantized:
        _set_compute_dtype(model, spec, least, notes)
    if missing and None in spec.job_adapters:
        trained = _TRAINED.get(spec.auto_class, "that was trained for this")
        raise ValueError(
            f"{name} has no weights for {listed(missing, 4, str)}; they would be random. Name a checkpoint "
            f"{trained}, or its adapter"
        )
    if not adapters:
        return model, None
    return attach_adapters(model, adapters, missing, spec, notes)


def _open_source(source: AdapterSource, spec: CheckpointSpec) -> AdapterFiles:
    """Return the files of an adapter, or the mean of several."""
    files = [open_adapter(name, spec.allow_pickle) for name in source.names]
    if not source.combination_type:
        return files[0]
    return average_adapters(str(source), files, source.combination_type)


def _config_for(adapters: Iterable[AdapterFiles], spec: CheckpointSpec) -> tuple[Any, dict[str, Any]]:
    """Return the checkpoint's config, and the arguments of ``model_kwargs`` that are no part of it.

    It has the adapters' number of labels, and leaves their heads out of the base's quantization.
    """
    config, unused = from_pretrained(AutoConfig, spec, return_unused_kwargs=True, **spec.model_kwargs)
    if spec.auto_class in WITH_LABELS:
        config.num_labels = len(spec.label_order)
    stored = getattr(config, "quantization_config", None)
    heads = sorted({module for adapter in adapters for module in adapter.whole_modules()})
    if isinstance(stored, dict) and method_of(stored) == BITSANDBYTES and heads:
        config.quantization_config = _keep_whole(stored, heads)
    return config, unused


def load_with_attention(
    spec: CheckpointSpec,
    attention: str,
    dtype: torch.dtype | str,
    on_gpu: bool,
    options: Mapping[str, Any],
    notes: list[str],
) -> tuple[Any, Any]:
    """Return the model with this attention, or with eager if it has no other, and how loading went."""
    options = {
        **placement_options(spec, on_gpu),
        **options,
        "dtype": dtype,
        # A head of another shape is initialized at random. The caller refuses it, by name, or makes it anew.
        "ignore_mismatched_sizes": True,
        # None: pickles if there are no safetensors. torch reads only tensors from them.
        "use_safetensors": None if spec.allow_pickle else True,
        "output_loading_info": True,
    }
    if spec.quantization_config is not None:
        options["quantization_config"] = quantization_config(spec.quantization_config, dtype)
    auto_class = getattr(transformers, spec.auto_class)
    try:
        model, info = from_pretrained(auto_class, spec, attn_implementation=attention, **options)
    except (ImportError, ValueError) as error:
        if not _ABOUT_ATTENTION.search(str(error)):
            raise
        if "attn_implementation" in spec.asked:
            # After "Please" comes advice to ask for support of the architecture, and to try calls of transformers.
            reason = str(error).split(" Please ")[0].strip().rstrip(".")
            raise ValueError(
                f"attn_implementation: {attention} cannot be used ({reason}); leave the key out, and the best one "
                "for model and device is used"
            ) from error
        if attention == "eager":
            raise
        # The parent's choice may not exist, such as for code that the checkpoint brings along.
        model, info = from_pretrained(auto_class, spec, attn_implementation="eager", **options)
        if hasattr(model.config.get_text_config(), "num_attention_heads"):  # convolutions have none at all
            notes.append(f"eager attention, as this model has no {attention}")
    # Some releases of transformers silently leave out the cap on a model's scores.
    used_attention = getattr(model.config.get_text_config(), "_attn_implementation", None)
    problem = cap_problem(used_attention, spec.model_name_or_path)
    if problem and is_soft_capped(model.config.to_dict()):
        raise ValueError(problem)
    return model, info


def model_dtype(spec: CheckpointSpec, least: Capability | None, notes: list[str]) -> torch.dtype | str:
    """Return the type for ``from_pretrained``: the spec's, one that this device has, or "auto": as stored."""
    is_asked = "dtype" in spec.asked
    asked = spec.dtype if is_asked or spec.dtype == "float32" else "auto"
    stored = None if spec.dtype == "auto" else spec.dtype
    dtype = choose_dtype(asked, stored, least is not None, least)
    if least is not None and least < AMPERE:
        if is_asked and dtype == "bfloat16":
            notes.append(
                "dtype: bfloat16 is only emulated below compute capability 8.0: slow; float16 is what this GPU has"
            )
        elif not is_asked and dtype == "float16":
            notes.append("float16: bfloat16 is only emulated below compute capability 8.0")
    return dtype if dtype == "auto" else getattr(torch, dtype)


def quantization_config(settings: Mapping[str, Any], dtype: torch.dtype | str = "auto") -> Any:
    """Return transformers' quantization config for a mapping from the YAML.

    Args:
        dtype: of the other weights.  4-bit layers compute in it unless the settings say otherwise.
    """
    if method_of(settings) != BITSANDBYTES:
        return AutoQuantizationConfig.from_dict(dict(settings))
    # A config.json that was saved names the method and repeats two keys with a line in front.
    keys = {
        key: value for key, value in settings.items() if key != "quant_method" and not key.startswith("_")
    }
    if keys.get("load_in_4bit") and isinstance(dtype, torch.dtype):
        keys.setdefault("bnb_4bit_compute_dtype", dtype)
    # Heads are small, and transformers finds by itself only heads that are named like Llama's.
    return BitsAndBytesConfig(**_keep_whole(keys, UNQUANTIZED))


def _keep_whole(settings: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Any]:
    """Return bitsandbytes' settings with these modules left unquantized."""
    skipped = settings.get("llm_int8_skip_modules") or []
    return {**settings, "llm_int8_skip_modules": [*dict.fromkeys([*skipped, *modules])]}


def _set_compute_dtype(model: Any, spec: CheckpointSpec, least: Capability | None, notes: list[str]) -> None:
    """Let stored 4-bit layers compute in a type that the device has."""
    stored = getattr(model.config, "quantization_config", None)
    stored = stored if isinstance(stored, dict) or stored is None else stored.to_dict()
    name = spec.compute_dtype or choose_compute_dtype(stored, least, spec.dtype)
    if name:
        for module in model.modules():
            # bitsandbytes' Linear4bit casts its input to this type.
            if hasattr(module, "compute_dtype") and hasattr(module, "compute_type_is_set"):
                module.compute_dtype = getattr(torch, name)
        stored_dtype = compute_dtype_of(stored)
        reason = "is only emulated below compute capability 8.0"
        if stored_dtype == "float32":
            reason = (
                "is several times slower, and the other layers are in half precision; dtype: float32 keeps it"
            )
        notes.append(f"4-bit layers compute in {name}: {stored_dtype}, as the checkpoint says, {reason}")


def from_pretrained(auto_class: Any, spec: CheckpointSpec, **options: Any) -> Any:
    """Load the checkpoint by one of transformers' auto classes; ``state_dict`` replaces its weights."""
    name = spec.model_name_or_path
    folder = None if "state_dict" in options else name
    try:
        if folder is None:  # auto classes need one, and know the class and its part of the config
            with torch.device("meta"):
                model = auto_class.from_config(options["config"], trust_remote_code=spec.trust_remote_code)
            auto_class, options["config"] = type(model), model.config
        return auto_class.from_pretrained(
            folder, revision=spec.revision or "main", trust_remote_code=spec.trust_remote_code, **options
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
        if _ABOUT_ATTENTION.search(str(error)) or reason.startswith(name):
            raise
        advice = config_advice(read_json(Path(name, "config.json")), spec.trust_remote_code)
        raise ValueError(
            f"{name}: transformers cannot make a model of its config.json and weights ({type(error).__name__}: "
            f"{reason[:_MAX_REASON]}); {advice}"
        ) from error


def _run_first_hooks(model: Any) -> None:
    """Run one token through a model whose hooks wait for that, as those of compressed-tensors do to unpack."""
    if isinstance(model, GenericForSequenceClassification) and model._forward_pre_hooks:
        token = torch.ones((1, 1), dtype=torch.int64, device=input_device(model))
        with torch.no_grad():
            model.eval()(input_ids=token, attention_mask=token)
