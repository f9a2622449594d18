"""The sentence about a pass that a machine cannot compute: for GPUs, which this one need not have, as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.members.huggingface.scoring.test_predict import LABELS, worker_spec

pytestmark = pytest.mark.usefixtures("one_thread")
NO_KERNEL = (
    "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors might be"
)


@pytest.fixture
def bert(tmp_path: Path) -> tuple[Any, Any]:
    from ensemble.members.huggingface.loading.load import load

    spec = worker_spec(make_checkpoint(tmp_path, "bert", LABELS), dtype="float16")
    return spec, load(spec).model


def run(bert: tuple[Any, Any], error: Exception, place: str, first: bool = False) -> None:
    """A pass in which the module at ``place`` fails with ``error``, on a GPU by what is said."""
    import torch

    from ensemble.members.huggingface.scoring.passes import explain_errors

    spec, model = bert

    def fails(*_: Any, **__: Any) -> None:
        raise error

    model.get_submodule(place).forward = fails
    with explain_errors(spec, model, "Tesla P4", first):
        model(input_ids=torch.tensor([[3, 7, 4]]))


@pytest.mark.fault(37)
def test_a_gpu_that_torch_has_no_kernels_for(bert: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="no kernel image") as caught:
        run(bert, RuntimeError(NO_KERNEL), "bert.encoder.layer.0.output.dense")
    sentence = str(caught.value)
    assert sentence.startswith(
        "its forward pass fails in bert.encoder.layer.0.output.dense (Linear(in_features=128, out_features=64, "
        "bias=True)) on this GPU (Tesla P4): RuntimeError: CUDA error: no kernel image is available for execution"
    )
    assert sentence.endswith("what else may work: dtype: float32 or bfloat16, or the CPU (num_gpus: 0)")


@pytest.mark.fault(37)
def test_what_may_be_a_rows_fault_stays_as_it_is(bert: tuple[Any, Any]) -> None:
    import torch

    place = "bert.encoder.layer.1.attention.self"
    with pytest.raises(RuntimeError, match=r"^shape"):
        run(bert, RuntimeError("shape '[2, 0]' is invalid"), place)
    with pytest.raises(torch.OutOfMemoryError):
        run(bert, torch.OutOfMemoryError("CUDA out of memory."), place, first=True)
    with pytest.raises(RuntimeError, match=r"^CUDA error"):
        run(bert, RuntimeError("CUDA error: an illegal memory access was encountered"), place, first=True)
    with pytest.raises(ValueError, match=r"shape.*what else may work: .*attn_implementation: eager"):
        run(bert, RuntimeError("shape '[2, 0]' is invalid"), place, first=True)
