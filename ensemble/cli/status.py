"""What ``status`` shows of a run directory, whether its run goes on, has ended or was killed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ensemble.cli.layout import Table
from ensemble.common.errors import RESUMES, DataError
from ensemble.common.files import read_json, unreadable
from ensemble.common.shards import part_rows
from ensemble.common.text import duration, plural
from ensemble.pipeline.fingerprint import Fingerprint
from ensemble.pipeline.run_dir import RunDir, holder

_HEADERS = ("member", "state", "rows done", "of", "share", "tokens/s", "time", "left")
_ENDINGS = {
    "complete": "complete, after {time}",
    "time_limit": f"stopped at its time limit with a complete submission, after {{time}}; {RESUMES}",
    "failed": f"failed, after {{time}}; {RESUMES}",
    "interrupted": f"interrupted, after {{time}}; {RESUMES}",
    "running": f"was killed, after {{time}} or more; {RESUMES}",
}


@dataclass(frozen=True)
class StatusReport:
    """A table of the members, None where there is none yet, and sentences to go below it."""

    table: Table | None
    lines: tuple[str, ...]


def status_report(folder: Path, now: datetime | None = None) -> StatusReport:
    """Look at a run directory without touching it.

    Raises:
        DataError: no run has ever been there, or what it left may not be read.
    """
    rundir = RunDir(folder)
    try:
        rundir.run_json.open("rb").close()
    except PermissionError as error:
        raise DataError(unreadable(rundir.run_json, error)) from error
    except OSError:
        pass  # said below
    document = read_json(rundir.run_json)
    by = holder(rundir)
    members = [one for one in document.get("members", []) if isinstance(one, dict)]
    if not members:
        if by is not None:
            return StatusReport(None, (f"{folder}: {by} is about to start a run here",))
        raise DataError(f"{folder}: there is no run.json that can be read; name the output_dir of a run")
    rows = int(document.get("rows", 0))
    # What a running one wrote some seconds ago; its clock and this one's are taken to agree.
    age = _seconds_since(document.get("written_at"), now or datetime.now(UTC)) if by else 0.0
    cells = [_cells(rundir, member, rows, age, by is not None) for member in members]
    return StatusReport(
        Table(_HEADERS, cells, texts=["state"]), tuple(_lines(folder, document, members, by, age))
    )


def _cells(
    rundir: RunDir, member: Mapping[str, Any], rows: int, age: float, is_running: bool
) -> tuple[str, ...]:
    progress = member.get("progress")
    progress = progress if isinstance(progress, dict) else {}
    state, done = _state(rundir, member, rows, is_running)
    if is_running:  # a chunk in hand counts as far as it has come
        done = min(max(done, int(progress.get("rows_done") or 0)), rows)
    seconds, left = _number(progress.get("seconds")), _number(progress.get("seconds_left"))
    speed = f"{float(progress.get('tokens') or 0) / seconds:,.0f}" if seconds else ""
    computes = is_running and state == "predicting"
    return (
        str(member.get("name")),
        state,
        f"{done:,}",
        f"{rows:,}",
        f"{done / rows:.0%}" if rows else "",
        speed,
        duration(seconds + (age if computes else 0.0)) if seconds else "",
        duration(max(0.0, left - age)) if computes and left is not None else "",
    )


def _state(rundir: RunDir, member: Mapping[str, Any], rows: int, is_running: bool) -> tuple[str, int]:
    """A word for a member, and how many of its rows are done."""
    name, fingerprint = str(member.get("name")), str(member.get("fingerprint"))
    made_of = Fingerprint.from_dict(read_json(rundir.seal(name)).get("fingerprint"))
    if made_of is not None and made_of.digest == fingerprint and rundir.predictions(name).is_file():
        return "done", rows
    done = min(part_rows(rundir.parts_dir(name, fingerprint)), rows)
    if member.get("failure") is not None:
        return "failed", done
    return (str(member.get("phase")) if is_running else "unfinished"), done


def _lines(
    folder: Path, document: Mapping[str, Any], members: list[dict[str, Any]], by: str | None, age: float
) -> Iterator[str]:
    status = str(document.get("status"))
    timing = document.get("timing")
    seconds = _number(timing.get("total_seconds")) if isinstance(timing, dict) else None
    if by is not None:
        left = _number(document.get("seconds_left"))
        so_far = "" if seconds is None else f" for {duration(seconds + age)}"
        ahead = "" if left is None else f", about {duration(max(0.0, left - age))} left"
        yield f"{folder}: running{so_far}{ahead} ({by})"
        return
    time = "an unknown time" if seconds is None else duration(seconds)
    yield f"{folder}: " + _ENDINGS.get(status, status).format(time=time)
    for member in members:
        failure = member.get("failure")
        if isinstance(failure, dict):
            log = f"; its log: {failure['log_path']}" if failure.get("log_path") else ""
            yield f"member {member.get('name')} failed: {failure.get('message')}{log}"
        bad_rows = member.get("bad_rows")
        if isinstance(bad_rows, dict) and bad_rows:
            row, reason = next(iter(bad_rows.items()))
            first = "," if len(bad_rows) == 1 else ", the first is"
            yield f"{member.get('name')}: {plural(len(bad_rows), 'bad row')}{first} row {int(row) + 1:,}: {reason}"


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _seconds_since(written_at: object, now: datetime) -> float:
    try:
        return max(0.0, (now - datetime.fromisoformat(str(written_at))).total_seconds())
    except (ValueError, TypeError):  # by another version
        return 0.0
