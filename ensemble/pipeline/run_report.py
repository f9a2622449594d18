"""run.json: what ran, where, for how long, and what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ensemble import __version__
from ensemble.common.files import write_text
from ensemble.pipeline.results import Results
from ensemble.pipeline.resume import MemberWork
from ensemble.pipeline.validate import Prepared
from ensemble.planning.forecast import total_seconds
from ensemble.planning.plan import MemberPlan
from ensemble.planning.time_limit import calibrated
from ensemble.scheduling.device_pool import Leases
from ensemble.scheduling.state import Failure, Gap, MemberState, WorkerRecord, phase_of


def run_document(
    *,
    status: str,
    prepared: Prepared,
    members: Sequence[MemberState],
    works: Mapping[str, MemberWork],
    leases: Leases | None,
    gaps: Sequence[Gap],
    results: Results,
    left_out: Sequence[Failure],
    timing: Mapping[str, float],
) -> dict[str, Any]:
    """The content of run.json: seconds, bytes and counts; plain JSON values only.

    The config stands there as it was written, and no text in it is a secret.

    Args:
        status: ``running``, ``complete``, ``time_limit``, ``failed`` or ``interrupted``.
        works: by member name, as far as it is known yet.
        leases: None before there are any.
        gaps: in which a device computed nothing between two members.
        left_out: members that the others were merged without.
        timing: seconds by phase of the whole run.
    """
    loaded, inventory, gpus = prepared.loaded, prepared.inventory, prepared.outlook.gpus
    document = {
        "status": status,
        "pid": os.getpid(),
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds_left": _seconds_left(prepared, members) if status == "running" else None,
        "versions": {"ensemble": __version__, "python": platform.python_version(), **_versions(members)},
        "platform": platform.platform(),
        "devices": [asdict(gpu) for gpu in gpus] or [{"uuid": "cpu", "name": _cpu_name()}],
        "driver_version": inventory.driver_version,
        "rows": prepared.table.rows,
        "null_texts": dict(prepared.table.null_texts),
        "timing": dict(timing),
        "idle_gaps": [asdict(gap) for gap in gaps],
        "releases": [asdict(release) for release in leases.releases] if leases else [],
        "device_memory": {uuid: asdict(curve) for uuid, curve in leases.curves.items()} if leases else {},
        "members": [_member(state, works.get(state.plan.name)) for state in members],
        "left_out": [failure.member for failure in left_out],
        "merged_rows": dict(results.merged_rows),
        "filled_rows": results.filled_rows,
        "scores": {name: asdict(score) for name, score in results.scores.items()},
        "warnings": list(prepared.warnings),
        # A copy: members are finished in another thread meanwhile.
        "files": {name: str(path) for name, path in dict(results.files).items()},
        "config": loaded.text,
        "overrides": list(loaded.overrides),
    }
    redacted: dict[str, Any] = loaded.redactor.document(document)
    return redacted


def worker_documents(state: MemberState) -> list[dict[str, Any]]:
    """What a member's workers did, in plain JSON values."""
    return [_worker(record) for record in state.workers]


