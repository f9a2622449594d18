"""Fit the predictions of a run or of CSVs, make the overlay ``weights.yaml``, and sum up the fit in sentences."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml

from ensemble.analysis.fit import LOG_LOSS, Candidate, FitReport, Options, fit
from ensemble.analysis.predictions import (
    LABEL_COLUMN,
    Predictions,
    read_files,
    read_run,
    read_truth,
    read_truth_of,
)
from ensemble.analysis.weights import FittedThresholds, Pool, StackingFit
from ensemble.common.errors import ConfigError, DataError
from ensemble.common.files import settings_file
from ensemble.common.protocol import Activation
from ensemble.common.text import metric_words, plural
from ensemble.config import CalibrationConfig, ConfigSource, LoadedConfig, MappingConfig
from ensemble.config.document import parse
from ensemble.config.schema import AnswerConfig
from ensemble.data.answers import whole_numbers
from ensemble.merging.methods.base import Values
from ensemble.merging.metrics import find_metric
from ensemble.merging.scoring import Interval
from ensemble.pipeline.prediction_files import changed_members, changed_sentence, path_of
from ensemble.pipeline.run_dir import RunDir

# The merge methods for which weights can be fitted.  For sigmoid members, and only for these, the mean of logits is
# the geometric mean.
POOLS: Final[Mapping[str, Pool]] = {
    "mean": "mean",
    "geometric_mean": "geometric_mean",
    "logit_mean": "geometric_mean",
}


def fit_sources(
    sources: Sequence[ConfigSource],
    load: Callable[[Sequence[ConfigSource]], LoadedConfig],
    options: Options,
    *,
    labels: Path | None = None,
    label_column: str | None = None,
    id_column: str | None = None,
    merge_method: Pool | None = None,
    activation: Activation | None = None,
    partial: bool = False,
    columns: Sequence[str] = (),
    folds_from: Path | None = None,
    has_overrides: bool = False,
    target: Path | None = None,
) -> tuple[FitReport, str]:
    """Fit the run of a config, or CSVs of predictions, as the sources say.

    Args:
        labels: the table with the true labels; None: the config's table.
        label_column: of the table with the true labels; None: "label", or the config's column.
        id_column: of ``labels``, ``folds_from`` and CSVs.
        merge_method, activation, partial, columns: only for CSVs, because a config has these settings.
        folds_from: the table that says which rows each fold's models have predicted.
        has_overrides: whether ``load`` overrides keys.

    Returns:
        the report, and the text of ``weights.yaml``.

    Raises:
        ConfigError: the sources mix configs and CSVs, or an option is not for these sources.
        OutputError: runs of the config write to ``target``.
        DataError: the predictions or the labels are missing or cannot be fitted.
    """
    configs = [source for source in sources if _is_config(source)]
    if configs:
        if len(configs) < len(sources):
            other = next(path for path in sources if path not in configs)
            raise ConfigError(f"{configs[0]}, {other}: name a config, or CSVs of predictions, not both")
        for_files = {
            "--merge-method": merge_method is not None,
            "--activation": activation is not None,
            "--partial": partial,
            "--label": bool(columns),
            "--id-column": id_column is not None and labels is None and folds_from is None,
        }
        problems = [
            f"{option}: is for CSVs of predictions; for {configs[0]}, set the key in the config or by --set"
            for option, is_set in for_files.items()
            if is_set
        ]
        if problems:
            raise ConfigError(problems)
        loaded = load(sources)
        if target is not None:
            RunDir(loaded.config.output_dir).demand_free("--output", target)
        return _fit_run(loaded, options, labels, label_column, id_column, folds_from)
    if has_overrides:
        raise ConfigError("--set: changes a config, but the sources are CSVs of predictions; leave --set out")
    if labels is None:
        raise ConfigError("--labels: name the table with the true labels of these predictions")
    if options.method == "auto" and merge_method is not None:
        raise ConfigError("--method auto: compares both merge methods; leave --merge-method out")
    files = [source for source in sources if isinstance(source, Path)]
    predictions = read_files(
        files,
        id_column,
        labels,
        label_column or LABEL_COLUMN,
        activation,
        may_lack_rows=partial,
        advice="give the same rows in each file, or --partial to fit to the rows that all of them have",
        columns=columns,
    )
    report = _fitted(predictions, replace(options, pool=merge_method or "mean"), folds_from, id_column)
    names = ", ".join(path_of(file).name for file in files)
    return report, _overlay(report, report.options.pool, f"{names} by {labels.name}", columns={})


def _fitted(
    predictions: Predictions, options: Options, folds_from: Path | None, id_column: str | None
) -> FitReport:
    if folds_from is not None:
        predictions = predictions.with_folds(folds_from, id_column, [find_metric(options.metric)])
    return fit(predictions.with_groups([options.group]), options)


def _is_config(source: ConfigSource) -> bool:
    return isinstance(source, MappingConfig) or source.suffix.lower() in (".yaml", ".yml")


def _fit_run(
    loaded: LoadedConfig,
    options: Options,
    labels: Path | None,
    label_column: str | None,
    id_column: str | None,
    folds_from: Path | None,
) -> tuple[FitReport, str]:
    """Fit the predictions in a config's ``output_dir``, for the config's merge method."""
    config, run_dir, data = loaded.config, loaded.config.output_dir, loaded.config.data
    method, advice = config.ensemble.method, "fit the weighted mean by --set ensemble.method=mean"
    if options.method not in ("stacking", "auto") and method not in POOLS:
        if method == "stacking":
            advice += ", or this method's coefficients by --method stacking"
        raise ConfigError(f"ensemble.method: weights cannot be fitted for {method}; {advice}")
    if not RunDir(run_dir).run_json.exists():
        raise DataError(f"{run_dir}: there is no run.json; run the config first, then fit")
    predictions = read_run(run_dir, with_truth=False)
    names = [model.name for model in config.models]
    missing = [name for name in names if name not in predictions.members]
    if missing:
        raise DataError(
            f"{run_dir}: no complete predictions of {', '.join(missing)}; run the config to the end first, then fit"
        )
    changed = changed_members(config, names, run_dir)
    if changed:
        raise DataError(
            f"{run_dir}: {changed_sentence(changed)}; run the config with these settings first, then fit"
        )
    post = predictions.post
    run_rules = () if post.rules is None else post.rules.rules
    if run_rules != (config.rules or ()):
        raise DataError(
            f"{run_dir}: its run has other rules than the config; run the config again (this only merges), then fit"
        )
    source = "column None" if post.allowed is None else post.allowed.source
    if source != loaded.redactor(f"column {config.possible_labels}"):
        raise DataError(
            f"{run_dir}: its run has other data.allowed_labels than the config; run the config again, then fit"
        )
    predictions = replace(
        predictions,
        members={name: predictions.members[name] for name in names},
        activations={name: predictions.activations[name] for name in names},
    )
    if options.method != "auto" and method == "logit_mean" and predictions.activation == "softmax":
        raise ConfigError(f"ensemble.method: logit_mean is not for labels that exclude each other; {advice}")
    data = data.labelled_by(label_column)
    if labels is not None:
        predictions = read_truth(
            predictions, labels, label_column or LABEL_COLUMN, id_column or data.id_column
        )
    elif data.has_truth:
        predictions = read_truth_of(predictions, data)
    columns = _submitted_columns(loaded)
    numbers = next(filter(None, (_numbers(column, config.labels) for column in columns.values())), ())
    options = replace(options, pool=POOLS.get(method, "mean"), numbers=numbers)
    report = _fitted(predictions, options, folds_from, id_column or data.id_column)
    if POOLS.get(method) != report.options.pool:
        method = report.options.pool
    overlay = _overlay(report, method, f"the predictions in {run_dir.name}", columns)
    return report, loaded.redactor(overlay)


def _submitted_columns(loaded: LoadedConfig) -> Mapping[str, Any]:
    """Return ``submission.columns`` as the last file has them that has some; later ones may have no submission."""
    for source, text in reversed([*zip(loaded.sources, loaded.texts, strict=True)]):
        submission = parse(text, source).data.get("submission")
        columns = submission.get("columns") if isinstance(submission, dict) else None
        if isinstance(columns, dict):
            return columns
    return {}


def _numbers(column: Any, labels: Sequence[str]) -> tuple[float, ...]:
    """Return the expected number of each label in a column's answers; none if it has no such answers."""
    numbers = _answer_of(column).get("expected")
    return tuple(map(float, numbers)) if isinstance(numbers, list) and len(numbers) == len(labels) else ()


