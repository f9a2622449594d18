"""How alike the members are, and who is right where they differ."""

from __future__ import annotations

from itertools import combinations
from typing import ClassVar

import numpy as np
from markupsafe import Markup
from scipy.special import bdtr

from ensemble.analysis.diversity import Diversity, diversity
from ensemble.analysis.report.base import ReportData, Section, html, notes, number, paragraphs, percent, table
from ensemble.analysis.report.results import MergedRows
from ensemble.merging.methods.base import Values

_MAX_PAIRS = 30
# A difference that chance brings more often than this counts as none.
_CHANCE = 0.05
# With errors so much alike, one of the two members hardly changes the mean.
_ALIKE = 0.9


class Agreement(Section):
    title: ClassVar[str] = "Agreement of members"

    def html(self, data: ReportData) -> Markup:
        results = data.results
        names = results.names
        if len(names) < 2:
            return html(
                "<p>{{ name }} is the only member: there is none to compare it with.</p>", name=names[0]
            )
        compared = diversity(results.values, results.activation, results.truth)
        pairs = [pair for pair in combinations(range(len(names)), 2) if compared.rows[pair] > 1]
        if not pairs:
            return html("<p>No two members have rows in common, so they cannot be compared.</p>")
        has_decisions, has_truth = results.activation != "none", results.truth is not None
        correlation = compared.correlation
        if compared.error_correlation is not None:
            correlation = compared.error_correlation
        pairs.sort(key=lambda pair: compared.agreement[pair] if has_decisions else correlation[pair])
        rows: list[list[str]] = []
        for first, second in pairs[:_MAX_PAIRS]:
            pair = (first, second)
            row = [f"{names[first]} / {names[second]}", number(correlation[pair], 2)]
            if has_decisions:
                differ = int(compared.decisions[pair] - compared.same[pair])
                share = percent(1 - compared.agreement[pair])
                row += [f"{differ:,}", share, number(compared.kappa[pair], 2)]
                if compared.only_right is not None:
                    one, other = int(compared.only_right[pair]), int(compared.only_right[second, first])
                    better = names[first] if one > other else names[second]
                    # An exact sign test.
                    if one + other < 1 or 2 * bdtr(min(one, other), one + other, 0.5) > _CHANCE:
                        better = "too close to call"
                    row += [f"{one:,}", f"{other:,}", f"{differ - one - other:,}", better]
            rows.append(row)
        headers = [
            *("members", "error correlation" if has_truth else "correlation", "differ", "share"),
            *("Cohen's kappa", "only first right", "only second right", "neither", "right more often"),
        ]
        remark = f"Of {len(pairs)} pairs the {_MAX_PAIRS} that differ most."
        return (
            paragraphs(_sentences(results, compared, pairs, correlation))
            + table(headers[: len(rows[0])], rows, left=(0, 8))
            + notes([remark] if len(pairs) > _MAX_PAIRS else [])
        )


def _sentences(
    results: MergedRows, compared: Diversity, pairs: list[tuple[int, int]], correlation: Values
) -> list[str]:
    lines, names = [], results.names
    if results.activation != "none":
        unit = "rows" if results.activation == "softmax" else "answers (row and label)"
        shares = [float(compared.agreement[pair]) for pair in pairs]
        low, high = percent(min(shares)), percent(max(shares))
        if len(pairs) == 1:
            lines.append(f"{names[pairs[0][0]]} and {names[pairs[0][1]]} agree on {low} of {unit}.")
        else:
            lines.append(f"Two members agree on {low} to {high} of {unit}.")
    correlated = [pair for pair in pairs if np.isfinite(correlation[pair])]
    if not correlated:
        lines.append("Some members give every row the same values, so their values do not correlate.")
        return lines
    closest = max(correlated, key=lambda pair: correlation[pair])
    furthest = min(correlated, key=lambda pair: correlation[pair])
    if results.truth is None:
        what = "values" if results.activation == "none" else "probabilities"
        meaning = "without true labels nobody can tell whether they share what is right or what is wrong."
    else:
        what, meaning = "errors", "they fail apart often enough for a mean of the two to gain."
        if correlation[closest] > _ALIKE:
            meaning = "they fail together, so a mean of the two gains little over either."
    high, low = number(correlation[closest], 2), number(correlation[furthest], 2)
    if len(correlated) == 1:
        lines.append(f"Their {what} correlate at {high}: {meaning}")
        return lines
    first, second = closest
    lines.append(
        f"The {what} of {names[first]} and {names[second]} are most alike (correlation {high}): {meaning}"
    )
    first, second = furthest
    lines.append(f"Those of {names[first]} and {names[second]} are least alike ({low}).")
    return lines
