"""The config as it was written, without secrets, and the files of the run."""

from __future__ import annotations

from typing import ClassVar

from markupsafe import Markup

from ensemble.analysis.report.base import ReportData, Section, html, table

_MAX_CHARACTERS = 100_000


class Settings(Section):
    title: ClassVar[str] = "Settings and files"

    def html(self, data: ReportData) -> Markup:
        report = data.report
        text = report.config
        if len(text) > _MAX_CHARACTERS:
            text = f"{text[:_MAX_CHARACTERS]}\n... and {len(text) - _MAX_CHARACTERS:,} characters more"
        return html(
            """
{% if overrides %}<p>Overridden:</p><pre>{% for one in overrides %}--set {{ one }}
{% endfor %}</pre>{% endif %}
<details open><summary>The config</summary><pre>{{ text }}</pre></details>
{{ files }}
<p class="note">Platform: {{ platform }}.</p>
""",
            overrides=report.overrides,
            text=text,
            platform=report.platform,
            files=table(("file", "path"), [*report.files.items()], left=(0, 1)) if report.files else "",
        )
