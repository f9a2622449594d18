"""Show what ``train`` has done: the trainings of each member, how long they took, and where they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ensemble.cli.layout import Table
from ensemble.common.text import duration, plural, shown_path
from ensemble.training.records import MemberRecord, TrainingReport

_HEADERS = ["member", "trained", "each in", "tries", "folder"]


def view(report: TrainingReport) -> Iterator[str | Table]:
    yield Table(_HEADERS, [_cells(member) for member in report.members], texts=["folder"])
    lacking = [part for member in report.members for part in member.parts if part.status != "done"]
    how = f"{plural(len(lacking), 'training')} not done" if lacking else "all trained"
    yield f"{how}, after {duration(report.seconds)}"


def _cells(member: MemberRecord) -> list[str]:
    done = [part for part in member.parts if part.status == "done"]
    seconds = [part.seconds or 0.0 for part in done]
    return [
        member.name,
        f"{len(done)}/{len(member.parts)}",
        duration(sum(seconds) / len(seconds)) if seconds else "",
        f"{sum(part.attempts for part in member.parts)}",
        shown_path(Path(done[0].folder).parent) if done else "",
    ]
