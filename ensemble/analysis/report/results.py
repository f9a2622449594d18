"""Show what a run has given: scores, agreement, views and calibration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from matplotlib.figure import Figure
from scipy.special import bdtr

from ensemble.analysis.predictions import Predictions
from ensemble.analysis.report.base import (
    ENSEMBLE,
    METRIC_NAMES,
    NOTHING,
    ReportData,
    Section,
    html,
    number,
    percent,
    shortened,
    with_interval,
)
from ensemble.analysis.report.pictures import INK, MUTED, SERIES, picture
from ensemble.analysis.weights import fit_temperature, one_hot
from ensemble.common.protocol import Activation
from ensemble.config.values import weight_text
from ensemble.data.table import Truth
from ensemble.jobs.job import job_name
from ensemble.merging.methods.base import Values
from ensemble.merging.metrics import ECE_BINS, METRICS, LabelledRows, krippendorff_alpha
from ensemble.merging.scoring import Bootstrap, Interval, Resamples
from ensemble.pipeline.ending import answer_texts, gain_text
from ensemble.pipeline.prediction_files import read_as_written
from ensemble.pipeline.run_dir import RunDir

_DIFFERENCE = "member \N{MINUS SIGN} ensemble"
_MAX_PAIRS = 30
_PAIR_HEADERS = (
    *("members", "error correlation", "differ", "share", "Cohen's kappa"),
    *("only first right", "only second right", "neither", "right more often"),
)
# Of a diagram.
_BINS = 10
# With fewer rows of a member no temperature is fitted.
_MIN_ROWS = 50
# Bins with fewer predictions are left out of the picture: their accuracy says nothing.
_MIN_IN_BIN = 10


class Scores(Section):
    title: ClassVar[str] = "Members and the ensemble"

    def html(self, data: ReportData) -> Markup:
        predictions = data.predictions
        loss = METRIC_NAMES[data.metrics[0].name]
        gaps = _gaps(data)
        headers = ["", _DIFFERENCE, "weight", "rows"]
        lines: list[str] = []
        ranking_remarks: list[str] = []
        if predictions.truth is not None:
            headers[1:1] = [METRIC_NAMES.get(metric.name, metric.name) for metric in data.metrics]
            lines = [gain_text(data.report), *answer_texts(data.report)]
            if predictions.ensemble is None:
                lines = ["The run has merged nothing, so there are only its members to look at."]
            elif not data.method.gives_probabilities:
                method = data.report.ensemble["method"]
                lines = [f"The ensemble has no {loss}: the values that {method} gives are no probabilities."]
            ranking_remarks = predictions.ranking_remarks(data.metrics)
        if data.report.fitted_on is not None:
            lines.append(f"The ensemble: {data.report.fitted_on.text}.")
        cells = _score_cells(data, gaps)  # before the problems, which it can add to
        return self.render(
            lines=[*filter(None, lines)],
            picture=_gaps_picture(loss, gaps),
            headers=headers,
            cells=cells,
            predictions=predictions,
            ranking_remarks=ranking_remarks,
            problems=sorted(data.problems),
        )


def _gaps(data: ReportData) -> dict[str, Interval]:
    """Return how far each member's loss is above the ensemble's, with the run's rules for both, the least first."""
    truth, ensemble = data.predictions.truth, data.predictions.ensemble
    if truth is None or ensemble is None or not data.method.gives_probabilities:
        return {}
    gaps = {}
    for name, values in data.as_ruled.items():
        gap = data.score(data.metrics[0], values, ensemble)
        if gap is not None:
            gaps[name] = gap
    return dict(sorted(gaps.items(), key=lambda item: item[1].value))


