"""How alike the members are, and who is right where they differ."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import ClassVar

import numpy as np
from markupsafe import Markup
from scipy.stats import binomtest

from ensemble.analysis.diversity import Diversity, diversity
from ensemble.analysis.report.base import ReportData, Section, html, table
from ensemble.analysis.report.shown import NOTHING, heat_map, number, percent, spread
from ensemble.common.text import plural
from ensemble.merging.methods.base import Values

_MAX_PAIRS = 15
# Members whose heat map has the numbers in its cells; of more it shows the colours alone.
_MAX_WRITTEN = 16
_CHANCE = 0.05


class Agreement(Section):
    title: ClassVar[str] = "Agreement of members"

    def html(self, data: ReportData) -> Markup:
        predictions = data.predictions
        names = [*predictions.members]
        if len(names) < 2:
            return html("<p>{{ name }} is the only member, so there is none to compare it with.</p>", name=names[0])
        found = diversity([*predictions.members.values()], predictions.activation, predictions.truth)
        is_exclusive = predictions.activation == "softmax"
        what = "first label" if is_exclusive else "answer for a label"
        unit = "row" if is_exclusive else "cell (row and label)"
        pairs = [
            pair for pair in combinations(range(len(names)), 2) if found.rows[pair] > 1
        ]
        return html(
            """
{% for line in lines %}<p>{{ line }}</p>
{% endfor %}
{% if maps %}<div class="pair">{% for one in maps %}{{ one }}{% endfor %}</div>
{% endif %}
{{ differences }}
""",
            lines=[*_lines(names, pairs, found, what, unit)],
            maps=[*_maps(names, found, what)] if len(names) > 2 else [],
            differences=_differences(names, pairs, found, unit),
        )
