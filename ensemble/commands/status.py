"""Report how far a run is, by the files in its directory: whether it runs, has ended or was killed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ensemble.common.errors import DataError
from ensemble.common.files import read_json
from ensemble.common.shards import shard_rows
from ensemble.jobs.job import job_name
from ensemble.pipeline.fingerprint import Fingerprint
from ensemble.pipeline.run_dir import RunDir, holder
from ensemble.pipeline.run_report import RunReport


@dataclass(frozen=True)
class MemberStatus:
    """Hold a member's progress.

    Attributes:
        state: "done", "failed", "left out", "unfinished" or, while the run goes on, the member's phase.
        tokens_per_second: None for members without tokens, which have ``rows_per_second``.
        seconds: of computing.
    """

    name: str
    state: str
    rows_done: int
    rows: int
    tokens_per_second: float | None
    rows_per_second: float | None
    seconds: float | None
    seconds_left: float | None


@dataclass(frozen=True)
class RunStatus:
    """Hold a run's progress.

    Attributes:
        holder: the process that runs it; if None, a report that says "running" is of a run that was killed.
        report: None if the run is about to start.
        seconds: from the start until the end, or until now.
    """

    folder: Path
    holder: str | None
    report: RunReport | None = None
    seconds: float = 0.0
    seconds_left: float | None = None
    members: tuple[MemberStatus, ...] = ()

    @classmethod
    def of(cls, folder: Path, now: datetime | None = None) -> RunStatus:
        """Look at a run directory without changing it.

        Raises:
            DataError: there never was a run, or its report cannot be read.
        """
        rundir = RunDir(folder)
        by = holder(rundir)
        try:
            report = RunReport.read(rundir.run_json)
        except DataError as error:
            if by is None or isinstance(error.__cause__, OSError):
                raise
            return cls(folder, by)
        # A running run writes its report every few seconds; its clock is taken to agree with ours.
        written_at = datetime.fromisoformat(report.written_at)
        age = max(0.0, ((now or datetime.now(UTC)) - written_at).total_seconds()) if by else 0.0
        members = []
        for member in report.members:
            name, fingerprint, rows = member.name, str(member.fingerprint), member.rows
            manifest = Fingerprint.from_dict(read_json(rundir.manifest(name)).get("fingerprint"))
            is_current = manifest is not None and manifest.digest == fingerprint
            if is_current and rundir.predictions(name).is_file():
                state, done = "done", rows
            else:
                state = member.phase if by else "unfinished"
                if member.failure:
                    state = member.failure.outcome
                jobs = {job_name(name, title): view.fingerprint for title, view in member.views.items()}
                folders = [rundir.shards_dir(*job) for job in (jobs or {name: fingerprint}).items()]
                done = min(sum(map(shard_rows, folders)), rows)
            if by:  # with the rows of unfinished chunks
                done = min(max(done, member.rows_done), rows)
            seconds, seconds_left = member.seconds, None
            if by is not None and state == "predicting":
                seconds_left = _left(member.seconds_left, age)
                seconds = None if seconds is None else seconds + age
            members.append(
                MemberStatus(
                    name=name,
                    state=state,
                    rows_done=done,
                    rows=rows,
                    tokens_per_second=member.tokens_per_second,
                    rows_per_second=member.rows_per_second,
                    seconds=seconds,
                    seconds_left=seconds_left,
                )
            )
        total = report.timing["total_seconds"] + age
        return cls(folder, by, report, total, _left(report.seconds_left, age), tuple(members))


def _left(seconds: float | None, age: float) -> float | None:
    return None if seconds is None else max(0.0, seconds - age)