def speed_document(state: MemberState) -> dict[str, float | None]:
    """What was measured of a member by now, for the next plan; see ``forecast.measured_speeds``."""
    speed = state.speed
    return {
        "startup_seconds": speed.startup_seconds or None,
        "seconds_per_work": speed.seconds_per_work or None,
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


def _member(state: MemberState, work: MemberWork | None) -> dict[str, Any]:
    plan: MemberPlan = state.plan
    # Of a member that an earlier run did, what that run's workers did.
    is_reused = work is not None and work.is_sealed and not state.workers
    counters = state.counters
    return {
        "name": plan.name,
        "phase": phase_of(state),
        "status": "failed" if state.failure else "complete" if state.finished else "unfinished",
        "weight": plan.model.weight,
        "gpus_per_replica": plan.gpus,
        "replicas": plan.replicas,
        "first_replicas": plan.first_replicas,
        "fingerprint": work.fingerprint.digest if work is not None else None,
        "reused_rows": state.reused_rows,
        "taken_over": dict(work.taken) if work is not None else {},
        "work": work.worked if work is not None and is_reused else plan.work * state.computed_cost,
        "computed_as": plan.model.computed_as,
        "speed": speed_document(state),
        "forecast": _forecast(state),
        "progress": _progress(state),
        "chunks": len(plan.chunks),
        "rows": counters.rows,
        "tokens": counters.tokens,
        "padded_tokens": counters.padded_tokens,
        "real_token_share": _share(counters.tokens, counters.padded_tokens),
        "bad_rows": {str(row): reason for row, reason in sorted(state.bad_rows.items())},
        "faults": [asdict(fault) for fault in state.faults],
        "failure": None if state.failure is None else asdict(state.failure),
        "workers": work.workers if work is not None and is_reused else worker_documents(state),
    }


def _progress(state: MemberState) -> dict[str, Any]:
    """How far a member is now, chunks in hand included; ``seconds`` and ``seconds_left`` are of computing."""
    now = time.monotonic()
    return {
        "rows_done": state.rows_done,
        "share": round(state.fraction, 4),
        "tokens": state.tokens_done,
        "seconds": None if state.predicting_since is None else round(state.predicting_seconds(now), 3),
        "seconds_left": round(state.seconds_left, 3) if state.computed_cost else None,
    }


def _seconds_left(prepared: Prepared, members: Sequence[MemberState]) -> float | None:
    """Until the last member ends, by the speeds so far; None before there is one."""
    now = time.monotonic()
    measured = {state.plan.name: speed for state in members if (speed := _seconds_per_member(state, now))}
    if not measured and not all(state.plan.speed.is_measured for state in members):
        return None
    guessed = {one.plan.name: one.plan.job.compute_seconds for one in members}
    seconds = calibrated(guessed, measured)
    jobs = []
    for state in members:
        if state.finished or state.failure is not None:
            continue
        whole = seconds[state.plan.name]
        if whole is None:
            return None
        startup = 0.0 if state.running else state.plan.job.startup_seconds
        left = whole * (1.0 - state.fraction)
        jobs.append(replace(state.plan.job, startup_seconds=startup, compute_seconds=left))
    places = {gpu.uuid: prepared.config.max_workers_per_gpu for gpu in prepared.outlook.gpus}
    return round(total_seconds(jobs, places), 3)


def _seconds_per_member(state: MemberState, now: float) -> float | None:
    """What all of a member's work would take one replica; None where nothing of it has been computed."""
    if state.seconds_per_cost is not None or not state.computed_cost:
        return state.seconds_per_cost
    return state.predicting_seconds(now) * max(1, state.running) / state.computed_cost


def _forecast(state: MemberState) -> dict[str, Any] | None:
    """What the plan said of a replica's memory, per device, at the token budget that the workers then took."""
    needed = state.plan.placement.footprint
    taken = [record.ready.token_budget for record in state.workers if record.ready is not None]
    if needed is None:
        return None
    tokens = max(filter(None, taken), default=needed.width)
    return {
        "parameters": needed.weights.parameters,
        "weight_bytes": needed.weights.bytes,
        "context_bytes": needed.context_bytes,
        "peak_bytes": needed.peak_bytes(state.plan.gpus, tokens),
        "token_budget": tokens,
        "width": needed.width,
    }


def _share(part: float, whole: float | None) -> float | None:
    return round(part / whole, 4) if whole else None


def _worker(record: WorkerRecord) -> dict[str, Any]:
    ready, closed = record.ready, record.closed
    return {
        "replica": record.replica,
        "devices": list(record.devices),
        "pid": record.pid,
        "exit_code": record.exit_code,
        "started_after_seconds": record.started_after_seconds,
        "leased_after_seconds": record.leased_after_seconds,
        "start_seconds": record.start_seconds,
        "load_seconds": record.load_seconds,
        "life_seconds": record.life_seconds,
        "forward_share": _share(record.counters.forward_seconds, record.life_seconds),
        **record.counters.rounded(3),
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
