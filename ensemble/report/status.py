"""What ``status`` shows of a run directory, whether its run goes on, has ended or was killed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from ensemble.errors import DataError
from ensemble.fingerprint import Fingerprint
from ensemble.planning.facts import read_json
from ensemble.rundir import RunDir, holder, part_rows

_GO_ON = "the same command again goes on from there"
_ENDINGS = {
    "complete": "complete",
    "time_limit": f"stopped at its time limit with a complete submission; {_GO_ON}",
    "failed": f"failed; {_GO_ON}",
    "interrupted": f"interrupted; {_GO_ON}",
    "running": f"was killed; {_GO_ON}",
}


@dataclass(frozen=True)
class StatusReport:
    """A table of the members, and sentences to go below it."""

    table: Table
    lines: tuple[str, ...]


def status_report(folder: Path) -> StatusReport:
    """Look at a run directory without touching it.

    Raises:
        DataError: no run has ever been there.
    """
    rundir = RunDir(folder)
    document = read_json(rundir.run_json)
    by = holder(rundir)
    members = [one for one in document.get("members", []) if isinstance(one, dict)]
    if not members:
        if by is not None:
            return StatusReport(Table(show_edge=False), (f"{folder}: {by} is about to start a run here",))
        raise DataError(f"{folder}: holds no run.json that can be read; name the output_dir of a run")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for header in ("member", "state", "rows done", "of", ""):
        table.add_column(header, justify="right" if header in ("rows done", "of") else "left")
    rows = int(document.get("rows", 0))
    for member in members:
        state, done = _state(rundir, member, rows, by is not None)
        share = f"{done / rows:.0%}" if rows else ""
        table.add_row(str(member.get("name")), state, f"{done:,}", f"{rows:,}", share)
    return StatusReport(table, tuple(_lines(folder, document, members, by)))


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
    folder: Path, document: Mapping[str, Any], members: list[dict[str, Any]], by: str | None
) -> Iterator[str]:
    status = str(document.get("status"))
    yield f"{folder}: " + (f"running, held by {by}" if by is not None else _ENDINGS.get(status, status))
    if by is not None:
        return
    for member in members:
        failure = member.get("failure")
        if isinstance(failure, dict):
            log = f"; its log: {failure['log_path']}" if failure.get("log_path") else ""
            yield f"member {member.get('name')} failed: {failure.get('message')}{log}"
        bad_rows = member.get("bad_rows")
        if isinstance(bad_rows, dict) and bad_rows:
            row, reason = next(iter(bad_rows.items()))
            count = "1 bad row," if len(bad_rows) == 1 else f"{len(bad_rows):,} bad rows, the first is"
            yield f"{member.get('name')}: {count} row {int(row) + 1}: {reason}"
