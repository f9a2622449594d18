"""What ``status``, ``validate`` and ``plan`` print with ``--json``; docs/running.md describes the keys."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ensemble.common.errors import EnsembleError
from ensemble.common.redact import Redactor

# Only for types: a problem with the config shall be told at once.
if TYPE_CHECKING:
    from ensemble.cli.result_objects import Preview
    from ensemble.commands.status import RunStatus
    from ensemble.planning.plan import MemberPlan


def print_json(document: dict[str, Any]) -> None:
    """Print an object as JSON without secrets of the environment; a number that JSON lacks becomes null."""
    from pydantic_core import to_json

    plain = json.loads(to_json(document, inf_nan_mode="null"))
    sys.stdout.write(json.dumps(Redactor(os.environ).document(plain), indent=2) + "\n")


@contextlib.contextmanager
def problems_as_json(is_asked: bool) -> Iterator[None]:
    """Print the problems of an error as JSON, if that is asked, before the error goes on."""
    try:
        yield
    except EnsembleError as error:
        if is_asked:
            print_json({"problems": error.problems})
        raise


def status_json(status: RunStatus) -> dict[str, Any]:
    """Describe how far a run is, or how it ended."""
    report, facts = status.report, vars(status).copy()
    del facts["report"], facts["folder"]
    facts |= {"problems": [], "output_dir": status.folder.absolute(), "state": "starting"}
    if report is not None:
        is_killed = report.status == "running" and status.holder is None
        facts |= {
            name: getattr(report, name) for name in ("rows", "scores", "fitted_on", "failures", "files")
        }
        facts["state"] = "killed" if is_killed else report.status
    return facts


def plan_json(preview: Preview) -> dict[str, Any]:
    """Describe a config that was checked and planned.

    The secrets of the config are left to ``guard_output``.
    """
    prepared, config, plan = preview.prepared, preview.config, preview.plan
    return {
        "problems": preview.problems,
        "warnings": [*prepared.table.remarks, *prepared.warnings, *plan.warnings],
        "output_dir": config.output_dir.absolute(),
        "table": config.data.path.absolute(),
        "rows": prepared.table.rows,
        "labels": config.labels,
        "devices": plan.gpus,
        "seconds": plan.seconds,
        "members": [_member(member) for member in plan.members],
    }


def _member(member: MemberPlan) -> dict[str, Any]:
    from ensemble.cli.views.plan import batch_tokens, least_fit

    fit, needed, job = least_fit(member), member.placement.footprint, member.job
    facts = {
        "name": member.name,
        "task_type": member.model.task_type,
        "weight": member.model.weight,
        "replicas": member.replicas,
        "gpus_per_replica": member.gpus,
        "chunks": len(member.chunks),
        "devices": member.placement.devices,
        "problems": member.placement.problems,
        "fit": fit and fit.verdict,
        "room_bytes": fit and fit.room_bytes,
        "parameters": None,
        "weight_bytes": None,
        "peak_bytes": None,
        "seconds": None,
    }
    if needed is not None:
        facts["parameters"], facts["weight_bytes"] = needed.weights.parameters, needed.weights.bytes
        facts["peak_bytes"] = needed.peak_bytes(member.gpus, batch_tokens(fit, needed.width))
    if member.replicas and member.speed.is_measured:
        facts["seconds"] = job.startup_seconds + job.compute_seconds / member.replicas
    return facts
