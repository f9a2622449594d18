"""The checks for a real GPU can fail: what they say of runs that went wrong, without a GPU and without a run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.gpu.measuring import DEADLINE_SECONDS as BENCH_SECONDS
from bench.gpu.measuring import Measuring, names_to_run, step_names, steps
from bench.gpu.place import GEMMA, GIB, NF4, Failed, Place, Skip, check_devices, chosen
from ensemble.common.gpus import Device
from tests.gpu.bench import DEADLINE_SECONDS, Bench
from tests.gpu.checks import CHECKS, main, seconds_of
from tests.gpu.verdicts import Apart, against_plan, follows_turing_rules
from tests.nvml.sim import Gpu, NvmlSim, gpu_uuid
from tests.project import ROOT

FORECAST = {"weight_bytes": 1 * GIB, "context_bytes": GIB // 2, "peak_bytes": 2 * GIB, "token_budget": 16384}


def member(forecast: dict[str, int] | None = FORECAST, **worker: Any) -> dict[str, Any]:
    counters = {"batches": 1, "padded_tokens": 60_000, "tokens": 10, "predict_seconds": 1.0}
    ready = {"device": "Tesla T4", "notes": [], "attn_implementation": "sdpa", **worker}
    closed = {"peak_gpu_memory_bytes": worker.pop("peak_gpu_memory_bytes", GIB)}
    parts = {"load_seconds": 1.0, "counters": counters, "ready": ready, "closed": closed}
    return {"name": "m", "forecast": forecast, "workers": [parts]}


def bench(tmp_path: Path, gibibytes: float = 80, seconds: float = 60) -> Bench:
    return Bench(tmp_path, [Device("GPU-0", "card", (7, 5), int(gibibytes * GIB), 0)], False, seconds)


def test_rows_must_be_close_to_themselves_and_not_to_each_other() -> None:
    values = np.random.default_rng(0).dirichlet([1, 1, 1], 50)
    assert Apart.of(values, values + 1e-5).verdict(largest=1e-4) == "ok"
    assert Apart.of(values, values + 1e-3).verdict(largest=1e-4) == "FAILED"
    assert Apart.of(values, values + 1e-3).verdict(mean=1e-4) == "FAILED"
    assert Apart.of(values, values[::-1]).verdict() == "FAILED"
    alike = np.full((50, 3), 1 / 3)
    assert Apart.of(alike, alike).verdict(largest=1e-4) == "FAILED"
    with pytest.raises(Failed, match="cannot be compared"):
        Apart.of(values, values[:-1])


@pytest.mark.parametrize("name", ["cpu", None])
def test_a_worker_beside_the_gpu_is_no_success(name: str | None) -> None:
    check_devices({"members": [member()]})
    with pytest.raises(Failed, match=r"not on a GPU \(the driver shows a GPU\)"):
        check_devices({"members": [member(), member(device=name, notes=["the driver shows a GPU"])]})
    with pytest.raises(Failed, match="m ran on nothing"):
        check_devices({"members": [{**member(), "workers": []}]})


@pytest.mark.parametrize(
    ("forecast", "measured", "verdict"),
    [
        (FORECAST, int(1.5 * GIB), "ok"),
        (FORECAST, int(1.25 * GIB), "FAILED"),
        (FORECAST, 2 * GIB, "FAILED"),
        (FORECAST, None, "FAILED"),
        (None, GIB, "FAILED"),
    ],
)
def test_a_plan_is_held_to_a_measured_peak(
    forecast: dict[str, int] | None, measured: int | None, verdict: str
) -> None:
    report = {"members": [member(forecast, peak_gpu_memory_bytes=measured)]}
    assert [row[1] for row in against_plan(report, False)] == [verdict]


def test_a_model_that_is_too_large_runs_in_4_bits_or_is_skipped(tmp_path: Path) -> None:
    assert bench(tmp_path, 24).settings(GEMMA) == {}
    assert bench(tmp_path, 15).settings(GEMMA) == {"quantization_config": NF4}
    with pytest.raises(Skip, match="gemma9b: needs 9 GiB even in 4 bits"):
        bench(tmp_path, 8).settings(GEMMA)


def test_both_commands_fit_their_time_by_their_own_reckoning() -> None:
    assert sum(map(seconds_of, CHECKS.values())) <= DEADLINE_SECONDS <= 10 * 60
    measuring = Measuring(Place(Path(), (), False, 0))
    names = names_to_run("", False)
    needed = [needs for name, needs, _ in steps(measuring) if name in names]
    assert sum(needed) <= BENCH_SECONDS <= 10 * 60


def test_what_is_only_reasoned_names_the_check_that_will_show_it() -> None:
    text = (ROOT / "docs" / "reference" / "benchmark-tables.md").read_text(encoding="utf-8")
    section = text.partition("## On GPUs: not measured yet")[2].partition("\n## ")[0]
    entries = [entry.replace("\n ", "") for entry in section.split("\n- ")[1:]]
    assert len(entries) > 5
    parts = {"tests": list(CHECKS), "bench": step_names(False)}
    for entry in entries:
        for command, names in re.findall(r"(tests|bench): ((?:`[^`]+`(?:, )?)+)", entry):
            for name in re.findall("`(?:ONLY=)?([^`]+)`", names):
                chosen(name, parts[command])


@pytest.mark.parametrize(
    ("worker", "verdict"),
    [
        ({"dtype": "float16", "notes": ["float16: bfloat16 is only emulated below"]}, "ok"),
        ({"dtype": "float16"}, "FAILED"),
        ({"dtype": "bfloat16", "notes": ["bfloat16 is only emulated"]}, "FAILED"),
        (
            {
                "dtype": "float16",
                "notes": ["bfloat16 is only emulated"],
                "attn_implementation": "flash_attention_2",
            },
            "FAILED",
        ),
    ],
)
def test_a_member_is_held_to_the_rules_of_a_t4(worker: dict[str, Any], verdict: str) -> None:
    rows = follows_turing_rules(member(**worker), False)
    assert [row[1] for row in rows] == [verdict]


@pytest.mark.long
def test_a_gpu_says_that_it_has_another_capability(nvml_sim: NvmlSim) -> None:
    """To pynvml and to torch, in a process as the checks start it."""
    nvml_sim.write([Gpu(gpu_uuid(0), compute_capability=(9, 0))])
    asks = (
        "from ensemble.common.gpus import inventory; import torch;"
        "print(inventory().gpus[0].compute_capability, torch.cuda.get_device_capability(0))"
    )
    paths = os.pathsep.join([str(ROOT / "tests" / "gpu" / "capability"), str(ROOT)])
    messages = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **nvml_sim.environment(), "PYTHONPATH": paths, **others},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for code, others in (
            (asks, {"TEST_GPU_CAPABILITY": "7.5"}),
            (asks.replace("torch.cuda.get_device_capability(0)", "None"), {}),
        )
    ]
    assert messages == ["(7, 5) (7, 5)", "(9, 0) None"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_rehearsal_goes_through_all_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rehearse"]) == 0
    message = capsys.readouterr().out
    assert "FAILED" not in message
    for name in CHECKS:
        assert f"| {name} | " in message
