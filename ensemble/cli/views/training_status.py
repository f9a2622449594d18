"""Show the status of a run whose members are trained: its trainings, then the run itself if it has begun."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ensemble.cli.layout import Table
from ensemble.cli.views import status
from ensemble.cli.views.training import counts, seconds_left, table
from ensemble.commands.status import RunStatus
from ensemble.common.errors import RESUMES
from ensemble.common.text import duration, shown_path
from ensemble.pipeline.run_dir import RunDir, holder
from ensemble.pipeline.training_dir import TrainingDir
from ensemble.training.records import TrainingReport, read_record

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
        is_training = report.status == "running" and by is not None
        has_run = not is_training and (by is not None or RunDir(folder).run_json.exists())
        return cls(folder, report, by, RunStatus.of(folder) if has_run else None)

    @property
    def state(self) -> str:
        """Return the report's status, or "killed" if no process is left that could change it."""
        is_killed = self.report.status == "running" and self.holder is None
        return "killed" if is_killed else self.report.status


def view(subject: TrainingStatus) -> Iterator[str | Table]:
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
