"""What breaks a forward pass: a character in a row, or an error that torch is made to raise."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from tests.checkpoints import make_checkpoint

# A text with this character ends in an IndexError on a CPU; on a GPU in an assertion that poisons CUDA.
BREAKING = "~"


def make_breaking(folder: Path, labels: Sequence[str], architecture: str = "llama") -> Path:
    """A tiny checkpoint whose tokenizer has an id for ``BREAKING`` for which the model has no embedding."""
    make_checkpoint(folder, architecture, labels)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    assert BREAKING in tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"][BREAKING] = 100_000
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


class FailingPass(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises an error from within every forward pass but the first ones, as a kernel does.

    Args:
        after: forward passes (told by their embedding look-ups) that succeed.

    Attributes:
        passed: how many have.
    """

    def __init__(self, error: Exception, after: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._error = error
        self._left = after
        self.passed = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if "embedding" in str(func):
            if self._left == 0:
                raise self._error
            self._left -= 1
            self.passed += 1
        return func(*args, **(kwargs or {}))
