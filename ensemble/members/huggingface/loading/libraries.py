"""Import torch, transformers and a kind's predictor, as part of a worker's start-up."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec


def import_libraries(predictor: str) -> Mapping[str, str]:
    """Import what predicting takes for a kind whose predictor is this module.

    Returns:
        the versions of what was imported, by name.
    """
    with no_collections():
        import torch
        import transformers

        importlib.import_module(predictor)
    names = ("accelerate", "bitsandbytes", "pyarrow", "tokenizers")
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "transformers": transformers.__version__,
        **{name: version(name) for name in names if find_spec(name) is not None},
    }


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Keep garbage collection off: imports make a million objects, all of which stay.

    What was made by the end is never looked through.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
