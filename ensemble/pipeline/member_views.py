"""Prepare the views of members: their columns, their templates, and the first row in each view."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ensemble.common.errors import DataError
from ensemble.data.json_cells import TemplateProblem, choice_rows
from ensemble.data.row_files import FileCells
from ensemble.data.table import InputTable, TableNeeds
from ensemble.data.template import PromptTemplate, compile_template
from ensemble.jobs.job import job_name
from ensemble.members.base import MemberKind
from ensemble.members.registry import member_kind
from ensemble.pipeline.checks import Problems


@dataclass(frozen=True)
class MemberView:
    """Show a member its rows; a member without views has a single view, which shows rows as they are.

    ``job`` is the name of its job, ``key`` the view's place in the config, ``title`` its name in messages; ``swap``
    has, by column, the column whose cells the view shows instead.
    """

    member: str
    job: str
    key: str
    title: str
    template_key: str
    swap: Mapping[str, str]
    columns: tuple[str, ...]
    any_type: bool
    template: PromptTemplate | None
    choices: str | None = None
    one_choice: bool = False

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
        if self.template is not None or self.any_type:
            return ()
        lists = self.swap.get(self.choices, self.choices) if self.choices is not None else None
        return tuple(name for name in self.table_columns if name != lists)

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
        if self.one_choice and self.choices is not None:
            with contextlib.suppress(TemplateProblem, StopIteration):  # of which another check tells
                cells = next(choice_rows(cells, self.choices))
        return cells


def member_views(kinds: Mapping[str, MemberKind[Any, Any]], problems: Problems) -> Iterator[MemberView]:
    """Yield the views of all members, by name; one with a problem is left out, and the problem is collected."""
    for index, (name, kind) in enumerate(kinds.items()):
        model = kind.settings
        for view in model.counted_views or (None,):
            key = template_place = f"models[{index}]"
            title, swap, reads = name, dict[str, str](), kind.reads()
            if view is not None:
                key = f"{key}.views[{model.views.index(view)}]"
                template_place = key if "prompt_template" in view.changes else template_place
                title, swap = f"{name} (view {view.name})", view.columns
                reads = member_kind(model.as_view(view)).reads()
            columns = reads.columns
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
            if swap and not set(swap) & set(columns):
                read = ", ".join(columns) or "no column"
                problems.add([f"{key}.swap.columns: the member reads neither of them; it reads {read}"])
                continue
            yield MemberView(
                member=name,
                job=name if view is None else job_name(name, view.name),
                key=key,
                title=title,
                template_key=f"{template_place}.prompt_template",
                swap=swap,
                columns=columns,
                any_type=reads.any_type,
                template=template,
                choices=reads.choices,
                one_choice=reads.one_choice,
            )


def member_columns(views: Iterable[MemberView], names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the table's columns that each member reads in any of its views, by name."""
    columns: dict[str, dict[str, None]] = {name: {} for name in names}
    for view in views:
        columns[view.member].update(dict.fromkeys(view.table_columns))
    return {name: tuple(of_member) for name, of_member in columns.items()}


def member_files(kinds: Mapping[str, MemberKind[Any, Any]], folder: Path) -> dict[str, FileCells]:
    """Return the column that names files, by name of the members that read files; ``folder`` is the table's."""
    files = {name: kind.reads().files for name, kind in kinds.items()}
    return {
        name: replace(cells, folder=cells.folder or folder)
        for name, cells in files.items()
        if cells is not None
    }


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
