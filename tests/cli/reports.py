"""Reports of runs that never were."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from ensemble.cli.layout import lines
from ensemble.common.gpus import Device
from ensemble.common.protocol import Closed, Counters, Ready
from ensemble.pipeline.run_report import SCHEMA, MemberReport, RunReport
from ensemble.planning.forecast import Speed
from ensemble.scheduling.records import WorkerRecord

Part = TypeVar("Part", Counters, Ready, Closed)


def worker(**changes: Any) -> WorkerRecord:
    """Return the record of a worker; fields of its parts are given like its own."""

    def part(kind: type[Part], **usual: Any) -> Part:
        names = [name for name in changes if name in fields_of(kind) and name not in fields_of(WorkerRecord)]
        return kind(**{**usual, **{name: changes.pop(name) for name in names}})

    facts = {"device": "cpu", "dtype": "float32", "attn_implementation": "sdpa", "parameters": 12}
    usual: dict[str, Any] = {
        **{"model": "m", "replica": 0, "devices": ("cpu",), "process": "7", "log_path": "logs/m-0.log"},
        **{"exit_code": 0, "started_after_seconds": 0.1, "leased_after_seconds": 0.1, "start_seconds": 1.0},
        **{"load_seconds": 1.0, "life_seconds": 9.0, "counters": part(Counters)},
        "ready": part(Ready, **{**facts, "max_length": 128, "token_budget": 2048}),
        "closed": part(Closed, peak_memory_bytes=2**30),
    }
    return WorkerRecord(**{**usual, **changes})


def fields_of(kind: type[Any]) -> set[str]:
    return {field.name for field in fields(kind)}


def member(name: str = "m", **changes: Any) -> MemberReport:
    workers = changes.get("workers", ()) if changes.get("chunks", 4) else ()
    usual: dict[str, Any] = {
        **{"phase": "done", "status": "complete", "weight": 1.0, "activation": "softmax", "chunks": 4},
        **{"fingerprint": "f" * 64, "work": 1.0, "computed_as": "same", "rows": 1000},
        "speed": Speed(10.0, 0.5, True, True),
        "counters": sum((item.counters for item in workers), Counters()),
    }
    return MemberReport(name=name, **{**usual, **changes})


def report(*members: MemberReport, **changes: Any) -> RunReport:
    usual: dict[str, Any] = {
        **{"schema": SCHEMA, "status": "complete", "pid": 7, "versions": {"ensemble": "0.1.0"}},
        **{"written_at": "2026-01-01T00:00:00+00:00", "platform": "Linux", "rows": 1000},
        "devices": (Device("cpu", "a CPU", None, 0, 0),),
        **{"timing": {"total_seconds": 60.0}, "on_bad_row": "uniform"},
    }
    return RunReport(members=members, **{**usual, **changes})


def shown(view: str, subject: object, width: int | None = None) -> list[str]:
    return list(lines(view, subject, width))
