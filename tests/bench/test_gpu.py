"""The figures for a GPU: what they count, what they refuse, and the whole program rehearsed on tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.gpu import measuring as command
from bench.gpu.figures import flops, gpus_row, member_row, speed_of, sweep_row
from bench.gpu.place import Place, why_no_gpu
from tests.checkpoints import make_checkpoint

SHAPE = {"vocab_size": 100, "hidden_size": 10, "num_attention_heads": 2, "num_hidden_layers": 3}


def member(
    seconds: float = 2.0, tokens: int = 1000, budget: int | None = 4096, **worker: Any
) -> dict[str, Any]:
    known = {"tokens": tokens, "predict_seconds": seconds, "forward_seconds": seconds / 2, "parameters": 2000,
             "token_budget": budget, "dtype": "bfloat16", "attn_implementation": "sdpa", "load_seconds": 1.5,
             "peak_gpu_memory_bytes": 1 << 30}  # fmt: skip
    return {"name": "m", "workers": [{**known, **worker}]}


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


def test_a_member_is_held_to_the_peak() -> None:
    gaps = [{"device": "GPU-0", "after": "x", "before": "m", "seconds": 0.7},
            {"device": "GPU-0", "after": "m", "before": "y", "seconds": 9.0}]  # fmt: skip
    row = member_row(member(), SHAPE, [100] * 10, peak=1e7, gaps=gaps)
    per_token = 2 * (2000 - 1000) + 2 * 3 * 10 * 100
    assert row["tokens/s"] == 500
    assert row["share of peak"] == pytest.approx(500 * per_token / 1e7)
    assert row["share of peak in them"] == pytest.approx(1000 * per_token / 1e7)
    assert row["device idle before it, s"] == 0.7
    assert member_row(member(forward_seconds=0.0), SHAPE, [100], 1e7, [])["share of peak in them"] is None


def test_the_chosen_budget_is_held_to_the_best() -> None:
    speeds = [speed_of(member(2.0, budget=16_384)), speed_of(member(1.6, budget=8192)), speed_of(member(3))]
    row = sweep_row("m", speeds)
    assert (row["budget chosen"], row["best budget of the sweep"]) == (16_384, 8192)
    assert row["chosen / best"] == pytest.approx(0.8)
    assert sweep_row("m", speeds[::2])["chosen / best"] == 1
    with pytest.raises(ValueError, match="m computed nothing"):
        speed_of(member(tokens=0))


def test_workers_on_several_gpus_are_counted_together() -> None:
    alone = speed_of(member(2.0))
    assert gpus_row(member(1.25), 2, alone)["of one GPU's"] == pytest.approx(1.6), "over both"
    two = {"name": "m", "workers": member(2.1)["workers"] * 2}
    row = gpus_row(two, 2, alone)
    assert (row["workers"], row["tokens/s together"]) == (2, 952)
    assert row["of one GPU's"] == pytest.approx(2 / 1.05)
    two["workers"].append(member(0.0, tokens=0)["workers"][0])
    assert gpus_row(two, 2, alone) == row, "one that came too late for a chunk"


def test_what_there_is_no_time_for_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = Place(tmp_path, [], False, 30)
    assert command._try("members", 150, lambda: pytest.fail("was begun"), place)
    assert "Skipped: members: 30 s are left, and it takes up to 150." in capsys.readouterr().out
    done: list[str] = []
    assert command._try("the peak", 20, lambda: done.append("it"), place)
    assert done == ["it"]
    assert not command._try("the rest", 20, lambda: done.remove("nothing"), place)
    assert "FAILED: the rest: ValueError: list.remove(x): x not in list." in capsys.readouterr().out


def test_it_refuses_kindly_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if not why_no_gpu():
        pytest.skip("there is a GPU")
    assert command.main([]) == 1
    assert "Nothing was measured: no GPU that this torch" in capsys.readouterr().out


@pytest.mark.long
def test_a_rehearsal_goes_through_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--rehearse"]) == 0
    said = capsys.readouterr().out
    assert "FAILED" not in said
    assert "Skipped" not in said.replace("Skipped: 4 bits", "")
    assert "| -" not in said, "a share below nothing"
    assert "| g270, 0.00e9 parameters |" in said
    assert "| gemma2b, 0.00e9 parameters |" in said
    assert "| 24 | g270 | 2,048 |" in said
    assert "| over-two | 2 | 1 |" in said
