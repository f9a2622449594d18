"""torch.compile for a loaded model, as Trainer's key of the same name: one call, before the first chunk."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ensemble.common.torch_errors import Verdict, classify, is_out_of_memory, one_line


def compile_model(model: Any, first_passes: Callable[[], object]) -> None:
    """Compile the body of a model for batches of any size, and run it, so that compiling counts as loading.

    Raises:
        ValueError: compiling failed.
        RuntimeError, MemoryError: the process cannot go on.
    """
    from torch._inductor import config

    # Processes that torch starts would outlive a worker that is killed.
    config.compile_threads = int(os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1"))
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
