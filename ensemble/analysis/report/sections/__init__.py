"""List the sections of the report in the page's order: one file and one line each."""

from __future__ import annotations

from ensemble.analysis.report.base import Section
from ensemble.common.extensions import Registry

SECTIONS: Registry[Section] = Registry(
    group="ensemble.report_sections",
    what="section of the report",
    base=Section,  # type: ignore[type-abstract]
    package=__name__,
    built_in={
        "header": ".header:Header",
        # The results.
        "scores": ".scores:Scores",
        "agreement": ".agreement:Agreement",
        "views": ".views:Views",
        "calibration": ".calibration:Calibration",
        "rows": ".rows:RowsToRead",
        # How it ran.
        "trainings": ".trainings:Trainings",
        "timeline": ".timeline:Timeline",
        "throughput": ".throughput:Throughput",
        "faults": ".faults:Faults",
        "settings": ".settings:Settings",
    },
)