def _answer_of(column: Any) -> Mapping[str, Any]:
    """Return the settings of a column's answers; empty if it has none."""
    answer = column.get("answer") if isinstance(column, dict) else None
    return answer if isinstance(answer, dict) else {}


def _answer(thresholds: FittedThresholds) -> dict[str, Any]:
    if thresholds.numbers:
        return {"expected": whole_numbers(thresholds.numbers), "thresholds": [*thresholds.values]}
    return {"above": dict(zip(thresholds.labels, thresholds.values, strict=True))}


def _fitted_column(name: str, column: Any, report: FitReport) -> Any:
    """Return a column of the submission with the fitted thresholds; the column itself if they are not for it."""
    answer, thresholds = _answer_of(column), report.thresholds
    if thresholds is None or ("above" not in answer and not thresholds.numbers):
        return column
    fitted = _answer(thresholds)
    if not thresholds.numbers:
        given = AnswerConfig.model_construct(above=answer["above"]).label_thresholds(name, report.labels)
        fitted = {"above": {label: fitted["above"].get(label, given[label]) for label in given}}
    elif _numbers(column, report.labels) != thresholds.numbers:
        return column
    return {**column, "answer": {**answer, **fitted}}


def _overlay(report: FitReport, method: str, sources: str, columns: Mapping[str, Any]) -> str:
    """Return the text of ``weights.yaml`` for a merge method.

    ``sources`` names the fitted predictions, ``columns`` are the submission's, which get the fitted thresholds.
    """
    today = time.strftime("%Y-%m-%d", time.gmtime())
    calibration = report.options.calibration
    words = {"none": "", "vector": ", vector scaling"}.get(calibration, f", {calibration}")
    how = f"{report.options.method}{words}"
    head = [
        f"By `ensemble fit` on {today}: {how}; {sources}, {plural(report.rows, 'labelled row')}.",
        *verdicts(report),
        "Use it as the last file of `ensemble run CONFIG THIS_FILE`.",
    ]
    models = [
        {
            "name": member.name,
            # Rounded: the log loss, flat at its minimum, changes by less than 1e-7 nats.
            "weight": 1 if member.weight is None else round(member.weight, 6),
            # None removes the config's calibration, because the weights were fitted without it.
            "calibration": _calibration(member.calibration),
        }
        for member in report.members
    ]
    fitted_on = report.fitted_on.model_dump(mode="json")
    fitted_on["value"] = _short(fitted_on["value"])
    fitted_on["interval"] = fitted_on["interval"] and [_short(end) for end in fitted_on["interval"]]
    ensemble = {"method": method} if report.stacking is None else _stacking(report, report.stacking)
    document = {"models": models, "fitted_on": fitted_on, "ensemble": ensemble}
    fitted = {name: _fitted_column(name, column, report) for name, column in columns.items()}
    if any(fitted[name] is not column for name, column in columns.items()):
        document["submission"] = {"columns": fitted}
    text = yaml.safe_dump(document, default_flow_style=None, sort_keys=False, allow_unicode=True, width=1_000)
    return "".join(f"# {' '.join(line.split())}\n" for line in head) + text


