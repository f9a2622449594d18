"""Show the run that has made out-of-fold predictions, and where these are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ensemble.cli.layout import Table
from ensemble.cli.views import summary
from ensemble.common.text import shown_path
from ensemble.pipeline.run_report import RunReport


def view(subject: tuple[RunReport, Sequence[Path]]) -> Iterator[str | Table]:
    report, files = subject
    yield from summary.view(report)
    if files:
        yield f"out-of-fold predictions: {' '.join(map(shown_path, files))}"
