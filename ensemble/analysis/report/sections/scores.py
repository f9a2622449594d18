"""Members against the ensemble: how good each is, or, without true labels, how much of it is in the ensemble."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
from markupsafe import Markup

from ensemble.analysis.metrics import METRICS, Interval, Scored
from ensemble.analysis.report.base import ReportData, Section, html, table
from ensemble.analysis.report.results import Results
from ensemble.analysis.report.shown import (
    MAX_MEMBERS,
    MAX_NAME,
    METRIC_NAMES,
    NOTHING,
    differences_picture,
    metric_heading,
    metric_text,
    metric_value,
    percent,
    shortened,
    with_interval,
)
from ensemble.common.text import plural
from ensemble.merging.methods.base import Values
from ensemble.pipeline.run_report import FittedOn

_ENSEMBLE = "ensemble"


class Scores(Section):
    title: ClassVar[str] = "Members and the ensemble"

    def html(self, data: ReportData) -> Markup:
        results = data.results
        shown = (
            _without_truth(results) if results.truth is None else _with_truth(results, data.report.fitted_on)
        )
        remarks = results.predictions.remarks
        return html(
            "{{ shown }}{% for line in remarks %}<p class=note>{{ line }}</p>{% endfor %}",
            shown=shown,
            remarks=remarks,
        )


def _with_truth(results: Results, fitted_on: FittedOn | None) -> Markup:
    ensemble, has_loss = results.ensemble, results.method.gives_probabilities
    loss, name = results.loss, METRIC_NAMES[results.loss.name]
    everybody: list[tuple[str, Values]] = [*zip(results.names, results.as_merged, strict=True)]
    if ensemble is not None:
        everybody.insert(0, (_ENSEMBLE, ensemble))
    scores = {
        who: [results.scored(METRICS[metric], values) for metric in results.metrics]
        for who, values in everybody
    }
    if ensemble is not None and not has_loss:
        of_ranks = ("accuracy", "auc")  # by which label is ahead, not by how much
        scores[_ENSEMBLE] = [
            found if metric in of_ranks else ""
            for metric, found in zip(results.metrics, scores[_ENSEMBLE], strict=True)
        ]
    rows_of = {who: int((~np.isnan(values).any(axis=1)).sum()) for who, values in everybody}
    problems = {one for found in scores.values() for one in found if isinstance(one, str) and one}
    differences = {
        who: found
        for who, values in zip(results.names, results.as_ruled, strict=True)
        if ensemble is not None
        and has_loss
        and isinstance(found := results.difference(loss, values, ensemble), Interval)
    }
    if (gain := results.gain) is not None:
        differences[gain[0]] = gain[1]
    order = sorted(results.names, key=lambda who: _value(scores[who][0]))
    rows: list[list[object]] = []
    for who in [*([_ENSEMBLE] if ensemble is not None else []), *order]:
        row: list[object] = [
            html("<strong>{{ who }}</strong>", who=who) if who == _ENSEMBLE else shortened(who, MAX_NAME)
        ]
        for metric, scored in zip(results.metrics, scores[who], strict=True):
            row.append(NOTHING if isinstance(scored, str) else with_interval(metric, scored.interval))
        row.append(
            with_interval(loss.name, differences[who], is_difference=True) if who in differences else ""
        )
        rows.append([*row, f"{rows_of[who]:,}"])
    headers = [
        "",
        *(metric_heading(metric) for metric in results.metrics),
        "member \N{MINUS SIGN} ensemble",
        "rows",
    ]
    drawn = [(who, differences[who]) for who in order if who in differences]
    return html(
        """
{% for line in lines %}<p class="{{ 'say' if loop.first }}">{{ line }}</p>
{% endfor %}
{{ picture }}{{ table }}
<p class="note">In brackets 95 % intervals (bootstrap over rows); those of differences are paired: the same rows
count for both. The best member stands first{% if gain %}; the difference of {{ gain }} is the one that the run has
printed, with the normal interval of the rows' differences{% endif %}.
{% if rules %}The ensemble's scores are with the rules, the members' without them; in differences both are with
them.{% endif %}
{% if left_out %}The diagram has the first {{ drawn }} of {{ members }} members; the table has all.{% endif %}</p>
{% for line in problems %}<p class="note">{{ line }}</p>{% endfor %}
""",
        lines=[
            *_verdict(results, scores, rows_of, differences),
            *([] if fitted_on is None else [f"The ensemble: {fitted_on.text}."]),
        ],
        left_out=len(drawn) > MAX_MEMBERS,
        drawn=MAX_MEMBERS,
        members=f"{len(drawn):,}",
        picture=differences_picture(
            drawn[:MAX_MEMBERS],
            f"{name}, member \N{MINUS SIGN} ensemble",
            f"The {name} of each member minus the ensemble's, with 95 % intervals: to the right of 0 the ensemble "
            "is better, to the left the member. Grey: no more than noise.",
            f"{metric_heading(loss.name)}, member \N{MINUS SIGN} ensemble",
        )
        if drawn
        else "",
        table=table(headers, rows),
        gain=None if gain is None else gain[0],
        rules=results.predictions.rules is not None,
        problems=sorted(problems),
    )


def _verdict(
    results: Results,
    scores: dict[str, list[Scored | str]],
    rows_of: dict[str, int],
    differences: dict[str, Interval],
) -> Iterator[Markup]:
    name = METRIC_NAMES[results.loss.name]
    if _ENSEMBLE not in scores:
        yield html("The run has merged nothing, so there are only its members to look at.")
        return
    if not results.method.gives_probabilities:
        yield html("Nothing is said of the ensemble's {{ name }}: {{ why }}.", name=name, why=results.no_loss)
        return
    own = scores[_ENSEMBLE][0]
    whole = [who for who in differences if rows_of[who] == rows_of[_ENSEMBLE]]
    if isinstance(own, str) or not whole:
        yield html("No member has all rows, so none can be compared with the whole ensemble.")
        return
    best = min(whole, key=lambda who: differences[who].value)
    if results.gain is not None:
        best = results.gain[0]
    ruled = results.as_ruled[results.names.index(best)]
    gap, theirs = differences[best], _value(results.scored(results.loss, ruled))
    one, other = (metric_text(results.loss.name, value) for value in (own.value, theirs))
    rules = " with the same rules" if results.predictions.rules is not None else ""
    first = f"The ensemble's {name} is {one}, that of its best member, {best}, {other}{rules}"
    if len(results.names) == 1 and gap.value == 0:
        yield html("{{ first }}: a single member is the ensemble.", first=first)
        return
    size = with_interval(results.loss.name, Interval(abs(gap.value), *sorted((abs(gap.low), abs(gap.high)))))
    if not gap.excludes_zero:
        size = with_interval(results.loss.name, gap, is_difference=True)
        yield html(
            "{{ first }}: over {{ rows }} that is no more than noise "
            "({{ best }} \N{MINUS SIGN} ensemble: {{ size }}).",
            first=first,
            rows=plural(rows_of[_ENSEMBLE], "row"),
            best=best,
            size=size,
        )
    elif gap.value > 0:
        yield html('{{ first }}: <strong class="good">better by {{ size }}</strong>.', first=first, size=size)
    else:
        yield html('{{ first }}: <strong class="bad">worse by {{ size }}</strong>.', first=first, size=size)
        yield html(
            "These weights lose to {{ best }} alone. <code>{{ command }}</code> finds weights that the rows with "
            "labels bear out.",
            best=best,
            command=" ".join(filter(None, ["ensemble fit CONFIG", results.method.fit_options])),
        )


def _without_truth(results: Results) -> Markup:
    ensemble, rows = results.ensemble, list[list[object]]()
    has_confidence = results.activation != "none"
    for who, values in zip(results.names, results.values, strict=True):
        there = ~np.isnan(values).any(axis=1)
        row: list[object] = [shortened(who, MAX_NAME), f"{int(there.sum()):,}"]
        if has_confidence:
            row.append(percent(_confidence(results, values[there])))
        if ensemble is not None:
            row.append(_likeness(results, values[there], ensemble[there]))
        rows.append(row)
    if ensemble is not None:
        own = percent(_confidence(results, ensemble))
        first = html("<strong>{{ who }}</strong>", who=_ENSEMBLE)
        rows.insert(0, [first, f"{len(ensemble):,}", *([own] if has_confidence else []), ""])
    headers = ["", "rows", *(["mean confidence"] if has_confidence else [])]
    if ensemble is not None:
        headers.append(
            "mean distance from the ensemble" if not has_confidence else "same answer as the ensemble"
        )
    return html(
        """
<p class="say">Without true labels nobody can say how good these predictions are, only how alike and how sure.</p>
<p>With <code>data.label_column</code> (or <code>label_columns</code>) for a table that has them, this page shows
metrics with intervals, calibration, and what each member's weight is worth.</p>
{{ table }}
""",
        table=table(headers, rows),
    )


def _confidence(results: Results, values: Values) -> float:
    """Mean probability of the first label; of labels that do not exclude each other, of each answer."""
    if not len(values):
        return np.nan
    if results.activation == "softmax":
        return float(values.max(axis=1).mean())
    return float(np.maximum(values, 1 - values).mean())


def _likeness(results: Results, values: Values, ensemble: Values) -> str:
    if not len(values):
        return NOTHING
    if results.activation == "none":
        return metric_value("rmse", float(np.abs(values - ensemble).mean()))
    if results.activation == "softmax":
        return percent(float((values.argmax(axis=1) == ensemble.argmax(axis=1)).mean()))
    return percent(float(((values >= 0.5) == (ensemble >= 0.5)).mean()))


def _value(found: Scored | str) -> float:
    return np.inf if isinstance(found, str) else found.value