def _calibration(calibration: CalibrationConfig | None) -> dict[str, Any] | None:
    if calibration is None:
        return None
    if calibration.isotonic:
        return calibration.model_dump(mode="json", include={"isotonic"})
    if not calibration.scale:
        return {"temperature": _short(calibration.temperature)}
    document = calibration.model_dump(include={"scale", "bias"})
    return {
        key: {label: _short(number) for label, number in factors.items()} for key, factors in document.items()
    }


def _stacking(report: FitReport, stacking: StackingFit) -> dict[str, Any]:
    """Return the keys of ``ensemble: {method: stacking}``."""
    labels = report.labels
    coefficients: dict[str, dict[str, Any]] = {}
    for number, member in enumerate(report.members):
        values = stacking.coefficients[:, number]
        if stacking.kind == "sigmoid":
            coefficients[member.name] = _by_label(labels, values)
        else:
            rows = zip(labels, values, strict=True)
            coefficients[member.name] = {label: _by_label(labels, row) for label, row in rows}
    return {
        "method": "stacking",
        "intercept": _by_label(labels, stacking.intercepts),
        "coefficients": coefficients,
    }


def check_output(output: Path, may_replace: bool, sources: Sequence[Path], *tables: Path | None) -> Path:
    """Return where to write the overlay, which may replace an overlay among the sources."""
    kept = [path_of(path) for number, path in enumerate(sources) if not number or not _is_config(path)]
    return settings_file("--output", output, [*kept, *filter(None, tables)], may_replace)


