"""Write the page: all sections, with everything that they need, in a single file."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from markupsafe import Markup

import ensemble.analysis.report.pictures  # noqa: F401  draws by Matplotlib: if that is broken, there is no page
from ensemble.analysis.report import base
from ensemble.analysis.report.base import ReportData, Section, html
from ensemble.common.errors import DataError
from ensemble.common.extensions import Registry
from ensemble.common.files import unreadable, write_text
from ensemble.common.redact import Redactor
from ensemble.common.text import error_text
from ensemble.data.predictions_csv import demand_as_written
from ensemble.pipeline.report_page import DIGEST, page_digest
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import RunReport

# In the page's order.
SECTIONS: Registry[Section] = Registry(
    group="ensemble.report_sections",
    what="section of the report",
    base=Section,  # type: ignore[type-abstract]
    package=__package__,
    built_in={
        "header": ".how_it_ran:Header",
        "scores": ".results:Scores",
        "agreement": ".results:Agreement",
        "views": ".results:Views",
        "calibration": ".results:Calibration",
        "rows": ".rows:RowsToRead",
        "trainings": ".how_it_ran:Trainings",
        "timeline": ".how_it_ran:Timeline",
        "throughput": ".how_it_ran:Throughput",
        "faults": ".how_it_ran:Faults",
        "settings": ".how_it_ran:Settings",
    },
)
# Control characters, and those by which text of a table could turn the direction of the text beside it.
_UNSEEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def write_report(run_dir: Path, output: Path) -> list[str]:
    """Make the page of a run and write it.

    Returns:
        what could not be shown, a sentence for each section; tracebacks go to the error stream.

    Raises:
        DataError: run.json cannot be read, or a member's predictions cannot be read or were changed after the run.
        WriteError: the disk is full or the like.
    """
    rundir = RunDir(run_dir)
    report = RunReport.read(rundir.run_json)
    complete = [member.name for member in report.members if member.status == "complete"]
    try:
        for path in map(rundir.predictions, complete):
            if path.exists():
                demand_as_written(path)
    except OSError as error:
        raise DataError(unreadable(rundir.predictions_dir, error)) from error
    data = ReportData(run_dir, report)
    problems: list[str] = []
    sections = list(_sections(data, problems))
    page = base.rendered(
        base.__name__,
        "page",
        title=data.title,
        digest_name=DIGEST,
        # A section that failed may work the next time: without a digest the next run makes the page again.
        digest="" if problems else page_digest(report),
        sections=sections,
    )
    write_text(output, _UNSEEN.sub(lambda character: f"\\u{ord(character[0]):04x}", page) + "\n")
    return problems


def _sections(data: ReportData, problems: list[str]) -> Iterator[tuple[str, str, Markup]]:
    """Yield the id, the title and the content of each section; add to ``problems`` why a section failed."""
    reasons = set[str]()
    for name in SECTIONS.names():
        title = name
        content: Markup | None = None
        try:
            section = SECTIONS.load(name)()
            title = section.title
            content = section.html(data)
        except DataError as error:  # nothing to show, as in a run that failed: the reason is given once
            if str(error) not in reasons:
                reasons.add(str(error))
                content = html('<p class="note">Not shown: {{ reason }}</p>', reason=str(error))
        except Exception as error:  # whatever goes wrong in one section, the others are worth reading
            redactor = Redactor(os.environ)
            print(redactor(traceback.format_exc()), file=sys.stderr)  # noqa: T201
            reason = redactor(f"{type(error).__name__}: {error_text(error)}")
            problems.append(f"{title}: this section could not be made ({reason})")
            content = html('<p class="problem">{{ problem }}</p>', problem=problems[-1])
        if content is not None:
            yield re.sub(r"\W+", "-", name), title, content
