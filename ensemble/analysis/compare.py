"""Compare two runs, or two CSVs of predictions: settings, rows, metrics, time and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from ensemble.analysis.predictions import (
    LABEL_COLUMN,
    Predictions,
    calibrations_of,
    common_folds,
    read_files,
    read_run,
    read_truth,
    run_settings,
)
from ensemble.common.errors import ConfigError, DataError
from ensemble.common.protocol import Activation
from ensemble.common.text import listed, plural, shown_path
from ensemble.config.document import SHOWN_CHARACTERS, Loc, place, shown
from ensemble.data.answers import numbers_of
from ensemble.data.ids import places_among
from ensemble.data.table import Truth
from ensemble.merging.methods.base import Values
from ensemble.merging.metrics import (
    USUAL,
    Metric,
    MetricKind,
    UndefinedMetric,
    decisions,
    find_metric,
    order_remarks,
)
from ensemble.merging.scoring import LEVEL, Bootstrap, Interval
from ensemble.pipeline.results import ENSEMBLE_ROW
from ensemble.pipeline.run_report import RunReport

# Keys that differ between any two runs, or that a remark explains.
_NOT_COMPARED = ("output_dir", "fitted_on")
NOT_SET: Final = "not set"


@dataclass(frozen=True)
class Setting:
    """Hold a key whose value differs, with both values as messages show them, or ``NOT_SET``."""

    key: str
    first: str
    second: str


@dataclass(frozen=True)
class Example:
    """Hold a row whose prediction changed, with both predictions in words."""

    id: str
    first: str
    second: str


@dataclass(frozen=True)
class Change:
    """Measure how far a member's predictions, or the ensemble's, are apart on the rows that both sides have.

    ``mean`` and ``largest`` are of the absolute differences of all values; ``examples`` are the changed rows that
    differ most. A row has changed if another label is the most likely. With labels that are not exclusive, it has
    changed if any value is above 0.5 on a single side only; with regression, if its number differs.
    """

    name: str
    rows: int
    changed: int
    mean: float
    largest: float
    examples: tuple[Example, ...]


@dataclass(frozen=True)
class MetricChange:
    """Hold a metric of one member, or the ensemble; ``difference`` is the second minus the first, paired."""

    name: str
    metric: str
    kind: MetricKind
    greater_is_better: bool
    rows: int
    first: Interval
    second: Interval
    difference: Interval

    @property
    def better(self) -> str:
        """Return ``first`` or ``second`` if the difference is more than noise; else an empty string."""
        if not self.difference.excludes_zero:
            return ""
        return "second" if (self.difference.value > 0) == self.greater_is_better else "first"


@dataclass(frozen=True)
class Side:
    """Name a run with its report, or a file without a report."""

    name: str
    report: RunReport | None = None


@dataclass(frozen=True, repr=False)
class Comparison:
    """Hold the differences of two runs or files on their common ``rows``; intervals have the ``level``.

    ``settings`` are None if a side is a file. ``changes`` begin with the ensemble. ``remarks`` say what could not
    be compared and why.
    """

    first: Side
    second: Side
    settings: tuple[Setting, ...] | None
    rows: int = 0
    changes: tuple[Change, ...] = ()
    metrics: tuple[MetricChange, ...] = ()
    remarks: tuple[str, ...] = ()
    level: float = LEVEL

    def __repr__(self) -> str:
        return f"<Comparison of {self.first.name} and {self.second.name}: {plural(self.rows, 'row')}>"


@dataclass(frozen=True)
class _Source:
    path: Path
    predictions: Predictions
    report: RunReport | None  # None for a file

    @property
    def name(self) -> str:
        return shown_path(self.path)

    def by_name(self, other: _Source) -> dict[str, Values]:
        """Return the ensemble, if it exists, and the members; a file is compared with the ensemble of a run."""
        if self.report is None:
            name = "predictions" if other.report is None else ENSEMBLE_ROW
            return {name: next(iter(self.predictions.members.values()))}
        merged = self.predictions.ensemble
        return ({} if merged is None else {ENSEMBLE_ROW: merged}) | self.predictions.members


def compare(
    first: Path,
    second: Path,
    metrics: Sequence[str] = (),
    labels: Path | None = None,
    label_column: str | None = None,
    id_column: str | None = None,
    activation: Activation | None = None,
    columns: Sequence[str] = (),
    folds_from: Path | None = None,
    group: str | None = None,
) -> Comparison:
    """Compare two runs, two CSVs of predictions, or a run with a CSV; see ``ensemble.compare``.

    Members of a run are compared after their ``calibration``, as in the scores of the run.

    Raises:
        ConfigError: there is no table that could have ``label_column``, or no CSV for ``columns``.
        DataError: a side cannot be read, two files have no row in common, or metrics are unknown or have no truth.
    """
    requested = [find_metric(name).name for name in metrics]
    if label_column is not None and labels is None and not any(path.is_dir() for path in (first, second)):
        raise ConfigError(
            "--label-column: is one of --labels or of a run's table, and these are CSVs; give --labels"
        )
    if columns and first.is_dir() and second.is_dir():
        raise ConfigError("--label: names columns of CSVs, and these are runs; leave it out")
    sources, problems = dict[Path, _Source](), list[str]()
    # Read runs first, because a CSV gets the activation of the run on the other side.
    for path in sorted((first, second), key=lambda path: not path.is_dir()):
        try:
            if path.is_dir():
                report = RunReport.read(path / "run.json")
                predictions = read_run(path, labels is None, label_column)
                predictions = predictions.as_merged(calibrations_of(report))
                activation = activation or predictions.activation
                sources[path] = _Source(path, predictions, report)
            else:
                files = {"predictions": path}
                predictions = read_files(files, id_column, activation=activation, columns=columns)
                sources[path] = _Source(path, predictions, None)
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    source_a, source_b = sources[first], sources[second]
    remarks = [
        f"{source.name}: {text}" for source in (source_a, source_b) for text in source.predictions.remarks
    ]
    for source in (source_a, source_b):
        if source.report is not None and source.report.fitted_on is not None:
            remarks.append(f"{source.name}: the ensemble was {source.report.fitted_on.text}")
    settings = None
    if source_a.report is not None and source_b.report is not None:
        settings = tuple(changed_settings(run_settings(source_a.report), run_settings(source_b.report)))
    result = Comparison(Side(source_a.name, source_a.report), Side(source_b.name, source_b.report), settings)
    try:
        source_a, source_b = _common(source_a, source_b, remarks)
    except DataError as error:
        if settings is None or metrics or group:
            raise
        return replace(result, remarks=(*remarks, *error.problems))
    sides = source_a.predictions, source_b.predictions
    predictions, kind = source_a.predictions, source_a.predictions.activation
    predictions = replace(
        predictions,
        folds=common_folds(side.folds for side in sides),
        made_elsewhere=any(side.made_elsewhere for side in sides),
    )
    numbers = numbers_of(predictions.labels)
    chosen = [find_metric(name, numbers, group) for name in requested or USUAL[kind]]
    if folds_from is not None:
        predictions = predictions.with_folds(folds_from, id_column, chosen)
    others = source_b.by_name(source_a)
    pairs = {
        name: (values, others[name]) for name, values in source_a.by_name(source_b).items() if name in others
    }
    is_same_kind = kind == source_b.predictions.activation
    predictions = replace(predictions, truth=None, remarks=())
    if not is_same_kind:
        remarks.append("no metric is compared, because only one side has exclusive labels")
    elif labels is not None:
        predictions = read_truth(predictions, labels, label_column or LABEL_COLUMN, id_column)
        remarks += predictions.remarks
    else:
        truth = _agreed_truth(source_a, source_b, remarks)
        data = sides[0].truth_data or sides[1].truth_data
        predictions = replace(predictions, truth=truth, truth_data=data)
    predictions = predictions.with_groups([group])
    changed: tuple[MetricChange, ...] = ()
    if predictions.truth is not None:
        remarks += order_remarks(requested, predictions.labels)
        changed = tuple(_metric_changes(pairs, chosen, Bootstrap(predictions.labelled), remarks))
        scored = {change.metric for change in changed}
        remarks += predictions.ranking_remarks(metric for metric in chosen if metric.name in scored)
    if (requested or group) and not changed:
        problem = "no metric could be computed"
        if predictions.truth is None:
            problem = "metrics need the truth; name its table (--labels)"
        raise DataError([problem, *dict.fromkeys(remarks)])
    change_kind = kind if is_same_kind else "none"
    return replace(
        result,
        rows=predictions.rows,
        changes=tuple(_change(name, *pair, predictions, change_kind) for name, pair in pairs.items()),
        metrics=changed,
        remarks=tuple(dict.fromkeys(remarks)),
    )


def changed_settings(first: object, second: object) -> Iterator[Setting]:
    """Yield the keys of two configs, as plain data, whose values differ; models are compared by name."""
    ours, theirs = dict(_keys(first)), dict(_keys(second))
    for loc in [*ours, *(loc for loc in theirs if loc not in ours)]:
        if loc[0] in _NOT_COMPARED or (loc in ours and loc in theirs and ours[loc] == theirs[loc]):
            continue
        texts = [shown(config[loc]) if loc in config else NOT_SET for config in (ours, theirs)]
        if texts[0] == texts[1]:  # the texts differ only after the characters that are shown
            texts = _around_difference(str(ours[loc]), str(theirs[loc]))
        yield Setting(place(loc), *texts)


def _keys(value: object, loc: Loc = ()) -> Iterator[tuple[Loc, object]]:
    """Yield each key with a plain value; keys of models have the model's name, keys of rules have numbers."""
    if loc == ("models",) and isinstance(value, list):
        yield loc, [model["name"] for model in value]
        value = {model["name"]: {key: model[key] for key in model if key != "name"} for model in value}
    elif loc == ("rules",) and isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _keys(inner, (*loc, key))
    else:
        yield loc, value


