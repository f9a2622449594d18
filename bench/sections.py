"""The parts of the benchmark that measure a room of this project by itself: safety, start-up, the merge."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from bench.processes import Failed
from bench.rounds import say
from bench.table import plain_table


@dataclass(frozen=True)
class Section:
    """A module with ``compare(**arguments)``, which returns a table's rows.

    Attributes:
        full, quick: its arguments in a full and in a short benchmark.
        on_page: whether the documentation has its table; it tells of the others in words.
    """

    name: str
    title: str
    module: str
    full: Mapping[str, Any]
    quick: Mapping[str, Any]
    on_page: bool = True

    def run(self, quick: bool, repeats: int) -> list[dict[str, object]]:
        """Measure; raises Failed where a command has failed or figures are wrong."""
        say(f"{self.title} ...")
        compare = import_module(self.module).compare
        rows: list[dict[str, object]] = compare(
            **(self.quick if quick else self.full), repeats=1 if quick else repeats
        )
        if not rows:
            raise Failed(f"{self.title}: nothing was measured")
        return rows


def show(compare: Callable[[], Sequence[Mapping[str, object]]]) -> int:
    """What a section's module does as a command: measure, and print a markdown table.

    Returns:
        0; 1 where something failed.
    """
    try:
        found = compare()
    except Failed as error:
        say(str(error))
        return 1
    sys.stdout.write(f"{plain_table(found)}\n")
    return 0


SECTIONS: Sequence[Section] = (
    Section("startup", "Start-up", "bench.startup", {}, {"warm": False}),
    Section(
        "busy",
        "Beside other programs: how threads wait",
        "bench.busy",
        {},
        {"works": {"process of the report": "report"}},
        on_page=False,
    ),
    Section(
        "merge",
        "Merge at scale",
        "bench.merge",
        {"rows": 2_000_000, "members": 5, "labels": 3},
        {"rows": 2000, "members": 2, "labels": 3},
    ),
    Section("prefix", "A beginning that all prompts share", "bench.prefix", {"rows": 500}, {"rows": 20}),
    Section("labels", "Ten labels of ten tokens", "bench.labels", {"rows": 200}, {"rows": 10}, on_page=False),
    Section(
        "scale",
        "64 nodes of 8 GPUs, pretended",
        "bench.scale",
        {"rows": 10_000_000},
        {"rows": 50_000, "members": 2, "chunk_seconds": 0.1},
        on_page=False,
    ),
    Section(
        "cluster",
        "The same work over two raylets",
        "bench.cluster",
        {"chunks": 16, "chunk_seconds": 5.0},
        {"chunks": 2, "chunk_seconds": 0.1},
        on_page=False,
    ),
    Section(
        "safety",
        "What safety costs: fsync and hashing",
        "bench.safety",
        {"times": 20},
        {"times": 1},
        on_page=False,
    ),
)
