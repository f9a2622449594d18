"""What the benchmark prints, and the part of it that has its place between two marks of a page."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.contests import Target, Work
from bench.machine import machine, versions
from bench.rounds import Found
from bench.table import missed, page_table, plain_table, targets_table
from bench.timeline import phases, timeline

BEGIN = "<!-- bench: begin (written by make bench) -->"
END = "<!-- bench: end -->"


def text_of(
    targets: Sequence[Target],
    works: Sequence[Work],
    rows: Mapping[str, int],
    found: Found,
    sections: Mapping[str, Sequence[Mapping[str, object]] | str],
    settings: str,
    judged: bool,
) -> str:
    """Everything that was measured, as markdown.

    Args:
        rows: by work.
        sections: rows by title; a text where one failed.
        settings: the command and what else decides the figures.
        judged: False: too few rows for a verdict.
    """
    parts = [_conditions(settings)]
    if targets:
        parts.append(targets_table(targets, rows, found, judged))
        parts += _notes(found)
        if judged and (late := missed(targets, found)):
            parts.append(
                "Missed: " + "; ".join(target.title for target in late) + ". See where the time went:"
            )
        if rows_ := timeline(works, found):
            parts += ["Where this project's time went, in the median run, in seconds:", plain_table(rows_)]
            parts += ["\n".join(phases(works, found))]
    return "\n\n".join([*parts, *_tables(sections)])


def page_of(
    targets: Sequence[Target],
    rows: Mapping[str, int],
    found: Found,
    sections: Mapping[str, Sequence[Mapping[str, object]] | str],
    settings: str,
) -> str:
    """What readers of the documentation look for, as markdown: no goals, no profiles and no runs of seconds.

    Args:
        as for ``text_of``.
    """
    parts = [_conditions(settings)]
    if whole := [target for target in targets if not target.phase and not target.work.startswith("demo")]:
        parts += [page_table(whole, rows, found), *_notes(found)]
    return "\n\n".join([*parts, *_tables(sections)])


def _conditions(settings: str) -> str:
    return f"{time.strftime('%Y-%m-%d')}. {machine()}. {versions()}. {settings}"


def _notes(found: Found) -> list[str]:
    if not found.apart:
        return []
    return [
        f"Probabilities in float32 agree with this project's within {max(found.apart.values()):.0e}. Figures are "
        "medians of the rounds, with the smallest and the largest in brackets; ratios are those of the rounds. MiB "
        "is the resident memory of all processes, sampled; shared pages count for each."
    ]


def _tables(sections: Mapping[str, Sequence[Mapping[str, object]] | str]) -> list[str]:
    return [
        f"### {title}\n\n{content if isinstance(content, str) else plain_table(content)}"
        for title, content in sections.items()
    ]


def write(path: Path, text: str) -> None:
    """Put the text between the two marks of the file.

    Raises:
        ValueError: the file has not both of them.
    """
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no place for the figures: it needs the lines {BEGIN} and {END}")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")
