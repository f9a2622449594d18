"""Python runs this at start-up where this folder is on PYTHONPATH: every GPU says that it has another capability.

It sits in the two libraries that ask the driver for it, pynvml and torch, below everything under test.  What
torch's own C++ picks stays that of the real GPU.
"""

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_QUESTIONS = {"pynvml": "nvmlDeviceGetCudaComputeCapability", "torch.cuda": "get_device_capability"}


class _Answering(Loader):
    """Loads a library as it is, and then answers the question in its place."""

    def __init__(self, loader: Loader, capability: tuple[int, ...]) -> None:
        self._loader, self._capability = loader, capability

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)

        def answer(*_: Any) -> Any:
            return self._capability

        setattr(module, _QUESTIONS[module.__name__], answer)


class _Finder(MetaPathFinder):
    def __init__(self, capability: tuple[int, ...]) -> None:
        self._capability = capability

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in _QUESTIONS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Answering(spec.loader, self._capability)
        return spec


if "TEST_GPU_CAPABILITY" in os.environ:
    sys.meta_path.insert(0, _Finder(tuple(map(int, os.environ["TEST_GPU_CAPABILITY"].split(".")))))
