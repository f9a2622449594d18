"""PURE: what an exception says of the process it came up in.

Errors are told by name and by text: this module must answer before torch is imported, and after that has failed.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from enum import Enum

from ensemble.common.errors import MemberError, WriteError
from ensemble.common.files import FilesChanged

# CUDA's errors are sticky: after an illegal access or a failed assertion every later call fails too.  Since
# torch 2.8 they have a type of their own; cuBLAS, cuDNN, Triton and older releases have their texts.
_STICKY = (
    *("cuda error", "cuda driver error", "device-side assert"),
    *("cudnn", "cublas", "cusolver", "triton error"),
)
_SUSPECT_TYPES = ("AcceleratorError", "OutOfMemoryError")
# There is no kernel for this GPU, or for this type of numbers on this device; that is so for all rows and in every
# process.  The last three come from a layer that is given another type than its weights have.
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
# Allocations past torch's own allocator: cuBLAS' and cuDNN's workspaces, CUDA's modules, memory of the host.
_OUT_OF_MEMORY = (
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
    *("CUDA error: out of memory", "DefaultCPUAllocator: can't allocate memory"),
)


class Verdict(Enum):
    """Whether to go on after an error."""

    SOUND = "sound"  # this process can go on; what it was given may be to blame
    SUSPECT = "suspect"  # this process must not go on; a fresh one may fare better
    HOPELESS = "hopeless"  # neither other rows nor a fresh process will fare better


def classify(error: BaseException) -> Verdict:
    """What the error, or one that it came of, leaves of this process."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        text = str(link).lower() if isinstance(link, RuntimeError) else ""
        # After FilesChanged a fresh process would make its numbers of other files.
        if isinstance(link, (FilesChanged, MemberError, WriteError)) or (
            isinstance(link, OSError) and link.errno in _FULL
        ):
            return Verdict.HOPELESS
        # Beside MemoryError and SystemError (the interpreter's own state), what is no Exception: a panic in a
        # library written in Rust, code of a checkpoint that calls exit().
        if isinstance(link, (MemoryError, SystemError)) or not isinstance(link, Exception):
            return Verdict.SUSPECT
        if any(words in text for words in _HOPELESS):
            return Verdict.HOPELESS
        if _is_of_torch(link, _SUSPECT_TYPES) or any(words in text for words in _STICKY):
            return Verdict.SUSPECT
        # As a traceback shows them: what it was raised from.
        link = link.__cause__ if link.__cause__ is not None or link.__suppress_context__ else link.__context__
    return Verdict.SOUND


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a forward pass failed for want of memory, so that a smaller one may fit."""
    if _is_of_torch(error, ("OutOfMemoryError",)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def one_line(error: BaseException, redact: Callable[[str], str] = str) -> str:
    """The error's text for a message, its type where it has none; never more than 500 characters."""
    # Secrets go before the text is cut: a part of one would not be known.
    return " ".join(redact(str(error)).split())[:500] or redact(repr(error))[:500]


def _is_of_torch(error: BaseException, names: tuple[str, ...]) -> bool:
    return any(
        kind.__module__.split(".")[0] == "torch" and kind.__name__ in names for kind in type(error).__mro__
    )