def _around_difference(first: str, second: str) -> list[str]:
    """Return parts of two long texts that start shortly before their first difference."""
    pairs = enumerate(zip(first, second, strict=False))
    differs_at = next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))
    start = max(0, differs_at - 15)
    return [f"...{shown(text[start : start + SHOWN_CHARACTERS])}" for text in (first, second)]


def _common(first: _Source, second: _Source, remarks: list[str]) -> tuple[_Source, _Source]:
    """Return both sides with only their common rows; the first side gives the order of rows and labels."""
    predictions_a, predictions_b = first.predictions, second.predictions
    if {*predictions_a.labels} != {*predictions_b.labels}:
        raise DataError(
            f"{first.name} and {second.name} have other labels, so their rows are not compared: "
            f"{listed(predictions_a.labels)}, and {listed(predictions_b.labels)}"
        )
    places = places_among(predictions_a.ids, predictions_b.ids)
    is_common = places >= 0
    if not is_common.any():
        raise DataError(
            f"{first.name} and {second.name} have no id in common, so their rows are not compared"
        )
    common = int(is_common.sum())
    for source, rows in ((first, predictions_a.rows), (second, predictions_b.rows)):
        if rows > common:
            remarks.append(
                f"{source.name}: {plural(rows - common, 'row')} left out, which the other side does not have"
            )
    numbers = np.flatnonzero(is_common)
    return (
        replace(first, predictions=predictions_a.taken(numbers)),
        replace(second, predictions=_relabelled(predictions_b.taken(places[numbers]), predictions_a.labels)),
    )


