"""Judge from an exception whether its process can go on.

Errors are recognized by name and by text, because this must work before torch is imported, and if that fails.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from enum import Enum

from ensemble.common.errors import MemberError, WriteError
from ensemble.common.files import FilesChanged

# After some of CUDA's errors, such as an illegal access or a failed assertion, every later call fails, too. Since
# torch 2.8 they have a type of their own; cuBLAS, cuDNN, Triton and older releases are recognized by texts.
_STICKY = (
    "cuda error",
    "cuda driver error",
    "device-side assert",
    "cudnn",
    "cublas",
    "cusolver",
    "triton error",
)
_SUSPECT_TYPES = ("AcceleratorError", "OutOfMemoryError")
# There is no kernel for this GPU, or for this dtype on this device, whatever the rows and the process. The last
# three come from a layer whose input has another dtype than its weights.
_HOPELESS = (
    "no kernel image is available",
    "unsupported toolchain",
    "invalid device function",
    "not implemented for '",
    "could not run 'aten::",
    "flashattention only support",
    "expected scalar type",
    "have the same dtype",
    "and weight type (",
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# Allocations past torch's allocator: cuBLAS' and cuDNN's workspaces, CUDA's modules, memory of the host.
_OUT_OF_MEMORY = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "DefaultCPUAllocator: can't allocate memory",
)


class Verdict(Enum):
    """Say whether to go on after an error."""

    SOUND = "sound"  # this process can go on; the rows may be to blame
    SUSPECT = "suspect"  # this process must end; a fresh one may succeed
    HOPELESS = "hopeless"  # neither other rows nor a fresh process will succeed


def classify(error: BaseException) -> Verdict:
    """Judge this process by an error and the errors that caused it."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        text = str(link).lower() if isinstance(link, RuntimeError) else ""
        # After FilesChanged a fresh process would read other files.
        if isinstance(link, (FilesChanged, MemberError, WriteError)) or (
            isinstance(link, OSError) and link.errno in _FULL
        ):
            return Verdict.HOPELESS
        # No Exception: a panic in a library written in Rust, or code of a checkpoint that calls exit(). SystemError
        # is about the interpreter itself, ChildProcessError about a process that this one has started.
        if isinstance(link, (MemoryError, SystemError, ChildProcessError)) or not isinstance(link, Exception):
            return Verdict.SUSPECT
        if any(words in text for words in _HOPELESS):
            return Verdict.HOPELESS
        if _is_of_torch(link, _SUSPECT_TYPES) or any(words in text for words in _STICKY):
            return Verdict.SUSPECT
        # The error that it was raised from, as in a traceback.
        has_cause = link.__cause__ is not None or link.__suppress_context__
        link = link.__cause__ if has_cause else link.__context__
    return Verdict.SOUND


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a forward pass ran out of memory, so that a smaller one may fit."""
    if _is_of_torch(error, ("OutOfMemoryError",)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def one_line(error: BaseException, redact: Callable[[str], str] = str) -> str:
    """Return an error's text, or else its type, for a message: at most 500 characters, and as many of its notes."""
    # Redacted before the text is cut, because a part of a secret would not be recognized.
    text = " ".join(redact(str(error)).split())[:500] or redact(repr(error))[:500]
    notes = " ".join(redact("; ".join(getattr(error, "__notes__", ()))).split())[:500]
    return f"{text} ({notes})" if notes else text


def _is_of_torch(error: BaseException, names: tuple[str, ...]) -> bool:
    return any(
        kind.__module__.split(".")[0] == "torch" and kind.__name__ in names for kind in type(error).__mro__
    )
