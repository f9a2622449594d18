"""Show trainings at the end of ``train``; or the status of a run whose members are trained, then the run itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ensemble.cli.layout import Table
from ensemble.cli.views import status
from ensemble.commands.status import RunStatus
from ensemble.common.errors import RESUMES
from ensemble.common.text import duration, plural, shown_path
from ensemble.pipeline.run_dir import RunDir, holder
from ensemble.pipeline.training_dir import TrainingDir
from ensemble.training.records import MemberRecord, PartRecord, TrainingReport, read_record

_HEADERS = ["member", "trained", "in progress", "time each", "retries", "folder"]
_ENDINGS = {
    "complete": "",
    "time_limit": f"; there was no time for more; {RESUMES}",
    "failed": f"; some failed; {RESUMES}",
    "interrupted": f"; interrupted; {RESUMES}",
    "killed": f"; its process was killed; {RESUMES}",
}


@dataclass(frozen=True)
class TrainingStatus:
    """Hold how far the trainings of a run are, and the run.

    Attributes:
        holder: the process that has the run's directory; None: no process.
        run: None if it has not begun.
    """

    folder: Path
    report: TrainingReport
    holder: str | None
    run: RunStatus | None

    @classmethod
    def of(cls, folder: Path) -> TrainingStatus | None:
        """Look at a run directory without changing it; None if nothing was trained there.

        Raises:
            DataError: run.json cannot be read.
        """
        by = holder(RunDir(folder))
        report = read_record(TrainingDir(folder).records, TrainingReport)
        if report is None:
            return None
        is_of_trainings = (
            report.status == "running" or holder(RunDir(TrainingDir(folder).oof_run)) is not None
        )
        is_run = by is not None and not is_of_trainings
        has_run = is_run or (by is None and RunDir(folder).run_json.exists())
        return cls(folder, report, by, RunStatus.of(folder) if has_run else None)

    @property
    def state(self) -> str:
        """Return the report's status, or "killed" if no process is left that could change it."""
        is_killed = self.report.status == "running" and self.holder is None
        return "killed" if is_killed else self.report.status


def view(subject: TrainingStatus | TrainingReport) -> Iterator[str | Table]:
    if isinstance(subject, TrainingReport):  # at the end of ``train``
        yield table(subject)
        yield counts(subject)
        return
    report, oof = subject.report, TrainingDir(subject.folder).oof_run
    yield table(report)
    for member in report.members:
        if member.failure:
            yield f"{member.name} failed: {member.failure}"
    so_far = f"{subject.folder}: {counts(report)}"
    if subject.state == "running":
        yield f"{so_far}; training for {duration(report.seconds)} ({subject.holder})"
    else:
        yield f"{so_far}{_ENDINGS[subject.state]}"
    if RunDir(oof).run_json.exists():
        yield f"out-of-fold predictions: `ensemble status {shown_path(oof)}` shows their run"
    if subject.run is not None:
        yield from status.view(subject.run)


def document(subject: TrainingStatus) -> dict[str, Any]:
    """Describe trainings, and the run if it has begun."""
    state = "training" if subject.state == "running" else "not_started"
    facts: dict[str, Any] = {
        "problems": [],
        "output_dir": subject.folder.absolute(),
        "state": state,
        "holder": subject.holder,
    }
    if subject.run is not None:
        facts = status.document(subject.run)
    members = [
        {
            **asdict(member),
            "parts": [{**asdict(part), "seconds_left": seconds_left(part)} for part in member.parts],
        }
        for member in subject.report.members
    ]
    facts["trainings"] = {"state": subject.state, "seconds": subject.report.seconds, "members": members}
    return facts


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
