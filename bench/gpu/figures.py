"""PURE: run.json and token counts -> tokens a second, and the share of the device's peak."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30
# Of the shapes that are measured here.
ENCODERS = ("xlm-roberta",)
BY_HAND = "hand-made loop"


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
    tokens, seconds, forward = (
        sum(worker["counters"][name] for worker in workers)
        for name in ("tokens", "predict_seconds", "forward_seconds")
    )
    budgets = [worker["ready"]["token_budget"] for worker in workers if worker["ready"] is not None]
    budgets = [budget for budget in budgets if budget is not None]
    if not tokens or not seconds or not budgets:
        raise ValueError(f"{member['name']} computed nothing")
    return Speed(
        member["name"], tokens, tokens / seconds, tokens / forward if forward else None, max(budgets)
    )


def flops(shape: Mapping[str, Any], parameters: int, lengths: Sequence[int]) -> float:
    """Floating-point operations that classifying rows takes.

    Two for each weight and token, embeddings left out, which are looked up; and attention: a multiplication and an
    addition for each pair of a token with one before it, in the scores and in the sum of the values, which is
    2 x length^2 x heads x head_dim for each layer, and twice as much in an encoder.

    Args:
        shape: the checkpoint's config.json.
        parameters: of the model, embeddings included.
        lengths: tokens of each row.
    """
    is_encoder = shape.get("model_type") in ENCODERS
    looked_up = shape["vocab_size"] + (shape["max_position_embeddings"] if is_encoder else 0)
    weights = float(parameters - looked_up * shape["hidden_size"])
    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    width = float(shape["num_attention_heads"] * head_dim * shape["num_hidden_layers"])
    pairs = (2.0 if is_encoder else 1.0) * sum(length**2 for length in lengths)
    return 2.0 * weights * sum(lengths) + 2.0 * width * pairs


def member_row(
    member: Mapping[str, Any],
    operations_per_token: float,
    peak: float,
    gaps: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return a row of the table of members.

    Args:
        peak: the device's floating-point operations a second.
        gaps: run.json's, of all members.
    """
    speed, worker = speed_of(member), member["workers"][0]
    idle = [gap["seconds"] for gap in gaps if gap["before"] == member["name"]]
    forward, closed = speed.forward_tokens_per_second, worker["closed"]
    return {
        "member": member["name"],
        "weights": worker["ready"]["dtype"],
        "attention": worker["ready"]["attn_implementation"],
        "tokens a batch": speed.token_budget,
        "tokens": speed.tokens,
        "tokens/s": round(speed.tokens_per_second),
        "share of peak": speed.tokens_per_second * operations_per_token / peak,
        "tokens/s in forward passes": round(forward) if forward is not None else None,
        "share of peak in them": forward * operations_per_token / peak if forward is not None else None,
        "load, s": worker["load_seconds"],
        "device idle before it, s": max(idle) if idle else None,
        "peak, GiB": round((closed["peak_gpu_memory_bytes"] or closed["peak_memory_bytes"] or 0) / GIB, 2),
    }


def by_hand_row(
    measured: Mapping[str, Any], attention: str, budget: int, operations_per_token: float, peak: float
) -> dict[str, Any]:
    """Return the row of a hand-made loop in the table of members; ``measured`` is what the loop prints."""
    speed = measured["tokens"] / measured["seconds"]
    return {
        "member": BY_HAND,
        "weights": measured["dtype"],
        "attention": attention,
        "tokens a batch": budget,
        "tokens": measured["tokens"],
        "tokens/s": round(speed),
        "share of peak": speed * operations_per_token / peak,
        "load, s": measured["load_seconds"],
        "peak, GiB": round(measured.get("peak_bytes", 0) / GIB, 2),
    }


def compared(rows: Sequence[dict[str, Any]], sweep: Collection[str]) -> list[dict[str, Any]]:
    """Add to each row its share of the fastest member's speed, and its speed by the hand-made loop's.

    Args:
        sweep: the members that differ in their budget alone.
    """
    speeds = {row["member"]: row["tokens/s"] for row in rows}
    best = max(speed for name, speed in speeds.items() if name in sweep)
    by_hand = speeds.get(BY_HAND)
    added = []
    for row in rows:
        speed = speeds[row["member"]]
        shares = {"of the best budget's": speed / best, "of the loop's": speed / by_hand if by_hand else None}
        added.append({**row, **shares})
    return added


def gpus_row(member: Mapping[str, Any], gpus: int, alone: Speed) -> dict[str, Any]:
    """A row of the table of members on several GPUs.

    Args:
        gpus: that all of its workers have together.
        alone: of the same model on one GPU.
    """
    speed, workers = speed_of(member), member["workers"]
    computing = [worker for worker in workers if worker["counters"]["tokens"]]
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
