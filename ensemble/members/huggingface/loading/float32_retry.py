"""A model with half-precision weights -> its forward pass in float32, for the rows that overflow half precision.

A model of nine billion parameters cannot be upcast as a whole on the GPU that it barely fits on.  So its weights
stay as they are, and each module gets float32 copies of its own weights while it runs and no longer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ensemble.members.huggingface.spec import choose_attention, is_soft_capped

_HALF = (torch.float16, torch.bfloat16)
_Forward = Callable[..., Any]


def uses_half_precision(model: Any) -> bool:
    """Whether float32 could give a finite number where this model's own types overflow."""
    return any(_is_half(module) for module in model.modules())


def why_not_float32(model: Any) -> str:
    """Why ``in_float32`` does not know how to run this model; empty where it does."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        return ""
    method = getattr(quantizer.quantization_config, "quant_method", "")
    method = str(getattr(method, "value", method))
    if method.startswith("bitsandbytes"):
        return ""
    return f"weights quantized by {method} compute in half precision only"


@contextlib.contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """While this lasts, the forward pass of ``model`` computes in float32; its weights are the same afterwards.

    Modules that accelerate moves from the CPU or the disk are upcast after they have arrived.  Vocabularies are
    not upcast as a whole (256,000 x 3,584 numbers would take 3.7 GB): only the rows in use are.

    Raises:
        RuntimeError: from the forward pass, of a model that computes with the weights of other modules than
            the one that is running.
    """
    vocabulary = model.get_input_embeddings().weight
    attention = getattr(model.config, "_attn_implementation", None)
    replaced: list[tuple[dict[str, Any], str, _Forward | None]] = []
    try:
        if "flash" in str(attention):  # made for half precision: it would cast its inputs back
            model.config._attn_implementation = choose_attention(
                is_soft_capped(model.config.to_dict()), model._supports_sdpa, flash_suits=False
            )
        for module in model.modules():
            if not _is_half(module) and not hasattr(module, "cast_input_dtype_enabled"):
                continue
            # accelerate's own forward moves the weights to the device and then calls this one.
            name = "_old_forward" if "_old_forward" in vars(module) else "forward"
            holds_vocabulary = (
                isinstance(module, nn.Embedding) and module.weight is vocabulary and vocabulary.dtype in _HALF
            )
            replaced.append((vars(module), name, vars(module).get(name)))
            vars(module)[name] = _in_float32(module, getattr(module, name), holds_vocabulary)
        yield
    finally:
        if "flash" in str(attention):
            model.config._attn_implementation = attention
        for attributes, name, before in replaced:
            if before is None:
                attributes.pop(name, None)
            else:
                attributes[name] = before


def _in_float32(module: nn.Module, forward: _Forward, holds_vocabulary: bool) -> _Forward:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            if holds_vocabulary and args:
                args = (stack.enter_context(_rows_in_use(module, args[0])), *args[1:])
            stack.enter_context(_upcast(module))
            stack.enter_context(_settings(module))
            inner = functools.partial(_linear_8bit, module) if _is_8bit(module) else forward
            return inner(*_cast(args), **_cast(kwargs))

    return run


@contextlib.contextmanager
def _upcast(module: nn.Module) -> Iterator[None]:
    """Float32 copies in the place of a module's own half-precision parameters and buffers."""
    swapped: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    try:
        for tensors, name, tensor in _half_tensors(module):
            upcast = tensor.detach().float()
            # Gemma's embeddings keep the exact number beside the buffer that was rounded with the weights.
            if isinstance(exact := getattr(module, f"scalar_{name}", None), float):
                upcast.fill_(exact)
            swapped.append((tensors, name, tensor))
            is_parameter = isinstance(tensor, nn.Parameter)
            tensors[name] = nn.Parameter(upcast, requires_grad=False) if is_parameter else upcast
        yield
    finally:
        for tensors, name, tensor in swapped:
            tensors[name] = tensor


@contextlib.contextmanager
def _rows_in_use(embedding: Any, ids: torch.Tensor) -> Iterator[torch.Tensor]:
    """A table of the rows that ``ids`` name in the place of the whole one; yields their numbers in it.

    The module's own forward then scales them, as Gemma's does, in the type that they have here.
    """
    table, padding = embedding.weight, embedding.padding_idx
    used, numbers = torch.unique(ids, return_inverse=True)
    try:
        embedding._parameters["weight"] = nn.Parameter(table.detach()[used].float(), requires_grad=False)
        # Of use in training only, and it need not be a row of this table.
        embedding.padding_idx = None
        yield numbers
    finally:
        embedding._parameters["weight"] = table
        embedding.padding_idx = padding


@contextlib.contextmanager
def _settings(module: nn.Module) -> Iterator[None]:
    """What would make a module cast its float32 input back to half precision, set otherwise."""
    wanted: dict[str, Any] = {}
    if _is_4bit(module):
        # bitsandbytes' Linear4bit casts its input to this type, and unpacks its weights to the input's.
        wanted = {"compute_dtype": torch.float32, "compute_type_is_set": True}
    elif hasattr(module, "cast_input_dtype_enabled"):
        wanted = {"cast_input_dtype_enabled": False}  # peft's layers cast it to their adapter's type
    before = {name: getattr(module, name) for name in wanted}
    vars(module).update(wanted)
    try:
        yield
    finally:
        vars(module).update(before)


def _linear_8bit(module: Any, inputs: torch.Tensor) -> torch.Tensor:
    """What bitsandbytes' Linear8bitLt computes, without its casting of the input to float16.

    A row of the weights is its int8 numbers times the row's largest value / 127 (LLM.int8(), Dettmers et al. 2022).
    """
    scales = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
    weight = module.weight.detach().float() * (scales.float().view(-1, 1) / 127)
    return nn.functional.linear(inputs, weight, module.bias)


def _is_half(module: nn.Module) -> bool:
    if _is_8bit(module) or any(True for _ in _half_tensors(module)):
        return True
    # Without a type of its own Linear4bit takes its input's, and keeps it.
    return _is_4bit(module) and getattr(module, "compute_dtype", None) is not torch.float32


def _half_tensors(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """A module's own, and those in its lists and dicts of parameters, which have no forward."""
    containers = [
        child for child in module.children() if isinstance(child, nn.ParameterList | nn.ParameterDict)
    ]
    for holder in (module, *containers):
        for tensors in (holder._parameters, holder._buffers):
            for name, tensor in list(tensors.items()):
                # Packed 4-bit weights can be stored as float16: no number of theirs is one.
                if tensor is not None and tensor.dtype in _HALF and not hasattr(tensor, "quant_state"):
                    yield tensors, name, tensor


def _is_4bit(module: nn.Module) -> bool:
    is_packed = hasattr(module._parameters.get("weight"), "quant_state")
    return is_packed and hasattr(module, "compute_dtype") and hasattr(module, "compute_type_is_set")


def _is_8bit(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.dtype is torch.int8 and hasattr(weight, "SCB")


def _cast(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in _HALF else value
    if type(value) in (tuple, list):
        return type(value)(_cast(item) for item in value)
    if type(value) is dict:
        return {key: _cast(item) for key, item in value.items()}
    return value
