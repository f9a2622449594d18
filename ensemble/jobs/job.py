"""Compile members into models, which workers load, and jobs, each a way in which a model reads the table's rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ensemble.config import MemberConfig
from ensemble.config.values import takes_time_left
from ensemble.members.base import Inspection, MemberKind
from ensemble.members.registry import kind_for_checks

# When jobs are due under a time limit: the first of each member, its others, and then as many rows as time allows.
FIRST, LATER, AS_TIME_ALLOWS = 0, 1, 2


@dataclass(frozen=True)
class Job:
    """Describe one way in which a model reads rows; a member's predictions are the weighted mean of its jobs'.

    Attributes:
        name: of its predictions: the member's, with the view's behind an "@" if the member has views.
        title: what tells it from the member's other jobs, in words; empty if it is the only one.
        settings: the member's with this view alone.
        weight: in the member's mean.
        swap: by column, the other column whose cells replace its cells.
        label_order: for each of the config's labels, the number of the label that the model predicts instead;
            empty: the label itself.
        when: the rule that selects its rows among the member's; None: all.
        phase: FIRST, LATER or AS_TIME_ALLOWS.
        number: its place among the member's jobs.
        has_rows: whether it computes rows of the table; a job without rows is done as a whole, and its member fails
            with the first that cannot be done.
    """

    name: str
    title: str
    settings: MemberConfig
    weight: float = 1.0
    swap: Mapping[str, str] = field(default_factory=dict)
    label_order: tuple[int, ...] = ()
    when: Mapping[str, float | str] | None = None
    phase: int = FIRST
    number: int = 0
    has_rows: bool = True

    @property
    def view(self) -> str:
        """Return the name of the member's view; empty if the member has none."""
        return self.name.partition("@")[2]

    @property
    def may_lack_rows(self) -> bool:
        """Return whether it may have fewer rows than its member when the member is complete."""
        return self.when is not None or self.phase == AS_TIME_ALLOWS


@dataclass(frozen=True)
class Model:
    """Describe what a worker loads, and the jobs that it computes.

    Attributes:
        name: the member's, or the first job's if the member has several models.
        index: the member's number in the config.
        key: the key of the member that names the model; empty: the member has no other.
        settings: the member's; it counts only views that this model computes.
    """

    name: str
    index: int
    key: str
    settings: MemberConfig
    kind: MemberKind[Any, Any] = field(compare=False, repr=False)
    jobs: tuple[Job, ...]

    @property
    def member(self) -> str:
        return self.settings.name

    @property
    def place(self) -> str:
        """Return where it stands in the config, for messages."""
        return f"models[{self.index}] ({self.member})" + (f": {self.key}" if self.key else "")


def compile_models(members: Sequence[MemberConfig], labels: Sequence[str]) -> tuple[Model, ...]:
    """Return the models of all members, in the config's order, with their jobs."""
    models: list[Model] = []
    for index, member in enumerate(members):
        by_key = member.models
        for key, settings in by_key.items():
            jobs = tuple(_jobs(member, settings, labels))
            name = member.name if len(by_key) == 1 else jobs[0].name
            models.append(Model(name, index, key, settings, kind_for_checks(settings), jobs))
    return tuple(models)


def model_of_trainings(members: Sequence[MemberConfig], member: MemberConfig, titles: Sequence[str]) -> Model:
    """Return the model of a member's trainings, which are its jobs; its workers load nothing."""
    settings = member.model_copy(update={"when": None, "views": None})
    jobs = tuple(
        Job(member.name, title, settings, number=number, has_rows=False)
        for number, title in enumerate(titles)
    )
    return Model(member.name, members.index(member), "", settings, kind_for_checks(settings), jobs)


def job_name(member: str, view: str) -> str:
    """Return the name of the job of a member's view."""
    return f"{member}@{view}"


def member_of(name: str) -> str:
    """Return the member of a job, or the member itself; names of members have no "@"."""
    return name.partition("@")[0]


def jobs_of(models: Sequence[Model], member: str) -> list[Job]:
    """Return the jobs of a member, in the order of its views."""
    jobs = [job for model in models if model.member == member for job in model.jobs]
    return sorted(jobs, key=lambda job: job.number)


def by_member(models: Sequence[Model], inspected: Mapping[str, Inspection]) -> dict[str, Inspection]:
    """Return what is known of each member's first model, by member, from what is known of models."""
    members: dict[str, Inspection] = {}
    for model in models:
        if model.name in inspected:
            members.setdefault(model.member, inspected[model.name])
    return members


def _jobs(member: MemberConfig, settings: MemberConfig, labels: Sequence[str]) -> Iterator[Job]:
    """Yield the jobs of one of the member's models."""
    if not settings.counted_views:
        phase = AS_TIME_ALLOWS if takes_time_left(member.when) else FIRST
        yield Job(member.name, "", settings, phase=phase)
    numbers = {view.name: number for number, view in enumerate(member.counted_views)}
    for view in settings.counted_views:
        phase = LATER if numbers[view.name] else FIRST
        if takes_time_left(member.when) or takes_time_left(view.when):
            phase = AS_TIME_ALLOWS
        yield Job(
            name=job_name(member.name, view.name),
            title=f"view {view.name}",
            settings=settings.as_view(view),
            weight=view.weight,
            swap=view.columns,
            label_order=view.label_order(labels) if view.swap is not None else (),
            when=view.when,
            phase=phase,
            number=numbers[view.name],
        )
