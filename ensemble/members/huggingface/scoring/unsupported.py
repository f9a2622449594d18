"""An error of a pass that this CPU or GPU cannot compute -> a sentence: where it failed, and what else may work.

Kernels differ between machines in the shapes and types that they take, and each has error messages of its own.  The
error's traceback tells the innermost module of the model that was running.
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
def explain_errors(spec: CheckpointSpec, model: Any, device_name: str, first: bool = False) -> Iterator[None]:
    """Explain an error of passes in a sentence if neither other rows nor a fresh process would avoid it.

    Args:
        device_name: of the model's device; "cpu" or a GPU's name.
        first: whether these are the first passes of this model, on texts that any model can compute: no error of a
            kernel is a row's fault then.

    Raises:
        ValueError: the sentence.
        Exception: the error as it was if it may be due to a row, to memory, or to a broken process.
    """
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        verdict = classify(error)
        is_permanent = verdict is Verdict.HOPELESS or (first and verdict is Verdict.SOUND)
        if not is_permanent or is_out_of_memory(error):
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
        inputs = getattr(module, "in_features", None)
        if inputs is not None:
            layer += f" with {inputs} inputs and {getattr(module, 'out_features', None)} outputs"
        layer += ") "

    settings = spec.quantization_config
    alternatives = []
    if settings is not None:
        if is_bitsandbytes(settings) and settings.get("load_in_4bit"):
            alternatives.append("load_in_8bit: true in the place of load_in_4bit")
        alternatives.append("no quantization_config")
    elif getattr(model.config, "quantization_config", None) is not None:
        alternatives.append("the checkpoint that this one was quantized from")
    elif model.dtype is not torch.float32:
        alternatives.append("dtype: float32" + (" or bfloat16" if model.dtype is torch.float16 else ""))
    attention = getattr(model.config, "_attn_implementation", None)
    if "attention" in type(module).__name__.lower() and attention not in (None, "eager"):
        alternatives.append("attn_implementation: eager")
    alternatives.append("a GPU (num_gpus: 1)" if on_cpu else "the CPU (num_gpus: 0)")
    return (
        f"its forward pass fails {layer}on {'this CPU' if on_cpu else f'this GPU ({device_name})'}: "
        f"{type(error).__name__}: {one_line(error)[:160]}; "
        f"what else may work: {', or '.join(alternatives)}"
    )
