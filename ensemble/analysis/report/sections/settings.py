"""Show the config as it was written, without secrets, and the files of the run."""

from __future__ import annotations

from typing import ClassVar

from markupsafe import Markup

from ensemble.analysis.report.base import ReportData, Section, html, table


class Settings(Section):
    title: ClassVar[str] = "Settings and files"

    def html(self, data: ReportData) -> Markup:
        report = data.report
        return html(
            """
{% if overrides %}<p>Overridden:</p><pre>{% for override in overrides %}--set {{ override }}
{% endfor %}</pre>{% endif %}
<details open><summary>The config</summary><pre>{{ text }}</pre></details>
{{ files }}
<p class="note">Platform: {{ platform }}.</p>
""",
            overrides=report.overrides,
            text=report.config,
            platform=report.platform,
            files=table(("file", "path"), list(report.files.items()), left=(0, 1)),
        )
