"""Numbers: which types the weights and the arithmetic have on this device, and which attention goes with them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from ensemble.members.huggingface.spec import ModelSpec, cap_problem, choose_dtype, is_soft_capped

Capability = tuple[int, int]
# Below, bfloat16 is only emulated, whatever is_bf16_supported() says, and there is no TF32 (CUDA C++ Programming
# Guide, "Compute Capabilities": both came with Ampere, as did the kernels of flash-attention-2).
AMPERE: Capability = (8, 0)
# What transformers' refusals speak of; names of modules, such as "attention.self", are not among it.
_OF_ATTENTION = (
    "attention implementation",
    "attn_implementation",
    "flash_attn",
    "flashattention",
    "flash attention",
    "flex attention",
)


def model_dtype(spec: ModelSpec, least: Capability | None, notes: list[str]) -> torch.dtype | str:
    """The type for ``from_pretrained``: the spec's, or what this device has instead; "auto": the checkpoint's own.

    Args:
        least: the compute capability of the least capable device; None on a CPU.
        notes: takes a sentence where the type may surprise.
    """
    is_asked, planned = "dtype" in spec.asked, spec.dtype
    asked = planned if is_asked or planned == "float32" else "auto"
    dtype = choose_dtype(asked, None if planned == "auto" else planned, least is not None, least)
    if least is not None and least < AMPERE:
        if is_asked and dtype == "bfloat16":
            notes.append(
                "dtype: bfloat16 is only emulated below compute capability 8.0: slow; float16 is what this GPU has"
            )
        elif not is_asked and dtype == "float16":
            notes.append("float16: bfloat16 is only emulated below compute capability 8.0")
    return dtype if dtype == "auto" else getattr(torch, dtype)


def capability(on_gpu: bool) -> Capability | None:
    """The compute capability of the least capable GPU that this process sees; None on a CPU."""
    if not on_gpu:
        return None
    return min(torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))


def set_tf32(spec: ModelSpec, least: Capability | None, notes: list[str]) -> None:
    """Let float32 products use TF32's 10 bits of mantissa or not, and note what did not take effect.

    cuDNN's is on in torch unless it is set.  The two switches are the ones that all releases have; since torch
    2.9 they set ``fp32_precision`` too, while after setting that one, whatever reads these raises an error.
    """
    torch.backends.cuda.matmul.allow_tf32 = spec.allow_tf32
    torch.backends.cudnn.allow_tf32 = spec.allow_tf32
    if {torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32} != {spec.allow_tf32}:
        notes.append(
            f"allow_tf32: {str(spec.allow_tf32).lower()} did not take effect: torch keeps its own setting"
        )
    if not spec.allow_tf32 or least is None:
        return
    if least < AMPERE:
        notes.append("allow_tf32 has no effect below compute capability 8.0")
    elif os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":  # cuBLAS and cuDNN heed it, whatever a program sets
        notes.append("allow_tf32 has no effect while NVIDIA_TF32_OVERRIDE=0 is in the environment")


def check_cap(spec: ModelSpec, model: Any) -> None:
    """Refuse attention that leaves out the cap on a model's scores; some releases of transformers say nothing.

    Raises:
        ValueError: it would.
    """
    attention = getattr(model.config.get_text_config(), "_attn_implementation", None)
    problem = cap_problem(attention, spec.model_name_or_path)
    if problem and is_soft_capped(model.config.to_dict()):
        raise ValueError(problem)


def may_omit_mask(model: Any, least: Capability | None) -> bool:
    """Whether this device's attention does as well without a mask, or better.

    Without one transformers lets torch's kernels repeat shared keys (use_gqa_in_sdpa), which only those for half
    precision from Ampere on can; others would fall back to plain products.

    Args:
        least: the compute capability of the least capable device; None on a CPU.
    """
    return least is None or (least >= AMPERE and model.dtype in (torch.float16, torch.bfloat16))


def is_of_attention(error: Exception) -> bool:
    """Whether transformers refuses the attention that it was told to take."""
    reason = str(error).lower()
    return any(words in reason for words in _OF_ATTENTION)


@contextlib.contextmanager
def attention_errors(spec: ModelSpec) -> Iterator[None]:
    """Names the key where transformers refuses the attention that the user asked for.

    Raises:
        ValueError: the model, the device or the installed packages do not have that attention.
    """
    try:
        yield
    except (ImportError, ValueError) as error:
        reason = str(error)
        if (
            "attn_implementation" not in spec.asked
            or not is_of_attention(error)
            or reason.startswith("attn_implementation: ")
        ):
            raise
        # What follows is advice to ask for support of the architecture, and calls of transformers to try.
        reason = reason.split(" Please ")[0].strip().rstrip(".")
        raise ValueError(
            f"attn_implementation: {spec.attn_implementation} cannot be used ({reason}); leave the key out, and "
            "the best one for model and device is used"
        ) from error
