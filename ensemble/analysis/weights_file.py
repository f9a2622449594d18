"""``weights.yaml``: what ``fit`` found, as a config that is read over the one that ran; and what is read for it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from ensemble.analysis.calibration import Values, VectorScaling
from ensemble.analysis.fit import FitReport, Options, fit
from ensemble.analysis.predictions import LABEL_COLUMN, read_files, read_run, read_truth, read_truth_of
from ensemble.analysis.weights import Pool
from ensemble.common.errors import ConfigError, DataError, WriteError
from ensemble.common.files import cannot_write, output_file, write_text
from ensemble.common.protocol import Activation
from ensemble.common.text import plural
from ensemble.config import ConfigSource, LoadedConfig, MappingConfig
from ensemble.merging.scoring import Interval
from ensemble.pipeline.fingerprint import changed_members, changed_sentence
from ensemble.pipeline.prediction_files import path_of
from ensemble.pipeline.run_dir import RunDir

# The methods of a config for which weights can be fitted.  The mean of logits is the geometric mean of sigmoid
# members, and for others it is not.
POOLS: Final[Mapping[str, Pool]] = {
    "mean": "mean",
    "geometric_mean": "geometric_mean",
    "logit_mean": "geometric_mean",
}
# Rounded to so many digits the log loss stays the same within 1e-7 nats: it is flat where it is least.
_WEIGHT_DECIMALS = 6
_DIGITS = 6


@dataclass(frozen=True)
class TruthFile:
    """Where the truth is: in a table of its own, or, with no ``path``, in that of a config.

    ``label_column`` is None for "label", or for what the config names.  ``id_column`` is that of the predictions,
    too.
    """

    path: Path | None = None
    label_column: str | None = None
    id_column: str | None = None


def fit_sources(
    sources: Sequence[ConfigSource],
    load: Callable[[Sequence[ConfigSource]], LoadedConfig],
    truth: TruthFile,
    options: Options,
    merge_method: Pool | None = None,
    activation: Activation | None = None,
    has_overrides: bool = False,
    partial: bool = False,
    target: Path | None = None,
) -> tuple[FitReport, str]:
    """Fit a config's run, or files of predictions, whichever the sources are; see ``fit_run`` and ``fit_files``.

    Args:
        load: of configs.
        merge_method, activation: of files; a config has its own.
        has_overrides: ``load`` overrides keys, which files have none of.
        partial: CSVs may lack rows that others have; of a config its members say so.
        target: where the overlay is to be written.

    Raises:
        ConfigError: they are some of both, or something is asked that goes with the other.
        OutputError: runs of the config write a file there.
    """
    configs = [source for source in sources if _is_config(source)]
    if not configs:
        if has_overrides:
            raise ConfigError("--set: changes a config, and these are CSVs of predictions; leave it out")
        options = options if merge_method is None else replace(options, pool=merge_method)
        return fit_files(
            [source for source in sources if isinstance(source, Path)], truth, options, activation, partial
        )
    if len(configs) < len(sources):
        other = next(path for path in sources if path not in configs)
        raise ConfigError(f"{configs[0]}, {other}: name a config, or CSVs of predictions, not both")
    problems = []
    if merge_method is not None:
        problems.append(
            f"--merge-method: is for CSVs of predictions, and {configs[0]} has its own; use --set "
            f"ensemble.method={merge_method}"
        )
    if activation is not None:
        problems.append(
            f"--activation: is for CSVs of predictions, and {configs[0]} says it of its own; leave it out"
        )
    if partial:
        problems.append(
            f"--partial: is for CSVs of predictions, and the members of {configs[0]} say it; leave it out"
        )
    if truth.id_column is not None and truth.path is None:
        problems.append(
            f"--id-column: is for --labels and for CSVs of predictions, and {configs[0]} has data.id_column; "
            "leave it out"
        )
    if problems:
        raise ConfigError(problems)
    loaded = load(sources)
    if target is not None:
        RunDir(loaded.config.output_dir).demand_free("--output", target)
    return fit_run(loaded, truth, options)


def _is_config(source: ConfigSource) -> bool:
    return isinstance(source, MappingConfig) or source.suffix.lower() in (".yaml", ".yml")


def fit_files(
    files: Sequence[Path],
    truth: TruthFile,
    options: Options,
    activation: Activation | None = None,
    partial: bool = False,
) -> tuple[FitReport, str]:
    """Fit CSVs of predictions, each a member, see ``named_files``.

    Args:
        partial: whether files may lack rows that others have.

    Returns:
        the report, and the overlay that ``write_weights`` writes.

    Raises:
        EnsembleError: see ``read_files`` and ``fit``.
    """
    if truth.path is None:
        raise ConfigError("--labels: name the table with the true labels of these predictions")
    predictions = read_files(
        files,
        truth.id_column,
        truth.path,
        truth.label_column or LABEL_COLUMN,
        activation,
        may_lack_rows=partial,
        advice="give the same rows in each file, or --partial to fit to the rows that all of them have",
    )
    report = fit(predictions, options)
    sources = f"{', '.join(path_of(file).name for file in files)} by {truth.path.name}"
    return report, overlay(report, options.pool, sources)


def fit_run(loaded: LoadedConfig, truth: TruthFile, options: Options) -> tuple[FitReport, str]:
    """Fit what a config's run has left in its ``output_dir``, for the config's merge method.

    Raises:
        EnsembleError: the run is not complete, or its method has no weights to fit; see
            ``read_run``, ``fit``.
    """
    config = loaded.config
    method, again = config.ensemble.method, "the weighted mean is fitted by --set ensemble.method=mean"
    if options.method != "stacking" and method not in POOLS:
        coefficients = ", this method's coefficients by --method stacking" if method == "stacking" else ""
        raise ConfigError(f"ensemble.method: weights cannot be fitted for {method}; {again}{coefficients}")
    rundir = RunDir(config.output_dir)
    if not rundir.run_json.exists():
        raise DataError(f"{config.output_dir}: there is no run.json; run the config first, then fit")
    data = config.data
    if truth.path is None and truth.label_column is not None:
        data = data.model_copy(update={"label_column": truth.label_column, "label_columns": None})
    has_truth = truth.path is not None or data.label_column is not None or data.label_columns is not None
    predictions = read_run(config.output_dir, "no" if has_truth else "needed")
    names = [model.name for model in config.models]
    if missing := [name for name in names if name not in predictions.members]:
        raise DataError(
            f"{config.output_dir}: no complete predictions of {', '.join(missing)}; run the config to the end "
            "first, then fit"
        )
    if changed := changed_members(config, names, config.output_dir):
        raise DataError(
            f"{config.output_dir}: {changed_sentence(changed)}; run the config with these settings first, then fit"
        )
    members = {name: predictions.members[name] for name in names}
    run_rules = () if predictions.rules is None else predictions.rules.rules
    if run_rules != (config.rules or ()):
        raise DataError(
            f"{config.output_dir}: its run has other rules than the config; run the config again, which merges "
            "only, then fit"
        )
    predictions = replace(
        predictions, members=members, activations={name: predictions.activations[name] for name in names}
    )
    if has_truth:
        rows = predictions.ids, predictions.labels, predictions.activation
        if truth.path is not None:
            ids = truth.id_column or data.id_column
            true, remarks = read_truth(truth.path, *rows, truth.label_column or LABEL_COLUMN, ids)
        else:
            true, remarks = read_truth_of(data, *rows)
        predictions = replace(predictions, truth=true, remarks=(*predictions.remarks, *remarks))
    if method == "logit_mean" and predictions.activation == "softmax":
        raise ConfigError(f"ensemble.method: logit_mean is not for labels that exclude each other; {again}")
    report = fit(predictions, replace(options, pool=POOLS.get(method, "mean")))
    text = overlay(report, method, f"the predictions in {config.output_dir.name}")
    return report, loaded.redactor(text)


def overlay(report: FitReport, method: str, sources: str) -> str:
    """The text of ``weights.yaml``.

    Args:
        method: the merge method of the weights.
        sources: what was fitted, for the head.
    """
    options = report.options
    today = time.strftime("%Y-%m-%d", time.gmtime())
    how = str(options.method) + {"none": "", "vector": ", vector scaling"}.get(
        options.calibration, f", {options.calibration}"
    )
    head = [
        f"By `ensemble fit` on {today}: {how}; {sources}, {plural(report.rows, 'labelled row')}.",
        *verdicts(report),
        "It takes effect as the last of the files in `ensemble run CONFIG THIS_FILE`.",
    ]
    lines = [f"# {' '.join(line.split())}" for line in head]
    lines += ["models:"]
    for member in report.members:
        keys: dict[str, Any] = {"name": member.name, "weight": 1}
        if member.weight is not None:
            weight = round(member.weight, _WEIGHT_DECIMALS)
            keys["weight"] = int(weight) if weight in (0, 1) else weight
        if isinstance(member.calibration, VectorScaling):
            keys["calibration"] = {
                "scale": _by_label(report.labels, member.calibration.scale),
                "bias": _by_label(report.labels, member.calibration.bias),
            }
        elif member.calibration is not None:
            keys["calibration"] = {"temperature": _short(member.calibration)}
        else:
            keys["calibration"] = None  # what the config below has must go: the weights are without it
        lines.append(f"  - {_flow(keys)}")
    fitted_on = report.fitted_on.model_dump(mode="json")
    fitted_on["value"] = _short(fitted_on["value"])
    if report.fitted_on.interval is not None:
        fitted_on["interval"] = [_short(end) for end in report.fitted_on.interval]
    lines.append(f"fitted_on: {_flow(fitted_on)}")
    settings: dict[str, Any] = {"method": method}
    if (stacking := report.stacking) is not None:
        settings = {"method": "stacking"}
        settings["intercept"] = _by_label(report.labels, stacking.intercepts)
        settings["coefficients"] = {
            member.name: (
                _by_label(report.labels, stacking.coefficients[:, number])
                if stacking.kind == "sigmoid"
                else {
                    label: _by_label(report.labels, row)
                    for label, row in zip(report.labels, stacking.coefficients[:, number], strict=True)
                }
            )
            for number, member in enumerate(report.members)
        }
        block = yaml.safe_dump({"ensemble": settings}, sort_keys=False, allow_unicode=True, width=1_000)
        return "\n".join([*lines, block])
    return "\n".join([*lines, f"ensemble: {_flow(settings)}", ""])


def check_output(output: Path, may_replace: bool, sources: Sequence[Path], labels: Path | None) -> Path:
    """Where the overlay is to be written, asked before anything is computed.

    Args:
        sources: what is fitted; an overlay among them may be replaced by a new one.

    Raises:
        EnsembleError: a file is there already, or what must not be replaced, or there is no such folder.
    """
    kept = [path_of(path) for number, path in enumerate(sources) if not number or not _is_config(path)]
    target = output_file(output, [*kept, *([] if labels is None else [labels])], may_replace)
    if not target.parent.is_dir():
        raise ConfigError(f"--output: {output}: name a file in a folder that is there")
    return target


def write_weights(output: Path, text: str) -> None:
    """Write the overlay; the name appears only when it is complete.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        write_text(output, text)
    except WriteError as error:
        raise ConfigError(error.problems) from error
    except OSError as error:
        raise ConfigError(cannot_write("--output", output, error)) from error