def _score_cells(data: ReportData, gaps: Mapping[str, Interval]) -> list[list[object]]:
    """Return the table's rows: the ensemble, then the members, the best first."""
    predictions, weights = data.predictions, {}
    total = sum(data.mean_weights.values())
    for member in data.report.members:
        weights[member.name] = weight_text(member.weight)
        if isinstance(member.weight, int | float) and member.name in data.mean_weights:
            weights[member.name] = percent(data.mean_weights[member.name] / total)
    rows: list[tuple[float, list[object]]] = []
    for name, values in data.values_of_all.items():
        is_ensemble = name == ENSEMBLE
        place = -np.inf if is_ensemble else np.inf
        cells: list[object] = [html("<strong>{{ name }}</strong>", name=name) if is_ensemble else name]
        for metric in data.metrics if predictions.truth is not None else ():
            score = None
            # Ranks have these metrics, too.
            is_of_ranks = metric.kind in ("ranks", "own") or metric.name == "accuracy"
            if not is_ensemble or data.method.gives_probabilities or is_of_ranks:
                score = data.score(metric, values)
            cells.append(NOTHING if score is None else with_interval(metric.name, score))
            if score is not None and metric is data.metrics[0] and not is_ensemble:
                place = score.value
        gap = "" if name not in gaps else with_interval(data.metrics[0].name, gaps[name], True)
        count = int((~np.isnan(values).any(axis=1)).sum())
        rows.append((place, [*cells, gap, weights.get(name, ""), f"{count:,}"]))
    rows.sort(key=lambda row: row[0])
    return [cells for _, cells in rows]


def _gaps_picture(name: str, gaps: Mapping[str, Interval]) -> Markup:
    """Draw the differences with their intervals below each other, and a line at 0."""
    if not gaps:
        return Markup()

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for place, gap in enumerate(gaps.values()):
            colour = SERIES[0] if gap.value >= 0 else SERIES[1]
            if not gap.excludes_zero:
                colour = MUTED
            axes.plot([gap.low, gap.high], [place, place], color=colour, linewidth=2.2, alpha=0.6)
            axes.plot([gap.value], [place], marker="o" if gap.value >= 0 else "D", markersize=5, color=colour)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(gaps)), [shortened(member, 18) for member in gaps])
        axes.set_ylim(len(gaps) - 0.3, -0.7)
        axes.tick_params(length=0)
        axes.locator_params(axis="x", nbins=5)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"{name}, {_DIFFERENCE}")

    text = (
        f"The {name} of each member minus the ensemble's, with 95 % intervals: right of 0 the ensemble is better, "
        "left of it the member. Grey: no more than noise."
    )
    return picture(draw, f"{name}, {_DIFFERENCE}", text, height=50 + 22 * len(gaps))


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
        rows = [_pair_cells(names, pairs[names], predictions) for names in order[:_MAX_PAIRS]]
        headers = [*_PAIR_HEADERS[: len(rows[0])]] if rows else []
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


