"""Python runs this at start-up where this folder is on PYTHONPATH: torch may take a part of the GPU only.

It sits in torch's allocator, below everything under test.
"""

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _AfterTorch(MetaPathFinder):
    """Sets the limit in the process that imports models; by then torch is there."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname == "transformers.modeling_layers":
            sys.meta_path.remove(self)
            _set_limit(int(os.environ["TEST_GPU_BYTES"]))
        return None


def _set_limit(allowed_bytes: int) -> None:
    import torch

    if torch.cuda.is_available():
        # torch takes a share of what it counts itself, a few percent less than NVML does.
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed_bytes / total), 0)


if "TEST_GPU_BYTES" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
