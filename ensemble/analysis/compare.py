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
from ensemble.merging.scoring import LEVEL
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
    report: RunReport | None  # of a run; None of a file

    @property
    def name(self) -> str:
        return shown_path(self.path)

    def by_name(self, other: _Source) -> dict[str, Values]:
        """Return the ensemble, if there is one, and members; a file is compared with the ensemble of a run."""
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
    requested = [find_metric(name) for name in metrics]
    if label_column is not None and labels is None and not any(path.is_dir() for path in (first, second)):
        raise ConfigError(
            "--label-column: is one of --labels or of a run's table, and these are CSVs; give --labels"
        )
    sources, problems = dict[Path, _Source](), list[str]()
    # A file of unknown values takes those of the run on the other side, which is therefore read first.
    for path in sorted((first, second), key=lambda path: not path.is_dir()):
        try:
            sources[path] = _read(path, id_column, activation, labels is None, label_column)
            if path.is_dir():
                activation = activation or sources[path].predictions.activation
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    ours, theirs = sources[first], sources[second]
    remarks = [f"{source.name}: {text}" for source in (ours, theirs) for text in source.predictions.remarks]
    for source in (ours, theirs):
        if source.report is not None and source.report.fitted_on is not None:
            remarks.append(f"{source.name}: the ensemble was {source.report.fitted_on.text}")
    settings = None
    if ours.report is not None and theirs.report is not None:
        changed_keys = changed_settings(run_settings(ours.report), run_settings(theirs.report))
        # A record of what fit did; a remark says what it means.
        settings = tuple(setting for setting in changed_keys if not setting.key.startswith("fitted_on"))
    result = Comparison(
        first=_side(ours), second=_side(theirs), rows=0, settings=settings, changes=(), metrics=(), remarks=()
    )
    try:
        left, right = _common(ours, theirs, remarks)
    except DataError as error:
        if settings is None or metrics:
            raise
        return replace(result, remarks=(*remarks, *error.problems))
    predictions, kind = left.predictions, left.predictions.activation
    is_same_kind = kind == right.predictions.activation
    others = right.by_name(left)
    pairs = {name: (values, others[name]) for name, values in left.by_name(right).items() if name in others}
    truth: Truth | None = None
    if not is_same_kind:
        remarks.append("one side has exclusive labels and the other not, so that no metric is of both")
    elif labels is not None:
        ids, names = predictions.ids, predictions.labels
        truth, more_remarks = read_truth(labels, ids, names, kind, label_column or LABEL_COLUMN, id_column)
        remarks += more_remarks
    else:
        truth = _agreed_truth(left, right, remarks)
    changed: tuple[MetricChange, ...] = ()
    if truth is not None:
        chosen = requested or [find_metric(name) for name in USUAL[kind]]
        changed = tuple(_metric_changes(pairs, chosen, truth, kind, remarks))
    if requested and not changed:
        what = "metrics need the truth; name its table (--labels)"
        if truth is not None:
            what = "no metric could be computed"
        raise DataError([what, *dict.fromkeys(remarks)])
    change_kind = kind if is_same_kind else "none"
    return replace(
        result,
        rows=predictions.rows,
        changes=tuple(_change(name, *pair, predictions, change_kind) for name, pair in pairs.items()),
        metrics=changed,
        remarks=tuple(dict.fromkeys(remarks)),
    )


def changed_settings(first: object, second: object, loc: tuple[str | int, ...] = ()) -> Iterator[Setting]:
    """Yield the keys whose values differ, models by their names.

    Args:
        first, second: configs as plain data.
        loc: where in them these are.
    """
    if loc == (_OWN_KEY,) or first == second:
        return
    if loc == ("models",):
        ours, theirs = _by_name(first), _by_name(second)
        if ours and theirs:
            order = [[name for name in names if name in ours and name in theirs] for names in (ours, theirs)]
            if order[0] != order[1]:
                yield Setting("models (order)", ", ".join(ours), ", ".join(theirs))
            first, second = ours, theirs
    elif loc == ("rules",):
        first, second = _by_number(first), _by_number(second)
    # A model or a rule that only one side has is one value.
    if not (len(loc) == 2 and loc[0] in ("models", "rules")):
        first = {} if first is _MISSING and isinstance(second, dict) else first
        second = {} if second is _MISSING and isinstance(first, dict) else second
    if isinstance(first, dict) and isinstance(second, dict):
        for key in [*first, *(key for key in second if key not in first)]:
            yield from changed_settings(first.get(key, _MISSING), second.get(key, _MISSING), (*loc, key))
        return
    texts = [NOT_SET if value is _MISSING else _value(value) for value in (first, second)]
    if texts[0] == texts[1]:  # they differ behind what a message shows of a value
        texts = _around_difference(str(first), str(second))
    yield Setting(place(loc), *texts)


