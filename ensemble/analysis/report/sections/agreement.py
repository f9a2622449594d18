"""How alike the members are, and who is right where they differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

import numpy as np
from markupsafe import Markup
from scipy.stats import binomtest

from ensemble.analysis.diversity import Diversity, diversity
from ensemble.analysis.report.base import ReportData, Section, html, table
from ensemble.analysis.report.shown import MAX_MEMBERS, NOTHING, heat_map, number, percent, shortened, spread
from ensemble.common.protocol import Activation
from ensemble.merging.methods.base import Values

_MAX_PAIRS = 15
# Members whose heat map has the numbers in its cells; that of more shows the colours alone.
_MAX_WRITTEN = 20
# A difference that chance brings more often than this is none.
_CHANCE = 0.05
# Errors so much alike that one of the two members hardly changes the mean.
_ALIKE = 0.9


class Agreement(Section):
    title: ClassVar[str] = "Agreement of members"

    def html(self, data: ReportData) -> Markup:
        results = data.results
        if len(results.names) < 2:
            return html(
                "<p>{{ name }} is the only member: there is none to compare it with.</p>",
                name=results.names[0],
            )
        if len(results.names) > MAX_MEMBERS:
            return html(
                "<p>Left out: {{ count }} members have too many pairs to compare (at most {{ most }}).</p>",
                count=f"{len(results.names):,}",
                most=MAX_MEMBERS,
            )
        found = diversity(results.values, results.activation, results.truth)
        pairs = [
            _Pair(results.names[i], results.names[j], found, i, j)
            for i, j in combinations(range(len(results.names)), 2)
            if found.rows[i, j] > 1
        ]
        if not pairs:
            return html("<p>No two members have rows in common, so they cannot be compared.</p>")
        return html(
            """
{% for line in lines %}<p class="{{ 'say' if loop.first }}">{{ line }}</p>
{% endfor %}
{% if maps %}<div class="pair">{% for one in maps %}{{ one }}{% endfor %}</div>
{% endif %}
{% if differences %}<h3>Where two members differ</h3>
{{ differences }}
{% if left_out %}<p class="note">Of {{ all }} pairs those {{ shown }} that differ most.</p>{% endif %}
{% endif %}
""",
            lines=[*_lines(pairs, results.activation, has_truth=results.truth is not None)],
            maps=[*_maps(results.names, found, results.activation)] if len(results.names) > 2 else [],
            differences=_differences(pairs, results.activation),
            left_out=len(pairs) > _MAX_PAIRS,
            all=len(pairs),
            shown=_MAX_PAIRS,
        )


@dataclass(frozen=True)
class _Pair:
    one: str
    other: str
    found: Diversity
    i: int
    j: int

    @property
    def agreement(self) -> float:
        return float(self.found.agreement[self.i, self.j])

    @property
    def differ(self) -> int:
        return int(self.found.decisions[self.i, self.j] - self.found.same[self.i, self.j])

    @property
    def alikeness(self) -> float:
        """The correlation that counts for a mean: of errors, where these are known."""
        known = self.found.error_correlation
        return float((self.found.correlation if known is None else known)[self.i, self.j])

    @property
    def right(self) -> tuple[int, int]:
        """How often one alone is right, and how often the other."""
        assert self.found.only_right is not None
        return int(self.found.only_right[self.i, self.j]), int(self.found.only_right[self.j, self.i])

    @property
    def better(self) -> str:
        """Who is right more often where they differ; empty where chance would bring as much (exact sign test)."""
        one, other = self.right
        if one + other == 0 or binomtest(one, one + other).pvalue > _CHANCE:
            return ""
        return self.one if one > other else self.other


def _lines(pairs: Sequence[_Pair], activation: Activation, has_truth: bool) -> Iterator[str]:
    unit = "rows" if activation == "softmax" else "answers (row and label)"
    if activation != "none":
        shares = [pair.agreement for pair in pairs]
        if len(pairs) == 1:
            (pair,) = pairs
            line = f"{pair.one} and {pair.other} agree on {percent(pair.agreement)} of {unit}."
            if has_truth and pair.differ:
                one, other = pair.right
                better = pair.better
                line += (
                    f" On the {pair.differ:,} others {better} is right more often: {max(one, other):,} times "
                    f"against {min(one, other):,}."
                    if better
                    else f" On the {pair.differ:,} others neither is right clearly more often: {pair.one} {one:,} "
                    f"times, {pair.other} {other:,} times."
                )
            yield line
        else:
            yield f"Two members agree on {percent(min(shares))} to {percent(max(shares))} of {unit}."
    known = [pair for pair in pairs if np.isfinite(pair.alikeness)]
    what = "errors" if has_truth else "values" if activation == "none" else "probabilities"
    if not known:
        yield "Some members give every row the same values, so nothing can be said of how they move together."
        return
    closest, furthest = (choose(known, key=lambda pair: pair.alikeness) for choose in (max, min))
    if len(known) == 1:
        yield f"Their {what} correlate at {number(closest.alikeness, 2)}: {_meaning(closest.alikeness, has_truth)}"
        return
    yield (
        f"The {what} of {closest.one} and {closest.other} are most alike (correlation "
        f"{number(closest.alikeness, 2)}): {_meaning(closest.alikeness, has_truth)} Those of {furthest.one} and "
        f"{furthest.other} are least alike ({number(furthest.alikeness, 2)})"
        + (", so a mean of these two cancels most." if has_truth else ".")
    )


def _meaning(correlation: float, has_truth: bool) -> str:
    if not has_truth:
        return "without true labels nobody can tell whether they share what is right or what is wrong."
    if correlation > _ALIKE:
        return "they fail together, so a mean of the two gains little over either."
    return "they fail apart often enough for a mean of the two to gain; the lower, the more."


def _maps(names: Sequence[str], found: Diversity, activation: Activation) -> Iterator[Markup]:
    is_written = len(names) <= _MAX_WRITTEN

    def one(values: Values, cells: list[list[str]], caption: str) -> Markup:
        shown = values.copy()
        np.fill_diagonal(shown, np.nan)
        written = [
            ["" if i == j or not is_written else cell for j, cell in enumerate(row)]
            for i, row in enumerate(cells)
        ]
        return heat_map(names, names, spread(shown), written, caption)

    if activation != "none":
        shares = [
            [NOTHING if np.isnan(v) else f"{100 * v:.0f}" for v in row] for row in found.agreement.tolist()
        ]
        what = "rows with the same first label" if activation == "softmax" else "answers that are the same"
        yield one(found.agreement, shares, f"Agreement: % of {what}. {_range(found.agreement, percent)}")
    errors = found.error_correlation
    correlation = found.correlation if errors is None else errors
    cells = [
        [NOTHING if np.isnan(v) else f"{v:.2f}".replace("0.", ".", 1) for v in row]
        for row in correlation.tolist()
    ]
    what = "values" if errors is None else "errors (probability \N{MINUS SIGN} truth)"
    if activation == "none" and errors is not None:
        what = "errors"
    yield one(correlation, cells, f"Correlation of {what}. {_range(correlation, lambda v: number(v, 2))}")


def _range(values: Values, show: object) -> str:
    others = values[~np.eye(len(values), dtype=bool)]
    others = others[np.isfinite(others)]
    if not len(others):
        return ""
    assert callable(show)
    return f"From {show(float(others.min()))} (pale) to {show(float(others.max()))} (strong)."


def _differences(pairs: Sequence[_Pair], activation: Activation) -> Markup | None:
    if activation == "none":
        return None
    chosen = sorted(pairs, key=lambda pair: pair.agreement)[:_MAX_PAIRS]
    has_truth = pairs[0].found.only_right is not None
    headers = ["members", "differ", "of", "Cohen's kappa"]
    rows: list[list[object]] = []
    for pair in chosen:
        row: list[object] = [
            f"{shortened(pair.one, 20)} / {shortened(pair.other, 20)}",
            f"{pair.differ:,}",
            percent(1 - pair.agreement),
            number(float(pair.found.kappa[pair.i, pair.j]), 2),
        ]
        if has_truth:
            one, other = pair.right
            row += [
                f"{one:,}",
                f"{other:,}",
                f"{pair.differ - one - other:,}",
                pair.better or "too close to call",
            ]
        rows.append(row)
    headers[2] = "share"
    if has_truth:
        headers += ["first right", "second right", "neither", "right more often"]
        return table(headers, rows, left=(0, 7))
    return table(headers, rows)
