"""Show how often a member's verdict changes with the view; for two answers in both orders, its position bias."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import ClassVar

import numpy as np
from markupsafe import Markup

from ensemble.analysis.metrics import METRICS, Bootstrap, Interval
from ensemble.analysis.report.base import ReportData, Section, with_interval
from ensemble.jobs.job import job_name
from ensemble.merging.methods.base import Values
from ensemble.pipeline.prediction_files import read_as_written
from ensemble.pipeline.run_dir import RunDir


class Views(Section):
    title: ClassVar[str] = "Views of the same rows"

    def html(self, data: ReportData) -> Markup | None:
        changes = {
            (name, *pair): share
            for name, views in _values_of_views(data).items()
            for pair, share in verdict_changes(views).items()
        }
        if not changes:
            return None
        order = sorted(changes, key=lambda names: -changes[names].value)
        name, first, second = order[0]
        rows = [
            [names[0], " / ".join(names[1:]), with_interval("accuracy", changes[names])] for names in order
        ]
        return self.render(name=name, first=first, second=second, share=changes[order[0]].value, rows=rows)


def _values_of_views(data: ReportData) -> dict[str, dict[str, Values]]:
    """Return what each view gives, float64 [rows, labels], by member, of members with exclusive labels."""
    values: dict[str, dict[str, Values]] = {}
    for member in data.report.members:
        if data.predictions.activations.get(member.name) == "softmax":
            values[member.name] = {}
            for view in member.views:
                path = RunDir(data.run_dir).predictions(job_name(member.name, view))
                file = read_as_written(path, labels=data.predictions.labels)
                values[member.name][view], _ = file.join(data.predictions.ids, may_lack=True)
    return values


def verdict_changes(views: Mapping[str, Values]) -> dict[tuple[str, str], Interval]:
    """Return the share of common rows with another likeliest label, by each pair of views that have such rows."""
    changes = {}
    for first, second in combinations(views, 2):
        is_in_both = ~np.isnan(views[first][:, 0] + views[second][:, 0])
        if is_in_both.any():
            bootstrap = Bootstrap(views[first][is_in_both].argmax(axis=1), "softmax")
            same = bootstrap.score(METRICS["accuracy"], views[second][is_in_both]).interval
            changes[first, second] = Interval(1 - same.value, 1 - same.high, 1 - same.low)
    return changes
