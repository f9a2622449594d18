"""PURE: what was measured -> markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.contests import Sample, Target
from bench.rounds import MIB, Found

HEADER = "| against | rows | this project, s | MiB | the other, s | MiB | ratio | at most | |"
_MISSED = "MISSED"


@dataclass(frozen=True)
class Spread:
    """A median with the smallest and the largest value."""

    middle: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))

    def text(self, digits: int) -> str:
        """The median; the range behind it."""
        return f"{self.middle:.{digits}f} ({self.least:.{digits}f} to {self.most:.{digits}f})"


def targets_table(targets: Sequence[Target], rows: Mapping[str, int], found: Found, judged: bool) -> str:
    """One line for each target.

    Args:
        rows: by work.
        judged: False: too few rows for a verdict.
    """
    lines = [HEADER, "|---|---|---|---|---|---|---|---|---|"]
    for target in targets:
        cells = [target.title, f"{rows[target.work]:,}", *_cells(target, found, judged)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page_table(targets: Sequence[Target], rows: Mapping[str, int], found: Found) -> str:
    """One line for each target, with how many times as fast this project is."""
    lines = [
        "| against | rows | this project, s | MiB | the other, s | MiB | times as fast |",
        "|---|---|---|---|---|---|---|",
    ]
    for target in targets:
        cells = [target.title, f"{rows[target.work]:,}", *_page_cells(target, found)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _page_cells(target: Target, found: Found) -> list[str]:
    if problem := found.problem(target):
        return ["", "", "", "", f"FAILED: {_one_line(problem)}"]
    pairs = found.pairs(target)
    if not pairs:
        return ["", "", "", "", "not run"]
    cells = []
    for side in zip(*pairs, strict=True):
        peak = median(sample.measured.peak_bytes for sample in side)
        cells += [f"{median(_seconds(target, sample) for sample in side):.1f}", f"{peak / MIB:,.0f}"]
    speeds = [_seconds(target, other) / _seconds(target, one) for one, other in pairs]
    return [*cells, Spread.of(speeds).text(2)]


def missed(targets: Sequence[Target], found: Found) -> list[Target]:
    """Those whose ratio is above what it may be."""
    return [
        target
        for target in targets
        if not found.problem(target)
        and (pairs := found.pairs(target))
        and target.at_most is not None
        and ratio(target, pairs).middle > target.at_most
    ]


def ratio(target: Target, pairs: Sequence[tuple[Sample, Sample]]) -> Spread:
    """This project's time by the other's, round by round."""
    return Spread.of([_seconds(target, one) / _seconds(target, other) for one, other in pairs])


def _cells(target: Target, found: Found, judged: bool) -> list[str]:
    at_most = "" if target.at_most is None else f"{target.at_most:.2f}"
    if problem := found.problem(target):
        return ["", "", "", "", "", at_most, f"FAILED: {_one_line(problem)}"]
    pairs = found.pairs(target)
    if not pairs:
        return ["", "", "", "", "", at_most, "not run"]
    cells, slower = [], 0.0
    for side in zip(*pairs, strict=True):
        seconds = Spread.of([_seconds(target, sample) for sample in side])
        slower = max(slower, seconds.middle)
        peak = median(sample.measured.peak_bytes for sample in side)
        cells += [seconds.text(1), f"{peak / MIB:,.0f}"]
    found_ratio = ratio(target, pairs)
    verdict = "" if target.at_most is None else "ok" if found_ratio.middle <= target.at_most else _MISSED
    if judged and verdict and slower < target.enough_seconds:
        verdict += f", on {slower:.0f} s of work only"
    return [*cells, found_ratio.text(3), at_most, verdict if judged else "not judged"]


def _seconds(target: Target, sample: Sample) -> float:
    if not target.phase:
        return sample.measured.seconds
    assert sample.phase_seconds is not None, target
    return max(sample.phase_seconds, 1e-9)


def _one_line(text: str) -> str:
    line = " ".join(text.replace("|", "/").split())
    return line if len(line) < 200 else f"{line[:60]} ... {line[-130:]}"


def plain_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows whose keys are the columns, in the order in which they first come."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        lines.append("| " + " | ".join(_cell(row.get(column, "")) for column in columns) + " |")
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else _one_line(str(value))
