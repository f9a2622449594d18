"""Show the status of a run that goes on, has ended or was killed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ensemble.cli.layout import Table
from ensemble.cli.views.summary import fitted_text, node_texts
from ensemble.commands.status import RunStatus
from ensemble.common.errors import RESUMES
from ensemble.common.gpus import device_names
from ensemble.common.text import duration, plural, rate
from ensemble.pipeline.ending import answer_texts, failure_text, gain_text
from ensemble.pipeline.run_report import MERGED, RunReport

_HEADERS = ("member", "state", "rows done", "of", "share", "tokens/s", "rows/s", "time", "left")
_ENDINGS = {
    "complete": "complete, after {time}",
    "time_limit": f"stopped at its time limit with a complete submission, after {{time}}; {RESUMES}",
    "failed": f"failed, after {{time}}; {RESUMES}",
    "interrupted": f"interrupted, after {{time}}; {RESUMES}",
    "running": f"was killed, after {{time}} or more; {RESUMES}",
}


def view(status: RunStatus) -> Iterator[str | Table]:
    report = status.report
    if report is None:
        yield f"{status.folder}: {status.holder} is about to start a run here"
        return
    cells = [
        (
            member.name,
            member.state,
            f"{member.rows_done:,}",
            f"{member.rows:,}",
            f"{member.rows_done / member.rows:.0%}" if member.rows else "",
            "" if member.tokens_per_second is None else f"{member.tokens_per_second:,.0f}",
            "" if member.rows_per_second is None else rate(member.rows_per_second),
            "" if member.seconds is None else duration(member.seconds),
            "" if member.seconds_left is None else duration(member.seconds_left),
        )
        for member in status.members
    ]
    yield Table(_HEADERS, cells, texts=["state"])
    yield from node_texts(report)
    time, seconds_left = duration(status.seconds), status.seconds_left
    if status.holder is not None:
        yield from _workers(report)
        ahead = "" if seconds_left is None else f", about {duration(seconds_left)} left"
        yield f"{status.folder}: running for {time}{ahead} ({status.holder})"
        return
    yield f"{status.folder}: {_ENDINGS[report.status].format(time=time)}"
    if report.status in MERGED:
        yield gain_text(report)
        yield fitted_text(report)
        yield from answer_texts(report)
    for member in report.members:
        if member.failure is not None:
            yield failure_text(member.failure)
        if member.bad_rows:
            row, reason = next(iter(member.bad_rows.items()))
            count = plural(len(member.bad_rows), "bad row")
            yield f"{member.name}: {count}, the first is row {int(row) + 1:,}: {reason}"


def document(status: RunStatus) -> dict[str, Any]:
    """Describe how far a run is, or how it ended."""
    report, facts = status.report, vars(status).copy()
    del facts["report"], facts["folder"]
    facts |= {"problems": [], "output_dir": status.folder.absolute(), "state": "starting"}
    if report is not None:
        names = ("rows", "scores", "fitted_on", "failures", "files")
        facts |= {name: getattr(report, name) for name in names}
        is_killed = report.status == "running" and status.holder is None
        facts["state"] = "killed" if is_killed else report.status
    return facts


def _workers(report: RunReport) -> Iterator[str]:
    """Yield where in a cluster the workers of each member are."""
    names = device_names(report.devices)
    for member in report.members:
        for worker in member.workers_now:
            if worker.node and worker.is_running:
                devices = ", ".join(names.get(device, device) for device in worker.devices)
                yield f"{member.name}-{worker.replica}: on {devices}"
