"""How far a run is, by what stands in its directory: whether it goes on, has ended or was killed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ensemble.common.errors import DataError
from ensemble.common.files import read_json
from ensemble.common.shards import shard_rows
from ensemble.pipeline.fingerprint import Fingerprint
from ensemble.pipeline.run_dir import RunDir, holder
from ensemble.pipeline.run_report import RunReport


@dataclass(frozen=True)
class MemberStatus:
    """``state`` is "done", "failed", "unfinished" or, while the run goes on, the member's phase.

    ``rows`` are those that it is to have.  Its speed is in tokens, or in rows where it has none.  ``seconds`` are
    of computing, None where it has not begun; ``seconds_left`` is None where it is not known.
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
    """A run as it stands; ``report`` is None where it is about to start.

    ``holder`` is the process that runs it, None where it does not run: then a report that says "running" is of a
    run that was killed.  ``seconds`` is how long it took, or has taken by now.
    """

    folder: Path
    holder: str | None
    report: RunReport | None = None
    seconds: float = 0.0
    seconds_left: float | None = None
    members: tuple[MemberStatus, ...] = ()

    @classmethod
    def of(cls, folder: Path, now: datetime | None = None) -> RunStatus:
        """Look at a run directory without touching it.

        Raises:
            DataError: no run has ever been there, or its report may not or cannot be read.
        """
        rundir = RunDir(folder)
        by = holder(rundir)
        try:
            report = RunReport.read(rundir.run_json)
        except DataError as error:
            if by is None or isinstance(error.__cause__, OSError):
                raise
            return cls(folder, by)
        # What a running one wrote some seconds ago; its clock and this one's are taken to agree.
        written_at = datetime.fromisoformat(report.written_at)
        age = max(0.0, ((now or datetime.now(UTC)) - written_at).total_seconds()) if by else 0.0
        members = []
        for member in report.members:
            name, fingerprint, progress = member.name, str(member.fingerprint), member.progress
            made_of = Fingerprint.from_dict(read_json(rundir.manifest(name)).get("fingerprint"))
            is_same = made_of is not None and made_of.digest == fingerprint
            # Of a member with ``when``, as far as that is known.
            rows = report.rows if member.cascade is None else member.cascade.rows
            rows *= max(1, len(member.views))
            if is_same and rundir.predictions(name).is_file():
                # What was made elsewhere may lack rows.
                state, done = "done", rows if member.replicas else report.merged_rows.get(name, rows)
            else:
                state = "failed" if member.failure else member.phase if by else "unfinished"
                done = min(shard_rows(rundir.shards_dir(name, fingerprint)), rows)
            if by:  # a chunk in hand counts as far as it has come
                done = min(max(done, progress.rows_done), rows)
            seconds, left, more = progress.seconds, None, 0.0
            if by and state == "predicting":
                left, more = _left(progress.seconds_left, age), age
            tokens = progress.tokens / seconds if seconds and progress.tokens else None
            computed = max(0, progress.rows_done - member.reused_rows)
            speed = computed / seconds if seconds and computed and tokens is None else None
            time = seconds + more if seconds else None
            members.append(MemberStatus(name, state, done, rows, tokens, speed, time, left))
        total = report.timing["total_seconds"] + age
        return cls(folder, by, report, total, _left(report.seconds_left, age), tuple(members))


def _left(seconds: float | None, age: float) -> float | None:
    return None if seconds is None else max(0.0, seconds - age)
