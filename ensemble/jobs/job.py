"""Compile members into models, which workers load, and jobs, each a way in which a model reads the table's rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from ensemble.config import MemberConfig
from ensemble.config.schema import deciding_members
from ensemble.config.values import takes_time_left
from ensemble.members.base import Inspection, MemberKind
from ensemble.members.registry import kind_for_checks

# When jobs are due under a time limit: the first of each member, its others, and then as many rows as time allows.
FIRST, LATER, AS_TIME_ALLOWS = 0, 1, 2


When: TypeAlias = Mapping[str, float | str]


@dataclass(frozen=True)
class Decider:
    """Name jobs of a member whose weighted mean, merged with other deciders, says of which rows these are unsure.

    ``has_all_jobs``: they are all of the member's, so that their mean is the member's predictions.
    """

    settings: MemberConfig
    jobs: tuple[str, ...]
    weights: tuple[float, ...]
    has_all_jobs: bool

    @property
    def files(self) -> tuple[str, ...]:
        """Return the names of the predictions that hold its values, once they are complete."""
        return (self.settings.name,) if self.has_all_jobs else self.jobs


@dataclass(frozen=True)
class Selection:
    """Select rows by ``when``, once the jobs of its deciders and inputs have ended.

    Attributes:
        name: of the member or of the job that has the rule.
        when: empty: it selects all rows.
        within: the selection among whose rows this one selects; None: among all.
        inputs: the members whose predictions are read; without them the rows cannot be computed.
    """

    name: str
    when: When
    deciders: tuple[Decider, ...]
    within: Selection | None = None
    inputs: tuple[Decider, ...] = ()

    @property
    def chain(self) -> tuple[Selection, ...]:
        """Return the selections whose rows it needs, and itself."""
        return (self,) if self.within is None else (*self.within.chain, self)

    @property
    def takes_time_left(self) -> bool:
        """Return whether there are as many rows as there is time for."""
        return any(takes_time_left(selection.when) for selection in self.chain)

    @property
    def has_all_rows(self) -> bool:
        """Return whether it only waits, and then selects all rows."""
        return not any(selection.when for selection in self.chain)


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
        selection: of its rows: its own, else its member's; None: all.
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
    selection: Selection | None = None
    phase: int = FIRST
    number: int = 0
    has_rows: bool = True

    @property
    def view(self) -> str:
        """Return the name of the member's view; empty if the member has none."""
        return view_of(self.name)

    @property
    def own_selection(self) -> Selection | None:
        """Return the selection by the job's own rule; None if it has none, or only its member has one."""
        has_own = self.selection is not None and self.selection.name == self.name
        return self.selection if has_own else None

    @property
    def has_all_rows(self) -> bool:
        """Return whether no rule selects some of the rows."""
        return self.selection is None or self.selection.has_all_rows


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
        before = [_decider(other) for other in deciding_members(members[:index])]
        deciders = tuple(decider for decider in before if decider.jobs)
        named = {other.name: other for other in members[:index]}
        # A member that is compiled alone is not run.
        inputs = tuple(_decider(named[name]) for name in member.input_names if name in named)
        for key, settings in by_key.items():
            jobs = tuple(_jobs(member, settings, labels, deciders, inputs))
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


class JobFiles:
    """Name the files of jobs below an ``output_dir``; the constructor touches nothing on disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.predictions_dir = root / "predictions"
        self.work_dir = root / "work"

    def predictions(self, name: str) -> Path:
        return self.predictions_dir / f"{name}.csv"

    def manifest(self, name: str) -> Path:
        return self.predictions_dir / f"{name}.json"

    def rows(self, name: str) -> Path:
        return self.predictions_dir / f"{name}.rows"

    def shards_dir(self, job: str, digest: str) -> Path:
        return self.work_dir / f"{job}.{digest[:16]}"


def job_name(member: str, view: str) -> str:
    return f"{member}@{view}"


def member_of(name: str) -> str:
    """Return the member of a job, or the member itself; names of members have no "@"."""
    return name.partition("@")[0]


def view_of(name: str) -> str:
    """Return the name of the view of a job; empty if its member has none."""
    return name.partition("@")[2]


def jobs_of(models: Sequence[Model], member: str) -> list[Job]:
    """Return the jobs of a member, in the order of its views."""
    jobs = [job for model in models if model.member == member for job in model.jobs]
    return sorted(jobs, key=lambda job: job.number)


def selections_of(jobs: Iterable[Job]) -> dict[str, Selection]:
    """Return the selections of jobs by their names, each behind those whose rows it needs."""
    chains = [job.selection.chain for job in jobs if job.selection is not None]
    return {selection.name: selection for chain in chains for selection in chain}


def by_member(models: Sequence[Model], inspected: Mapping[str, Inspection]) -> dict[str, Inspection]:
    """Return what is known of each member's first model, by member, from what is known of models."""
    members: dict[str, Inspection] = {}
    for model in models:
        if model.name in inspected:
            members.setdefault(model.member, inspected[model.name])
    return members


def _decider(member: MemberConfig, stop: int | None = None) -> Decider:
    """Return the jobs of a member, or those of its views before ``stop``, that decide about rows of later ones.

    Jobs whose own rows depend on the time that is left decide nothing.
    """
    views = member.counted_views
    if not views:
        return Decider(member, (member.name,), (1.0,), has_all_jobs=True)
    deciding = [view for view in views[:stop] if not takes_time_left(view.when)]
    return Decider(
        settings=member,
        jobs=tuple(job_name(member.name, view.name) for view in deciding),
        weights=tuple(view.weight for view in deciding),
        has_all_jobs=len(deciding) == len(views),
    )


def _jobs(
    member: MemberConfig,
    settings: MemberConfig,
    labels: Sequence[str],
    deciders: tuple[Decider, ...],
    inputs: tuple[Decider, ...],
) -> Iterator[Job]:
    """Yield the jobs of one of the member's models; ``deciders`` are of the members before it."""
    member_selection = None
    if member.when is not None:
        member_selection = Selection(member.name, member.when, deciders, inputs=inputs)
    elif inputs:
        member_selection = Selection(member.name, {}, (), inputs=inputs)
    if not settings.counted_views:
        phase = AS_TIME_ALLOWS if takes_time_left(member.when) else FIRST
        yield Job(member.name, "", settings, selection=member_selection, phase=phase)
    numbers = {view.name: number for number, view in enumerate(member.counted_views)}
    for view in settings.counted_views:
        name, number, selection = job_name(member.name, view.name), numbers[view.name], member_selection
        if view.when is not None:
            weighted = member if member.has_weight else member.model_copy(update={"weight": 1.0})
            views_before = _decider(weighted, number)
            also = (views_before,) if views_before.jobs else ()
            selection = Selection(name, view.when, (*deciders, *also), member_selection)
        phase = LATER if number else FIRST
        if selection is not None and selection.takes_time_left:
            phase = AS_TIME_ALLOWS
        yield Job(
            name=name,
            title=f"view {view.name}",
            settings=settings.as_view(view),
            weight=view.weight,
            swap=view.columns,
            label_order=view.label_order(labels) if view.swap is not None else (),
            selection=selection,
            phase=phase,
            number=number,
        )
