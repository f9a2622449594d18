"""Templates of sections: found beside their module, in an archive too, and never without escaping."""

from __future__ import annotations

import importlib
import re
import zipfile
from pathlib import Path

import pytest

from ensemble.analysis.report.base import ReportData, Section
from tests.analysis.report.runs import EVIL, make_run
from tests.project import ROOT

MODULE = """
from ensemble.analysis.report.base import Section

class Names(Section):
    title = "Names"

    def html(self, data):
        rows = [(member.name, member.rows) for member in data.report.members]
        return self.render(members=data.report.members, rows=rows)
"""
TEMPLATE = """
{% macro Names(members, rows) %}
{% for member in members %}
  <p title="{{ member.name }}">{{ member.name }}, {{ 0.125|percent }}</p>
{% endfor %}
{{ table(("member", "rows"), rows) }}
{% endmacro %}
"""


def test_a_section_from_an_archive_has_its_template_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "site.zip", "w") as archive:
        archive.writestr("ensemble_archived/__init__.py", "")
        archive.writestr("ensemble_archived/names.py", MODULE)
        archive.writestr("ensemble_archived/names.j2", TEMPLATE)
    monkeypatch.syspath_prepend(tmp_path / "site.zip")
    section: Section = importlib.import_module("ensemble_archived.names").Names()
    name = EVIL[1].replace("/", "")
    report = make_run(tmp_path, (name,))
    made = str(section.html(ReportData(tmp_path / "run", report)))
    assert ", 12.5\N{NO-BREAK SPACE}%</p>" in made
    assert name not in made
    assert made.count("&#34;&gt;&lt;img src=x onerror=&#39;") == 3


def test_no_template_puts_a_value_where_escaping_is_off_or_not_enough() -> None:
    templates = [*(ROOT / "ensemble").rglob("*.j2")]
    assert templates
    for path in templates:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\bsafe\b|\bautoescape\b|Markup", text), path
        assert "={" not in text, f"{path}: quotes around an attribute are missing"
        assert not re.search(r'\b(href|src|on\w+)="(?!#)[^"]*\{', text), path
