"""Python runs this at start-up where this folder is on PYTHONPATH: torch gets the limit that a test asks for."""

import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class _AfterTorch(MetaPathFinder):
    """Sets the limit in the process that imports models; by then torch is there."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname == "transformers.modeling_layers":
            sys.meta_path.remove(self)
            _set_limit()
        return None


def _set_limit() -> None:
    file = Path(__file__).with_name("limit.py")
    spec = importlib.util.spec_from_file_location("allocator_limit", file)
    assert spec is not None
    assert isinstance(spec.loader, Loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.AllocatorLimit(largest_bytes=int(os.environ["TEST_LARGEST_TENSOR_BYTES"])).__enter__()


if "TEST_LARGEST_TENSOR_BYTES" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
