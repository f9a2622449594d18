"""Report how far a run and its trainings are, by the files in its directory, and show it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ensemble.cli.layout import Table, table
from ensemble.cli.runs import fitted_text, inputs_text, node_texts
from ensemble.common.errors import RESUMES, DataError
from ensemble.common.files import read_json
from ensemble.common.gpus import device_names
from ensemble.common.shards import shard_rows
from ensemble.common.text import duration, percent_of, plural, rate, shown_path, written
from ensemble.jobs.causes import Causes
from ensemble.jobs.job import job_name
from ensemble.pipeline.ending import answer_texts, failure_text, gain_text, rows_of
from ensemble.pipeline.run_dir import RunDir, holder, is_held_by
from ensemble.pipeline.run_report import MERGED, RunReport
from ensemble.pipeline.training_dir import TrainingDir
from ensemble.training.records import MemberRecord, PartRecord, TrainingReport, read_record

_RUN_ENDINGS = {
    "complete": "complete, after {time}",
    "time_limit": f"stopped at its time limit with a complete submission, after {{time}}; {RESUMES}",
    "failed": f"failed, after {{time}}; {RESUMES}",
    "interrupted": f"interrupted, after {{time}}; {RESUMES}",
    "running": f"was killed, after {{time}} or more; {RESUMES}",
}
_TRAINING_ENDINGS = {
    "complete": "",
    "time_limit": f"; there was no time for more; {RESUMES}",
    "failed": f"; some failed; {RESUMES}",
    "interrupted": f"; interrupted; {RESUMES}",
    "killed": f"; its process was killed; {RESUMES}",
}


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
    """Hold the progress of a run and of its trainings.

    Attributes:
        holder: the process that has the run's directory; if None, a report that says "running" is of a run, or of
            trainings, that were killed.
        report: of the holder's run, or of the last one if there is no holder; None if the run is about to start, or
            has not begun after its trainings.
        seconds: from the start until the end, or until now.
        trainings: None if nothing was trained there.
        predicts_held_out: whether their out-of-fold predictions are being made.
    """

    folder: Path
    holder: str | None
    report: RunReport | None = None
    seconds: float = 0.0
    seconds_left: float | None = None
    members: tuple[MemberStatus, ...] = ()
    trainings: TrainingReport | None = None
    predicts_held_out: bool = False

    @property
    def state(self) -> str:
        if self.report is not None:
            is_killed = self.report.status == "running" and self.holder is None
            return "killed" if is_killed else self.report.status
        if self.training_state == "running" or self.predicts_held_out:
            return "training"
        return "starting" if self.holder is not None else "not_started"

    @property
    def training_state(self) -> str:
        """Return how trainings are going or have ended; empty if there are none."""
        if self.trainings is None:
            return ""
        is_killed = self.trainings.status == "running" and self.holder is None
        return "killed" if is_killed else self.trainings.status

    @classmethod
    def of(cls, folder: Path, now: datetime | None = None) -> RunStatus:
        """Look at a run directory without changing it.

        Raises:
            DataError: there never was a run, or its report cannot be read.
        """
        rundir, files = RunDir(folder), TrainingDir(folder)
        by = holder(rundir)
        begun = cls(
            folder,
            by,
            trainings=read_record(files.records, TrainingReport),
            predicts_held_out=any(holder(RunDir(run)) for run in files.oof_runs),
        )
        if begun.state == "training" or (begun.trainings and by is None and not rundir.run_json.exists()):
            return begun
        try:
            report = RunReport.read(rundir.run_json)
        except DataError as error:
            if by is None or isinstance(error.__cause__, OSError):
                raise
            return begun
        if by is not None and not is_held_by(by, report.pid):  # it is of an earlier run
            return begun
        # A running run writes its report every few seconds; its clock is taken to agree with ours.
        written_at = datetime.fromisoformat(report.written_at)
        age = max(0.0, ((now or datetime.now(UTC)) - written_at).total_seconds()) if by else 0.0
        members = []
        for member in report.members:
            name, fingerprint = member.name, str(member.fingerprint)
            # Predictions that were made elsewhere may lack rows.
            rows = member.rows if member.replicas else rows_of(report, member)
            manifest = Causes.from_dict(read_json(rundir.manifest(name)).get("fingerprint"))
            is_current = manifest is not None and manifest.digest == fingerprint
            if is_current and rundir.predictions(name).is_file():
                state, done = "done", min(member.rows, rows)
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
        left = _left(report.seconds_left, age)
        return replace(begun, report=report, seconds=total, seconds_left=left, members=tuple(members))


def _left(seconds: float | None, age: float) -> float | None:
    return None if seconds is None else max(0.0, seconds - age)


def status(subject: RunStatus) -> Iterator[str | Table]:
    """Yield how far a run and its trainings are, or how they ended."""
    if subject.trainings is not None:
        yield from _trainings(subject, subject.trainings)
    if subject.report is not None:
        yield from _run(subject, subject.report)
    elif subject.state == "starting":
        yield f"{subject.folder}: {subject.holder} is about to start a run here"


def _run(subject: RunStatus, report: RunReport) -> Iterator[str | Table]:
    yield table(
        subject.members,
        {
            "member": lambda member: member.name,
            "state": lambda member: member.state,
            "rows done": lambda member: member.rows_done,
            "of": lambda member: member.rows,
            "share": lambda member: percent_of(member.rows_done, member.rows),
            "tokens/s": lambda member: written(member.tokens_per_second, ",.0f"),
            "rows/s": lambda member: rate(member.rows_per_second),
            "time": lambda member: duration(member.seconds),
            "left": lambda member: duration(member.seconds_left),
        },
        texts=["state"],
    )
    yield from (f"{member.name}: {inputs_text(member.inputs)}" for member in report.members if member.inputs)
    yield from node_texts(report)
    if subject.holder is not None:
        yield from _workers_on_nodes(report)
        left = subject.seconds_left
        ahead = "" if left is None else f", about {duration(left)} left"
        yield f"{subject.folder}: running for {duration(subject.seconds)}{ahead} ({subject.holder})"
        return
    yield f"{subject.folder}: {_RUN_ENDINGS[report.status].format(time=duration(subject.seconds))}"
    if report.status in MERGED:
        yield gain_text(report)
        yield fitted_text(report)
        yield from answer_texts(report)
    for member in report.members:
        if member.failure is not None:
            yield failure_text(member.failure)
        if member.bad_rows:
            row, reason = next(iter(member.bad_rows.items()))
            count = plural(len(member.bad_rows), "bad row")
            yield f"{member.name}: {count}, the first is row {int(row) + 1:,}: {reason}"


def _workers_on_nodes(report: RunReport) -> Iterator[str]:
    """Yield where in a cluster the workers of each member are."""
    names = device_names(report.devices)
    for member in report.members:
        for worker in member.workers_now:
            if worker.node and worker.is_running:
                devices = ", ".join(names.get(device, device) for device in worker.devices)
                yield f"{member.name}-{worker.replica}: on {devices}"


def _trainings(subject: RunStatus, report: TrainingReport) -> Iterator[str | Table]:
    yield _table(report)
    for member in report.members:
        if member.failure:
            yield f"{member.name} failed: {member.failure}"
    so_far = f"{subject.folder}: {counts(report)}"
    if subject.training_state == "running":
        yield f"{so_far}; training for {duration(report.seconds)} ({subject.holder})"
    else:
        yield f"{so_far}{_TRAINING_ENDINGS[subject.training_state]}"
    oof = TrainingDir(subject.folder).oof_run
    if RunDir(oof).run_json.exists():
        yield f"out-of-fold predictions: `ensemble status {shown_path(oof)}` shows their run"


def trained(report: TrainingReport) -> Iterator[str | Table]:
    """Yield what ``train`` has trained, at its end."""
    yield _table(report)
    yield counts(report)


def document(subject: RunStatus) -> dict[str, Any]:
    """Return what ``status --json`` prints."""
    facts = {**vars(subject), "problems": [], "output_dir": subject.folder.absolute(), "state": subject.state}
    for name in ("folder", "report", "trainings", "predicts_held_out"):
        del facts[name]
    if subject.report is not None:
        names = ("rows", "scores", "fitted_on", "failures", "files")
        facts |= {name: getattr(subject.report, name) for name in names}
    if subject.trainings is not None:
        members = [asdict(member) for member in subject.trainings.members]
        for described, member in zip(members, subject.trainings.members, strict=True):
            for part, record in zip(described["parts"], member.parts, strict=True):
                part["seconds_left"] = seconds_left(record)
        seconds = subject.trainings.seconds
        facts["trainings"] = {"state": subject.training_state, "seconds": seconds, "members": members}
    return facts


def _table(report: TrainingReport) -> Table:
    def done(member: MemberRecord) -> list[PartRecord]:
        return [part for part in member.parts if part.status == "done"]

    def seconds_each(member: MemberRecord) -> float | None:
        seconds = [part.seconds or 0.0 for part in done(member)]
        return sum(seconds) / len(seconds) if seconds else None

    return table(
        report.members,
        {
            "member": lambda member: member.name,
            "trained": lambda member: f"{len(done(member))}/{len(member.parts)}",
            "in progress": lambda member: ", ".join(
                _progress_text(part) for part in member.parts if part.status == "training"
            ),
            "time each": lambda member: duration(seconds_each(member)),
            "retries": lambda member: sum(max(0, part.attempts - 1) for part in member.parts) or None,
            "folder": lambda member: shown_path(Path(member.folder)) if done(member) else None,
        },
        texts=["in progress", "folder"],
    )


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


def _progress_text(part: PartRecord) -> str:
    steps, left = part.steps_done, seconds_left(part)
    share = "" if steps is None else f" {steps[0] / steps[1]:.0%}"
    ahead = f" ({duration(left)} left)" if left else ""
    return f"{part.text}{share}{ahead}"
