"""PURE: run.json and token counts -> tokens a second, and the share of the device's peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def member_row(member: Mapping[str, Any], operations_per_token: float, peak: float) -> dict[str, Any]:
    """Return a row of the table of members.

    Args:
        peak: the device's floating-point operations a second.
    """
    speed, worker = speed_of(member), member["workers"][-1]  # one before it may have failed
    forward, closed = speed.forward_tokens_per_second, worker["closed"]
    planned, allocated = planned_and_allocated(member)
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
        "peak, GiB": round((closed["peak_gpu_memory_bytes"] or closed["peak_memory_bytes"] or 0) / GIB, 2),
        "planned / allocated": planned / allocated if planned and allocated else None,
        "notes": "; ".join(worker["ready"]["notes"]),
    }


def planned_and_allocated(member: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """A member of run.json -> bytes that a GPU was planned to hold at most, and what torch held of it.

    Neither counts CUDA's context.  The plan forecasts what tensors take; torch reserves more.
    """
    forecast = member["forecast"]
    planned = forecast["peak_bytes"] - forecast["context_bytes"] if forecast else None
    closed = [worker["closed"] for worker in member["workers"] if worker["closed"]]
    peaks = [each.get("peak_gpu_allocated_bytes") or each["peak_gpu_memory_bytes"] or 0 for each in closed]
    return planned, max(peaks, default=0) or None


def gap_rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A run.json -> a row for each gap between two members on a device, with its parts, in seconds.

    Where imports were not done when the device was free, the member before computed for too short a time, and the
    gap is no figure for longer ones.
    """
    workers = {
        member["name"]: [worker for worker in member["workers"] if worker["computed_from"] is not None]
        for member in report["members"]
    }
    rows = []
    for gap in report.get("idle_gaps", ()):
        before, behind = workers[gap["after"]][-1], workers[gap["before"]][0]
        ended = before["leased_after_seconds"] + before["life_seconds"]
        leased = behind["leased_after_seconds"]
        imports = max(0.0, behind["started_after_seconds"] + behind["start_seconds"] - leased)
        rows.append(
            {
                "between": f"{gap['after']} and {gap['before']}",
                "gap, s": gap["seconds"],
                "its process ends": ended - before["computed_to"],
                "memory is back": leased - ended,
                "late imports": imports,
                "loading": behind["computed_from"] - leased - imports,
            }
        )
    return rows


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


def compared(rows: Sequence[dict[str, Any]], base: str) -> list[dict[str, Any]]:
    """Add to each row its speed by that of the row whose member is ``base``, where there is one."""
    speeds = {row["member"]: row["tokens/s"] for row in rows}
    by = speeds.get(base)
    return [{**row, f"times {base}": row["tokens/s"] / by if by else None} for row in rows]


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
