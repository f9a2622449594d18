"""Show what ``train`` has done: the trainings of each member, how long they took, and where they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ensemble.cli.layout import Table
from ensemble.common.text import duration, plural, shown_path
from ensemble.training.records import MemberTrainings, TrainingReport

_HEADERS = ["member", "trained", "now", "seconds each", "tries", "in"]


def view(report: TrainingReport) -> Iterator[str | Table]:
    yield Table(_HEADERS, [_cells(member) for member in report.members], texts=["in"])
    lacking = [part for member in report.members for part in member.parts if not part.folder]
    if not lacking and report.status == "complete":
        yield f"all trained, after {duration(report.seconds)}"
    elif lacking:
        yield f"{plural(len(lacking), 'training')} not done, after {duration(report.seconds)}"


def _cells(member: MemberTrainings) -> list[str]:
    done = [part for part in member.parts if part.folder]
    now = [part for part in done if part.status == "done"]
    seconds = [part.seconds for part in done if part.seconds is not None]
    return [
        member.name,
        f"{len(done)}/{len(member.parts)}",
        f"{len(now)}",
        f"{sum(seconds) / len(seconds):,.1f}" if seconds else "",
        f"{sum(part.attempts for part in member.parts)}",
        shown_path(Path(done[0].folder).parent) if done else "",
    ]
