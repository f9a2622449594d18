"""How alike the members are, and who is right where they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

import numpy as np
from markupsafe import Markup
from scipy.special import bdtr

from ensemble.analysis.diversity import Diversity, diversity
from ensemble.analysis.report.base import ReportData, Section, html, notes, paragraphs, table
from ensemble.analysis.report.wording import number, percent, shortened
from ensemble.common.protocol import Activation

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
        pairs = [
            _pair(compared, names, i, j)
            for i, j in combinations(range(len(names)), 2)
            if compared.rows[i, j] > 1
        ]
        if not pairs:
            return html("<p>No two members have rows in common, so they cannot be compared.</p>")
        lines = _agreement_lines(pairs, results.activation)
        lines += _correlation_lines(pairs, results.activation, has_truth=results.truth is not None)
        return paragraphs(lines) + _table(pairs, results.activation, has_truth=results.truth is not None)


@dataclass(frozen=True)
class _Pair:
    """Two members: in how many decisions they differ, and how often only one of them is right, -1 if not known.

    ``correlation`` is that of their errors if the truth is known, else of their values.
    """

    first: str
    second: str
    agreement: float
    kappa: float
    correlation: float
    differ: int
    only_first: int
    only_second: int

    @property
    def better(self) -> str:
        """Return who is right more often where they differ; empty if that may be chance (exact sign test)."""
        either = self.only_first + self.only_second
        if either < 1 or 2 * bdtr(min(self.only_first, self.only_second), either, 0.5) > _CHANCE:
            return ""
        return self.first if self.only_first > self.only_second else self.second


def _pair(compared: Diversity, names: Sequence[str], i: int, j: int) -> _Pair:
    correlation = compared.correlation if compared.error_correlation is None else compared.error_correlation
    only_right = compared.only_right
    return _Pair(
        first=names[i],
        second=names[j],
        agreement=float(compared.agreement[i, j]),
        kappa=float(compared.kappa[i, j]),
        correlation=float(correlation[i, j]),
        differ=int(compared.decisions[i, j] - compared.same[i, j]),
        only_first=-1 if only_right is None else int(only_right[i, j]),
        only_second=-1 if only_right is None else int(only_right[j, i]),
    )


def _agreement_lines(pairs: Sequence[_Pair], activation: Activation) -> list[str]:
    if activation == "none":
        return []
    unit = "rows" if activation == "softmax" else "answers (row and label)"
    low, high = (percent(choose(pair.agreement for pair in pairs)) for choose in (min, max))
    if len(pairs) == 1:
        return [f"{pairs[0].first} and {pairs[0].second} agree on {low} of {unit}."]
    return [f"Two members agree on {low} to {high} of {unit}."]


def _correlation_lines(pairs: Sequence[_Pair], activation: Activation, has_truth: bool) -> list[str]:
    correlated = [pair for pair in pairs if np.isfinite(pair.correlation)]
    if not correlated:
        return [
            "Some members give every row the same values, so nothing can be said of how they move together."
        ]
    closest = max(correlated, key=lambda pair: pair.correlation)
    furthest = min(correlated, key=lambda pair: pair.correlation)
    high, low = number(closest.correlation, 2), number(furthest.correlation, 2)
    what, meaning = (
        "errors",
        "they fail apart often enough for a mean of the two to gain; the lower, the more.",
    )
    if closest.correlation > _ALIKE:
        meaning = "they fail together, so a mean of the two gains little over either."
    if not has_truth:
        what = "values" if activation == "none" else "probabilities"
        meaning = "without true labels nobody can tell whether they share what is right or what is wrong."
    if len(correlated) == 1:
        return [f"Their {what} correlate at {high}: {meaning}"]
    return [
        f"The {what} of {closest.first} and {closest.second} are most alike (correlation {high}): {meaning}",
        f"Those of {furthest.first} and {furthest.second} are least alike ({low}).",
    ]


def _table(pairs: Sequence[_Pair], activation: Activation, has_truth: bool) -> Markup:
    has_decisions = activation != "none"
    rows = []
    for pair in sorted(pairs, key=lambda pair: pair.agreement if has_decisions else pair.correlation)[
        :_MAX_PAIRS
    ]:
        row = [f"{shortened(pair.first, 20)} / {shortened(pair.second, 20)}", number(pair.correlation, 2)]
        row += (
            [f"{pair.differ:,}", percent(1 - pair.agreement), number(pair.kappa, 2)] if has_decisions else []
        )
        if has_decisions and has_truth:
            neither = pair.differ - pair.only_first - pair.only_second
            row += [f"{pair.only_first:,}", f"{pair.only_second:,}", f"{neither:,}"]
            row.append(pair.better or "too close to call")
        rows.append(row)
    headers = [
        *("members", "error correlation" if has_truth else "correlation", "differ", "share", "Cohen's kappa"),
        *("only first right", "only second right", "neither", "right more often"),
    ]
    remark = f"Of {len(pairs)} pairs the {_MAX_PAIRS} that differ most."
    return table(headers[: len(rows[0])], rows, left=(0, 8)) + notes(
        [remark] if len(pairs) > _MAX_PAIRS else []
    )
