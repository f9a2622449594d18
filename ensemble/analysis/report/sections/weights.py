"""What each member's weight is worth: the ensemble without it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
from markupsafe import Markup

from ensemble.analysis.metrics import Interval
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
    percent,
    shortened,
    with_interval,
)
from ensemble.common.text import plural
from ensemble.config.values import weight_text

# Numbers that merging again without each member in turn may take; of more rows as many are taken as that allows.
_MAX_CELLS = 2_000_000_000


class Weights(Section):
    title: ClassVar[str] = "What each member adds"

    def html(self, data: ReportData) -> Markup:
        results = data.results
        shares = results.weights / results.weights.sum()
        by_name = dict(zip(results.names, shares.tolist(), strict=True))
        written = {
            member.name: percent(by_name[member.name])
            if isinstance(member.weight, int | float)
            else html("<div class=words>{{ text }}</div>", text=weight_text(member.weight))
            for member in data.report.members
            if member.name in by_name
        }
        weights = table(["member", "weight"], [*written.items()])
        if missing := _missing(results):
            return html("<p>{{ missing }}</p>{{ weights }}", missing=missing, weights=weights)
        assert results.ensemble is not None
        count = len(results.names)
        rows = results.sample(_MAX_CELLS // (count * count * len(results.labels)))
        members = results.as_merged if rows is None else [values[rows] for values in results.as_merged]
        whole = results.ensemble if rows is None else results.ensemble[rows]
        worth = dict[str, Interval]()
        compared = dict[str, int]()
        alone: list[str] = []
        for number_, name in enumerate(results.names):
            rest = results.merged(members, without=number_, rows=rows)
            compared[name] = int((~np.isnan(rest).any(axis=1)).sum())
            found = results.difference(results.loss, rest, whole, rows)
            if isinstance(found, Interval):
                worth[name] = found
            else:
                alone.append(f"{name}: {found}")
        order = sorted(worth, key=lambda name: -worth[name].value)
        loss = METRIC_NAMES[results.loss.name]
        return html(
            """
{% for line in lines %}<p class="{{ 'say' if loop.first }}">{{ line }}</p>
{% endfor %}
{{ picture }}{{ table }}
<p class="note">The other members' weights are left as they are and scaled up; they are not fitted again. The
intervals are paired: the same rows count with and without the member, and rows that no other member has do not.
{% if sampled %}To stay within seconds, {{ rows }} are taken, at the same distance.{% endif %}</p>
{% for line in alone %}<p class="note">{{ line }}</p>{% endfor %}
""",
            lines=[*_lines(order, worth, by_name, results.loss.name)],
            picture=differences_picture(
                [(name, worth[name]) for name in order],
                f"{loss} of the ensemble, without each member \N{MINUS SIGN} with it",
                f"By how much the {loss} rises without the member, with 95 % intervals: to the right of 0 the "
                "member helps, to the left the ensemble is better off without it. Grey: no more than noise.",
                f"{metric_heading(results.loss.name)}, without \N{MINUS SIGN} with the member",
            ),
            table=table(
                ["member", "weight", f"{loss}, without it \N{MINUS SIGN} with it", "", "rows"],
                [
                    [
                        shortened(name, MAX_NAME),
                        written[name],
                        with_interval(results.loss.name, worth[name], is_difference=True)
                        if name in worth
                        else NOTHING,
                        _word(worth[name]) if name in worth else "",
                        f"{compared[name]:,}",
                    ]
                    for name in [*order, *(name for name in results.names if name not in worth)]
                ],
                left=(0, 3),
            ),
            rows=plural(len(whole), "row"),
            sampled=rows is not None,
            alone=alone,
        )


def _missing(results: Results) -> str:
    if results.truth is None:
        return "Without true labels nobody can say what a member adds; these are the weights of the merge."
    if len(results.names) < 2:
        return f"{results.names[0]} is the only member, so there is no ensemble without it."
    if not results.method.gives_probabilities:
        return f"What a member adds is not shown: {results.no_loss}."
    if (count := len(results.names)) > MAX_MEMBERS:
        return (
            f"What a member adds is left out: {count:,} members are too many to merge without each in turn (at "
            f"most {MAX_MEMBERS})."
        )
    if problem := results.merge_problem:
        return f"What a member adds is not shown: {problem}."
    return ""


def _word(one: Interval) -> str:
    return "no more than noise" if not one.excludes_zero else "helps" if one.value > 0 else "hurts"


def _lines(
    order: Sequence[str], worth: dict[str, Interval], shares: dict[str, float], metric: str
) -> Iterator[str]:
    helping = [name for name in order if _word(worth[name]) == "helps"]
    hurting = [name for name in order if _word(worth[name]) == "hurts"]
    idle = [name for name in order if name not in helping and name not in hurting and shares[name] > 0]
    if helping:
        first = helping[0]
        rise = f"{METRIC_NAMES[metric]} is {metric_text(metric, worth[first].value)} higher"
        others = f" {_listed(helping[1:])} as well." if helping[1:] else ""
        yield f"{first} adds most: without it the {rise}.{others}"
    else:
        yield "No member can be said to help: without any one of them the ensemble is as good, but for noise."
    if hurting:
        yield f"Without {_one_of(hurting)} the ensemble would be better: try a lower weight, or run ensemble fit."
    if idle:
        spared = "it" if len(idle) == 1 else "one of them"
        yield f"{_listed(idle, 'makes', 'make')} no clear difference: {spared} could be left out to save time."


def _listed(names: Sequence[str], verb: str = "helps", verbs: str = "help") -> str:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"{shown} {verb if len(names) == 1 else verbs}"


def _one_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"any one of {', '.join(names[:5])}"
