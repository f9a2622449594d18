"""Write the page: all sections, with everything that they need, in a single file."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from markupsafe import Markup

from ensemble.analysis.report.base import ReportData, html
from ensemble.analysis.report.pictures import PICTURE_STYLE
from ensemble.analysis.report.sections import SECTIONS
from ensemble.common.errors import DataError
from ensemble.common.files import unreadable, write_text
from ensemble.common.redact import Redactor
from ensemble.common.text import error_text
from ensemble.data.predictions_csv import demand_as_written
from ensemble.pipeline.report_page import DIGEST, page_digest
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import RunReport

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
    page = html(
        _PAGE,
        title=data.title,
        digest_name=DIGEST,
        # A section that failed may work the next time: without a digest the next run makes the page again.
        digest="" if problems else page_digest(report),
        style=Markup(_STYLE + PICTURE_STYLE),
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


_STYLE = """
:root { color-scheme: light dark; --font: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif;
  --paper: #fefefe; --ink: #1f2328; --muted: #656d76; --line: #d8dee4; --link: #2f6fd1; --good: #1a7f38;
  --bad: #cf222f; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #0d1117; --ink: #e6edf3; --muted: #9198a1; --line: #3d444d; --link: #79a9f7; --good: #3fb950;
    --bad: #f85149; }
}
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 var(--font); overflow-wrap: anywhere; }
main { max-width: 64rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0.5rem 0; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 0.5rem; padding-top: 0.5rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.5rem 0 0.25rem; }
p, ul, dl { margin: 0.5rem 0; }
a, summary { color: var(--link); }
nav { font-size: 0.875rem; display: flex; flex-wrap: wrap; gap: 0.25rem 1rem; }
/* A shadow at each edge behind which there is more of a table; at the table's own ends it is covered. */
.table { overflow-x: auto; margin: 0.75rem 0; background:
  linear-gradient(to right, var(--paper) 50%, transparent) left / 3rem 100%,
  linear-gradient(to left, var(--paper) 50%, transparent) right / 3rem 100%,
  linear-gradient(to right, rgb(127 127 127 / 0.6), transparent) left / 1rem 100%,
  linear-gradient(to left, rgb(127 127 127 / 0.6), transparent) right / 1rem 100%;
  background-attachment: local, local, scroll, scroll; background-repeat: no-repeat; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.5rem; text-align: right; vertical-align: top; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--muted); }
th.left, td.left { text-align: left; }
td.left { white-space: normal; min-width: 6.5rem; }
td.words { text-align: left; white-space: pre-wrap; min-width: 16rem; max-width: 36rem; }
dl { display: grid; grid-template-columns: fit-content(40%) minmax(0, 1fr); gap: 0.1rem 1rem; font-size: 0.875rem; }
dt { color: var(--muted); } dd { margin: 0; }
figure { margin: 1rem 0; }
figcaption, .note { font-size: 0.875rem; color: var(--muted); }
pre { font-size: 0.8125rem; padding: 0.75rem; border: 1px solid var(--line);
  border-radius: 6px; white-space: pre-wrap; }
code { font-size: 0.875em; }
summary { cursor: pointer; font-size: 0.875rem; margin: 0.5rem 0; }
article { border: 1px solid var(--line); border-radius: 8px; padding: 0.6rem 0.8rem; margin: 0.6rem 0; }
article p { margin: 0.25rem 0; white-space: pre-wrap; }
article .top { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 1rem; font-size: 0.8125rem; }
article dl { font-size: 0.8125rem; margin: 0.4rem 0 0; }
article dt { min-width: 5.5rem; }
.tag { color: var(--ink); border-radius: 4px; padding: 0 0.35rem; background: rgb(101 109 118 / 0.15); }
.tag.right { background: rgb(43 138 92 / 0.25); }
.say { font-size: 1.0625rem; }
.good { color: var(--good); } .bad, .problem { color: var(--bad); } .muted { color: var(--muted); }
@media print { main { max-width: none; } nav { display: none; } }
"""
# The page may load nothing and runs no script, whatever stands in a cell of a table.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<meta name="{{ digest_name }}" content="{{ digest }}">
<title>{{ title }}</title>
<style>
{{ style }}
</style>
</head>
<body><main>
{% for id, title, content in sections %}
<section id="{{ id }}">
{% if not loop.first %}<h2>{{ title }}</h2>
{% endif %}
{{ content }}
{% if loop.first %}<nav aria-label="Sections">
{% for id, title, _ in sections[1:] %}<a href="#{{ id }}">{{ title }}</a>
{% endfor %}</nav>
{% endif %}
</section>
{% endfor %}
</main></body>
</html>"""
