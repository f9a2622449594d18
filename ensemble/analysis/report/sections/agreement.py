"""How alike the members are, and who is right where they differ."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import ClassVar

import numpy as np
from markupsafe import Markup
from scipy.special import bdtr

from ensemble.analysis.diversity import Pair, compare_pair
from ensemble.analysis.report.base import ReportData, Section, html, notes, number, paragraphs, percent, table
from ensemble.analysis.report.results import MergedRows

_MAX_PAIRS = 30
# A difference that chance brings more often than this counts as none.
_CHANCE = 0.05
# With errors so much alike, one of the two members hardly changes the mean.
_ALIKE = 0.9
_HEADERS = (
    *("members", "error correlation", "differ", "share", "Cohen's kappa"),
    *("only first right", "only second right", "neither", "right more often"),
)


class Agreement(Section):
    title: ClassVar[str] = "Agreement of members"

    def html(self, data: ReportData) -> Markup:
        results = data.results
        if len(results.names) < 2:
            text = "<p>{{ name }} is the only member: there is none to compare it with.</p>"
            return html(text, name=results.names[0])
        members = zip(results.names, results.values, strict=True)
        pairs = {
            (first, second): compare_pair(values, others, results.activation, results.truth)
            for (first, values), (second, others) in combinations(members, 2)
        }
        pairs = {names: pair for names, pair in pairs.items() if pair.rows > 1}
        if not pairs:
            return html("<p>No two members have rows in common, so they cannot be compared.</p>")
        order = sorted(pairs, key=lambda names: (-pairs[names].differ, pairs[names].correlation))
        rows = [_cells(names, pairs[names], results) for names in order[:_MAX_PAIRS]]
        headers = [*_HEADERS[: len(rows[0])]]
        if results.truth is None:
            headers[1] = "correlation"
        remark = f"Of {len(pairs)} pairs the {_MAX_PAIRS} that differ most."
        return (
            paragraphs(_sentences(results, pairs))
            + table(headers, rows, left=(0, 8))
            + notes([remark] if len(pairs) > _MAX_PAIRS else [])
        )


def _cells(names: tuple[str, str], pair: Pair, results: MergedRows) -> list[str]:
    cells = [" / ".join(names), number(pair.correlation, 2)]
    if results.activation == "none":
        return cells
    cells += [f"{pair.differ:,}", percent(pair.difference), number(pair.kappa, 2)]
    if results.truth is None:
        return cells
    either = pair.only_first + pair.only_second
    better = names[0] if pair.only_first > pair.only_second else names[1]
    # An exact sign test.
    if not either or 2 * bdtr(min(pair.only_first, pair.only_second), either, 0.5) > _CHANCE:
        better = "too close to call"
    return [*cells, f"{pair.only_first:,}", f"{pair.only_second:,}", f"{pair.differ - either:,}", better]


def _sentences(results: MergedRows, pairs: Mapping[tuple[str, str], Pair]) -> list[str]:
    lines = []
    if results.activation != "none":
        unit = "rows" if results.activation == "softmax" else "answers (row and label)"
        shares = sorted(1 - pair.difference for pair in pairs.values())
        if len(pairs) == 1:
            lines.append(f"{' and '.join(next(iter(pairs)))} agree on {percent(shares[0])} of {unit}.")
        else:
            lines.append(f"Two members agree on {percent(shares[0])} to {percent(shares[-1])} of {unit}.")
    correlations = {names: pair.correlation for names, pair in pairs.items() if np.isfinite(pair.correlation)}
    if not correlations:
        return [*lines, "Some members give every row the same values, so their values do not correlate."]
    closest = max(correlations, key=lambda names: correlations[names])
    furthest = min(correlations, key=lambda names: correlations[names])
    if results.truth is None:
        what = "values" if results.activation == "none" else "probabilities"
        meaning = "without true labels nobody can tell whether they share what is right or what is wrong."
    else:
        what, meaning = "errors", "they fail apart often enough for a mean of the two to gain."
        if correlations[closest] > _ALIKE:
            meaning = "they fail together, so a mean of the two gains little over either."
    high, low = number(correlations[closest], 2), number(correlations[furthest], 2)
    if len(correlations) == 1:
        return [*lines, f"Their {what} correlate at {high}: {meaning}"]
    return [
        *lines,
        f"The {what} of {' and '.join(closest)} are most alike (correlation {high}): {meaning}",
        f"Those of {' and '.join(furthest)} are least alike ({low}).",
    ]