def verdicts(report: FitReport) -> Iterator[str]:
    """Say what the fit is worth, a sentence each: against equal weights, the best member, without each member."""
    metric, equal = report.options.metric.replace("_", " "), report.over_equal
    yield (
        f"Held-out {metric} {_number(report.score, equal)}: {plural(report.rows, 'row')}, each predicted by what "
        f"was fitted to the others ({report.options.folds} folds; in brackets 95 % intervals).{_by_fold(report)}"
    )
    as_well = "" if equal.excludes_zero else " Equal weights do as well."
    yield f"{_against('equal weights', report.equal, equal)}{as_well}"
    if equal.high < 0:
        yield "Keep equal weights: the fitted ones do worse."
    if len(report.members) > 1:
        yield _against(f"the best member, {report.best_member}", report.best, report.over_best)
    for member in report.members:
        gain = member.gain
        if gain is None or gain.low > 0:
            continue
        without = f"without it {difference(gain, 'worse', 'better')}"
        if gain == Interval(0.0, 0.0, 0.0):
            yield f"{member.name} does not help: its weight is 0, whichever rows are held out."
        elif gain.value > 0:
            yield f"{member.name} is not shown to help: {without}, which may be noise."
        else:
            yield f"{member.name} {'does harm' if gain.excludes_zero else 'does not help'}: {without}."
    if report.rows_left_out:
        whole = report.rows + report.rows_left_out + report.rows_decided
        yield (
            f"These figures are of the {report.rows:,} of {plural(whole, 'row')} that all members have; a run "
            "merges the others by the members that are there."
        )
    if report.rows_decided:
        yield f"Rules decide {plural(report.rows_decided, 'further row')}, which tell nothing of the members."


