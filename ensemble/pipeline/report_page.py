"""The report of a run (report.html): when it is written, by which process, and that nothing of it ends a run."""

from __future__ import annotations

import hashlib
import json

from ensemble.pipeline.run_report import RunReport


def page_digest(report: RunReport) -> str:
    """What a report is made of, but for when and how fast the run went: the same again, and nothing has changed."""
    members = [
        (one.name, one.weight, one.status, one.fingerprint, one.bad_rows, one.failure and one.failure.message)
        for one in report.members
    ]
    results = (report.merged_rows, report.filled_rows, [*map(str, report.scores.items())], report.ensemble)
    asked = report.config, report.overrides, report.versions.get("ensemble")
    told = json.dumps([report.status, report.rows, members, results, asked], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()