_MISSING: Final = object()


def _by_name(models: object) -> dict[str, object]:
    """Return models by their names, without these; none if one has no name."""
    models = models if isinstance(models, list) else []
    if not all(isinstance(model, dict) and isinstance(model.get("name"), str) for model in models):
        return {}
    return {model["name"]: {key: model[key] for key in model if key != "name"} for model in models}


def _by_number(rules: object) -> dict[int, object]:
    return dict(enumerate(rules)) if isinstance(rules, list) else {}


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
        predictions = read_run(path, "if there" if wants_truth else "no", label_column)
        merged = as_merged(predictions, calibrations_of(report))
        return _Source(path, replace(predictions, members=merged), report)
    return _Source(path, read_files({"predictions": path}, id_column, activation=activation), None)


def _common(first: _Source, second: _Source, remarks: list[str]) -> tuple[_Source, _Source]:
    """Return both sides with the rows that they have in common, in the first one's order of rows and labels.

    Raises:
        DataError: there is none, or the labels differ.
    """
    left, right = first.predictions, second.predictions
    if {*left.labels} != {*right.labels}:
        raise DataError(
            f"{first.name} and {second.name} have other labels, so their rows are not compared: "
            f"{listed(left.labels)}, and {listed(right.labels)}"
        )
    places = places_among(left.ids, right.ids)
    is_common = places >= 0
    if not is_common.any():
        raise DataError(
            f"{first.name} and {second.name} have no id in common, so their rows are not compared"
        )
    common = int(is_common.sum())
    for source, rows in ((first, left.rows), (second, right.rows)):
        if rows > common:
            remarks.append(
                f"{source.name}: {plural(rows - common, 'row')} left out, which the other side does not have"
            )
    numbers = np.flatnonzero(is_common)
    order = [right.labels.index(label) for label in left.labels]
    return (
        replace(first, predictions=_taken(left, numbers, [*range(len(order))])),
        replace(second, predictions=_taken(right, places[numbers], order)),
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
    numbers = np.flatnonzero(~(np.isnan(first) | np.isnan(second)).any(axis=1))
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
    metrics: Sequence[Metric],
    truth: Truth,
    kind: Activation,
    remarks: list[str],
) -> Iterator[MetricChange]:
    for name, (first, second) in pairs.items():
        is_present = ~(np.isnan(first) | np.isnan(second)).any(axis=1)
        bootstrap = Bootstrap(truth[is_present], kind)
        first, second = first[is_present], second[is_present]
        for metric in metrics:
            try:
                ours, theirs = bootstrap.score(metric, first), bootstrap.score(metric, second)
            except UndefinedMetric as error:
                remarks += [f"{name}: {problem}" for problem in error.problems]
                continue
            yield MetricChange(
                name=name,
                metric=metric.name,
                kind=metric.kind,
                greater_is_better=metric.greater_is_better,
                rows=int(is_present.sum()),
                first=ours.interval,
                second=theirs.interval,
                difference=theirs.minus(ours),
            )


def _side(source: _Source) -> Side:
    report = source.report
    if report is None:
        return Side(source.name)
    costs = tuple(_cost(member) for member in report.members)
    return Side(source.name, report.status, report.timing.get("total_seconds"), costs)


def _cost(member: MemberReport) -> Cost:
    def largest(values: Iterator[float | None]) -> float | None:
        return max(filter(None, values), default=None)

    # Not the workers of an earlier run, whose time is no part of this one's.
    workers, seconds = member.workers_now, member.progress.seconds
    host = largest(worker.peak_memory_bytes for worker in workers)
    gpu = largest(worker.peak_gpu_memory_bytes for worker in workers)
    return Cost(
        name=member.name,
        seconds=seconds,
        startup_seconds=largest(
            (worker.start_seconds or 0.0) + (worker.load_seconds or 0.0) for worker in workers
        ),
        rows_per_second=member.counters.rows / seconds if seconds else None,
        host_bytes=None if host is None else int(host),
        gpu_bytes=None if gpu is None else int(gpu),
        origin="" if workers else "reused" if member.replicas else "given",
    )
