"""What ``status`` shows of a run directory, whether its run goes on, has ended or was killed."""

from __future__ import annotations

from collections.abc import Iterator

from ensemble.cli.layout import Table
from ensemble.cli.views.summary import against_best, fitted_text, node_text
from ensemble.commands.status import RunStatus
from ensemble.common.errors import RESUMES
from ensemble.common.gpus import device_names
from ensemble.common.text import duration, plural, rate
from ensemble.pipeline.ending import failure_text
from ensemble.pipeline.run_report import MERGED, RunReport

_HEADERS = ("member", "state", "rows done", "of", "share", "tokens/s", "rows/s", "time", "left")
_ENDINGS = {
    "complete": "complete, after {time}",
    "time_limit": f"stopped at its time limit with a complete submission, after {{time}}; {RESUMES}",
    "failed": f"failed, after {{time}}; {RESUMES}",
    "interrupted": f"interrupted, after {{time}}; {RESUMES}",
    "running": f"was killed, after {{time}} or more; {RESUMES}",
}


def _nodes(report: RunReport) -> Table:
    """Return a table of nodes: whether each is there, and which workers have which of its devices."""
    names = device_names(report.devices)
    home = {device.uuid: device.node for device in report.devices if device.is_gpu}
    workers: dict[str, list[str]] = {}
    for member in report.members:
        for worker in member.workers_now:
            if worker.life_seconds is None and worker.exit_code is None:
                devices = [names.get(device, "CPU").partition(" on ")[0] for device in worker.devices]
                place = home.get(worker.devices[0]) or worker.devices[0].removeprefix("cpu on ")
                workers.setdefault(place, []).append(
                    f"{member.name}-{worker.replica} on {', '.join(devices)}"
                )
    rows = []
    for node in report.nodes:
        gpus = sum(gpu.node == node.name for gpu in report.devices if gpu.is_gpu)
        state = node_text(node).removeprefix(f"node {node.name} ") or "there"
        rows.append((node.name, state, str(gpus), ", ".join(workers.get(node.name, ()))))
    return Table(("node", "state", "GPUs", "workers"), rows, texts=["state", "workers"])


def view(status: RunStatus) -> Iterator[str | Table]:
    """Show a table of the members, once there is a report, and how the run stands or ended."""
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
    if status.holder is not None and report.nodes:
        yield _nodes(report)
    else:
        yield from map(node_text, report.nodes)
    time, left = duration(status.seconds), status.seconds_left
    if status.holder is not None:
        ahead = "" if left is None else f", about {duration(left)} left"
        yield f"{status.folder}: running for {time}{ahead} ({status.holder})"
        return
    yield f"{status.folder}: {_ENDINGS[report.status].format(time=time)}"
    if report.status in MERGED:
        yield against_best(report)
        yield fitted_text(report)
    for member in report.members:
        if member.failure is not None:
            yield failure_text(member.failure)
        for row, reason in list(member.bad_rows.items())[:1]:
            count = len(member.bad_rows)
            first = "," if count == 1 else ", the first is"
            yield f"{member.name}: {plural(count, 'bad row')}{first} row {int(row) + 1:,}: {reason}"
