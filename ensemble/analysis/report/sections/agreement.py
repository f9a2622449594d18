"""Show how similar the members are, and which member is right where they differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from scipy.special import bdtr

from ensemble.analysis.metrics import METRICS
from ensemble.analysis.predictions import Predictions
from ensemble.analysis.report.base import NOTHING, ReportData, Section, number, percent, with_interval
from ensemble.analysis.weights import one_hot
from ensemble.common.protocol import Activation
from ensemble.data.table import Truth
from ensemble.merging.methods.base import Values

_MAX_PAIRS = 30
_HEADERS = (
    *("members", "error correlation", "differ", "share", "Cohen's kappa"),
    *("only first right", "only second right", "neither", "right more often"),
)


@dataclass(frozen=True)
class Pair:
    """Compare two members on the rows that both have.

    Attributes:
        correlation: Pearson's of the values - truth, or without a truth of the values, over all rows and labels;
            NaN if a member is constant.
        decisions: of both: a row's first label, or with "sigmoid" each label by itself (0.5 is yes); 0 if values
            are no probabilities.
        differ: how many of these are different.
        kappa: Cohen's, the agreement beyond chance: (same - chance) / (1 - chance), where chance is that of two
            raters with the same frequencies (Cohen 1960); NaN if there are no decisions or only one.
        only_first: decisions in which only the first member is right; so is ``only_second``; 0 without a truth.
    """

    rows: int
    correlation: float
    decisions: int = 0
    differ: int = 0
    kappa: float = float("nan")
    only_first: int = 0
    only_second: int = 0

    @property
    def difference(self) -> float:
        """Return the share of decisions that are different."""
        return self.differ / self.decisions if self.decisions else float("nan")


class Agreement(Section):
    title: ClassVar[str] = "Agreement of members"

    def html(self, data: ReportData) -> Markup:
        predictions = data.predictions
        pairs = {
            (first, second): compare_pair(values, others, predictions.activation, predictions.truth)
            for (first, values), (second, others) in combinations(predictions.members.items(), 2)
        }
        pairs = {names: pair for names, pair in pairs.items() if pair.rows > 1}
        order = sorted(pairs, key=lambda names: (-pairs[names].differ, pairs[names].correlation))
        rows = [_cells(names, pairs[names], predictions) for names in order[:_MAX_PAIRS]]
        headers = [*_HEADERS[: len(rows[0])]] if rows else []
        if rows and predictions.truth is None:
            headers[1] = "correlation"
        is_alone = len(predictions.members) < 2
        return self.render(
            only_member=next(iter(predictions.members)) if is_alone else "",
            lines=_sentences(predictions, pairs) if pairs else [],
            headers=headers,
            rows=rows,
            pairs=len(pairs),
            kappas=_kappas(data) if rows or is_alone else [],
        )


def _kappas(data: ReportData) -> list[list[object]]:
    """Return the agreement of each member, and of the ensemble, with the true labels beyond chance."""
    predictions = data.predictions
    if predictions.truth is None or predictions.activation != "softmax":
        return []
    rows: list[list[object]] = []
    for name, values in data.values_of_all.items():
        kappa = data.score(METRICS["cohen_kappa"], values)
        rows.append([name, NOTHING if kappa is None else with_interval("cohen_kappa", kappa)])
    return rows


def _cells(names: tuple[str, str], pair: Pair, predictions: Predictions) -> list[str]:
    cells = [" / ".join(names), number(pair.correlation, 2)]
    if predictions.activation == "none":
        return cells
    cells += [f"{pair.differ:,}", percent(pair.difference), number(pair.kappa, 2)]
    if predictions.truth is None:
        return cells
    either = pair.only_first + pair.only_second
    better = names[0] if pair.only_first > pair.only_second else names[1]
    # An exact sign test.
    if not either or 2 * bdtr(min(pair.only_first, pair.only_second), either, 0.5) > 0.05:
        better = "too close to call"
    return [*cells, f"{pair.only_first:,}", f"{pair.only_second:,}", f"{pair.differ - either:,}", better]


def _sentences(predictions: Predictions, pairs: Mapping[tuple[str, str], Pair]) -> list[str]:
    lines = []
    if predictions.activation != "none":
        unit = "rows" if predictions.activation == "softmax" else "answers (row and label)"
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
    if predictions.truth is None:
        subject = "values" if predictions.activation == "none" else "probabilities"
        meaning = "without true labels nobody can tell whether they share what is right or what is wrong."
    else:
        subject, meaning = "errors", "they fail apart often enough for a mean of the two to gain."
        if correlations[closest] > 0.9:
            meaning = "they fail together, so a mean of the two gains little over either."
    effective = []
    if predictions.truth is not None and len(correlations) == len(pairs):
        mean, members = float(np.mean([*correlations.values()])), len(predictions.members)
        count = effective_members(members, mean)
        if math.isfinite(count):
            effective = [
                f"Together the {members} members count as {number(count, 1)} members with independent errors."
            ]
    high, low = number(correlations[closest], 2), number(correlations[furthest], 2)
    if len(correlations) == 1:
        return [*lines, f"Their {subject} correlate at {high}: {meaning}", *effective]
    return [
        *lines,
        f"The {subject} of {' and '.join(closest)} are most alike (correlation {high}): {meaning}",
        f"Those of {' and '.join(furthest)} are least alike ({low}).",
        *effective,
    ]


def effective_members(members: int, correlation: float) -> float:
    """Return how many members with independent errors have a mean that varies as the mean of these members does.

    ``correlation`` is the mean over pairs. The result is the sample size over the design effect (L. Kish, "Survey
    Sampling", 1965, section 5.4), and infinite if the errors cancel.
    """
    effect = 1 + (members - 1) * correlation
    return members / effect if effect > 0 else float("inf")


def compare_pair(first: Values, second: Values, activation: Activation, truth: Truth | None = None) -> Pair:
    """Compare two members, float64 [rows, labels]; a row of NaN is one that a member lacks."""
    is_in_both = ~np.isnan(first[:, 0] + second[:, 0])
    first, second = first[is_in_both], second[is_in_both]
    rows = len(first)
    if truth is None:
        correlation = _correlation(first, second)
    else:
        true_values = one_hot(truth[is_in_both], first.shape[1])
        correlation = _correlation(first - true_values, second - true_values)
    if activation == "none" or not rows:
        return Pair(rows, correlation)
    ours, theirs = _decisions(first, activation), _decisions(second, activation)
    only_first = only_second = 0
    if truth is not None:
        right = _decisions(true_values, activation)
        only_first = int(((ours == right) & (theirs != right)).sum())
        only_second = int(((ours != right) & (theirs == right)).sum())
    classes = max(int(ours.max()), int(theirs.max())) + 1
    chance = (
        float(np.bincount(ours, minlength=classes) @ np.bincount(theirs, minlength=classes)) / len(ours) ** 2
    )
    same = float((ours == theirs).mean())
    return Pair(
        rows=rows,
        correlation=correlation,
        decisions=len(ours),
        differ=int((ours != theirs).sum()),
        kappa=(same - chance) / (1 - chance) if chance < 1 else float("nan"),
        only_first=only_first,
        only_second=only_second,
    )


def _decisions(values: Values, activation: Activation) -> npt.NDArray[np.int64]:
    """Return the first label of each row, or with "sigmoid" whether each label is likely."""
    if activation == "softmax":
        return np.asarray(values.argmax(axis=1))
    return np.asarray(values >= 0.5, np.int64).ravel()


def _correlation(first: Values, second: Values) -> float:
    """Return Pearson's correlation of all cells; NaN if either is constant."""
    if not len(first) or min(np.ptp(first), np.ptp(second)) <= 1e-12:
        return float("nan")
    return float(np.corrcoef(first.ravel("F"), second.ravel("F"))[0, 1])
