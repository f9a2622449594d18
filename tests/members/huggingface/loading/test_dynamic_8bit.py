"""Products of 8 bits equal a reference that rounds in the same way, in a layer and in whole models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from ensemble.members.huggingface.checkpoint.quantization_methods import DYNAMIC_FP8, DYNAMIC_INT8
from ensemble.members.huggingface.loading.dynamic_8bit import DynamicLinear, quantize
from tests.checkpoints import make_checkpoint, make_texts, reference
from tests.members.huggingface.scoring.test_predict import LABELS, compute, worker_spec

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = make_texts(15, longest=25)
ROWS = [{"text": text} for text in TEXTS]
TYPES = {DYNAMIC_INT8: torch.int8, DYNAMIC_FP8: torch.float8_e4m3fn}


def layer(
    inputs: int, outputs: int, dtype: torch.dtype, bias: bool = True
) -> tuple[nn.Linear, DynamicLinear]:
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs, bias=bias)
    quantized = DynamicLinear(linear, dtype)
    weight, scale = quantize(linear.weight.detach(), dtype)
    quantized.weight = nn.Parameter(weight, requires_grad=False)
    quantized.scale = nn.Parameter(scale, requires_grad=False)
    return linear, quantized


def rounded(values: torch.Tensor, method: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of 8 bits as float64, and a scale for each row."""
    limit = 127 if method == DYNAMIC_INT8 else 448
    scales = values.float().abs().max(dim=1, keepdim=True).values / limit
    numbers = values.float() / scales
    numbers = numbers.round() if method == DYNAMIC_INT8 else numbers.to(torch.float8_e4m3fn)
    return numbers.double(), scales


def product(tokens: torch.Tensor, linear: nn.Linear, method: str) -> torch.Tensor:
    """The same rounding, and products in float64."""
    numbers, scales = rounded(tokens.reshape(-1, tokens.shape[-1]), method)
    weights, weight_scales = rounded(linear.weight.detach(), method)
    result = (numbers @ weights.T).float() * scales * weight_scales.T
    if linear.bias is not None:
        result = result + linear.bias
    return result.view(*tokens.shape[:-1], -1)


def skip_without_product(method: str) -> None:
    if method == DYNAMIC_FP8:
        try:
            layer(16, 16, torch.float8_e4m3fn)[1](torch.randn(1, 16))
        except (RuntimeError, NotImplementedError) as error:
            pytest.skip(f"torch {torch.__version__} multiplies no FP8 on a CPU: {error}")


@pytest.mark.parametrize("tokens", [1, 16, 17, 1025, 2048])
@pytest.mark.parametrize("method", [DYNAMIC_INT8, DYNAMIC_FP8])
@torch.inference_mode()
def test_a_layer_equals_a_reference_of_the_same_rounding(method: str, tokens: int) -> None:
    skip_without_product(method)
    for bias in (True, False):
        linear, quantized = layer(48, 32, TYPES[method], bias)
        hidden = torch.randn(tokens, 1, 48) * torch.rand(tokens, 1, 1) * 30
        hidden[0, 0, 5] = 1000.0  # an outlier coarsens its own token only
        actual, expected = quantized(hidden), product(hidden, linear, method)
        if method == DYNAMIC_INT8:
            np.testing.assert_array_equal(actual.numpy(), expected.numpy())
        else:  # comes out in bfloat16
            tolerance = 2**-8 * expected.abs().amax(-1, keepdim=True)
            assert bool(((actual - expected).abs() <= tolerance).all())
        exact = linear(hidden)
        # Half of the largest number's last place, for the input and for the weight.
        step = 1 / 127 if method == DYNAMIC_INT8 else 1 / 16
        scale = functional.linear(hidden.abs(), linear.weight.abs()).amax(-1, keepdim=True)
        assert bool(((actual - exact).abs() <= 48**0.5 * step * scale).all())


@pytest.mark.parametrize("method", [DYNAMIC_INT8, DYNAMIC_FP8])
@torch.inference_mode()
def test_a_token_is_independent_of_its_neighbours(method: str) -> None:
    skip_without_product(method)
    _, quantized = layer(48, 32, TYPES[method])
    hidden = torch.randn(40, 48)
    beside = hidden.clone()
    beside[1:] *= 1e4
    np.testing.assert_array_equal(quantized(hidden)[0].numpy(), quantized(beside)[0].numpy())
    if method == DYNAMIC_INT8:  # sums of whole numbers are exact in any order
        np.testing.assert_array_equal(quantized(hidden[:1])[0].numpy(), quantized(beside)[0].numpy())


@torch.inference_mode()
def test_a_weight_that_the_checkpoint_lacks_stays_as_it_is() -> None:
    linear = torch.nn.Linear(48, 32)
    hidden = torch.randn(3, 48)
    np.testing.assert_array_equal(DynamicLinear(linear, torch.int8)(hidden).numpy(), linear(hidden).numpy())


@torch.inference_mode()
def test_zeros_stay_zeros_and_what_is_not_finite_is_no_number() -> None:
    _, quantized = layer(48, 32, torch.int8, bias=False)
    hidden = torch.zeros(3, 48)
    hidden[1, 4], hidden[2, 4] = float("inf"), float("nan")
    result = quantized(hidden)
    assert bool((result[0] == 0).all())
    assert not bool(result[1:].isfinite().any())


