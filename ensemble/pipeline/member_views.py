"""Prepare the views of members: their columns, their templates, and the first row in each view."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ensemble.common.errors import DataError
from ensemble.common.protocol import Activation
from ensemble.config import DataConfig, MemberConfig
from ensemble.data.json_cells import TemplateProblem, choice_rows
from ensemble.data.row_files import FileCells
from ensemble.data.table import InputTable, TableNeeds
from ensemble.data.template import PromptTemplate, compile_template
from ensemble.jobs.job import Job, Model, jobs_of, member_of
from ensemble.members.base import OutputColumns, Reads
from ensemble.members.registry import member_kind
from ensemble.pipeline.checks import Problems


@dataclass(frozen=True)
class MemberView:
    """Say what a job reads of the table.

    Attributes:
        key: the place of its view, or of its member, in the config.
        columns: that it reads, those of its template included; in a view that swaps, by the names as they are.
    """

    job: Job
    key: str
    template_key: str
    reads: Reads
    columns: tuple[str, ...]
    template: PromptTemplate | None

    @property
    def member(self) -> str:
        return member_of(self.job.name)

    @property
    def title(self) -> str:
        """Return the name for messages."""
        return f"{self.member} ({self.job.title})" if self.job.view else self.member

    @property
    def swap(self) -> Mapping[str, str]:
        """Return, by column, the column whose cells the job reads instead."""
        return self.job.swap

    @property
    def choices_column(self) -> str | None:
        """Return the table's column of choices; None if there is none."""
        choices = self.reads.choices
        return None if choices is None else self.swap.get(choices, choices)

    @property
    def table_columns(self) -> tuple[str, ...]:
        """Return the table's columns that the view needs, in the member's order."""
        if not self.swap:
            return self.columns
        needed = [self.swap.get(name, name) for name in self.columns]
        kept = [name for name in self.columns if name in needed]
        return tuple(dict.fromkeys([*kept, *needed]))

    @property
    def text_columns(self) -> tuple[str, ...]:
        if self.template is not None or self.reads.any_type:
            return ()
        return tuple(name for name in self.table_columns if name != self.choices_column)

    @property
    def json_columns(self) -> tuple[str, ...]:
        parsed = () if self.template is None else self.template.json_columns
        return tuple(self.swap.get(name, name) for name in parsed)

    def reader(self, column: str) -> str:
        """Return the key that asks for one of ``table_columns``, or the member that does."""
        if column not in self.columns:
            return f"{self.key}.swap"
        return f"{self.key} ({self.member})" if self.template is None else self.template_key

    def shown(self, row: Mapping[str, object]) -> dict[str, object]:
        """Return a row of the table as this view shows it, with its first choice."""
        cells = {name: row[self.swap.get(name, name)] for name in self.columns}
        if self.reads.one_choice and self.reads.choices is not None:
            with contextlib.suppress(TemplateProblem, StopIteration):  # of which another check tells
                cells = next(choice_rows(cells, self.reads.choices))
        return cells


def member_views(
    members: Sequence[MemberConfig], models: Sequence[Model], outputs: OutputColumns, problems: Problems
) -> Iterator[MemberView]:
    """Yield what each job reads, by member; a job with a problem is left out, and the problem is collected."""
    for index, member in enumerate(members):
        views = {view.name: (number, view) for number, view in enumerate(member.all_views)}
        for job in jobs_of(models, member.name):
            key = template_place = f"models[{index}]"
            if job.view:
                number, view = views[job.view]
                key = f"{key}.views[{number}]"
                template_place = key if "prompt_template" in view.changes else template_place
            reads = member_kind(job.settings).reads()
            columns = reads.columns
            if reads.as_in_table:
                columns = outputs.of_rows(columns)
            template: PromptTemplate | None = None
            if reads.template is not None:
                with problems.at(f"{template_place}.prompt_template"):
                    template = compile_template(reads.template)
                if template is None:
                    continue
                columns = template.columns
            if reads.one_choice and reads.choices not in columns:
                read = ", ".join(columns) or "no column"
                text = f"no prompt would hold a choice, as only {read} is read; read {reads.choices!r}, too"
                problems.add([f"{key}.choices: {text}"])
            if reads.choices is not None:
                columns = tuple(dict.fromkeys([*columns, reads.choices]))
            if job.swap and not set(job.swap) & set(columns):
                read = ", ".join(columns) or "no column"
                problems.add([f"{key}.swap.columns: the member reads neither of them; it reads {read}"])
                continue
            yield MemberView(job, key, f"{template_place}.prompt_template", reads, columns, template)


def member_columns(views: Iterable[MemberView], names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the table's columns that each member reads in any of its views, by name."""
    columns: dict[str, dict[str, None]] = {name: {} for name in names}
    for view in views:
        columns[view.member].update(dict.fromkeys(view.table_columns))
    return {name: tuple(of_member) for name, of_member in columns.items()}


def member_files(models: Iterable[Model], folder: Path) -> dict[str, FileCells]:
    """Return the column that names files, by name of the members that read files; ``folder`` is the table's."""
    files = {model.member: model.kind.reads().files for model in models}
    return {
        name: replace(cells, folder=cells.folder or folder)
        for name, cells in files.items()
        if cells is not None
    }


def needs_of(
    data: DataConfig, labels: tuple[str, ...], truth_as: Activation, limit: int | None = None
) -> TableNeeds:
    """Return what is needed of a table with the true labels that a config names; for ``truth_as`` see there."""
    return TableNeeds(
        id_column=data.id_column,
        label_column=data.label_column,
        label_columns=data.truth_columns(labels),
        labels=labels,
        limit=limit,
        truth_as=truth_as,
        skip_unlabelled=data.skip_unlabelled,
    )


def with_columns(needs: TableNeeds, views: Sequence[MemberView]) -> TableNeeds:
    """Return what is needed of a table together with the columns that views read."""
    return replace(
        needs,
        columns=tuple(dict.fromkeys(name for view in views for name in view.table_columns)),
        json_columns=tuple(dict.fromkeys(name for view in views for name in view.json_columns)),
        text_columns=tuple(dict.fromkeys(name for view in views for name in view.text_columns)),
        # The first view that asks for a column is named.
        read_by={name: view.reader(name) for view in reversed(views) for name in view.table_columns},
    )


def first_texts(views: Iterable[MemberView], table: InputTable, problems: Problems) -> dict[str, str]:
    """Return the first row as each template renders it, by the view's title; collect problems of a few rows."""
    texts: dict[str, str] = {}
    for view in views:
        types = table.types(view.swap) if view.swap else {}
        if len(set(types.values())) > 1:
            contents = " and ".join(f"{column!r} holds {kind}" for column, kind in types.items())
            problems.add([f"{view.key}.swap.columns: {contents}; both must hold the same"], DataError)
            continue
        if view.template is None:
            continue
        for number, row in enumerate(table.head(5)):
            try:
                texts.setdefault(view.title, view.template.render(view.shown(row)))
            except TemplateProblem as error:
                place = f"row {number + 1} (id {table.ids[number].as_py()!r})"
                problems.add([f"{view.template_key}: {place}: {error}"], DataError)
                break
    return texts
