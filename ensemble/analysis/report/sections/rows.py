"""Rows to read: the least certain, the most disputed and, with true labels, the costliest, with their texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np
from markupsafe import Markup

from ensemble.analysis.report.base import ReportData, Section, html
from ensemble.analysis.report.results import Results
from ensemble.analysis.report.shown import number, percent, shortened
from ensemble.analysis.rows import TopRows, costliest, least_certain, most_disputed
from ensemble.common.errors import EnsembleError
from ensemble.merging.methods.base import Values

_ROWS = 20
# Of each list at first sight; the others are a click away.
_OPEN = 3
_MAX_CHARACTERS = 400
# Of members that give one label, in words.
_MAX_NAMED = 6
_MAX_LABELS = 3


class RowsToRead(Section):
    title: ClassVar[str] = "Rows to read"

    def html(self, data: ReportData) -> Markup:
        results = data.results
        lists = [*_lists(results)]
        wanted = sorted({row for _, _, _, top in lists for row in top.rows.tolist()})
        texts: Mapping[int, Mapping[str, str]] = {}
        problem = ""
        try:
            texts = data.texts(wanted)
        except EnsembleError as error:
            problem = f"No texts are shown: {error}."
        return html(
            """
{% if problem %}<p class="note">{{ problem }}</p>{% endif %}
{% if lists and has_legend %}
<p class="note"><span class="tag">label</span> answer of the members beside it{% if has_truth %},
<span class="tag right">label \N{CHECK MARK}</span> the right answer{% endif %}.</p>
{% endif %}
{% for title, note, cards in lists %}
<h3>{{ title }}</h3>
<p class="note">{{ note }}</p>
{% for card in cards[:open] %}{{ card }}{% endfor %}
{% if cards[open:] %}<details><summary>{{ cards[open:]|length }} more</summary>
{% for card in cards[open:] %}{{ card }}{% endfor %}</details>{% endif %}
{% endfor %}
{% if not lists %}<p>There are no rows to show: nothing was merged.</p>{% endif %}
""",
            problem=problem,
            has_legend=results.activation != "none",
            has_truth=results.truth is not None,
            lists=[
                (
                    title,
                    note,
                    [
                        _card(results, row, f"{score_name} {score:.3g}", texts.get(row, {}))
                        for row, score in zip(top.rows.tolist(), top.scores.tolist(), strict=True)
                    ],
                )
                for title, note, score_name, top in lists
            ],
            open=_OPEN,
        )


def _lists(results: Results) -> Iterator[tuple[str, str, str, TopRows]]:
    """Title, what it means, what the score is called, and the rows."""
    activation, ensemble = results.activation, results.ensemble
    if ensemble is not None and results.truth is not None:
        top = costliest(ensemble, results.truth, activation, _ROWS)
        name = "squared error" if activation == "none" else "log loss"
        note = (
            f"The highest {name} of the ensemble. Some of these are the members' mistakes, some are wrong labels "
            "in the table: read them before anything is fitted to them."
        )
        yield "Costliest", note, name, top
    counting = np.flatnonzero(results.weights > 0)
    if len(counting) > 1:
        members = [results.as_merged[place] for place in counting]
        top = most_disputed(members, results.weights[counting], activation, _ROWS)
        top = TopRows(top.rows[top.scores > 0], top.scores[top.scores > 0])
        name = "standard deviation" if activation == "none" else "divergence in bits"
        note = (
            "Where the members' values are furthest apart (standard deviation by their weights)."
            if activation == "none"
            else "Where the members' probabilities are furthest apart: the Jensen-Shannon divergence by their "
            "weights, 0 where all say the same."
        )
        if len(top.rows):
            yield "Most disputed", note, name, top
    if ensemble is not None and activation != "none":
        top = least_certain(ensemble, activation, _ROWS)
        note = (
            "Where the ensemble's first two labels are closest."
            if activation == "softmax"
            else "Where the ensemble's answers are closest to 50 % (mean entropy of the labels)."
        )
        if len(top.rows):
            if activation == "softmax":  # what is small says more than 1 less that
                yield "Least certain", note, "margin", TopRows(top.rows, 1 - top.scores)
            else:
                yield "Least certain", note, "entropy in bits", top


def _card(results: Results, row: int, score: str, texts: Mapping[str, str]) -> Markup:
    labels = results.labels
    right = _true_labels(results, row)
    says = [*_sayings(results, row)]
    own = results.ensemble[row] if results.ensemble is not None else None
    return html(
        """
