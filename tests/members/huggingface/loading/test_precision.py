"""Types, TF32 and attention: what the device and the user's word make of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ensemble.members.huggingface.spec import ModelSpec
from tests.checkpoints import make_checkpoint
from tests.members.huggingface.scoring.test_predict import LABELS, worker_spec

pytestmark = pytest.mark.usefixtures("one_thread")
T4, A100 = (7, 5), (8, 0)


def spec(**changes: Any) -> ModelSpec:
    return worker_spec(Path("nowhere"), **changes)


@pytest.mark.parametrize(
    ("asked", "planned", "capability", "expected", "note"),
    [
        ("auto", "auto", None, "float32", ""),
        ("auto", "float16", None, "float32", ""),  # a GPU that torch cannot use: the CPU after all
        ("bfloat16", "auto", None, "bfloat16", ""),
        ("auto", "auto", T4, "float16", "bfloat16 is only emulated"),
        ("auto", "bfloat16", T4, "float16", "bfloat16 is only emulated"),
        ("auto", "float16", T4, "float16", "bfloat16 is only emulated"),
        ("auto", "float32", T4, "float32", ""),
        ("bfloat16", "float16", T4, "bfloat16", "dtype: bfloat16 is only emulated"),
        ("float16", "float16", T4, "float16", ""),
        ("auto", "auto", A100, "auto", ""),
        ("auto", "bfloat16", A100, "bfloat16", ""),
        ("float32", "bfloat16", A100, "float32", ""),
    ],
)
def test_the_type_of_the_weights(
    asked: str, planned: str, capability: tuple[int, int] | None, expected: str, note: str
) -> None:
    from ensemble.members.huggingface.loading.model import model_dtype

    notes: list[str] = []
    changes = {"dtype": planned, "asked": ()} if asked == "auto" else {"dtype": asked}
    chosen = model_dtype(spec(**changes), capability, notes)
    assert str(chosen).removeprefix("torch.") == expected
    assert len(notes) == bool(note)
    assert note in "".join(notes)


@pytest.fixture
def own_tf32() -> Iterator[None]:
    import torch

    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.usefixtures("own_tf32")
def test_tf32_is_off_unless_asked_for(tmp_path: Path) -> None:
    import torch

    from ensemble.members.huggingface.loading.load import load

    folder = make_checkpoint(tmp_path, "llama", LABELS)
    for allow_tf32 in (True, False):
        assert load(worker_spec(folder, allow_tf32=allow_tf32)).notes == ()
        assert torch.backends.cudnn.allow_tf32 is allow_tf32
        assert torch.get_float32_matmul_precision() == ("high" if allow_tf32 else "highest")
        if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
            assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if allow_tf32 else "ieee")
            convolution: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
            assert (convolution.fp32_precision == "tf32") is allow_tf32


@pytest.mark.usefixtures("own_tf32")
def test_tf32_that_cannot_have_an_effect_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    from ensemble.members.huggingface.loading.kernels import set_tf32

    for override, capability, expected in (
        ("", A100, ""),
        ("", T4, "below compute capability 8.0"),
        ("0", A100, "NVIDIA_TF32_OVERRIDE=0"),
        ("0", None, ""),
    ):
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
        notes: list[str] = []
        set_tf32(spec(allow_tf32=True), capability, notes)
        assert len(notes) == bool(expected)
        assert expected in "".join(notes)
        set_tf32(spec(allow_tf32=False), capability, notes := [])
        assert notes == []


@pytest.fixture
def own_kernels() -> Iterator[None]:
    import torch
    from transformers.integrations import sdpa_attention

    products = torch.backends.cuda.matmul
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    reductions = (
        products.allow_fp16_reduced_precision_reduction,
        products.allow_bf16_reduced_precision_reduction,
    )
    shared = sdpa_attention.use_gqa_in_sdpa
    yield
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    products.allow_fp16_reduced_precision_reduction, products.allow_bf16_reduced_precision_reduction = (
        reductions
    )
    sdpa_attention.use_gqa_in_sdpa = shared


@pytest.mark.usefixtures("own_kernels")
def test_kernels_are_chosen_on_a_gpu_only() -> None:
    import torch
    from transformers.integrations import sdpa_attention

    from ensemble.members.huggingface.loading.kernels import choose_kernels

    def state() -> tuple[Any, ...]:
        products = torch.backends.cuda.matmul
        return (
            torch.backends.cuda.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]
            products.allow_fp16_reduced_precision_reduction,
            products.allow_bf16_reduced_precision_reduction,
        )

    torch.backends.cuda.enable_cudnn_sdp(True)
    before, shared = state(), sdpa_attention.use_gqa_in_sdpa
    choose_kernels(None)
    assert (state(), sdpa_attention.use_gqa_in_sdpa) == (before, shared)
    for _ in range(2):
        choose_kernels((9, 0))
        assert state() == (False, False, False)
        assert sdpa_attention.use_gqa_in_sdpa is not shared


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "expected"),
    [
        (T4, "float16", 64, False),
        (T4, "float32", 64, False),
        (A100, "float16", 128, True),
        (A100, "bfloat16", 256, True),
        (A100, "float32", 64, False),
        (A100, "bfloat16", 512, False),
        ((12, 0), "float16", 64, True),
    ],
)
def test_shared_keys_are_passed_on_where_a_fused_kernel_takes_them(
    capability: tuple[int, int], dtype: str, width: int, expected: bool
) -> None:
    import torch

    from ensemble.members.huggingface.loading.kernels import takes_shared_keys

    assert takes_shared_keys(capability, getattr(torch, dtype), width) is expected


@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen2"])
def test_repeated_keys_give_the_same_numbers(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a T4: torch is given as many heads of keys as of queries, and nothing to repeat by itself."""
    import torch
    import transformers

    from ensemble.members.huggingface.loading.kernels import choose_kernels
    from tests.members.huggingface.scoring.test_warmup import CASES, encoded_of, model_of, warmed_up

    given: list[tuple[int, int, bool]] = []
    own = torch.nn.functional.scaled_dot_product_attention

    def watched(query: Any, key: Any, value: Any, **options: Any) -> Any:
        assert key.shape[1] == value.shape[1]
        given.append((query.shape[1], key.shape[1], options.get("enable_gqa", False)))
        return own(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    config = CASES[architecture][0](transformers)
    is_fused = architecture != "gemma2"  # whose cap torch's kernels do not have
    config._attn_implementation = "sdpa" if is_fused else "eager"
    model = model_of(config)
    classifier = warmed_up(model)
    assert "NO_MASK" in {shortcut.name for shortcut in classifier.taken}
    # No longer than a local layer sees, for which transformers would make a mask.
    encoded = encoded_of([2, 5, 7, 7], seed=2)
    result = {}
    for name, capability in (("as they are", None), ("on an A100 in float32", A100), ("on a T4", T4)):
        choose_kernels(capability)
        given.clear()
        result[name] = classifier.logits(encoded, np.arange(4)).numpy()
        expected = {(4, 2, True)} if capability is None else {(4, 4, False)}
        assert set(given) == (expected if is_fused else set())
        np.testing.assert_allclose(result[name], result["as they are"], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("architecture", "chosen"), [("gemma2", "capped_blocks"), ("llama", "sdpa"), ("deberta-v2", "eager")]
)
def test_the_attention_that_the_model_supports(architecture: str, chosen: str, tmp_path: Path) -> None:
    from ensemble.members.huggingface.loading.load import load

    folder = make_checkpoint(tmp_path, architecture, LABELS)
    assert load(worker_spec(folder)).attn_implementation == chosen
    assert load(worker_spec(folder, attn_implementation="eager")).attn_implementation == "eager"


@pytest.mark.parametrize(
    ("asked", "reason"),
    [("flash_attention_2", "FlashAttention2"), ("fast", "fast")],
)
def test_an_attention_that_cannot_be_had_names_the_key(asked: str, reason: str, tmp_path: Path) -> None:
    from ensemble.members.huggingface.loading.load import load

    folder = make_checkpoint(tmp_path, "gemma2", LABELS)
    with pytest.raises(
        ValueError, match=f"^attn_implementation: {asked} cannot be used .*{reason}"
    ) as caught:
        load(worker_spec(folder, attn_implementation=asked))
    assert "leave the key out" in str(caught.value)
    assert "http" not in str(caught.value)


@pytest.mark.fault(30)
def test_attention_that_leaves_out_the_cap_is_refused(tmp_path: Path) -> None:
    """Releases of transformers before 5.22 take it without a word, and the numbers are others."""
    from ensemble.members.huggingface.loading.load import load

    folder = make_checkpoint(tmp_path, "gemma2", LABELS)
    with pytest.raises(ValueError, match=r"^attn_implementation: sdpa "):
        load(worker_spec(folder, attn_implementation="sdpa"))


def test_an_attention_that_was_chosen_and_is_not_there_makes_way(tmp_path: Path) -> None:
    """As for code that a checkpoint brings along, of which the plan knows nothing."""
    from ensemble.members.huggingface.loading.load import load

    folder = make_checkpoint(tmp_path, "deberta-v2", LABELS)
    loaded = load(worker_spec(folder, attn_implementation="sdpa", asked=()))
    assert loaded.attn_implementation == "eager"
    assert loaded.notes == ("eager attention, as this model has no sdpa",)


def test_a_worker_decides_where_the_plan_could_not(tmp_path: Path) -> None:
    from ensemble.members.huggingface.loading.load import load

    for name, chosen in (("gemma2", "capped_blocks"), ("llama", "sdpa")):
        folder = make_checkpoint(tmp_path / name, name, LABELS)
        assert load(worker_spec(folder)).attn_implementation == chosen
