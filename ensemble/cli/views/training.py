"""Show trainings: how many of each member are done, how far others are, how long they took, and where they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ensemble.cli.layout import Table
from ensemble.common.text import duration, plural, shown_path
from ensemble.training.records import MemberRecord, PartRecord, TrainingReport

_HEADERS = ["member", "trained", "in progress", "time each", "retries", "folder"]


def view(report: TrainingReport) -> Iterator[str | Table]:
    yield table(report)
    yield counts(report)


def table(report: TrainingReport) -> Table:
    return Table(_HEADERS, [_cells(member) for member in report.members], texts=["in progress", "folder"])


def counts(report: TrainingReport) -> str:
    """Return how many trainings are done, how long these took together, and how many are not done."""
    parts = [part for member in report.members for part in member.parts]
    lacking = sum(part.status != "done" for part in parts)
    seconds = sum(part.seconds or 0.0 for part in parts)
    together = f" in {duration(seconds)}" if seconds else ""
    done = f"{plural(len(parts) - lacking, 'training')} done{together}"
    return f"{done}, {lacking:,} not done" if lacking else done


def seconds_left(part: PartRecord) -> float | None:
    """Return how long a training in progress takes at the speed that it has; None where that is not known."""
    steps, seconds = part.steps_done, part.progress.get("seconds")
    first = part.progress.get("first_step", 0)
    if part.status != "training" or steps is None or not isinstance(seconds, int | float):
        return None
    done = steps[0] - first if isinstance(first, int) else 0
    return round(seconds * (steps[1] - steps[0]) / done, 1) if done > 0 else None


def _cells(member: MemberRecord) -> list[str]:
    done = [part for part in member.parts if part.status == "done"]
    seconds = [part.seconds or 0.0 for part in done]
    retries = sum(max(0, part.attempts - 1) for part in member.parts)
    return [
        member.name,
        f"{len(done)}/{len(member.parts)}",
        ", ".join(_progress_text(part) for part in member.parts if part.status == "training"),
        duration(sum(seconds) / len(seconds)) if seconds else "",
        f"{retries}" if retries else "",
        shown_path(Path(member.folder)) if done else "",
    ]


def _progress_text(part: PartRecord) -> str:
    steps, left = part.steps_done, seconds_left(part)
    share = "" if steps is None else f" {steps[0] / steps[1]:.0%}"
    ahead = f" ({duration(left)} left)" if left else ""
    return f"{part.text}{share}{ahead}"