def _by_fold(report: FitReport) -> str:
    """Say how many folds the figures are the mean of; empty if they are of all rows at once."""
    scored, folds = report.folds_scored, report.options.folds
    if scored is None:
        return ""
    text = f" Each fold is scored by itself; the figures are the mean of {plural(scored, 'fold')}"
    if scored < folds:
        text += f"; {folds - scored} of {folds} folds left out, which lack rows with or without some label"
    return f"{text}."


def difference(gain: Interval, above: str = "better", below: str = "worse") -> str:
    """Return ``0.0012 better (0.0004 to 0.0020)``; ``above`` is the word for a gain, ``below`` for a loss."""
    size = gain.size
    value, low, high = (_number(end, gain) for end in (size.value, size.low, size.high))
    if not any(float(end) for end in (value, low, high)):
        return "no difference"
    interval = "" if math.isnan(gain.low) else f" ({low} to {high})"
    return f"{value} {above if gain.value >= 0 else below}{interval}"


def _against(what: str, value: float, gain: Interval) -> str:
    text = f"Against {what} ({_number(value, gain)}): {difference(gain)}"
    if text.endswith("no difference"):
        return f"{text}."
    return f"{text}, more than noise." if gain.excludes_zero else f"{text}, which is no more than noise."


def _number(number: float, gain: Interval) -> str:
    """Show a number with four digits, and more if the interval has no two digits then."""
    width = gain.high - gain.low
    digits = next((digits for digits in range(4, 7) if width * 10**digits >= 40), 7) if width > 0 else 4
    return f"{number:.{digits}f}"


def _flow(value: object) -> str:
    """In one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9)
    return text.strip()


def _by_label(labels: Sequence[str], numbers: Values) -> dict[str, float]:
    return {label: _short(number) for label, number in zip(labels, numbers.tolist(), strict=True)}


def _short(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")
