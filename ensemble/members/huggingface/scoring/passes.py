"""Set up forward passes: torch.compile, and a sentence for each operation that this machine cannot compute."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ensemble.common.torch_errors import Verdict, classify, is_out_of_memory, one_line
from ensemble.members.huggingface.loading.kernels import compile_in_this_process
from ensemble.members.huggingface.spec import CheckpointSpec


@contextlib.contextmanager
def explain_errors(spec: CheckpointSpec, model: Any, device_name: str, first: bool = False) -> Iterator[None]:
    """Explain an error of passes by a ValueError if neither other rows nor a fresh process would avoid it.

    Args:
        first: whether these are the first passes of this model, on texts that any model can compute: no error of a
            kernel is a row's fault then.
    """
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        verdict = classify(error)
        is_permanent = verdict is Verdict.HOPELESS or (first and verdict is Verdict.SOUND)
        if not is_permanent or is_out_of_memory(error):
            raise
        layer = _failing_layer(error, model)
        device = "this CPU" if device_name == "cpu" else f"this GPU ({device_name})"
        raise ValueError(
            f"its forward pass fails {layer}on {device}: {type(error).__name__}: {one_line(error)[:160]}; "
            f"what else may work: {', or '.join(_alternatives(spec, model, layer, device_name == 'cpu'))}"
        ) from error


def _failing_layer(error: BaseException, model: Any) -> str:
    """Return the innermost module that was running, with a space behind it; empty if there was none."""
    names = {id(module): name for name, module in model.named_modules() if name}
    layer = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if id(module) in names:
            layer = f"in {names[id(module)]} ({' '.join(repr(module).split())[:80]}) "
    return layer


def _alternatives(spec: CheckpointSpec, model: Any, layer: str, on_cpu: bool) -> Iterator[str]:
    settings = spec.quantization_config
    if settings is not None:
        if settings.get("load_in_4bit"):
            yield "load_in_8bit: true in the place of load_in_4bit"
        yield "no quantization_config"
    elif getattr(model.config, "quantization_config", None) is not None:
        yield "the checkpoint that this one was quantized from"
    elif model.dtype is not torch.float32:
        yield "dtype: float32" + (" or bfloat16" if model.dtype is torch.float16 else "")
    attention = getattr(model.config, "_attn_implementation", None)
    if "Attention(" in layer and attention not in (None, "eager"):
        yield "attn_implementation: eager"
    yield "a GPU (num_gpus: 1)" if on_cpu else "the CPU (num_gpus: 0)"


def compile_model(model: Any, first_passes: Callable[[], object]) -> None:
    """Compile the body of a model for batches of any size, and run it, so that compiling counts as loading."""
    compile_in_this_process()
    body = getattr(model, model.base_model_prefix, model)
    body.compile(dynamic=True)  # by default torch takes the first size for the only one
    try:
        first_passes()
    except Exception as error:  # compilers raise many types
        if classify(error) is Verdict.SUSPECT or is_out_of_memory(error):
            raise
        raise ValueError(
            f"torch_compile: compiling failed ({type(error).__name__}: {one_line(error)[:160]}); "
            "remove the key, or see the worker's log for what torch's compiler lacks"
        ) from error