@pytest.mark.parametrize("architecture", ["llama", "bert"])
def test_a_model_equals_one_with_the_same_rounding(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = make_checkpoint(tmp_path, architecture, LABELS)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name not in ("score", "classifier"):
            module.forward = lambda hidden, module=module: product(hidden, module, DYNAMIC_INT8)  # type: ignore[method-assign, misc]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = [model(**tokenizer([text], return_tensors="pt")).logits[0] for text in TEXTS]
    expected = torch.stack(logits).double().softmax(-1).numpy()
    spec = worker_spec(folder, quantization_config={"quant_method": DYNAMIC_INT8}, batch_size=1)
    actual = compute(spec, ROWS)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
    assert 1e-4 < np.abs(actual - reference(folder, TEXTS)).max() < 0.1, "eight bits must show, but not much"


@pytest.mark.parametrize("method", [DYNAMIC_INT8, DYNAMIC_FP8])
@pytest.mark.parametrize("architecture", ["llama", "bert", "gemma2"])
def test_weights_take_a_byte_as_the_plan_counts(method: str, architecture: str, tmp_path: Path) -> None:
    from ensemble.members.huggingface.loading.load import load
    from ensemble.members.huggingface.memory.estimate import checkpoint_memory
    from ensemble.members.seq_cls.settings import SequenceClassifierSettings
    from tests.checkpoints import inspect_folder

    skip_without_product(method)
    settings = {"quant_method": method}
    folder = make_checkpoint(tmp_path, architecture, LABELS)
    model = load(worker_spec(folder, quantization_config=settings)).model
    assert {module.weight.dtype for module in model.modules() if isinstance(module, DynamicLinear)} == {
        TYPES[method]
    }
    loaded = sum(tensor.nbytes for tensor in model.parameters())
    member = SequenceClassifierSettings(
        name="m", model_name_or_path=str(folder), text_column="text", quantization_config=settings
    )
    checkpoint = inspect_folder(folder, LABELS, quantization_config=settings)
    memory = checkpoint_memory(member, checkpoint, np.array([10]), len(LABELS))
    footprint = memory.footprint(0, None)
    assert footprint is not None
    assert footprint.quantization == method
    assert footprint.weights.bytes == pytest.approx(loaded, rel=0.01)
    assert loaded < 0.6 * sum(4 * tensor.numel() for tensor in model.parameters())
    needed = (7, 5) if method == DYNAMIC_INT8 else (8, 9)
    assert not memory.problem(needed)
    assert not memory.problem(None)
    assert f"{method} needs compute capability" in memory.problem((7, 0))


def test_a_gpu_without_such_products_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    from ensemble.members.huggingface.loading.model import load_model

    spec = worker_spec(tmp_path, quantization_config={"quant_method": DYNAMIC_FP8})
    with pytest.raises(ValueError, match=r"dynamic_fp8 needs compute capability 8\.9, and .* has 8\.0"):
        load_model(spec, (8, 0), [])


@pytest.mark.parametrize(
    "keys",
    [
        {"adapter_name_or_path": "adapter"},
        {"offload_folder": "offloaded"},
        {"max_memory": {0: "1GiB", "cpu": "4GiB"}, "num_gpus": 1},
    ],
)
def test_adapters_and_offload_are_refused(keys: dict[str, Any]) -> None:
    from ensemble.members.seq_cls.settings import SequenceClassifierSettings

    settings = {"name": "m", "model_name_or_path": "m", "text_column": "text"}
    quantization = {"quantization_config": {"quant_method": DYNAMIC_INT8}}
    with pytest.raises(ValueError, match="dynamic_int8 goes neither with an adapter nor with offload"):
        SequenceClassifierSettings.model_validate({**settings, **quantization, **keys})


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    from ensemble.members.huggingface.loading.load import load

    folder = make_checkpoint(tmp_path, "gpt2", LABELS)
    with pytest.raises(ValueError, match="has no linear layers for dynamic_int8"):
        load(worker_spec(folder, quantization_config={"quant_method": DYNAMIC_INT8}))


@pytest.mark.parametrize(
    ("capability", "offered"),
    [(None, set()), ((7, 0), set()), ((7, 5), {DYNAMIC_INT8}), ((8, 9), {DYNAMIC_INT8, DYNAMIC_FP8})],
)
def test_tune_tries_what_the_gpu_has(
    capability: tuple[int, int] | None, offered: set[str], tmp_path: Path
) -> None:
    from ensemble.members.base import Assigned
    from ensemble.members.huggingface.checkpoint.description import Description
    from ensemble.members.registry import member_kind
    from ensemble.members.seq_cls.settings import SequenceClassifierSettings

    member = SequenceClassifierSettings(name="m", model_name_or_path="m", text_column="text")
    inspected: Any = SimpleNamespace(folder=tmp_path, described=Description(), quantization=None)
    precisions, *_ = member_kind(member).candidates(inspected, Assigned(gpus=1, capability=capability))
    assert {candidate.name for candidate in precisions} & {DYNAMIC_INT8, DYNAMIC_FP8} == offered
    on_cpu, *_ = member_kind(member).candidates(inspected, Assigned(gpus=0, capability=(9, 0)))
    assert not {candidate.name for candidate in on_cpu} & {DYNAMIC_INT8, DYNAMIC_FP8}
