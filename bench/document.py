"""The benchmark's page: its text, and its place between two marks in a file of documentation."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.contests import Target, Work
from bench.machine import machine, versions
from bench.rounds import Found
from bench.table import missed, plain_table, targets_table
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
    parts = [f"{time.strftime('%Y-%m-%d')}. {machine()}. {versions()}. {settings}"]
    if targets:
        parts.append(targets_table(targets, rows, found, judged))
        if found.apart:
            parts.append(
                f"All contestants' probabilities agree with this project's within {max(found.apart.values()):.0e}. "
                "Seconds and ratios: median (smallest to largest) of rounds; MiB: resident memory of all processes "
                "together, shared pages counted for each, sampled; the ratio is the median of the rounds' ratios."
            )
        if judged and (late := missed(targets, found)):
            parts.append(
                "Missed: " + "; ".join(target.title for target in late) + ". See where the time went:"
            )
        if rows_ := timeline(works, found):
            parts += ["Where this project's time went, in the median run, in seconds:", plain_table(rows_)]
            parts += ["\n".join(phases(works, found))]
    for title, content in sections.items():
        parts += [f"### {title}", content if isinstance(content, str) else plain_table(content)]
    return "\n\n".join(parts)


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