<article>
<div class="top"><span><strong>{{ id }}</strong> <span class="muted">row {{ row }}</span></span>
<span class="muted">{{ score }}</span></div>
{% for name, text in texts %}<p>{% if named %}<span class="muted">{{ name }}:</span> {% endif %}{{ text }}</p>
{% endfor %}
<div class="says">
{% if told %}<div class="muted">truth</div><div>{{ told }}</div>{% endif %}
{% if own %}<div class="muted">ensemble</div><div>{{ own }}</div>{% endif %}
{% for label, is_right, who in says %}
<div><span class="tag{{ ' right' if is_right }}">{{ label }}{% if is_right %} \N{CHECK MARK}{% endif %}</span></div>
<div>{{ who }}</div>
{% endfor %}
</div></article>
""",
        id=results.predictions.ids[row].as_py(),
        row=f"{row + 1:,}",
        score=score,
        texts=[(name, _cut(text)) for name, text in texts.items()],
        named=len(texts) > 1,
        told=_truth_text(results, row),
        own=_first_labels(own, labels, results.activation == "none") if own is not None else "",
        says=[(label, label in right, who) for label, who in says],
    )


def _cut(text: str) -> str:
    text = text.strip()
    if len(text) <= _MAX_CHARACTERS:
        return text or "(empty)"
    return f"{text[:_MAX_CHARACTERS].rstrip()} \N{HORIZONTAL ELLIPSIS} ({len(text):,} characters)"


def _first_labels(values: Values, labels: tuple[str, ...], is_raw: bool) -> str:
    order = np.argsort(-values, kind="stable")[:_MAX_LABELS]
    return ", ".join(
        f"{shortened(labels[place], 40)} {(number if is_raw else percent)(float(values[place]))}"
        for place in order
    )


def _true_labels(results: Results, row: int) -> set[str]:
    if results.truth is None or results.activation == "none":
        return set()
    truth = results.truth[row]
    if results.truth.ndim == 1:
        return {results.labels[int(truth)]}
    if results.activation == "softmax":
        return {results.labels[int(np.argmax(truth))]}
    return {label for label, value in zip(results.labels, truth.tolist(), strict=True) if value >= 0.5}


def _truth_text(results: Results, row: int) -> str:
    if results.truth is None:
        return ""
    if results.truth.ndim == 2 and (results.activation != "sigmoid"):
        return _first_labels(results.truth[row], results.labels, results.activation == "none")
    return ", ".join(sorted(_true_labels(results, row))) or "none of the labels"


def _sayings(results: Results, row: int) -> Iterator[tuple[str, str]]:
    """What members say, and who says it: those together that say the same, the most first."""
    said: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)
    for name, values in zip(results.names, results.as_merged, strict=True):
        own = values[row]
        if np.isnan(own).any():
            said["(no such row)"].append((name, np.nan))
        elif results.activation == "softmax":
            said[results.labels[int(own.argmax())]].append((name, float(own.max())))
        elif results.activation == "sigmoid":
            yes = [label for label, value in zip(results.labels, own, strict=True) if value >= 0.5]
            sure = float(np.where(own >= 0.5, own, 1 - own).min())
            said[", ".join(yes[:_MAX_LABELS]) + (", ..." if len(yes) > _MAX_LABELS else "") or "none"].append(
                (name, sure)
            )
        else:
            shown = ", ".join(number(float(value)) for value in own[:_MAX_LABELS])
            said[shown].append((name, np.nan))
    for label, who in sorted(said.items(), key=lambda item: -len(item[1])):
        names = [
            f"{shortened(name, 30)} {percent(value, 0)}" if np.isfinite(value) else shortened(name, 30)
            for name, value in who[:_MAX_NAMED]
        ]
        more = [f"and {len(who) - _MAX_NAMED} more"] if len(who) > _MAX_NAMED else []
        yield shortened(label, 60), ", ".join([*names, *more])
