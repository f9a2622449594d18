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
from ensemble.members.huggingface.spec import CheckpointSpec


@contextlib.contextmanager
def told_in_a_sentence(
    spec: CheckpointSpec, model: Any, device_name: str, first: bool = False
) -> Iterator[None]:
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


def _sentence(error: BaseException, spec: CheckpointSpec, model: Any, device_name: str) -> str:
    on_cpu = device_name == "cpu"
    module, layer = None, ""
    names = {id(module): name for name, module in model.named_modules()}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        running = frame.f_locals.get("self")
        if isinstance(running, nn.Module) and names.get(id(running)):
            module = running  # the innermost
    if module is not None:
        layer = f"in {names[id(module)]} ({type(module).__name__}"
        if (inputs := getattr(module, "in_features", None)) is not None:
            layer += f" with {inputs} inputs and {getattr(module, 'out_features', None)} outputs"
        layer += ") "

    settings = spec.quantization_config
    others = []
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
    others.append("a GPU (num_gpus: 1)" if on_cpu else "the CPU (num_gpus: 0)")
    return (
        f"its forward pass fails {layer}on {'this CPU' if on_cpu else f'this GPU ({device_name})'}: "
        f"{type(error).__name__}: {one_line(error)[:160]}; "
        f"what else may work: {', or '.join(others)}"
    )
