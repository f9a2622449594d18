"""Types, TF32 and attention: what the device and the user's word make of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ensemble.members.huggingface.spec import ModelSpec
from tests.checkpoints import make_checkpoint
from tests.worker.test_predict import LABELS, worker_spec

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
    from ensemble.members.huggingface.loading.precision import model_dtype

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
    from ensemble.members.huggingface.loading.precision import set_tf32

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


@pytest.mark.parametrize(
    ("architecture", "chosen"), [("gemma2", "eager"), ("llama", "sdpa"), ("deberta-v2", "eager")]
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

    for name, chosen in (("gemma2", "eager"), ("llama", "sdpa")):
        folder = make_checkpoint(tmp_path / name, name, LABELS)
        assert load(worker_spec(folder)).attn_implementation == chosen
