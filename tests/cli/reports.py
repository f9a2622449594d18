"""Reports of runs that never were."""

from __future__ import annotations

from typing import Any

from ensemble.cli.views import lines
from ensemble.common.gpus import Device
from ensemble.pipeline.run_report import MemberReport, ProgressReport, RunReport, WorkerReport
from ensemble.planning.forecast import Speed


def worker(**changes: Any) -> WorkerReport:
    usual: dict[str, Any] = {
        **{"replica": 0, "devices": ("cpu",), "process": "7", "exit_code": 0, "started_after_seconds": 0.1},
        **{"leased_after_seconds": 0.1, "start_seconds": 1.0, "load_seconds": 1.0, "life_seconds": 9.0},
        **{"forward_share": 0.5, "peak_memory_bytes": 2**30, "peak_gpu_memory_bytes": None, "notes": ()},
        **{"peak_gpu_allocated_bytes": None},
        **{"device_name": "cpu", "dtype": "float32", "attn_implementation": "sdpa", "parameters": 12},
        **{"max_length": 128, "token_budget": 2048, "log": "logs/m-0.log"},
    }
    return WorkerReport(**{**usual, **changes})


def member(name: str = "m", **changes: Any) -> MemberReport:
    usual: dict[str, Any] = {
        **{"phase": "done", "status": "complete", "weight": 1.0, "replicas": 1},
        **{"fingerprint": "f" * 64, "reused_rows": 0, "taken_over": {}, "work": 1.0},
        **{
            "computed_as": "same",
            "settings": {},
            "speed": Speed(10.0, 0.5, True, True),
            "forecast": None,
            "chunks": 4,
            "rows": 1000,
        },
        **{"progress": ProgressReport(), "tokens": 10, "padded_tokens": 12, "real_token_share": 0.8},
        **{"bad_rows": {}, "faults": (), "failure": None, "workers": (), "activation": "softmax"},
    }
    return MemberReport(name=name, **{**usual, **changes})


def report(*members: MemberReport, **changes: Any) -> RunReport:
    usual: dict[str, Any] = {
        **{"status": "complete", "pid": 7, "versions": {"ensemble": "0.1.0"}, "seconds_left": None},
        **{
            "written_at": "2026-01-01T00:00:00+00:00",
            "platform": "Linux",
            "driver_version": None,
            "rows": 1000,
        },
        **{
            "devices": (Device("cpu", "a CPU", None, 0, 0),),
            "null_texts": {},
            "timing": {"total_seconds": 60.0},
        },
        **{"idle_gaps": (), "left_out": (), "merged_rows": {}},
        **{"filled_rows": 0, "scores": {}, "on_bad_row": "uniform"},
    }
    return RunReport(members=members, **{**usual, **changes})


def shown(view: str, subject: object, width: int | None = None) -> list[str]:
    return list(lines(view, subject, width))
