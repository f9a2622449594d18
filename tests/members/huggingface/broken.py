"""What breaks a forward pass: a character in a row, or an error that torch is made to raise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# A text with this character ends in an IndexError while ``BreakingToken`` is there.
BREAKING = "~"


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


class BreakingToken(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises what an id without an embedding raises, in every forward pass over rows with this token.

    Args:
        token: its id.
    """

    def __init__(self, token: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._token = token

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if "embedding" in str(func) and (args[1] == self._token).any():
            raise IndexError("index out of range in self")
        return func(*args, **(kwargs or {}))
