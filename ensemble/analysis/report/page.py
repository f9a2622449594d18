"""The whole page: its sections one below the other, with all that they need, in one file."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from ensemble.analysis.report.base import ReportData, html
from ensemble.analysis.report.pictures import colours
from ensemble.analysis.report.sections import SECTIONS
from ensemble.analysis.report.shown import RESULTS_STYLE
from ensemble.common.errors import DataError
from ensemble.common.files import unreadable, write_text
from ensemble.common.redact import Redactor
from ensemble.common.text import error_text
from ensemble.data.predictions_csv import demand_as_written
from ensemble.pipeline.report_page import DIGEST, page_digest
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import RunReport

# Control characters, and those by which text of a table could turn the direction of what stands beside it.
_UNSEEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class _Made:
    id: str
    title: str
    html: Markup
    problem: str = ""


def write_report(run_dir: Path, output: Path) -> list[str]:
    """Make the page of a run and write it.

    Returns:
        what could not be shown, a sentence for each section; their tracebacks go to the error stream.

    Raises:
        DataError: there is no run.json that can be read, or a member's predictions were changed since or cannot be
            read.
        WriteError: the disk is full or the like.
    """
    rundir = RunDir(run_dir)
    report = RunReport.read(rundir.run_json)
    try:
        for path in (rundir.predictions(one.name) for one in report.members if one.status == "complete"):
            if path.exists():
                demand_as_written(path)
    except OSError as error:
        raise DataError(unreadable(rundir.predictions_dir, error)) from error
    data = ReportData(run_dir, report)
    made = [*_sections(data)]
    page = html(
        _PAGE,
        title=data.title,
        digest_name=DIGEST,
        # What could not be made may be made the next time: such a page counts as one of other results.
        digest="" if any(one.problem for one in made) else page_digest(report),
        style=Markup(_STYLE + RESULTS_STYLE),
        colours=[*colours()],
        sections=made,
    )
    write_text(output, _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", page) + "\n")
    return [one.problem for one in made if one.problem]


def _sections(data: ReportData) -> Iterator[_Made]:
    lacking = set[str]()
    for name in SECTIONS.names():
        title, anchor = name, re.sub(r"\W+", "-", name)
        try:
            section = SECTIONS.load(name)()
            title = section.title
            made = section.html(data)
        except DataError as error:  # what it would show is not there, as in a run that failed: said once
            if (why := str(error)) not in lacking:
                lacking.add(why)
                yield _Made(anchor, title, html('<p class="note">Not shown: {{ why }}</p>', why=why))
            continue
        except Exception as error:  # whatever goes wrong in one, the others are worth reading
            redactor = Redactor(os.environ)
            print(redactor(traceback.format_exc()), file=sys.stderr)  # noqa: T201
            why = redactor(f"{type(error).__name__}: {error_text(error)}")
            problem = f"{title}: this section could not be made ({why})"
            yield _Made(anchor, title, html("<p class=problem>{{ text }}</p>", text=problem), problem)
            continue
        if made is not None:
            yield _Made(anchor, title, made)


_STYLE = """
body { margin: 0; background: var(--cfefefe); color: var(--c1f2328); line-height: 1.5;
  font: 16px/1.5 var(--font); overflow-wrap: anywhere; }
main { max-width: 64rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0.5rem 0; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 0.5rem; padding-top: 0.5rem; border-top: 1px solid var(--cd8dee4); }
h3 { font-size: 1rem; margin: 1.5rem 0 0.25rem; }
p, ul, dl { margin: 0.5rem 0; }
a { color: var(--c2f6fd1); }
nav { font-size: 0.875rem; display: flex; flex-wrap: wrap; gap: 0.25rem 1rem; }
/* A shadow at each edge behind which there is more; at the table's own ends it is covered. */
.table { overflow-x: auto; margin: 0.75rem 0; background:
  linear-gradient(to right, var(--cfefefe) 50%, transparent) left / 3rem 100%,
  linear-gradient(to left, var(--cfefefe) 50%, transparent) right / 3rem 100%,
  linear-gradient(to right, rgb(127 127 127 / 0.6), transparent) left / 1rem 100%,
  linear-gradient(to left, rgb(127 127 127 / 0.6), transparent) right / 1rem 100%;
  background-attachment: local, local, scroll, scroll; background-repeat: no-repeat; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.5rem; text-align: right; vertical-align: top; white-space: nowrap;
  border-bottom: 1px solid var(--cd8dee4); }
th { font-weight: 600; color: var(--c656d76); }
th.left, td.left { text-align: left; }
td.left { white-space: normal; overflow-wrap: anywhere; min-width: 6.5rem; }
td .words, .words { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 16rem; max-width: 36rem; }
dl { display: grid; grid-template-columns: fit-content(40%) minmax(0, 1fr); gap: 0.1rem 1rem; font-size: 0.875rem; }
dt { color: var(--c656d76); } dd { margin: 0; }
figure { margin: 1rem 0; }
figcaption, .note { font-size: 0.875rem; color: var(--c656d76); }
svg { display: block; max-width: 100%; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
svg.narrow { display: none; }
pre { overflow-x: auto; font-size: 0.8125rem; padding: 0.75rem; border: 1px solid var(--cd8dee4);
  border-radius: 6px; white-space: pre-wrap; }
code { font-size: 0.875em; }
.good { color: var(--c1a7f38); } .bad, .problem { color: var(--ccf222f); }
.muted { color: var(--c656d76); }
@media (max-width: 47rem) { svg.wide { display: none; } svg.narrow { display: block; } }
@media print { main { max-width: none; } nav { display: none; } }
"""
# What the page may load: nothing but what is in it; and it runs no script, whatever stands in a cell of a table.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:; \
base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<meta name="{{ digest_name }}" content="{{ digest }}">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; --font: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif;
{% for name, light, dark in colours %}{{ name }}: {{ light }}; {% endfor %} }
@media (prefers-color-scheme: dark) { :root {
{% for name, light, dark in colours %}{{ name }}: {{ dark }}; {% endfor %} } }
{{ style }}
</style>
</head>
<body><main>
{% for one in sections %}
<section id="{{ one.id }}">
{% if not loop.first %}<h2>{{ one.title }}</h2>
{% endif %}
{{ one.html }}
{% if loop.first %}<nav aria-label="Sections">
{% for other in sections[1:] %}<a href="#{{ other.id }}">{{ other.title }}</a>
{% endfor %}</nav>
{% endif %}
</section>
{% endfor %}
</main></body>
</html>"""
