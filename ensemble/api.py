"""Define the Python API: each command as a function for notebooks and scripts.

The functions leave nothing changed in the caller's process: no module is kept out or loaded in a special way, no
stream is replaced, and handlers of signals and loggers are put back. Errors and printed text hold no secrets. Where
the command would fail, its function raises an ``EnsembleError`` with every problem found.

The command line takes its help from the docstrings (``cli/app.py``): paragraphs before ``Args`` describe the
command, ``Args`` its options.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, TypeAlias, cast

from ensemble.cli.layout import show
from ensemble.common.errors import ConfigError, DataError, Interrupted, OutputError, OutputInUse
from ensemble.common.files import output_file, settings_file, write_text
from ensemble.common.packages import demand_supported
from ensemble.common.python_process import keep_pandas_out, one_thread_for_numpy
from ensemble.common.redact import RedactedStream, Redactor, guard_output, redacted_errors
from ensemble.common.remote_files import address_of, local_path, written_locally
from ensemble.common.text import quoted

# What imports numpy or pyarrow is imported when it is used: --help and a typo in a key shall answer at once.
if TYPE_CHECKING:
    from ensemble.analysis.compare import Comparison
    from ensemble.analysis.fit import FitReport
    from ensemble.analysis.tune import Tuning
    from ensemble.cli.result_objects import Preview, Run
    from ensemble.commands.rehearse import Rehearsal
    from ensemble.common.protocol import Activation
    from ensemble.config import ConfigSource, LoadedConfig
    from ensemble.training.records import TrainingReport

FilePath: TypeAlias = str | os.PathLike[str]
# The path of a YAML file, or a dict in its place.
ConfigFile: TypeAlias = FilePath | Mapping[str, object]
# One or several, of which later ones override earlier ones.
ConfigFiles: TypeAlias = ConfigFile | Sequence[ConfigFile]
# {"models.gemma2.weight": 0.5} or ["models.gemma2.weight=0.5"], as --set takes them.
Overrides: TypeAlias = Mapping[str, object] | Sequence[str]

# One run at a time: runs share the log, the display, the signals and, above all, the GPUs.
_running = threading.Lock()
# Whether this process is the command line's own.
_is_command = False


def own_process() -> None:
    """Treat this process as the command line's own, which ends with the command.

    Output is guarded for good, a second signal ends the process, pandas is kept out of pyarrow, and a run's time
    limit counts from the start of the process.
    """
    global _is_command
    _is_command = True


def run(
    config: ConfigFiles,
    overrides: Overrides | None = None,
    *,
    fresh: bool = False,
    reuse: FilePath | None = None,
    retrain: bool = False,
    discard_old: bool = False,
    quiet: bool = False,
    verbose: bool = False,
) -> Run:
    """Run every model of CONFIG and merge the probabilities.

    Work that an earlier run in the same output_dir has done is kept: the same command resumes where it stopped.

    Args:
        config: YAML file of the run; later files override earlier ones.
        overrides: Override a key, for example models.gemma2.weight=0.5.
        fresh: Start over; do not resume an earlier run.
        reuse: Another run, whose rows need not be computed again.
        retrain: Begin even where a change makes more than an hour of finished training again.
        discard_old: Remove finished trainings that others replace (default: keep them as fold-0.old).
        quiet: Print nothing but errors.
        verbose: Also print what the log records.

    Note:
        ``config`` may be a dict that says what such a file would (``{"data": ..., "models": ...}``; relative paths
        start at the working directory), or a list such as ``["config.yaml", "weights.yaml"]``.  ``overrides`` is
        ``{"models.gemma2.weight": 0.5}``, or texts in the form of ``--set``.

        Ctrl-C, or a notebook's interrupt, ends the run in order and then raises ``KeyboardInterrupt``.  In a thread
        other than the main one no signal is handled.

        After ``TimeLimitReached`` ensemble and submission are complete, and ``open_run`` opens them.
    """
    loaded = _load_as_written(config, overrides)
    other = _optional_path(reuse)
    with _exclusive_run(loaded, quiet) as stream:
        from ensemble.cli.progress import choose_display, log_shown
        from ensemble.cli.result_objects import Run
        from ensemble.common.clock import boot_seconds
        from ensemble.pipeline.ending import raise_unless_complete
        from ensemble.pipeline.remote import copy_results
        from ensemble.pipeline.run import run as run_config
        from ensemble.training.command import Asked, trained_for_run

        display = choose_display(stream)
        began = boot_seconds() - _elapsed_seconds()
        with log_shown(display) if verbose else contextlib.nullcontext():
            asked = Asked(retrain=retrain, discard_old=discard_old)
            training = trained_for_run(loaded, display, began, asked, owns_process=_is_command)
            with training as (loaded, held):
                elapsed_seconds = boot_seconds() - began
                report = run_config(loaded, display, fresh, elapsed_seconds, _is_command, other, held)
        show("runs.summary", report, stream)
        addresses = copy_results(loaded, report)
        if addresses and stream is not None:
            stream.write(f"results copied to {' and '.join(addresses)}\n")
        raise_unless_complete(report)
    return Run(loaded.config.output_dir)


def train(
    config: ConfigFiles,
    overrides: Overrides | None = None,
    *,
    fold: int | None = None,
    fresh: bool = False,
    retrain: bool = False,
    discard_old: bool = False,
    quiet: bool = False,
    verbose: bool = False,
) -> TrainingReport:
    """Train the models of CONFIG, fold by fold.

    Each training of a model with `train` is a process of its own on its own devices. The same command again trains
    only what is missing.

    Args:
        config, overrides, retrain, discard_old, quiet, verbose: as for ``run``.
        fold: Train this fold only, counted from 0 (default: all folds).
        fresh: Train again what is trained already.
    """
    loaded = _load_as_written(config, overrides)
    with _exclusive_run(loaded, quiet) as stream:
        from ensemble.cli.progress import choose_display, log_shown
        from ensemble.common.clock import boot_seconds
        from ensemble.pipeline.trained_members import is_trained
        from ensemble.pipeline.training_dir import TrainingDir
        from ensemble.training import command

        display = choose_display(stream)
        began = boot_seconds() - _elapsed_seconds()
        with log_shown(display) if verbose else contextlib.nullcontext():
            asked = command.Asked(fold=fold, fresh=fresh, retrain=retrain, discard_old=discard_old)
            training = command.trained(loaded, display, began, asked, owns_process=_is_command)
            with training as (result, _):
                show("status.trained", result, stream)
                command.raise_unless_trained(result)
                if is_trained(loaded):
                    report = command.predict_held_out(loaded, display, began, owns_process=_is_command)
                    oof_of = TrainingDir(loaded.config.output_dir).oof
                    oof = [oof_of(member.name) for member in report.members]
                    files = [file for file in oof if file.is_file()]
                    show("runs.out_of_fold", (report, files, loaded.config), stream)
                    command.raise_unless_predicted(report)
                else:
                    display.say(command.untrained_text(loaded))
    return result


def validate(config: ConfigFiles, overrides: Overrides | None = None) -> Preview:
    """Check CONFIG without loading a model. Lists all wrong keys and missing files together.

    When all keys are right, it also checks columns, ids, labels, templates and devices.

    Args:
        config, overrides: as for ``run``.
    """
    return _preview("validate", config, overrides)


def plan(
    config: ConfigFiles, overrides: Overrides | None = None, *, predictions_from: FilePath | None = None
) -> Preview:
    """Show the memory, devices and time that CONFIG would take. Also shows which GPUs each model fits on.

    Args:
        config, overrides: as for ``run``.
        predictions_from: Run whose predictions tell how many rows `when` selects.

    Note:
        Why models fit nowhere is in the result's ``problems``.
    """
    return _preview("plan", config, overrides, _optional_path(predictions_from))


def rehearse(
    config: ConfigFiles,
    overrides: Overrides | None = None,
    *,
    rows: int | None = None,
    lengths_from: FilePath | None = None,
    sample: int | None = None,
    quiet: bool = False,
) -> Rehearsal:
    """Run a sample of CONFIG's table and estimate the whole run.

    The estimate covers time, memory and disk for --rows rows. Files of real runs are not touched. The exit code is
    1 if the run would exceed its time_limit or the free disk space.

    Args:
        config, overrides, quiet: as for ``run``.
        rows: Rows of the whole run (default: those of the table).
        lengths_from: Table to take the rows from, for example train.csv.
        sample: Rows to compute (default: enough to measure the speed).

    Note:
        Why a run would not end as it should is in the result's ``problems``.
    """
    for name, count in (("rows", rows), ("sample", sample)):
        if count is not None and count < 1:
            raise ConfigError(f"{name}: give a whole number of at least 1, not {count}")
    loaded = _load(config, overrides, quiet)
    table = _optional_input(lengths_from)
    with _exclusive_run(loaded, quiet) as stream:
        from ensemble.cli.progress import choose_display
        from ensemble.commands.rehearse import rehearse as rehearse_config

        result = rehearse_config(
            loaded,
            lambda: choose_display(stream),
            rows,
            table,
            sample,
            _elapsed_seconds(),
            owns_process=_is_command,
        )
        show("plans.rehearse", result, stream)
    return result


def tune(
    config: ConfigFiles,
    overrides: Overrides | None = None,
    *,
    rows: int | None = None,
    tolerance: float | None = None,
    write: FilePath | None = None,
    force: bool = False,
    quiet: bool = False,
) -> Tuning:
    """Find each model's fastest settings on this machine.

    Measures precision, quantization, attention and batch size on a sample, each in a fresh worker, and keeps
    settings that do not change the probabilities by more than --tolerance. The same command resumes an
    interrupted tuning. Then: ensemble run CONFIG YAML, with the file that --write wrote.

    Args:
        config, overrides, quiet: as for ``run``.
        rows: Rows of the sample (default: 256).
        tolerance: Largest allowed difference from float32's probabilities: the mean over rows of each row's largest
            difference (default: 0.02).
        write: File for the settings found, for `run CONFIG YAML`.
        force: Replace an existing file.
    """
    loaded = _load(config, overrides, quiet)
    file = _optional_path(write)
    with imports():
        from ensemble.analysis.tune import overrides_beside
        from ensemble.analysis.tune import tune as tune_config
        from ensemble.cli.progress import choose_display

    with _exclusive_run(loaded, quiet) as stream:
        target = None if file is None else settings_file("--write", file, loaded.paths, force)
        display = choose_display(stream)
        result = tune_config(loaded, display, rows, tolerance, target, owns_process=_is_command)
        show("analyses.tune", result, stream)
        if file is not None and result.has_result and stream is not None:
            sets = [text for override in overrides_beside(loaded, result) for text in ("--set", override)]
            command = shlex.join(map(str, [*loaded.paths, file, *sets]))
            print(f"{file}: written; run it as `ensemble run {command}`", file=stream)
    return result


def fit(
    sources: ConfigFiles | Mapping[str, FilePath],
    overrides: Overrides | None = None,
    *,
    labels: FilePath | None = None,
    label_column: str | None = None,
    id_column: str | None = None,
    metric: str = "log_loss",
    group: str | None = None,
    method: Literal["equal", "best_member", "simplex", "greedy", "stacking", "auto"] | None = None,
    calibration: Literal["none", "temperature", "vector", "isotonic"] = "none",
    merge_method: Literal["mean", "geometric_mean"] | None = None,
    activation: Activation | None = None,
    folds: int = 5,
    seed: int = 0,
    partial: bool = False,
    columns: Sequence[str] = (),
    folds_from: FilePath | None = None,
    output: FilePath | None = None,
    force: bool = False,
    quiet: bool = False,
) -> FitReport:
    """Fit weights and calibrations to true labels.

    Writes weights.yaml, and reports on held-out rows whether the weights beat equal weights. The run of CONFIG must
    be complete, and its table must have the labels. Then: ensemble run CONFIG weights.yaml, which merges again.

    Args:
        sources: YAML files of a run (later files override earlier ones), or CSVs of members' predictions.
        overrides, quiet: as for ``run``.
        labels, label_column, columns, folds_from, group: as for ``compare``.
        id_column, activation, partial: as for ``merge``.
        metric: Metric to optimize; also a function of yours, such as my_metric.py:score.
        method: Weights that minimize log loss (simplex), greedy selection for any metric, a logistic regression
            (stacking), equal weights, the best member alone, or auto, which compares all of these on held-out rows
            (default: simplex for log_loss, greedy for other metrics).
        calibration: Calibration of each member: one temperature, a scale and bias per label (vector), or a rising
            line per label (isotonic).
        merge_method: Merge method that the weights of CSVs are for (default: mean); a CONFIG names its own.
        folds: Number of cross-validation folds.
        seed: Random seed for the folds.
        output: File to write.
        force: Replace an existing file.

    Note:
        A dict without the key ``models`` holds the CSVs by the names that they are to have.  Without ``output``
        nothing is written.
    """
    with imports(for_analysis=True):
        from ensemble.analysis.fit import Options
        from ensemble.analysis.weights_file import check_output, fit_sources

    with redacted_errors():
        if isinstance(sources, Mapping) and "models" not in sources:
            paths: list[ConfigSource] = [*_files(sources)]
        else:
            paths = _config_sources(sources)
        table, fold_table = _optional_input(labels), _optional_input(folds_from)
        file, target = _optional_path(output), None
        if file is not None:
            inputs = [path for path in paths if isinstance(path, Path)]
            target = check_output(file, force, inputs, table, fold_table)
        report, text = fit_sources(
            paths,
            lambda configs: _load(configs, overrides, quiet),
            Options(metric, method, calibration, folds, seed, merge_method or "mean", group=group),
            labels=table,
            label_column=label_column,
            id_column=id_column,
            merge_method=merge_method,
            activation=activation,
            partial=partial,
            columns=_names("columns", columns),
            folds_from=fold_table,
            has_overrides=bool(overrides),
            target=target,
        )
        if target is not None:
            write_text(target, text)
    stream = _stream(quiet)
    show("analyses.fit", report, stream)
    if file is not None and stream is not None:
        print(f"{file}: written", file=stream)
    return report


@redacted_errors()
def compare(
    first: FilePath,
    second: FilePath,
    metrics: Sequence[str] = (),
    *,
    labels: FilePath | None = None,
    label_column: str | None = None,
    id_column: str | None = None,
    activation: Activation | None = None,
    columns: Sequence[str] = (),
    folds_from: FilePath | None = None,
    group: str | None = None,
    quiet: bool = False,
) -> Comparison:
    """Compare two runs, or two CSVs of predictions.

    Shows settings, rows whose prediction changed, metrics, time and memory. Metrics need the true labels, from the
    table of a run or --labels; differences have paired confidence intervals.

    Args:
        first: The output_dir of a run, or a CSV of predictions.
        second: The run or CSV to compare with, for the same rows; name a run twice for its own metrics.
        metrics: log_loss, accuracy, macro_f1, micro_f1, weighted_f1, mcc, auc, brier, ece, cohen_kappa,
            quadratic_kappa, map@K, ndcg@K, mrr, rmse, pearson, spearman, or a function of yours, such as
            my_metric.py:score; repeatable.
        labels: Table with the true labels, if the run's table has none.
        label_column: Column of the true labels (default: label, or a column per label).
        id_column, activation: as for ``merge``.
        columns: Label column of CSVs to read (default: all).
        folds_from: Table with the columns id and fold, if each fold's rows were predicted by a model of its own:
            auc is then the mean over the folds (default: training/folds.csv beside a folder oof).
        group: Column of the table with the true labels, over whose groups of rows metrics are averaged.
        quiet: Print nothing but errors.

    Note:
        Without ``activation``, CSVs have that of the run that they are compared with; else they hold probabilities
        that sum to 1, or, of one label, probabilities if all are from 0 to 1.
    """
    with imports(for_analysis=True):
        from ensemble.analysis.compare import compare as compare_sides

    sides = local_path(_path(first)), local_path(_path(second))
    result = compare_sides(
        *sides,
        _names("metrics", metrics),
        _optional_input(labels),
        label_column,
        id_column,
        activation,
        _names("columns", columns),
        _optional_input(folds_from),
        group,
    )
    show("analyses.compare", result, _stream(quiet))
    return result


@redacted_errors()
def merge(
    files: Sequence[FilePath] | Mapping[str, FilePath],
    output: FilePath,
    overrides: Overrides | None = None,
    *,
    method: str | None = None,
    weights: Mapping[str, object] | FilePath | None = None,
    id_column: str | None = None,
    labels: Sequence[str] = (),
    activation: Activation | None = None,
    partial: bool = False,
    quiet: bool = False,
) -> Path:
    """Merge CSVs of predictions into one, without a config.

    Rows are joined by id, and written in the order of the first file. --set ensemble.power=2 sets a key of the
    merge method.

    Args:
        files: Predictions: an id and a column per label (default name: the file's, without its ending).
        output: File to write: CSV, or Parquet if its name ends in .parquet.
        overrides: Override a key, for example ensemble.power=2.
        method: mean (the default), median, vote, ...
        weights: Weights and calibration, as fit writes them.
        id_column: Column of the ids (default: id, else the first column).
        labels: Label column to merge (default: all).
        activation: Values of the CSVs: probabilities that sum to 1 (softmax), one per label (sigmoid), or any
            numbers.
        partial: Files may lack rows that others have.
        quiet: Print nothing but errors.

    Note:
        ``files`` may be a dict of paths by name, ``weights`` a dict of weights by name.  Returns the path that was
        written; if there is a problem, nothing is written.
    """
    with imports():
        from ensemble.commands.merge_files import merge_files
        from ensemble.pipeline.signals import heed_signals

    labels = _names("labels", labels)
    sets = _texts(overrides)
    if method is not None:
        sets.insert(0, f"ensemble.method={method}")
    keys: dict[str, object] = {"partial": partial}
    if activation is not None:
        keys["activation"] = activation
    by_name: dict[str, str] = {}
    if isinstance(weights, Mapping):
        by_name = dict(text.split("=", 1) for text in _texts(weights))
        weights = None
    names, file = [*map(str, _files(files))], _optional_path(weights)
    path = _path(output)
    try:
        # No signal leaves a temporary file.
        with _signals_passed_on(), heed_signals(_is_command), written_locally(path) as target:
            merged = merge_files(names, target, sets, file, by_name, id_column, labels, keys)
    except Interrupted as stopped:
        raise Interrupted(stopped.exit_code - 128, "run the same command again") from None
    show("runs.merge", replace(merged, path=path), _stream(quiet))
    return path


@redacted_errors()
def open_run(path: FilePath) -> Run:
    """Open the ``output_dir`` of a run, whether it goes on or has ended."""
    from ensemble.cli.result_objects import Run
    from ensemble.pipeline.run_dir import RunDir, holder

    folder = _path(path)
    rundir = RunDir(folder)
    if not rundir.run_json.exists() and holder(rundir) is None:
        raise DataError(f"{path}: there is no run.json; name the output_dir of a run")
    return Run(folder)


@redacted_errors()
def report(path: FilePath, output: FilePath | None = None) -> Path:
    """Write the report of the run in RUN_DIR as one HTML file.

    A run writes its report at its end, unless its config says report: false. This command writes it again.

    Args:
        path: The output_dir of a run.
        output: File to write (default: RUN_DIR/report.html).

    Note:
        What could not be shown is printed to standard error.
    """
    with imports(for_analysis=True):
        from ensemble.analysis.report.page import write_report
        from ensemble.pipeline.report_page import is_report
        from ensemble.pipeline.run_dir import RunDir

    run_dir = _path(path)
    if output is None:
        # A link there was not named by anybody, and is not followed.
        page = target = RunDir(run_dir).report_page
        if page.is_dir():
            raise OutputError(f"{page} is a folder; remove it, or name a file with --output")
    else:
        page = _path(output)
        target = output_file(page)
        if target.exists() and not is_report(target):
            raise OutputError(f"{page}: is there already and is no report; choose another name")
    for problem in write_report(run_dir, target):
        print(problem, file=sys.stderr)  # noqa: T201
    return page


def _stream(quiet: bool, redactor: Redactor | None = None) -> IO[str] | None:
    """Return where to print to; None to print nothing."""
    if quiet or sys.stdout is None:
        return None
    return cast(IO[str], RedactedStream(sys.stdout, redactor or Redactor(os.environ)))


def _elapsed_seconds() -> float:
    """Return how much of a run's time limit has passed before the function was called."""
    from ensemble.common.host import process_age_seconds

    return process_age_seconds() if _is_command else 0.0


@contextlib.contextmanager
def imports(for_analysis: bool = False) -> Iterator[None]:
    """Check the packages' versions before numpy and pyarrow are imported within.

    In a process of the command line numpy gets one thread, and pyarrow does without pandas.

    Raises:
        ConfigError: a package is too old.
    """
    demand_supported(for_analysis)
    if not _is_command:
        yield
        return
    if for_analysis:
        os.environ["MPLBACKEND"] = "svg"  # what the user has set may be unknown here, or need a screen
    with one_thread_for_numpy():
        yield
        keep_pandas_out()  # with pyarrow, which imports numpy


@contextlib.contextmanager
def _exclusive_run(loaded: LoadedConfig, quiet: bool) -> Iterator[IO[str] | None]:
    """Hold this process for one run; give the stream to print to, None if it is to print nothing.

    Raises:
        OutputInUse: another run goes on in this process.
    """
    if not _running.acquire(blocking=False):
        raise OutputInUse("a run goes on in this process; wait for it, or start this one in another process")
    try:
        with redacted_errors(loaded.redactor), _signals_passed_on():
            yield _stream(quiet, loaded.redactor)
    finally:
        _running.release()


@contextlib.contextmanager
def _signals_passed_on() -> Iterator[None]:
    """Give a signal that stopped the work within to the caller's own handler, which is back by then."""
    try:
        yield
    except Interrupted as stopped:
        if not _is_command:
            # Python's own handler raises KeyboardInterrupt for SIGINT.
            signal.raise_signal(stopped.exit_code - 128)
        raise


def _preview(
    view: Literal["validate", "plan"],
    config: ConfigFiles,
    overrides: Overrides | None,
    predictions_in: Path | None = None,
) -> Preview:
    try:
        loaded = _load_as_written(config, overrides)
    except ConfigError as error:
        if error.rest is None:
            raise
        with redacted_errors(Redactor(os.environ, error.rest.model_dump())):
            from ensemble.pipeline.prepare import file_problems

            raise ConfigError([*error.problems, *file_problems(error.rest)]) from error
    with redacted_errors(loaded.redactor):
        from ensemble.cli.result_objects import Preview
        from ensemble.pipeline.prepare import prepare

        loaded, warnings = checked_trainings(loaded)
        prepared = prepare(loaded, view == "validate", predictions_in)
        return Preview(view, replace(prepared, warnings=(*warnings, *prepared.warnings)))


def checked_trainings(loaded: LoadedConfig) -> tuple[LoadedConfig, list[str]]:
    """Check trainings before they begin; return the config with those that are done, and warnings.

    Raises:
        ConfigError: with every problem.
    """
    from ensemble.pipeline.trained_members import with_trained
    from ensemble.training.command import preview_trainings

    loaded, warnings = preview_trainings(loaded)
    return with_trained(loaded, may_lack=True), warnings


def _load(config: object, overrides: Overrides | None, quiet: bool = True) -> LoadedConfig:
    """Load a config, with an ordinary member in place of each one that is trained; say what a change outdates.

    Raises:
        ConfigError: a member is not trained yet.
    """
    loaded = _load_as_written(config, overrides)
    with imports(), redacted_errors(loaded.redactor):
        from ensemble.pipeline.trained_members import with_trained
        from ensemble.training.command import outdated_texts

        result, stream = with_trained(loaded), _stream(quiet, loaded.redactor)
        if stream is not None:
            for text in outdated_texts(loaded, "taken as it was trained, and train would train it anew"):
                print(f"! {text}", file=stream)
        return result


def _load_as_written(config: object, overrides: Overrides | None) -> LoadedConfig:
    """Load a config, in which members that are to be trained have ``train``."""
    with imports(), redacted_errors():
        from ensemble.pipeline.load import load

        loaded = load(_config_sources(config), _texts(overrides))
        if _is_command:
            guard_output(loaded.redactor)  # now that the config's own secrets are known
        return loaded


def _listed(value: object) -> Sequence[object]:
    """Return a sequence as it is, and anything else as the only item of one."""
    return value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]


