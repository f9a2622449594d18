"""A table that is cut into four chunks of four rows each, because its texts are long; and what a run of it makes.

Only the first tokens of a text are computed, so a run costs little more than the starts of its processes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoints import WORDS
from tests.faults.inject import token_ids
from tests.faults.steps import Judge, Step, Verdict
from tests.project import LABELS, Project

ROWS = 16
ROWS_PER_CHUNK = 4
# A chunk takes 64 KiB of text and 32 bytes a row.
_TEXT_BYTES = 16_000
_SHARD = re.compile(r"/work/([^/]+)\.\w+/\d+-\d+\.\w+\.csv$")
RESULTS = ("ensemble.csv", "submission.csv", "predictions/llama.csv")


def write_chunky_table(project: Project, rows: int = ROWS) -> None:
    """All texts are equally long, so that the chunks are rows 0 to 3, 4 to 7, 8 to 11 and so on."""
    texts = []
    for row in range(rows):
        start = f"{WORDS[row % len(WORDS)]} {word(row)} {WORDS[7 * row % len(WORDS)]} "
        texts.append((start + "person " * _TEXT_BYTES)[:_TEXT_BYTES])
    project.ids = [f"{37 * row % 101:03d}" for row in range(rows)]
    project.texts = texts
    project.truth = [LABELS[row % 3] for row in range(rows)]
    cells = zip(project.ids, texts, project.truth, strict=True)
    project.write_csv("test.csv", ["id", "text", "label"], [list(row) for row in cells])
    sample = [[row_id, "0.3", "0.3", "0.4"] for row_id in sorted(project.ids)]
    project.write_csv("sample.csv", ["id", "tie", "winner_a", "winner_b"], sample)


def chunky_config(project: Project, **changes: Any) -> dict[str, Any]:
    """One member, llama; keyword arguments replace top-level keys."""
    members = project.config()["models"][1:]
    return project.config(
        **{"models": members, "defaults": {"text_column": "text", "max_length": 16}, **changes}
    )


def word(row: int) -> str:
    """A word that stands in this row only, of the first 27, of letters that are in no other word."""
    return "z" + "".join("qxj"[row // 3**place % 3] for place in range(3))


def ids_of(project: Project, row: int) -> tuple[int, ...]:
    """The tokens of a row's own word."""
    return token_ids(project.models / "llama", word(row))


def results(
    project: Project, output_dir: str = "runs/first", names: Sequence[str] = RESULTS
) -> dict[str, bytes]:
    """The bytes of what a run hands over."""
    folder: Path = project.folder / output_dir
    handed_over = {name: (folder / name).read_bytes() for name in names}
    return {**handed_over, "out/submission.csv": (project.folder / "out/submission.csv").read_bytes()}


def values(project: Project, name: str, output_dir: str = "runs/first") -> np.ndarray:
    """The numbers of a CSV of a run, shape (rows, labels)."""
    return project.values(f"{output_dir}/{name}.csv")


def kill_before_predictions(step: Step) -> Verdict:
    return Verdict.KILL if "predictions/" in step.paths[0] else Verdict.GO


def kill_after_shards(number: int, job: str = "") -> Judge:
    """Kill the run when so many shards have their names: of this job, or of whichever."""
    seen = 0

    def judge(step: Step) -> Verdict:
        nonlocal seen
        if seen >= number and not step.is_sync:
            return Verdict.KILL
        shard = _SHARD.search(step.paths[-1]) if step.call.startswith("rename") else None
        seen += shard is not None and job in ("", shard[1])
        return Verdict.GO

    return judge
