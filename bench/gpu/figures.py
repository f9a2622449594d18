"""PURE: run.json and token counts -> tokens a second, and the share of the device's peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30


@dataclass(frozen=True)
class Speed:
    """How fast a member was.

    Attributes:
        tokens_per_second: real tokens by the time from each chunk's command to its end.
        forward_tokens_per_second: the same by the time in forward passes; None where that was not measured.
        token_budget: padded tokens a batch could hold.
    """

    member: str
    tokens: int
    tokens_per_second: float
    forward_tokens_per_second: float | None
    token_budget: int


def speed_of(member: Mapping[str, Any]) -> Speed:
    """A member of run.json -> its speed.

    Raises:
        ValueError: no worker of it computed anything.
    """
    workers = member["workers"]
    tokens = sum(worker["tokens"] for worker in workers)
    seconds = sum(worker["predict_seconds"] for worker in workers)
    forward = sum(worker.get("forward_seconds") or 0.0 for worker in workers)
    budgets = [worker["token_budget"] for worker in workers if worker["token_budget"] is not None]
    if not tokens or not seconds or not budgets:
        raise ValueError(f"{member['name']} computed nothing")
    return Speed(
        member["name"], tokens, tokens / seconds, tokens / forward if forward else None, max(budgets)
    )


def flops(shape: Mapping[str, Any], parameters: int, lengths: Sequence[int]) -> float:
    """Floating-point operations that classifying rows takes.

    Two for each weight and token, embeddings left out, which are looked up; and causal attention: a
    multiplication and an addition for each pair of a token with one before it, in the scores and in the sum of the
    values, which is 2 x length^2 x heads x head_dim for each layer.

    Args:
        shape: the checkpoint's config.json.
        parameters: of the model, embeddings included.
        lengths: tokens of each row.
    """
    weights = float(parameters - shape["vocab_size"] * shape["hidden_size"])
    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    width = float(shape["num_attention_heads"] * head_dim * shape["num_hidden_layers"])
    return 2.0 * weights * sum(lengths) + 2.0 * width * sum(length**2 for length in lengths)


def member_row(
    member: Mapping[str, Any],
    shape: Mapping[str, Any],
    lengths: Sequence[int],
    peak: float,
    gaps: Sequence[Mapping[str, Any]],
) -> dict[str, object]:
    """A row of the table of members.

    Args:
        lengths: tokens of the run's rows.
        peak: the device's floating-point operations a second.
        gaps: run.json's, of all members.
    """
    speed, worker = speed_of(member), member["workers"][0]
    per_token = flops(shape, worker["parameters"], lengths) / sum(lengths)
    idle = [gap["seconds"] for gap in gaps if gap["before"] == member["name"]]
    forward = speed.forward_tokens_per_second
    return {
        "member": f"{member['name']}, {worker['parameters'] / 1e9:.2f}e9 parameters",
        "weights": worker["dtype"],
        "attention": worker["attn_implementation"],
        "tokens": speed.tokens,
        "tokens/s": round(speed.tokens_per_second),
        "share of peak": speed.tokens_per_second * per_token / peak,
        "tokens/s in forward passes": round(forward) if forward is not None else None,
        "share of peak in them": forward * per_token / peak if forward is not None else None,
        "load, s": worker["load_seconds"],
        "device idle before it, s": max(idle) if idle else None,
        "peak, GiB": round((worker["peak_gpu_memory_bytes"] or worker["peak_memory_bytes"] or 0) / GIB, 2),
    }


def sweep_row(model: str, speeds: Sequence[Speed]) -> dict[str, object]:
    """A row of the table of budgets; the first speed is with the budget that was chosen."""
    chosen, best = speeds[0], max(speeds, key=lambda speed: speed.tokens_per_second)
    return {
        "model": model,
        "budget chosen": chosen.token_budget,
        "tokens/s": round(chosen.tokens_per_second),
        "best budget of the sweep": best.token_budget,
        "its tokens/s": round(best.tokens_per_second),
        "chosen / best": chosen.tokens_per_second / best.tokens_per_second,
        "all": ", ".join(f"{each.token_budget}: {each.tokens_per_second:.0f}" for each in speeds[1:]),
    }


def gpus_row(member: Mapping[str, Any], gpus: int, alone: Speed) -> dict[str, object]:
    """A row of the table of members on several GPUs.

    Args:
        gpus: that all of its workers have together.
        alone: of the same model on one GPU.
    """
    speed, workers = speed_of(member), member["workers"]
    computing = [worker for worker in workers if worker["tokens"]]
    per_second = speed.tokens_per_second * len(computing)
    return {
        "member": member["name"],
        "GPUs": gpus,
        "workers": len(computing),
        "tokens a batch": speed.token_budget,
        "tokens/s together": round(per_second),
        "of one GPU's": per_second / alone.tokens_per_second,
        "load, s": max(worker["load_seconds"] for worker in workers),
    }
