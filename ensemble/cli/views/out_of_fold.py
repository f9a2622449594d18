"""Show the run that has made out-of-fold predictions, where these are, and what to do with them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from ensemble.cli.layout import Table
from ensemble.cli.views import summary
from ensemble.common.text import shown_path
from ensemble.config import RunConfig
from ensemble.pipeline.run_report import RunReport


def view(subject: tuple[RunReport, Sequence[Path], RunConfig]) -> Iterator[str | Table]:
    report, files, config = subject
    yield from summary.view(report)
    if files:
        yield f"out-of-fold predictions: {' '.join(map(shown_path, files))}"
    if len(files) == len(config.models):
        yield _next(report, files, config)


def _next(report: RunReport, files: Sequence[Path], config: RunConfig) -> str:
    """Return the commands that lead to the ensemble; empty where ``fit`` would need to be told more."""
    configs = [shown_path(Path(path)) for path in report.config_files]
    sets = [text for override in report.overrides for text in ("--set", override)]
    if len(files) == 1:
        return f"next: {shlex.join(['ensemble', 'run', *configs, *sets])}"
    data = config.training_data
    is_exclusive = all(member.activation == "softmax" for member in report.members)
    if not is_exclusive or data.label_column is None:
        return ""
    fit = ["ensemble", "fit", *map(shown_path, files), "--labels", shown_path(data.path)]
    if data.label_column != "label":
        fit += ["--label-column", data.label_column]
    return f"next: {shlex.join(fit)} && {shlex.join(['ensemble', 'run', *configs, 'weights.yaml', *sets])}"
