"""What an error says of its process: real errors where this machine can raise them, CUDA's by type and text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ensemble.common.errors import WriteError
from ensemble.common.files import atomic_path
from ensemble.common.torch_errors import Verdict, classify, is_out_of_memory, one_line

TOO_MUCH = 1 << 60


def raised(action: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011  any error at all
        action()
    return caught.value


def wrapped(inner: BaseException, hidden: bool = False) -> BaseException:
    """A ValueError that was raised while ``inner`` was handled."""
    try:
        try:
            raise inner
        except BaseException:
            if hidden:
                raise ValueError("the model cannot be loaded") from None
            raise ValueError("the model cannot be loaded")  # noqa: B904
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`",
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(handle, opa, ...)`",
        "CUDA driver error: unspecified launch failure",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "cublasLt ran into an error!",
        "Triton Error [CUDA]: an illegal memory access was encountered",
    ],
)
def test_what_poisons_cuda_needs_a_fresh_process(text: str) -> None:
    error = RuntimeError(text)
    assert classify(error) is Verdict.SUSPECT
    assert classify(wrapped(error)) is Verdict.SUSPECT
    assert classify(wrapped(error, hidden=True)) is Verdict.SOUND, "a cause that was cut off is not known"
    assert classify(ValueError(text)) is Verdict.SOUND, "only a RuntimeError comes out of a kernel"
    assert not is_out_of_memory(error)


def test_torchs_own_types() -> None:
    import torch

    out_of_memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert is_out_of_memory(out_of_memory)
    assert classify(out_of_memory) is Verdict.SUSPECT
    if hasattr(torch, "AcceleratorError"):
        assert classify(torch.AcceleratorError("launch failed")) is Verdict.SUSPECT
        assert is_out_of_memory(torch.AcceleratorError("CUDA error: out of memory"))


def test_memory_of_the_host() -> None:
    import numpy as np
    import torch

    tensor = raised(lambda: torch.empty(TOO_MUCH, dtype=torch.uint8))
    assert type(tensor) is RuntimeError
    assert is_out_of_memory(tensor)
    array = raised(lambda: np.empty(TOO_MUCH, dtype=np.uint8))
    assert classify(array) is Verdict.SUSPECT
    assert classify(wrapped(array)) is Verdict.SUSPECT


def test_what_is_no_exception_needs_a_fresh_process() -> None:
    class PanicException(BaseException):  # as pyo3 derives it, for libraries written in Rust
        pass

    assert classify(PanicException("called `Option::unwrap()` on a `None` value")) is Verdict.SUSPECT
    assert classify(raised(lambda: sys.exit(0))) is Verdict.SUSPECT
    assert classify(SystemError("error return without exception set")) is Verdict.SUSPECT


def test_a_full_disk_is_full_for_a_fresh_process_too(tmp_path: Path) -> None:
    def write() -> None:
        with atomic_path(tmp_path / "gone" / "part.csv") as temporary:
            temporary.write_bytes(b"x")

    assert isinstance(raised(write), WriteError)
    assert classify(raised(write)) is Verdict.HOPELESS
    assert classify(raised(lambda: Path("/dev/full").write_text("x"))) is Verdict.HOPELESS
    missing = RuntimeError("CUDA error: no kernel image is available for execution on the device")
    assert classify(missing) is Verdict.HOPELESS


def test_a_type_that_no_kernel_takes_is_no_rows_fault() -> None:
    import torch

    half, eighth = torch.ones(2, 2).half(), torch.ones(2, 2, dtype=torch.float8_e4m3fn)
    for action in (
        lambda: torch.linalg.svd(half),
        lambda: eighth + 1,
        lambda: half @ torch.ones(2, 2),
        lambda: torch.nn.functional.conv1d(half[None], torch.ones(2, 2, 1)),
        lambda: torch.ops.aten._flash_attention_forward(
            half, half, half, None, None, 1, 1, 0.0, False, False
        ),
    ):
        assert classify(raised(action)) is Verdict.HOPELESS, raised(action)


def test_what_a_row_can_do_leaves_the_process_sound() -> None:
    import torch

    ids = torch.tensor([7])
    assert classify(raised(lambda: torch.nn.functional.embedding(ids, torch.ones(2, 2)))) is Verdict.SOUND
    assert classify(raised(lambda: torch.ones(2, 3) @ torch.ones(2, 3))) is Verdict.SOUND
    assert classify(raised(lambda: Path("/nowhere").read_text())) is Verdict.SOUND


def test_errors_in_one_line() -> None:
    assert one_line(ValueError("a\n   b\n\nc")) == "a b c"
    assert one_line(KeyError()) == "KeyError()"
    assert len(one_line(ValueError("x" * 10_000))) == 500


def test_a_process_beneath_it_that_was_killed_may_fare_better_in_a_fresh_worker() -> None:
    assert classify(ChildProcessError("its command was killed by signal 9 (SIGKILL)")) is Verdict.SUSPECT
