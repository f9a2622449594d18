"""Two runs, or two CSVs of predictions, side by side: settings, rows, metrics, time and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.analysis.metrics import (
    LEVEL,
    USUAL,
    Bootstrap,
    Interval,
    Metric,
    MetricKind,
    UndefinedMetric,
    find_metric,
)
from ensemble.analysis.predictions import (
    LABEL_COLUMN,
    Predictions,
    Values,
    as_merged,
    calibrations_of,
    read_files,
    read_run,
    read_truth,
    run_settings,
)
from ensemble.common.errors import ConfigError, DataError
from ensemble.common.protocol import Activation
from ensemble.common.text import listed, plural, shown_path
from ensemble.config.document import SHOWN_CHARACTERS, place, shown
from ensemble.data.ids import places_among
from ensemble.data.table import Truth
from ensemble.pipeline.results import ENSEMBLE_ROW
from ensemble.pipeline.run_report import MemberReport, RunReport

# What two computations of the same may differ by: a resumed run shares other batches.
_SAME = 1e-6
_EXAMPLES = 5
# It differs between any two runs.
_OWN_KEY = "output_dir"
_BEFORE_DIFFERENCE = 15
NOT_SET: Final = "not set"


@dataclass(frozen=True)
class Setting:
    """A key whose value differs; as messages show values, ``NOT_SET`` where there is none."""

    key: str
    first: str
    second: str


@dataclass(frozen=True)
class Example:
    """A row whose prediction changed, in words."""

    id: str
    first: str
    second: str


@dataclass(frozen=True)
class Change:
    """How far one member's predictions, or the ensemble's, are apart on the rows that both sides have.

    Attributes:
        changed: rows with another likeliest label; of labels that are not exclusive, with one that is above 0.5 on
            one side only; of regression, with another number.
        mean: absolute difference of all values; ``largest`` the largest.
        examples: the changed rows that differ most, the first the most.
    """

    name: str
    rows: int
    changed: int
    mean: float
    largest: float
    examples: tuple[Example, ...]


@dataclass(frozen=True)
class MetricChange:
    """A metric of one member, or the ensemble, on both sides; ``difference``: the second less the first, paired.

    ``kind`` says what the metric does with rows, see ``METRIC_KINDS``.
    """

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
        """``first`` or ``second``, where the difference is more than noise; else empty."""
        if not self.difference.excludes_zero:
            return ""
        return "second" if (self.difference.value > 0) == self.greater_is_better else "first"


@dataclass(frozen=True)
class Cost:
    """What a member took: seconds, rows per second and bytes; None for what is not known or was not needed.

    ``startup_seconds`` and the peaks are those of the worker that had most.  ``origin``: "reused" where an earlier
    run did it, "given" where it came from elsewhere, else empty.
    """

    name: str
    seconds: float | None
    startup_seconds: float | None
    rows_per_second: float | None
    host_bytes: int | None
    gpu_bytes: int | None
    origin: str


@dataclass(frozen=True)
class Side:
    """One of the two: a run, whose ``seconds`` are its whole, or a file, of which there is no more to tell."""

    name: str
    status: str | None = None
    seconds: float | None = None
    costs: tuple[Cost, ...] = ()


@dataclass(frozen=True, repr=False)
class Comparison:
    """What differs between two runs or files.

    Attributes:
        rows: that both have; the others are in ``remarks``.
        settings: of two runs; None where one is a file.
        changes: the ensemble's first, then those of the members that both have.
        remarks: what could not be compared and why, a sentence each.
        level: of the intervals.
    """

    first: Side
    second: Side
    rows: int
    settings: tuple[Setting, ...] | None
    changes: tuple[Change, ...]
    metrics: tuple[MetricChange, ...]
    remarks: tuple[str, ...]
    level: float = LEVEL

    def __repr__(self) -> str:
        return f"<Comparison of {self.first.name} and {self.second.name}: {plural(self.rows, 'row')}>"


@dataclass(frozen=True)
class _Source:
    path: Path
    predictions: Predictions
    report: RunReport | None

    @property
    def name(self) -> str:
        return shown_path(self.path)

    def by_name(self, other: _Source) -> dict[str, Values]:
        """The ensemble, where there is one, and members; a file is held against the ensemble of a run."""
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
) -> Comparison:
    """Compares two directories of runs, two CSVs of predictions, or one with the other.

    A run's members count as they were merged, after their ``calibration``, as in its own scores.

    Args:
        metrics: by name; empty: the usual ones of such values.
        labels: the table of the truth; None: a run's own table, where its config names the truth.
        label_column: of that table, or of the runs' own; None: "label", or what their configs name.
        id_column: of ``labels`` and of CSVs, see ``read_files``.
        activation: what the values of CSVs are; None: those of the run on the other side, or see ``read_files``.

    Raises:
        ConfigError: there is no table of which ``label_column`` could be one.
        DataError: one of them cannot be read, two files have no row in common, or metrics are asked for that are
            not known, or have no truth.
    """
    asked = [find_metric(name) for name in metrics]
    if label_column is not None and labels is None and not any(path.is_dir() for path in (first, second)):
        raise ConfigError(
            "--label-column: is one of --labels or of a run's table, and these are CSVs; give --labels"
        )
    sources, problems = list[_Source](), list[str]()
    # A file of unknown values is of what the run is that it is held against, which is therefore read first.
    for path in sorted((first, second), key=lambda path: not path.is_dir()):
        try:
            sources.append(_read(path, id_column, activation, labels is None, label_column))
            activation = activation or (sources[-1].predictions.activation if path.is_dir() else None)
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    one, two = sources if sources[0].path == first else reversed(sources)
    remarks = [f"{source.name}: {text}" for source in sources for text in source.predictions.remarks]
    settings = None
    if one.report is not None and two.report is not None:
        settings = tuple(changed_settings(run_settings(one.report), run_settings(two.report)))
    sides = _side(one), _side(two)
    try:
        left, right = _common(one, two, remarks)
    except DataError as error:
        if settings is None or metrics:
            raise
        return Comparison(*sides, 0, settings, (), (), (*remarks, *error.problems))
    ours, theirs = left.by_name(right), right.by_name(left)
    pairs = {name: (values, theirs[name]) for name, values in ours.items() if name in theirs}
    kinds = {source.predictions.activation for source in (left, right)}
    kind = kinds.pop() if len(kinds) == 1 else None
    predictions = left.predictions
    changes = tuple(_change(name, *pair, predictions, kind or "none") for name, pair in pairs.items())
    truth: Truth | None = None
    if kind is None:
        remarks.append("one side has exclusive labels and the other not, so that no metric is of both")
    elif labels is not None:
        ids, names = predictions.ids, predictions.labels
        truth, left_out = read_truth(labels, ids, names, kind, label_column or LABEL_COLUMN, id_column)
        remarks += left_out
    else:
        truth = _agreed_truth(left, right, remarks)
    scores: tuple[MetricChange, ...] = ()
    if truth is not None and kind is not None:
        chosen = asked or [find_metric(name) for name in USUAL[kind]]
        scores = tuple(_metric_changes(pairs, chosen, truth, kind, remarks))
    if asked and not scores:
        what = (
            "no metric could be computed"
            if truth is not None
            else "metrics need the truth; name its table (--labels)"
        )
        raise DataError([what, *dict.fromkeys(remarks)])
    return Comparison(*sides, predictions.rows, settings, changes, scores, tuple(dict.fromkeys(remarks)))


def changed_settings(first: object, second: object, loc: tuple[str | int, ...] = ()) -> Iterator[Setting]:
    """The keys whose values differ, models by their names.

    Args:
        first, second: configs as plain data.
        loc: where in them these are.
    """
    if loc == (_OWN_KEY,) or first == second:
        return
    both = (first, second)
    if loc == ("models",):
        named = [_by_name(one) for one in both]
        if all(named):
            if [name for name in named[0] if name in named[1]] != [
                name for name in named[1] if name in named[0]
            ]:
                yield Setting("models (order)", *(", ".join(one) for one in named))
            both = (named[0], named[1])
    if loc == ("rules",):
        given = [dict(enumerate(one)) if isinstance(one, list) else {} for one in both]
        both = (given[0], given[1])
    # A model or a rule that only one side has is one value.
    is_one = len(loc) == 2 and loc[0] in ("models", "rules")
    mappings = [{} if one is _MISSING and not is_one else one for one in both]
    if all(isinstance(one, dict) for one in mappings) and any(mappings):
        for key in dict.fromkeys(key for one in mappings if isinstance(one, dict) for key in one):
            ours, theirs = (one.get(key, _MISSING) for one in mappings if isinstance(one, dict))
            yield from changed_settings(ours, theirs, (*loc, key))
        return
    texts = [NOT_SET if one is _MISSING else _value(one) for one in both]
    if texts[0] == texts[1]:  # they differ behind what a message shows of a value
        texts = _around_difference(str(first), str(second))
    yield Setting(place(loc), *texts)


_MISSING: Final = object()


def _by_name(models: object) -> dict[str, object]:
    """Models by their names, without these; none where one has no name."""
    listed_models = models if isinstance(models, list) else []
    if not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in listed_models):
        return {}
    return {one["name"]: {key: value for key, value in one.items() if key != "name"} for one in listed_models}


def _value(value: object) -> str:
    if not isinstance(value, dict):
        return shown(value)
    text = ", ".join(f"{key}: {_value(inner)}" for key, inner in value.items())
    return f"{{{text}}}" if len(text) < SHOWN_CHARACTERS else f"{{{text[:SHOWN_CHARACTERS]}..."


def _around_difference(first: str, second: str) -> list[str]:
    """Two long texts from a little before where they differ."""
    pairs = enumerate(zip(first, second, strict=False))
    differs = next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))
    start = max(0, differs - _BEFORE_DIFFERENCE)
    return [f"...{shown(text[start : start + SHOWN_CHARACTERS])}" for text in (first, second)]


def _read(
    path: Path,
    id_column: str | None,
    activation: Activation | None,
    wants_truth: bool,
    label_column: str | None,
) -> _Source:
    if path.is_dir():
        report = RunReport.read(path / "run.json")
        found = read_run(path, "if there" if wants_truth else "no", label_column)
        return _Source(path, replace(found, members=as_merged(found, calibrations_of(report))), report)
    return _Source(path, read_files({"predictions": path}, id_column, activation=activation), None)


def _common(one: _Source, two: _Source, remarks: list[str]) -> tuple[_Source, _Source]:
    """Both sides with the rows that they have in common, in the first one's order of rows and labels.

    Raises:
        DataError: there is none, or the labels differ.
    """
    left, right = one.predictions, two.predictions
    if {*left.labels} != {*right.labels}:
        raise DataError(
            f"{one.name} and {two.name} have other labels, so their rows are not compared: {listed(left.labels)}, "
            f"and {listed(right.labels)}"
        )
    places = places_among(left.ids, right.ids)
    is_common = places >= 0
    if not is_common.any():
        raise DataError(f"{one.name} and {two.name} have no id in common, so their rows are not compared")
    common = int(is_common.sum())
    for source, rows in ((one, left.rows), (two, right.rows)):
        if rows > common:
            remarks.append(
                f"{source.name}: {plural(rows - common, 'row')} left out, which the other side does not have"
            )
    numbers = np.flatnonzero(is_common)
    order = [right.labels.index(label) for label in left.labels]
    return (
        replace(one, predictions=_taken(left, numbers, [*range(len(order))])),
        replace(two, predictions=_taken(right, places[numbers], order)),
    )


def _taken(predictions: Predictions, rows: npt.NDArray[np.int64], order: Sequence[int]) -> Predictions:
    """Some rows, with the labels in another order."""
    if len(rows) == predictions.rows and [*order] == sorted(order) and bool((np.diff(rows) == 1).all()):
        return predictions

    def values(whole: Values) -> Values:
        return np.asfortranarray(whole[rows][:, order])

    truth, merged = predictions.truth, predictions.ensemble
    if truth is not None:
        truth = np.argsort(order)[truth[rows]] if truth.ndim == 1 else truth[rows][:, order]
    return replace(
        predictions,
        ids=predictions.ids.take(pa.array(rows)),
        labels=tuple(predictions.labels[place] for place in order),
        members={name: values(whole) for name, whole in predictions.members.items()},
        truth=truth,
        ensemble=None if merged is None else values(merged),
    )


def _agreed_truth(left: _Source, right: _Source, remarks: list[str]) -> Truth | None:
    """The first side's truth, or the second's where it has none; a remark where they differ."""
    ours, theirs = left.predictions.truth, right.predictions.truth
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    if ours.shape != theirs.shape:
        remarks.append(f"{right.name} has a truth of another kind; that of {left.name} counts")
    elif others := int((ours != theirs).reshape(len(ours), -1).any(axis=1).sum()):
        remarks.append(
            f"{right.name} has another truth for {plural(others, 'row')}; that of {left.name} counts"
        )
    return ours


def _change(name: str, first: Values, second: Values, predictions: Predictions, kind: Activation) -> Change:
    is_there = ~(np.isnan(first) | np.isnan(second)).any(axis=1)
    numbers = np.flatnonzero(is_there)
    if len(numbers) < len(first):
        first, second = first[numbers], second[numbers]
    differences = np.abs(second - first)
    if kind == "softmax":
        has_changed = first.argmax(axis=1) != second.argmax(axis=1)
    elif kind == "sigmoid":
        has_changed = ((first > 0.5) != (second > 0.5)).any(axis=1)
    else:
        has_changed = (differences > _SAME * np.maximum(1.0, np.abs(first))).any(axis=1)
    rows = np.flatnonzero(has_changed)
    most = rows[np.argsort(-differences[rows].max(axis=1), kind="stable")[:_EXAMPLES]]
    examples = tuple(
        Example(
            str(predictions.ids[int(numbers[row])].as_py()),
            *(_shown(one[row], first[row], second[row], predictions.labels, kind) for one in (first, second)),
        )
        for row in most
    )
    mean, largest = (float(differences.mean()), float(differences.max())) if len(numbers) else (0.0, 0.0)
    return Change(name, len(numbers), len(rows), mean, largest, examples)


def _shown(row: Values, first: Values, second: Values, labels: Sequence[str], kind: Activation) -> str:
    """A row's prediction in words."""
    if kind == "softmax":
        return f"{labels[int(row.argmax())]} {row.max():.3f}"
    chosen = [
        index
        for index in range(len(labels))
        if kind == "none" or (first[index] > 0.5) != (second[index] > 0.5)
    ]
    if len(labels) == 1:
        return f"{row[0]:.6g}"
    return ", ".join(f"{labels[index]} {row[index]:.3g}" for index in chosen)


