"""torch.compile for a loaded model, as Trainer's key of the same name: one call, before the first chunk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ensemble.common.torch_errors import Verdict, classify, is_out_of_memory, one_line
from ensemble.members.huggingface.loading.float32_retry import in_float32

_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


def compile_model(model: Any, first_passes: Callable[[], object]) -> None:
    """Compile the body of a model, which computes everything but the head, for batches of any size.

    Args:
        first_passes: runs the model, so that compiling counts as loading and not as the first chunk's time.

    Raises:
        ValueError: compiling failed.
        RuntimeError, MemoryError: the process cannot go on.
    """
    from torch._inductor import config

    # Processes that torch starts would outlive a worker that is killed.
    config.compile_threads = int(os.environ.setdefault(_THREADS, "1"))
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


@contextlib.contextmanager
def in_float32_uncompiled(model: Any) -> Iterator[None]:
    """Run ``in_float32`` without compiled code, which would ignore the forward methods that it replaces."""
    with torch.compiler.set_stance("force_eager"), in_float32(model):
        yield
