"""The figures for a GPU: what they count, what they refuse, and the whole program rehearsed on tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.gpu import measuring as command
from bench.gpu.figures import by_hand_row, compared, flops, gap_rows, gpus_row, member_row, speed_of
from tests.checkpoints import make_checkpoint

SHAPE = {"vocab_size": 100, "hidden_size": 10, "num_attention_heads": 2, "num_hidden_layers": 3}


def member(
    seconds: float = 2.0, tokens: int = 1000, budget: int | None = 4096, **worker: Any
) -> dict[str, Any]:
    counters = {"tokens": tokens, "predict_seconds": seconds, "forward_seconds": seconds / 2, **worker}
    ready = {"parameters": 2000, "token_budget": budget, "dtype": "bfloat16", "attn_implementation": "sdpa",
             "notes": ["slow"]}  # fmt: skip
    known = {"load_seconds": 1.5, "ready": ready, "closed": {"peak_gpu_memory_bytes": 1 << 30}}
    forecast = {"peak_bytes": 2 << 30, "context_bytes": 1 << 29}
    return {"name": "m", "forecast": forecast, "workers": [{**known, "counters": counters}]}


def test_operations_are_those_that_torch_counts(tmp_path: Path) -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForSequenceClassification

    folder = make_checkpoint(tmp_path / "m", "llama", ["a", "b"])
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager")
    length = 200
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.full((1, length), 7))
    shape, parameters = model.config.to_dict(), sum(each.numel() for each in model.parameters())
    # Eager attention computes what lies behind a token, too.
    behind = 2 * length**2 * shape["num_attention_heads"] * shape["head_dim"] * shape["num_hidden_layers"]
    counted = counter.get_total_flops()
    assert flops(shape, parameters, [length]) + behind == pytest.approx(counted, rel=0.02)
    assert flops(shape, parameters, [length, 1]) < flops(shape, parameters, [length + 1])
    encoder = {**shape, "model_type": "xlm-roberta", "max_position_embeddings": 10}
    with_table = parameters + 10 * shape["hidden_size"]
    assert flops(encoder, with_table, [length]) == flops(shape, parameters, [length]) + behind


def test_a_member_is_held_to_the_peak() -> None:
    per_token = flops(SHAPE, 2000, [100] * 10) / 1000
    assert per_token == 2 * (2000 - 1000) + 2 * 3 * 10 * 100
    row = member_row(member(), per_token, peak=1e7)
    assert row["tokens/s"] == 500
    assert row["share of peak"] == pytest.approx(500 * per_token / 1e7)
    assert row["share of peak in them"] == pytest.approx(1000 * per_token / 1e7)
    assert row["planned / allocated"] == 1.5, "without CUDA's context"
    assert member_row(member(forward_seconds=0.0), per_token, 1e7)["share of peak in them"] is None
    with pytest.raises(ValueError, match="m computed nothing"):
        speed_of(member(tokens=0))


def test_speeds_are_held_to_one_of_them() -> None:
    rows = [
        {**member_row(member(seconds), 1.0, 1e7), "member": name}
        for name, seconds in (("flex", 2.0), ("eager", 4.0))
    ]
    loop = {"tokens": 1000, "seconds": 5.0, "dtype": "bfloat16", "load_seconds": 1.0}
    rows.append(by_hand_row(loop, "sdpa", 16_384, 1.0, 1e7))
    assert [row["times eager"] for row in compared(rows, "eager")] == [2.0, 1.0, 0.8]
    assert compared(rows, "gone")[0]["times gone"] is None


def test_a_gap_is_split_into_its_parts() -> None:
    first = {"computed_from": 5.0, "leased_after_seconds": 1.0, "life_seconds": 30.0, "computed_to": 30.2}
    second = {"started_after_seconds": 20.0, "start_seconds": 9.0, "leased_after_seconds": 31.5}
    members = [
        {"name": "a", "workers": [first]},
        {"name": "b", "workers": [{**second, "computed_from": 35.0}]},
    ]
    report = {
        "members": members,
        "idle_gaps": [{"device": "GPU-0", "after": "a", "before": "b", "seconds": 4.8}],
    }
    (row,) = gap_rows(report)
    parts = ("its process ends", "memory is back", "late imports", "loading")
    assert [row[part] for part in parts] == pytest.approx([0.8, 0.5, 0.0, 3.5])
    second["start_seconds"] = 13.0
    members[1]["workers"] = [{**second, "computed_from": 35.0}]
    (row,) = gap_rows(report)
    assert [row[part] for part in parts] == pytest.approx([0.8, 0.5, 1.5, 2.0])
    assert sum(row[part] for part in parts) == pytest.approx(row["gap, s"])


def test_workers_on_several_gpus_are_counted_together() -> None:
    alone = speed_of(member(2.0))
    assert gpus_row(member(1.25), 2, alone)["of one GPU's"] == pytest.approx(1.6), "over both"
    two = {"name": "m", "workers": member(2.1)["workers"] * 2}
    row = gpus_row(two, 2, alone)
    assert (row["workers"], row["tokens/s together"]) == (2, 952)
    assert row["of one GPU's"] == pytest.approx(2 / 1.05)
    two["workers"].append(member(0.0, tokens=0)["workers"][0])
    assert gpus_row(two, 2, alone) == row, "one that came too late for a chunk"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_rehearsal_goes_through_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--rehearse"]) == 0
    message = capsys.readouterr().out
    assert "FAILED" not in message
    assert "No figure" not in message
    assert "| -" not in message, "a share below nothing"
    for model in ("gemma9b", "llama8b", "encoder", "g270"):
        assert f"{model}, 24 rows" in message
    assert message.count("| hand-made loop | float32 |") == 3
    assert message.count("| flex | float32 | capped_blocks |") == 1, "on a CPU, with the note of why"
    assert message.count("| nf4 | float32 |") == message.count("| int8 | float32 |") == 1
    assert "| capped_blocks attention |" in message
    assert "fused norms |" in message
    assert "| over-two | 2 | 1 |" in message
    skipped = [line for line in message.splitlines() if line.startswith("Skipped")]
    assert all("not offered here" in line for line in skipped), skipped