def verdicts(report: FitReport) -> Iterator[str]:
    """Yield sentences that compare the fit with equal weights, with the best member, and without each member."""
    metric, equal = metric_words(report.options.score_name), report.over_equal
    means = f" The figures are {report.mean_over}." if report.mean_over else ""
    if report.rejected is not None:
        worse = difference(report.rejected.over_equal)
        yield f"Equal weights are kept: {report.rejected.options.title} does worse on held-out rows, {worse}."
    if report.chosen is not None:
        yield from _comparison(report, report.chosen)
    yield (
        f"Held-out {metric} {_number(report.score, equal)}: {plural(report.rows, 'row')}, each predicted by a fit "
        f"to the other folds ({report.options.folds} folds; in brackets 95 % intervals).{means}"
    )
    if report.rejected is None:
        is_open = equal.excludes_zero or report.candidates or math.isnan(equal.low)
        as_well = "" if is_open else " Equal weights do as well."
        yield f"{_against('equal weights', report.equal, equal)}{as_well}"
    if len(report.members) > 1:
        best = f"the best member, {report.best_member}"
        if report.best_in < report.options.folds:
            best = (
                f"the member that is best on the other folds, for {report.best_in} of {report.options.folds} folds "
                f"{report.best_member}"
            )
        yield _against(best, report.best, report.over_best)
    for member in report.members:
        gain = member.gain
        if gain is None or gain.low > 0:
            continue
        without = f"without it {difference(gain, 'worse', 'better')}"
        if member.is_left_out:
            yield f"{member.name} is left out, because it does harm: {without}."
        elif gain == Interval(0.0, 0.0, 0.0):
            yield f"{member.name} does not help: its weight is 0, whichever rows are held out."
        elif gain.value > 0:
            is_shown = without != "without it no difference"
            doubt = ", which may be noise" if is_shown else " that these rows show"
            yield f"{member.name} is not shown to help: {without}{doubt}."
        else:
            yield f"{member.name} {'does harm' if gain.excludes_zero else 'does not help'}: {without}."
    if report.thresholds is not None:
        over = report.thresholds.over_halfway
        answer = ", ".join(f"{key}: {numbers}" for key, numbers in _answer(report.thresholds).items())
        yield f"Thresholds, as a column of the submission has them: {{answer: {{{answer}}}}}"
        if report.thresholds.numbers:
            score = f"Held-out {metric} of these answers {_number(report.thresholds.score, over)}. "
            yield score + _against("rounding", report.thresholds.halfway, over)
        else:
            yield _against("thresholds of 0.5", report.thresholds.halfway, over)
    if report.rows_left_out:
        whole = report.rows + report.rows_left_out + report.rows_decided
        yield (
            f"These figures are of the {report.rows:,} of {plural(whole, 'row')} that all members have; a run "
            "merges each of the other rows from the members that have it."
        )
    if report.rows_decided:
        yield f"Rules decide {plural(report.rows_decided, 'further row')}, which say nothing about the members."


def _comparison(report: FitReport, chosen: Candidate) -> Iterator[str]:
    """Yield which way to merge is fitted, and why; and whether it, or the best one, is worse by log loss."""
    metric, ways = metric_words(report.options.score_name), report.candidates
    best = max(ways, key=lambda way: way.behind.value)
    why = "it is the best on held-out rows, and none that is simpler is as good"
    if chosen is not best:
        why = (
            f"it has the fewest numbers to fit ({chosen.numbers:,}) of those that are not worse by more than noise "
            f"than the best on held-out rows, {best.options.title}"
        )
    yield f"Of {plural(len(ways), 'way')} to merge, {chosen.options.title} is fitted: {why}."
    if report.options.score_name == LOG_LOSS:
        return
    for way in dict.fromkeys((best, chosen)):
        behind = way.log_loss_behind
        if behind is not None and behind.high < 0:
            rank = "wins" if way is best else "is as good by"
            yield f"{way.options.title} {rank} {metric}, and loses the log loss: {difference(behind)}."


def difference(gain: Interval, above: str = "better", below: str = "worse") -> str:
    """Return ``0.0012 better (0.0004 to 0.0020)``; ``above`` is the word for a gain, ``below`` for a loss."""
    size = gain.size
    value, low, high = (_number(end, gain) for end in (size.value, size.low, size.high))
    if not any(float(end) for end in (value, low, high)):
        return "no difference"
    interval = "" if math.isnan(gain.low) else f" ({low} to {high})"
    return f"{value} {above if gain.value >= 0 else below}{interval}"


def _against(other: str, value: float, gain: Interval) -> str:
    text = f"Against {other} ({_number(value, gain)}): {difference(gain)}"
    if text.endswith("no difference") or math.isnan(gain.low):
        return f"{text}."
    return f"{text}, more than noise." if gain.excludes_zero else f"{text}, which is no more than noise."


def _number(number: float, gain: Interval) -> str:
    """Return a number with four decimals, or more if its interval needs them to have two digits."""
    width = gain.high - gain.low
    digits = next((digits for digits in range(4, 7) if width * 10**digits >= 40), 7) if width > 0 else 4
    return f"{number:.{digits}f}"


def _by_label(labels: Sequence[str], numbers: Values) -> dict[str, float]:
    return {label: _short(number) for label, number in zip(labels, numbers.tolist(), strict=True)}


def _short(number: float) -> float:
    return float(f"{number:.6g}")