def _config_sources(config: object) -> list[ConfigSource]:
    """Return paths of YAML files, and mappings in their place."""
    from ensemble.config import MappingConfig, mapping_config

    sources: list[ConfigSource] = []
    for source in _listed(config):
        if isinstance(source, Mapping):
            source = mapping_config(source)
        sources.append(source if isinstance(source, MappingConfig) else _path(source))
    if not sources:
        raise ConfigError("the list is empty; give the path of a config or of CSVs")
    return sources


def _files(value: object) -> list[Path]:
    """Return a path, several, or paths by their names, which become ``NAME=path``."""
    if isinstance(value, Mapping):
        return [Path(f"{name}={_path(path)}") for name, path in value.items()]
    return [_path(path) for path in _listed(value)]


def _path(value: object) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{quoted(repr(value))} is not a path")
    return Path(value)


def _optional_path(value: object) -> Path | None:
    """Return a path, which must be on this machine."""
    path = None if value is None else _path(value)
    address = None if path is None else address_of(path)
    if address is not None:
        raise ConfigError(f"{address}: must be on this machine; name a local path")
    return path


def _optional_input(value: object) -> Path | None:
    """Return the path of a file to read, or of its copy if the value is an address."""
    return None if value is None else local_path(_path(value))


def _names(argument: str, names: Sequence[str]) -> Sequence[str]:
    if isinstance(names, str):
        raise ConfigError(f"{argument}: give a list of names, such as [{quoted(names)}]")
    return names


def _texts(overrides: Overrides | None) -> list[str]:
    """Return overrides in the form of ``--set``."""
    if overrides is None:
        return []
    if not isinstance(overrides, Mapping):
        is_list = isinstance(overrides, Sequence) and not isinstance(overrides, str)
        if is_list and all(isinstance(text, str) for text in overrides):
            return [*overrides]
        raise ConfigError(
            'overrides: give a mapping or a list of texts, such as {"limit": 100} or ["limit=100"]'
        )
    texts = []
    for key, value in overrides.items():
        if not isinstance(key, str) or "=" in key:
            raise ConfigError(
                f"overrides: {quoted(repr(key))} is not a key; write it like models.gemma2.weight"
            )
        try:
            texts.append(f"{key}={json.dumps(value, ensure_ascii=False, default=_plain)}")  # YAML takes JSON
        except (TypeError, ValueError, AttributeError, RecursionError):
            raise ConfigError(
                f"overrides: {key} holds {quoted(repr(value))}; give numbers, texts, lists and mappings"
            ) from None
    return texts


def _plain(value: Any) -> Any:
    """Return what JSON can hold of a path, or of a number or an array of numpy."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value.tolist()
