"""Run a half-precision model's forward pass in float32, for rows that overflow half precision.

A model of nine billion parameters cannot be upcast as a whole if it barely fits on its GPU.  So its weights stay as
they are, and each module gets float32 copies of its weights only while it runs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ensemble.members.huggingface.loading.architecture import attention_of_padded

_HALF = (torch.float16, torch.bfloat16)
_ABSENT = object()
# Weights of a head over the vocabulary that are upcast at a time: 128 MiB.
_PIECE_WEIGHTS = 1 << 25
# A module's dict of tensors or attributes, a name in it, and the value that it has for a while.
_Change = tuple[dict[str, Any], str, Any]


def uses_half_precision(model: Any) -> bool:
    """Return whether float32 could give a finite number if this model's own types overflow."""
    return any(map(_is_half, model.modules()))


def why_not_float32(model: Any) -> str:
    """Return why ``in_float32`` cannot run this model; empty if it can."""
    quantizer = getattr(model, "hf_quantizer", None)
    method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", "")
    method = str(getattr(method, "value", method))
    if quantizer is None or method.startswith("bitsandbytes"):
        return ""
    return f"weights quantized by {method} compute in half precision only"


@contextlib.contextmanager
def in_float32(model: Any, is_compiled: bool = False) -> Iterator[None]:
    """Let the forward pass of ``model`` compute in float32; its weights are the same afterwards.

    Vocabularies are not upcast as a whole (256,000 x 3,584 numbers would take 3.7 GB): embeddings only in the rows
    in use, heads in pieces.
    """
    vocabulary = model.get_input_embeddings().weight
    attention = getattr(model.config, "_attn_implementation", None)
    forwards: list[_Change] = []
    for module in model.modules():
        if _is_half(module) or hasattr(module, "cast_input_dtype_enabled"):
            # accelerate's own forward moves the weights to the device and then calls this one.
            name = "_old_forward" if "_old_forward" in vars(module) else "forward"
            forward = getattr(module, name)
            if type(module) is nn.Linear and module.weight.shape == vocabulary.shape:
                run: Callable[..., Any] = functools.partial(_in_pieces, module)
            else:
                is_vocabulary = isinstance(module, nn.Embedding) and module.weight is vocabulary
                run = _in_float32(module, forward, is_vocabulary and vocabulary.dtype in _HALF)
            forwards.append((vars(module), name, run))
    is_flash = "flash" in str(attention)  # made for half precision: it would cast its inputs back
    try:
        if is_flash:
            model.config._attn_implementation = attention_of_padded(model)
        # Compiled code would ignore the forward methods that are replaced.
        stance = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
        with stance, _replaced(forwards):
            yield
    finally:
        if is_flash:
            model.config._attn_implementation = attention


def _in_float32(module: Any, forward: Callable[..., Any], is_vocabulary: bool) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        rows: list[_Change] = []
        if is_vocabulary and args:
            # A table of the rows in use.  The module's own forward then scales them in this type, as Gemma's does.
            used, numbers = torch.unique(args[0], return_inverse=True)
            table = nn.Parameter(module.weight.detach()[used].float(), requires_grad=False)
            # Only training uses the padding's row, and it need not be in this table.
            rows = [(module._parameters, "weight", table), (vars(module), "padding_idx", None)]
            args = (numbers, *args[1:])
        with _replaced(itertools.chain(rows, _upcast(module))):
            inner = functools.partial(_linear_8bit, module) if _is_8bit(module) else forward
            return inner(*_cast(args), **_cast(kwargs))

    return run


@contextlib.contextmanager
def _replaced(changes: Iterable[_Change]) -> Iterator[None]:
    """Change entries of dicts one after the other, and restore them afterwards."""
    before: list[_Change] = []
    try:
        for entries, name, value in changes:
            before.append((entries, name, entries.get(name, _ABSENT)))
            entries[name] = value
        yield
    finally:
        for entries, name, value in before:
            if value is _ABSENT:
                del entries[name]
            else:
                entries[name] = value


def _upcast(module: Any) -> Iterator[_Change]:
    """Yield the changes for float32: half-precision tensors, and settings that would cast the input back."""
    for tensors, name, tensor in _half_tensors(module):
        upcast = tensor.detach().float()
        # Gemma's embeddings keep the exact number beside the buffer that was rounded with the weights.
        exact = getattr(module, f"scalar_{name}", None)
        if isinstance(exact, float):
            upcast.fill_(exact)
        is_parameter = isinstance(tensor, nn.Parameter)
        yield tensors, name, nn.Parameter(upcast, requires_grad=False) if is_parameter else upcast
    if _is_4bit(module):
        # bitsandbytes' Linear4bit casts its input to this type, and unpacks its weights to the input's.
        yield vars(module), "compute_dtype", torch.float32
        yield vars(module), "compute_type_is_set", True
    elif hasattr(module, "cast_input_dtype_enabled"):  # peft's layers cast it to their adapter's type
        yield vars(module), "cast_input_dtype_enabled", False


def _in_pieces(head: nn.Linear, states: torch.Tensor) -> torch.Tensor:
    """Compute a head over a vocabulary in float32, [..., hidden] -> [..., vocabulary]."""
    rows = max(1, _PIECE_WEIGHTS // head.in_features)
    inputs = states.float()
    parts = [nn.functional.linear(inputs, piece.float()) for piece in torch.split(head.weight.detach(), rows)]
    logits = torch.cat(parts, dim=-1)
    return logits if head.bias is None else logits + head.bias.float()


def _linear_8bit(module: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Compute bitsandbytes' Linear8bitLt without casting the input to float16."""
    # A row of the weights is int8 numbers times the row's largest value / 127 (LLM.int8(), Dettmers et al. 2022).
    scales = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
    weight = module.weight.detach().float() * (scales.float().view(-1, 1) / 127)
    return nn.functional.linear(inputs, weight, module.bias)


def _is_half(module: nn.Module) -> bool:
    # If no type is set, Linear4bit takes that of its first input, and keeps it.
    computes_in_half = _is_4bit(module) and getattr(module, "compute_dtype", None) is not torch.float32
    return computes_in_half or _is_8bit(module) or next(_half_tensors(module), None) is not None


def _half_tensors(module: nn.Module) -> Iterator[_Change]:
    """Yield a module's half-precision tensors, with those in its lists and dicts of parameters."""
    lists = (child for child in module.children() if isinstance(child, nn.ParameterList | nn.ParameterDict))
    for holder in (module, *lists):
        for tensors in (holder._parameters, holder._buffers):
            for name, tensor in list(tensors.items()):
                # Packed 4-bit weights may be stored as float16, but are no such numbers.
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
        return type(value)(map(_cast, value))
    if type(value) is dict:
        return {key: _cast(item) for key, item in value.items()}
    return value
