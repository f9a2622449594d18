"""run.json: what ran, where, for how long, and what came of it."""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ensemble import __version__
from ensemble.config import LoadedConfig
from ensemble.devices import Device, Inventory
from ensemble.leases import Leases
from ensemble.merge.metrics import Score
from ensemble.planning.plan import MemberPlan
from ensemble.rundir import write_text
from ensemble.state import MemberState, WorkerRecord


def run_document(
    *,
    status: str,
    loaded: LoadedConfig,
    inventory: Inventory,
    gpus: Sequence[Device],
    rows: int,
    null_texts: Mapping[str, int],
    members: Sequence[MemberState],
    leases: Leases,
    scores: Mapping[str, Score],
    warnings: Sequence[str],
    files: Mapping[str, Path],
    timing: Mapping[str, float],
) -> dict[str, Any]:
    """The content of run.json: seconds, bytes and counts; plain JSON values only.

    Args:
        status: ``complete``, ``failed`` or ``interrupted``.
        loaded: the config; stored as it was written, because a value from the environment may be a secret.
        timing: seconds by phase of the whole run.
    """
    return {
        "status": status,
        "versions": {"ensemble": __version__, "python": platform.python_version(), **_versions(members)},
        "platform": platform.platform(),
        "devices": [asdict(gpu) for gpu in gpus] or [{"uuid": "cpu", "name": _cpu_name()}],
        "driver_version": inventory.driver_version,
        "rows": rows,
        "null_texts": dict(null_texts),
        "timing": dict(timing),
        "releases": [asdict(release) for release in leases.releases],
        "device_memory": {uuid: asdict(curve) for uuid, curve in leases.curves.items()},
        "members": [_member(state) for state in members],
        "scores": {name: asdict(score) for name, score in scores.items()},
        "warnings": list(warnings),
        "files": {name: str(path) for name, path in files.items()},
        "config": loaded.text,
        "overrides": list(loaded.overrides),
    }


def write_run_json(path: Path, document: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _versions(members: Sequence[MemberState]) -> dict[str, str]:
    # The parent never imports torch; the workers say what they ran with.
    for state in members:
        for record in state.workers:
            if record.versions:
                return {name: version for name, version in record.versions.items() if version}
    return {}


def _member(state: MemberState) -> dict[str, Any]:
    plan: MemberPlan = state.plan
    tokens = sum(record.tokens for record in state.workers)
    padded = sum(record.padded_tokens for record in state.workers)
    return {
        "name": plan.name,
        "status": "failed" if state.failure else "complete" if state.finished else "unfinished",
        "weight": plan.model.weight,
        "gpus_per_replica": plan.gpus,
        "replicas": plan.replicas,
        "first_replicas": plan.first_replicas,
        "work": plan.work,
        "computed_as": plan.model.computed_as,
        "forecast": _forecast(state),
        "chunks": len(plan.chunks),
        "rows": sum(record.rows for record in state.workers),
        "tokens": tokens,
        "padded_tokens": padded,
        "real_token_share": round(tokens / padded, 4) if padded else None,
        "failure": None if state.failure is None else asdict(state.failure),
        "workers": [_worker(record) for record in state.workers],
    }


def _forecast(state: MemberState) -> dict[str, Any] | None:
    """What the plan said of a replica's memory, per device, at the token budget that the workers then took."""
    needed = state.plan.placement.footprint
    budgets = [record.ready.token_budget for record in state.workers if record.ready is not None]
    if needed is None:
        return None
    tokens = max(budgets, default=needed.width)
    return {
        "parameters": needed.weights.parameters,
        "weight_bytes": needed.weights.bytes,
        "context_bytes": needed.context_bytes,
        "peak_bytes": needed.peak_bytes(state.plan.gpus, tokens),
        "token_budget": tokens,
        "width": needed.width,
    }


def _worker(record: WorkerRecord) -> dict[str, Any]:
    ready, closed = record.ready, record.closed
    return {
        "replica": record.replica,
        "devices": list(record.devices),
        "pid": record.pid,
        "exit_code": record.exit_code,
        "started_after_seconds": record.started_after_seconds,
        "start_seconds": record.start_seconds,
        "load_seconds": record.load_seconds,
        "predict_seconds": round(record.predict_seconds, 3),
        "life_seconds": record.life_seconds,
        "rows": record.rows,
        "chunks": record.chunks,
        "batches": record.batches,
        "tokens": record.tokens,
        "padded_tokens": record.padded_tokens,
        "truncated_rows": record.truncated_rows,
        "oom_events": record.oom_events,
        "recomputed_rows": record.recomputed_rows,
        "peak_memory_bytes": closed.peak_memory_bytes if closed else None,
        "peak_gpu_memory_bytes": closed.peak_gpu_memory_bytes if closed else None,
        "device_name": ready.device if ready else None,
        "dtype": ready.dtype if ready else None,
        "attn_implementation": ready.attn_implementation if ready else None,
        "parameters": ready.parameters if ready else None,
        "max_length": ready.max_length if ready else None,
        "token_budget": ready.token_budget if ready else None,
        "notes": list(ready.notes) if ready else [],
        "log": record.log_path,
    }