def _relabelled(predictions: Predictions, labels: Sequence[str]) -> Predictions:
    """Return predictions with their labels in another order."""
    order = [predictions.labels.index(label) for label in labels]
    truth, merged = predictions.truth, predictions.ensemble
    if truth is not None:
        truth = np.argsort(order)[truth] if truth.ndim == 1 else truth[:, order]
    return replace(
        predictions,
        labels=tuple(labels),
        members={name: values[:, order] for name, values in predictions.members.items()},
        truth=truth,
        ensemble=None if merged is None else merged[:, order],
    )


def _agreed_truth(first: _Source, second: _Source, remarks: list[str]) -> Truth | None:
    """Return the first side's truth, or else the second side's; add a remark if the truths differ."""
    ours, theirs = first.predictions.truth, second.predictions.truth
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    if not np.array_equal(ours, theirs):
        remarks.append(f"{second.name} has other true labels; the labels of {first.name} count")
    return ours


def _change(name: str, first: Values, second: Values, predictions: Predictions, kind: Activation) -> Change:
    numbers = np.flatnonzero(~(np.isnan(first) | np.isnan(second)).any(axis=1))
    first, second = first[numbers], second[numbers]
    differences = np.abs(second - first)
    if kind != "none":
        has_changed = (decisions(first, kind) != decisions(second, kind)).any(axis=1)
    else:
        # A resumed run has other batches, and so other last digits.
        has_changed = (differences > 1e-6 * np.maximum(1.0, np.abs(first))).any(axis=1)
    rows = np.flatnonzero(has_changed)
    most = rows[np.argsort(-differences[rows].max(axis=1), kind="stable")[:5]]
    return Change(
        name=name,
        rows=len(numbers),
        changed=len(rows),
        mean=float(differences.mean()) if len(numbers) else 0.0,
        largest=float(differences.max(initial=0.0)),
        examples=tuple(
            Example(
                str(predictions.ids[int(numbers[row])].as_py()),
                _shown(first[row], first[row], second[row], predictions.labels, kind),
                _shown(second[row], first[row], second[row], predictions.labels, kind),
            )
            for row in most
        ),
    )


def _shown(row: Values, first: Values, second: Values, labels: Sequence[str], kind: Activation) -> str:
    """Return a row's prediction in words: its label, the values that crossed 0.5, or its numbers."""
    if kind == "softmax":
        return f"{labels[int(row.argmax())]} {row.max():.3f}"
    if len(labels) == 1:
        return f"{row[0]:.6g}"
    return ", ".join(
        f"{label} {row[index]:.3g}"
        for index, label in enumerate(labels)
        if kind == "none" or (first[index] > 0.5) != (second[index] > 0.5)
    )


def _metric_changes(
    pairs: Mapping[str, tuple[Values, Values]],
    metrics: Sequence[Metric],
    bootstrap: Bootstrap,
    remarks: list[str],
) -> Iterator[MetricChange]:
    for name, pair in pairs.items():
        of_pair, (first, second) = bootstrap.of_common_rows(*pair)
        for metric in metrics:
            try:
                ours, theirs = of_pair.score(metric, first), of_pair.score(metric, second)
            except UndefinedMetric as error:
                remarks += [f"{name}: {problem}" for problem in error.problems]
                continue
            if ours.partition is not None:
                remarks.append(f"{metric.name}: {ours.partition.text}")
            yield MetricChange(
                name=name,
                metric=metric.name,
                kind=metric.kind,
                greater_is_better=metric.greater_is_better,
                rows=len(first),
                first=ours.interval,
                second=theirs.interval,
                difference=theirs.minus(ours),
            )
