"""A pass that this CPU or GPU cannot compute -> one sentence: where it failed, and what else may work.

Kernels differ between machines in the shapes and types that they take, and say so in their own words at the first
pass.  Where a pass failed stands in the error's traceback: the innermost module of the model that was running.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ensemble.common.torch_errors import Verdict, classify, is_out_of_memory, one_line
from ensemble.members.huggingface.loading.quantization import is_bitsandbytes
from ensemble.members.huggingface.spec import ModelSpec

# bitsandbytes' _convert_weight_packed_for_cpu cuts the outputs into blocks of so many.
_OUTPUTS_PER_BLOCK = 32
_SHOWN_OF_ERROR = 160


@contextlib.contextmanager
def told_in_a_sentence(spec: ModelSpec, model: Any, device_name: str, first: bool = False) -> Iterator[None]:
    """Passes within: an error that no other rows and no fresh process get over becomes one sentence.

    Args:
        device_name: where the model is; "cpu" or a GPU's name.
        first: these are the first passes of this model, on texts that any model can compute: whatever a kernel
            raises is no row's fault.

    Raises:
        ValueError: the sentence.
        Exception: as it was, where it may be a row's fault, memory's, or that of a process that is done for.
    """
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        verdict = classify(error)
        is_ours = verdict is Verdict.HOPELESS or (first and verdict is Verdict.SOUND)
        if not is_ours or is_out_of_memory(error):
            raise
        raise ValueError(_sentence(error, spec, model, device_name)) from error


def _sentence(error: BaseException, spec: ModelSpec, model: Any, device_name: str) -> str:
    name, module = _failed_in(error, model)
    place = "this CPU" if device_name == "cpu" else f"this GPU ({device_name})"
    layer = f"in {name} ({_shape_of(module)}) " if module is not None else ""
    reason = f"{type(error).__name__}: {one_line(error)[:_SHOWN_OF_ERROR]}"
    others = _what_else(spec, model, module, device_name == "cpu")
    return (
        f"its forward pass fails {layer}on {place}: {reason}{_limit_of(module)}; "
        f"what else may work: {', or '.join(others)}"
    )


def _failed_in(error: BaseException, model: Any) -> tuple[str, nn.Module | None]:
    """The innermost module that was running, with its name within the model."""
    names = {id(module): name for name, module in model.named_modules()}
    found: nn.Module | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, nn.Module) and names.get(id(candidate)):
            found = candidate
    return ("", None) if found is None else (names[id(found)], found)


def _shape_of(module: nn.Module) -> str:
    kind = type(module).__name__
    inputs, outputs = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if inputs is None or outputs is None:
        return kind
    return f"{kind} with {inputs} inputs and {outputs} outputs"


def _limit_of(module: nn.Module | None) -> str:
    """What bitsandbytes asks of a 4-bit layer where it repacks it for the CPU, if this layer does not fulfil it."""
    state = getattr(getattr(module, "weight", None), "quant_state", None)
    if not getattr(module, "support_avx512bf16_for_cpu", False) or state is None:
        return ""
    outputs, inputs = state.shape
    if inputs % state.blocksize == 0 and outputs % _OUTPUTS_PER_BLOCK == 0:
        return ""
    return (
        " (on CPUs with AVX512_BF16 bitsandbytes takes 4-bit layers only with inputs in blocks of "
        f"{state.blocksize} and outputs in blocks of {_OUTPUTS_PER_BLOCK})"
    )


def _what_else(spec: ModelSpec, model: Any, module: nn.Module | None, on_cpu: bool) -> list[str]:
    others = []
    settings = spec.quantization_config
    if settings is not None:
        if is_bitsandbytes(settings) and settings.get("load_in_4bit"):
            others.append("load_in_8bit: true in the place of load_in_4bit")
        others.append("no quantization_config")
    elif getattr(model.config, "quantization_config", None) is not None:
        others.append("the checkpoint that this one was quantized from")
    elif model.dtype is not torch.float32:
        others.append("dtype: float32" + (" or bfloat16" if model.dtype is torch.float16 else ""))
    attention = getattr(model.config, "_attn_implementation", None)
    if "attention" in type(module).__name__.lower() and attention not in (None, "eager"):
        others.append("attn_implementation: eager")
    return [*others, "a GPU (num_gpus: 1)" if on_cpu else "the CPU (num_gpus: 0)"]