def _pair_cells(names: tuple[str, str], pair: Pair, predictions: Predictions) -> list[str]:
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
    alpha = krippendorff_alpha([*predictions.members.values()], predictions.activation)
    if np.isfinite(alpha):
        lines.append(f"Krippendorff's alpha of all members is {number(alpha, 2)}: 1 is agreement, 0 chance.")
    correlations = {names: pair.correlation for names, pair in pairs.items() if np.isfinite(pair.correlation)}
    if not correlations:
        return [*lines, "Some members give every row the same values, so their values do not correlate."]
    closest = max(correlations, key=lambda names: correlations[names])
    furthest = min(correlations, key=lambda names: correlations[names])
    if predictions.truth is None:
        subject = "values" if predictions.activation == "none" else "probabilities"
        meaning = "without true labels nobody can tell whether they share what is right or what is wrong."
    else:
        subject, meaning = "errors", "at 0 they would be independent, at 1 the same."
    effective = []
    if predictions.truth is not None and len(correlations) == len(pairs):
        mean, members = float(np.mean([*correlations.values()])), len(predictions.members)
        count = effective_members(members, mean)
        if math.isfinite(count):
            effective = [
                f"Together the {members} members count as {number(count, 1)} members with independent errors: the "
                "higher this number, the more their mean can gain."
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


class Views(Section):
    title: ClassVar[str] = "Views of the same rows"

    def html(self, data: ReportData) -> Markup | None:
        changes = {
            (name, *pair): share
            for name, views in _values_of_views(data).items()
            for pair, share in verdict_changes(views).items()
        }
        if not changes:
            return None
        order = sorted(changes, key=lambda names: -changes[names].value)
        name, first, second = order[0]
        rows = [
            [names[0], " / ".join(names[1:]), with_interval("accuracy", changes[names])] for names in order
        ]
        return self.render(name=name, first=first, second=second, share=changes[order[0]].value, rows=rows)


def _values_of_views(data: ReportData) -> dict[str, dict[str, Values]]:
    """Return what each view gives, float64 [rows, labels], by member, of members with exclusive labels."""
    values: dict[str, dict[str, Values]] = {}
    for member in data.report.members:
        if data.predictions.activations.get(member.name) == "softmax":
            values[member.name] = {}
            for view in member.views:
                path = RunDir(data.run_dir).predictions(job_name(member.name, view))
                file = read_as_written(path, labels=data.predictions.labels)
                values[member.name][view], _ = file.join(data.predictions.ids, may_lack=True)
    return values


def verdict_changes(views: Mapping[str, Values]) -> dict[tuple[str, str], Interval]:
    """Return the share of common rows with another likeliest label, by each pair of views that have such rows."""
    changes = {}
    for first, second in combinations(views, 2):
        is_in_both = ~np.isnan(views[first][:, 0] + views[second][:, 0])
        if is_in_both.any():
            labels = views[first][is_in_both].argmax(axis=1)
            bootstrap = Bootstrap(LabelledRows(labels, "softmax", possible=None, folds=None))
            same = bootstrap.score(METRICS["accuracy"], views[second][is_in_both]).interval
            changes[first, second] = Interval(1 - same.value, 1 - same.high, 1 - same.low)
    return changes


@dataclass(frozen=True)
class Reliability:
    """Hold bins of equal width from 0 to 1, without their lower edge; every array is [bins].

    Attributes:
        counts: predictions in the bin: rows by the probability of their first label, or with "sigmoid" all cells.
        confidence: their mean probability; NaN in an empty bin.
        accuracy: the share of them that came true; NaN in an empty bin.
        low, high: the 95 % bootstrap interval of ``accuracy``.
        overconfidence: mean confidence minus the share that came true, over all predictions.
    """

    counts: npt.NDArray[np.int64]
    confidence: Values
    accuracy: Values
    low: Values
    high: Values
    overconfidence: Interval


class Calibration(Section):
    title: ClassVar[str] = "Calibration"

    def html(self, data: ReportData) -> Markup:
        predictions = data.predictions
        activation = predictions.activation
        if activation == "none" or predictions.truth is None:
            return self.render(activation=activation, has_truth=predictions.truth is not None)
        values_of = {}
        if predictions.ensemble is not None and data.method.gives_probabilities:
            values_of[ENSEMBLE] = predictions.ensemble
        for name in sorted(predictions.members, key=lambda name: -data.mean_weights[name]):
            values_of[name] = predictions.members[name]
        diagrams: dict[str, Reliability] = {}
        cells: list[list[object]] = []
        for name, values in values_of.items():
            rows = np.flatnonzero(~np.isnan(values).any(axis=1))
            if not len(rows):
                continue
            values, known = values[rows], predictions.labelled.taken(rows)
            diagrams[name] = reliability(values, known)
            temperature = ""
            if name != ENSEMBLE and len(rows) >= _MIN_ROWS:
                fitted_to = data.calibrated.members[name][rows]
                temperature = number(fit_temperature(fitted_to, known), 2)
            gap = with_interval("accuracy", diagrams[name].overconfidence, is_difference=True)
            cells.append([name, gap, number(METRICS["ece"].value(known, values)), temperature])
        quantity, rate = "confidence", "accuracy"
        if activation == "sigmoid":
            quantity, rate = "probability", "frequency"
        name, diagram = next(iter(diagrams.items()))
        verdict = "neither over- nor underconfident, as far as these rows tell"
        if diagram.overconfidence.excludes_zero:
            verdict = "overconfident" if diagram.overconfidence.value > 0 else "underconfident"
        return self.render(
            activation=activation,
            has_truth=True,
            who="The ensemble" if name == ENSEMBLE else name,
            verdict=verdict,
            gap_name=f"{quantity} \N{MINUS SIGN} {rate}",
            gap=with_interval("accuracy", diagram.overconfidence, is_difference=True),
            picture=_diagrams_picture(diagrams, quantity),
            cells=cells,
            ece_bins=ECE_BINS,
            bins=_BINS,
            min_rows=_MIN_ROWS,
        )


def _diagrams_picture(diagrams: Mapping[str, Reliability], quantity: str) -> Markup:
    panels = list(diagrams.items())[:6]
    across, down = min(len(panels), 2), -(-len(panels) // 2)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, (name, diagram) in zip(grid.flat, panels, strict=False):
            filled = diagram.counts >= _MIN_IN_BIN
            x, y = 100 * diagram.confidence[filled], 100 * diagram.accuracy[filled]
            axes.plot([0, 100], [0, 100], color=MUTED, linewidth=0.8, linestyle="--")
            axes.plot(x, y, color=SERIES[0])
            axes.vlines(x, 100 * diagram.low[filled], 100 * diagram.high[filled], color=SERIES[0], alpha=0.5)
            sizes = 4 + 40 * np.sqrt(diagram.counts[filled] / diagram.counts.max())
            axes.scatter(x, y, sizes, color=SERIES[0], zorder=3)
            axes.set_title(shortened(name, 22))
            axes.set(xlim=(0, 102), ylim=(0, 102), aspect="equal")
        figure.supxlabel(f"{quantity} (%)", fontsize=9, color=MUTED)
        figure.supylabel("came true (%)", fontsize=9, color=MUTED)

    text = (
        f"The {quantity} and how often it came true, in bins of 10 points. On the dashed line both are the same; "
        "below it probabilities are too high. The larger the dot, the more rows; bins of fewer than "
        f"{_MIN_IN_BIN} are left out. Lines are 95 % intervals."
    )
    if len(diagrams) > len(panels):
        text += f" The first {len(panels)} of {len(diagrams)}; the table has all."
    return picture(draw, "Reliability diagrams", text, height=40 + 165 * down)


def reliability(values: Values, known: LabelledRows) -> Reliability:
    """Sort probabilities, [rows, labels], into bins: of "softmax" those of each row's first label, else all."""
    confidence, came_true = values, one_hot(known.truth, values.shape[1])
    if known.activation == "softmax":
        first = values.argmax(axis=1)[:, None]
        confidence = np.take_along_axis(values, first, axis=1)
        came_true = np.take_along_axis(came_true, first, axis=1)
    resamples = Resamples(len(values))
    bin_of = np.searchsorted(np.linspace(0.0, 1.0, _BINS + 1)[1:-1], confidence)
    counts, confidences = np.zeros(_BINS, np.int64), np.full(_BINS, np.nan)
    intervals = []
    for place in range(_BINS):
        is_in = bin_of == place
        counts[place] = is_in.sum()
        if counts[place]:
            confidences[place] = confidence[is_in].mean()
        columns = np.column_stack([(came_true * is_in).sum(axis=1), is_in.sum(axis=1)])
        by_group = resamples.by_group(slice(None), columns)
        intervals.append(resamples.mean(by_group[:, 0], by_group[:, 1]))
    differences = (confidence - came_true).mean(axis=1, keepdims=True)
    return Reliability(
        counts=counts,
        confidence=confidences,
        accuracy=np.array([interval.value for interval in intervals]),
        low=np.array([interval.low for interval in intervals]),
        high=np.array([interval.high for interval in intervals]),
        overconfidence=resamples.mean(resamples.by_group(slice(None), differences)[:, 0]),
    )