def _metric_changes(
    pairs: Mapping[str, tuple[Values, Values]],
    chosen: Sequence[Metric],
    truth: Truth,
    kind: Activation,
    remarks: list[str],
) -> Iterator[MetricChange]:
    samples: dict[bytes, Bootstrap] = {}  # by the rows that both have, most often all
    for name, pair in pairs.items():
        is_there = ~(np.isnan(pair[0]) | np.isnan(pair[1])).any(axis=1)
        key = np.packbits(is_there).tobytes()
        if key not in samples:
            samples[key] = Bootstrap(truth[is_there], kind)
        own = pair if is_there.all() else tuple(values[is_there] for values in pair)
        for metric in chosen:
            try:
                first, second = (samples[key].score(metric, values) for values in own)
            except UndefinedMetric as error:
                remarks += [f"{name}: {problem}" for problem in error.problems]
                continue
            yield MetricChange(
                name,
                metric.name,
                metric.kind,
                metric.greater_is_better,
                int(is_there.sum()),
                first.interval,
                second.interval,
                second.minus(first),
            )


def _side(source: _Source) -> Side:
    report = source.report
    if report is None:
        return Side(source.name)
    costs = tuple(_cost(one) for one in report.members)
    return Side(source.name, report.status, report.timing.get("total_seconds"), costs)


def _cost(member: MemberReport) -> Cost:
    def largest(values: Iterator[float | None]) -> float | None:
        return max(filter(None, values), default=None)

    # Not the workers of an earlier run, whose time is no part of this one's.
    workers, seconds = member.workers_now, member.progress.seconds
    host = largest(one.peak_memory_bytes for one in workers)
    gpu = largest(one.peak_gpu_memory_bytes for one in workers)
    return Cost(
        name=member.name,
        seconds=seconds,
        startup_seconds=largest((one.start_seconds or 0.0) + (one.load_seconds or 0.0) for one in workers),
        rows_per_second=member.counters.rows / seconds if seconds else None,
        host_bytes=None if host is None else int(host),
        gpu_bytes=None if gpu is None else int(gpu),
        origin="" if workers else "reused" if member.replicas else "given",
    )
