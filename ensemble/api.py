"""The Python API: what the commands do, as functions for notebooks and scripts.

They run in somebody else's process and leave nothing changed there: no module is kept out or loaded in a special
way, no stream is replaced, and handlers of signals and loggers are put back.  Like the command line they tell no
secrets.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, SupportsIndex, TypeAlias, cast

from ensemble.cli.layout import Page
from ensemble.cli.views import lines, show
from ensemble.commands.status import RunStatus
from ensemble.common.errors import (
    ConfigError,
    DataError,
    EnsembleError,
    Interrupted,
    OutputError,
    OutputInUse,
)
from ensemble.common.files import output_file
from ensemble.common.packages import demand_supported
from ensemble.common.redact import RedactedStream, Redactor
from ensemble.common.text import did_you_mean, quoted
from ensemble.config import ConfigSource, LoadedConfig, MappingConfig, RunConfig, mapping_config
from ensemble.pipeline.load import load
from ensemble.pipeline.report_page import is_report
from ensemble.pipeline.run_dir import RunDir, holder
from ensemble.pipeline.run_report import RunReport

if TYPE_CHECKING:
    import pandas as pd

    from ensemble.analysis.compare import Comparison
    from ensemble.analysis.fit import FitReport
    from ensemble.analysis.tune.tuning import Tuning
    from ensemble.commands.rehearse import Rehearsal
    from ensemble.pipeline.prepared import Prepared
    from ensemble.planning.plan import Plan

# The path of a YAML file, or a dict in its place.
ConfigFile: TypeAlias = str | os.PathLike[str] | Mapping[str, object]
# One or several, of which later ones override earlier ones.
ConfigFiles: TypeAlias = ConfigFile | Sequence[ConfigFile]
# {"models.gemma2.weight": 0.5} or ["models.gemma2.weight=0.5"], as --set takes them.
Overrides: TypeAlias = Mapping[str, object] | Sequence[str]
# One at a time: they share the log, the display, the signals and, above all, the GPUs.
_running = threading.Lock()


@contextlib.contextmanager
def _told(redactor: Redactor | None = None) -> Iterator[None]:
    """Errors without secrets, those of the environment at least, and a signal's own effect once all is in order."""
    try:
        yield
    except EnsembleError as error:
        error.problems = tuple(map(redactor or Redactor(os.environ), error.problems))
        error.args = ("\n".join(error.problems),)
        raise
    except Interrupted as stopped:
        # The caller's own handler is back: Python's raises KeyboardInterrupt for SIGINT.
        signal.raise_signal(stopped.exit_code - 128)
        raise


@contextlib.contextmanager
def _alone(loaded: LoadedConfig, quiet: bool) -> Iterator[tuple[IO[str], bool]]:
    """The only run of this process: where it writes, and whether it is quiet, as without a terminal."""
    if not _running.acquire(blocking=False):
        raise OutputInUse("a run goes on in this process; wait for it, or start this one in another process")
    try:
        with _told(loaded.redactor):
            yield cast(IO[str], RedactedStream(sys.stdout, loaded.redactor)), quiet or sys.stdout is None
    finally:
        _running.release()


def run(
    config: ConfigFiles,
    overrides: Overrides | None = None,
    *,
    fresh: bool = False,
    reuse: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> Run:
    """Run a config as ``ensemble run`` does; what an earlier run in its ``output_dir`` has done is kept.

    Ctrl-C, or a notebook's interrupt, ends the run in order and then raises ``KeyboardInterrupt``.  In a thread
    other than the main one no signal is heeded.

    Args:
        config: the path of a YAML file, a dict that says what such a file would (``{"data": ..., "models": ...}``;
            relative paths start at the working directory), or several of these, such as ``["config.yaml",
            "weights.yaml"]``: later ones override earlier ones.
        overrides: ``{"models.gemma2.weight": 0.5}``, or texts as ``--set`` takes them; they come last.
        fresh: start over, whatever an earlier run did.
        reuse: the ``output_dir`` of another run: rows that it computed in the same way are not computed again.
        quiet: print nothing.

    Raises:
        EnsembleError: as the command fails.  After ``TimeLimitReached`` ensemble and submission are complete, and
            ``open_run`` opens them.
    """
    from ensemble.cli.progress import choose_display
    from ensemble.cli.views.summary import raise_unless_complete
    from ensemble.pipeline.run import run as run_config

    loaded = _load(config, overrides)
    other = None if reuse is None else _path(reuse, "give the output_dir of another run")
    with _alone(loaded, quiet) as (stream, quiet):
        display = choose_display(stream, quiet)
        report = run_config(loaded, display, fresh, owns_process=False, reuse=other)
        if not quiet:
            show("summary", report, stream)
        raise_unless_complete(report)
    return Run(loaded.config.output_dir)


def validate(config: ConfigFiles, overrides: Overrides | None = None) -> Preview:
    """Check a config as ``ensemble validate`` does, without loading a model.

    Raises:
        EnsembleError: with every problem found.
    """
    return _preview("validate", config, overrides)


def plan(
    config: ConfigFiles,
    overrides: Overrides | None = None,
    *,
    predictions_from: str | os.PathLike[str] | None = None,
) -> Preview:
    """What a config would take, as ``ensemble plan`` shows it; what fits nowhere is in its ``problems``.

    Args:
        predictions_from: the directory of a run whose predictions tell what members with ``when`` would compute.

    Raises:
        EnsembleError: with every other problem found.
    """
    folder = None if predictions_from is None else _path(predictions_from, "give the output_dir of a run")
    return _preview("plan", config, overrides, folder)


def rehearse(
    config: ConfigFiles,
    overrides: Overrides | None = None,
    *,
    rows: int | None = None,
    lengths_from: str | os.PathLike[str] | None = None,
    sample: int | None = None,
    quiet: bool = False,
) -> Rehearsal:
    """What a config would take with ``rows`` rows, by a run of a sample, as ``ensemble rehearse`` shows it.

    Why a run would not end as it should is in the result's ``problems``.

    Args:
        rows: of the whole; None: as many as the table has.
        lengths_from: a table, such as train.csv, whose rows are taken instead.
        sample: rows to compute; None: what takes long enough to know the speed.
        quiet: print nothing.

    Raises:
        EnsembleError: as the command fails.
    """
    from ensemble.cli.progress import choose_display
    from ensemble.commands.rehearse import rehearse as rehearse_config

    rows, sample = _count("rows", rows), _count("sample", sample)
    loaded = _load(config, overrides)
    table = None if lengths_from is None else _path(lengths_from, "give the path of a table")
    with _alone(loaded, quiet) as (stream, quiet):
        result = rehearse_config(
            loaded, lambda: choose_display(stream, quiet), rows, table, sample, owns_process=False
        )
        if not quiet:
            show("rehearse", result, stream)
    return result


def tune(
    config: ConfigFiles,
    overrides: Overrides | None = None,
    *,
    rows: int | None = None,
    tolerance: float | None = None,
    write: str | os.PathLike[str] | None = None,
    force: bool = False,
    quiet: bool = False,
) -> Tuning:
    """Find each member's fastest settings on this machine that keep its probabilities, as ``ensemble tune`` does.

    Args:
        rows: of the sample that every candidate computes; None: 256, and more where those are done at once.
        tolerance: how far its probabilities may be from the reference's: the mean over rows of a row's largest
            difference, and the share of rows whose first label may be another; None: 0.02.
        write: where to write the overlay, if settings were chosen for any member; None: nowhere.
        force: replace a file that is there.
        quiet: print nothing.

    Raises:
        EnsembleError: as the command fails.
    """
    from ensemble.analysis.tune.command import check_output
    from ensemble.analysis.tune.command import tune as tune_config
    from ensemble.cli.progress import choose_display

    rows = _count("rows", rows)
    loaded = _load(config, overrides)
    with _told(loaded.redactor):
        file = None if write is None else _path(write, "give the path of a YAML file to write")
        target = None if file is None else check_output(file, force, loaded.paths)
    with _alone(loaded, quiet) as (stream, quiet):
        result = tune_config(
            loaded, choose_display(stream, quiet), rows, tolerance, target, owns_process=False
        )
        if not quiet:
            show("tune", result, stream)
    return result


def fit(
    sources: ConfigFiles | Mapping[str, str | os.PathLike[str]],
    overrides: Overrides | None = None,
    *,
    labels: str | os.PathLike[str] | None = None,
    label_column: str | None = None,
    id_column: str | None = None,
    metric: str = "log_loss",
    method: Literal["simplex", "greedy", "stacking"] | None = None,
    calibration: Literal["none", "temperature", "vector"] = "none",
    merge_method: Literal["mean", "geometric_mean"] | None = None,
    activation: Literal["softmax", "sigmoid", "none"] | None = None,
    folds: int = 5,
    seed: int = 0,
    partial: bool = False,
    output: str | os.PathLike[str] | None = None,
    force: bool = False,
    quiet: bool = False,
) -> FitReport:
    """Fit members' weights and calibrations to true labels, as ``ensemble fit`` does.

    Args:
        sources: a config whose run is complete (a path or a dict with the key ``models``; of several, later ones
            override earlier ones), or CSVs of predictions, perhaps by the names that they are to have, for which
            ``labels`` names the table of the truth.
        labels: a table with the true labels; None: the table of the config.
        label_column: its column of them; None: "label", or what the config names.
        id_column: of ``labels`` and of the CSVs; None: ``id``, or the first.
        method: None: "simplex" for log loss, "greedy" for other metrics.
        merge_method: what the weights of CSVs are for, None: the mean; a config has its own.
        activation: what the values of CSVs are; None: as for ``compare``.
        partial: whether CSVs may lack rows that others have; fitted is to the rows that all have.
        output: where to write the overlay; None: nowhere.
        force: replace a file that is there.
        quiet: print nothing.

    Raises:
        EnsembleError: as the command fails.
    """
    demand_supported(for_analysis=True)
    from ensemble.analysis.fit import Options
    from ensemble.analysis.weights_file import TruthFile, check_output, fit_sources, write_weights

    with _told():
        paths = _fit_sources(sources)
        if not paths:
            raise ConfigError("sources: the list is empty; give the path of a config or of CSVs")
        known = None if labels is None else _path(labels, "give the path of a table")
        target = None if output is None else _path(output, "give the path of a file to write")
        if target is not None:
            files = [path for path in paths if isinstance(path, Path)]
            target = check_output(target, force, files, known)
        # merge_method is here to be checked; a config's own takes its place.
        options = Options(metric, method, calibration, folds, seed, merge_method or "mean")
        truth = TruthFile(known, label_column, id_column)
        report, text = fit_sources(
            paths,
            lambda configs: _load(configs, overrides),
            truth,
            options,
            merge_method,
            activation,
            bool(overrides),
            partial,
            target,
        )
        if target is not None:
            write_weights(target, text)
    if not quiet and sys.stdout is not None:
        show("fit", report, sys.stdout)
    return report


@_told()
def compare(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    metrics: Sequence[str] = (),
    *,
    labels: str | os.PathLike[str] | None = None,
    label_column: str | None = None,
    id_column: str | None = None,
    activation: Literal["softmax", "sigmoid", "none"] | None = None,
    quiet: bool = False,
) -> Comparison:
    """Two runs, or two CSVs of predictions, side by side, as ``ensemble compare`` shows them.

    Args:
        first, second: the ``output_dir`` of a run, or a CSV.
        metrics: by name, such as "log_loss" or "map@3"; empty: the usual ones.
        labels: a table with the true labels; None: the table of a run.
        label_column: its column of them, None: "label", or of a run's own table what its config names; where it
            is not there, a column per label is read.
        id_column: of the CSVs; None: ``id``, or the first.
        activation: what the values of the CSVs are; None: those of the run that they are held against, else
            probabilities that sum to 1, and of one label probabilities where all are from 0 to 1, or any numbers.
        quiet: print nothing.

    Raises:
        DataError: as the command fails.
    """
    demand_supported(for_analysis=True)
    from ensemble.analysis.compare import compare as compare_sides

    if isinstance(metrics, str):
        raise ConfigError(f"metrics: give a list of names, such as [{quoted(metrics)}]")
    one, two = (_path(path, "give the output_dir of a run, or a CSV") for path in (first, second))
    table = None if labels is None else _path(labels, "give the path of a table")
    result = compare_sides(one, two, metrics, table, label_column, id_column, activation)
    if not quiet and sys.stdout is not None:
        show("compare", result, cast(IO[str], RedactedStream(sys.stdout, Redactor(os.environ))))
    return result


@_told()
def merge(
    files: Sequence[str | os.PathLike[str]] | Mapping[str, str | os.PathLike[str]],
    output: str | os.PathLike[str],
    overrides: Overrides | None = None,
    *,
    method: str | None = None,
    weights: Mapping[str, object] | str | os.PathLike[str] | None = None,
    id_column: str | None = None,
    labels: Sequence[str] = (),
    activation: Literal["softmax", "sigmoid", "none"] | None = None,
    partial: bool = False,
) -> Path:
    """Merge CSVs of predictions as ``ensemble merge`` does, joined by id; returns the path that was written.

    Args:
        files: paths, or paths by the names that the files are to have.
        overrides: such as ``{"ensemble.power": 2}``.
        method: of merging; None: that of ``weights``, or the mean.
        weights: of each file by its name, or the path of a YAML file with weights and calibration.
        id_column: of the files; None: ``id``, or the first.
        labels: the columns to merge; all but the ids if there are none.
        activation: "softmax" (the default), "sigmoid" or "none": what the values are.
        partial: whether files may lack rows that others have.

    Raises:
        EnsembleError: with every problem found; nothing is written then.
    """
    from ensemble.commands.merge_files import merge_files

    demand_supported()
    advice = "give the path of a CSV"
    if isinstance(labels, str):
        raise ConfigError(f"labels: give a list of names, such as [{quoted(labels)}]")
    by_name = dict(text.split("=", 1) for text in _texts(weights)) if isinstance(weights, Mapping) else {}
    keys = {"partial": partial} | ({} if activation is None else {"activation": activation})
    sets = [*([] if method is None else [f"ensemble.method={method}"]), *_texts(overrides or {})]
    return merge_files(
        [*map(str, _files(files, advice))],
        _path(output, advice),
        sets,
        None if weights is None or isinstance(weights, Mapping) else _path(weights, advice),
        by_name,
        id_column,
        labels,
        keys,
    ).path


@_told()
def open_run(path: str | os.PathLike[str]) -> Run:
    """Open the ``output_dir`` of a run, whether it goes on or has ended.

    Raises:
        DataError: no run has ever been there.
    """
    folder = _path(path, "give the output_dir of a run")
    rundir = RunDir(folder)
    if not rundir.run_json.exists() and holder(rundir) is None:
        raise DataError(f"{path}: there is no run.json; name the output_dir of a run")
    return Run(folder)


def report(path: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of a run, as ``ensemble report`` does; returns the HTML file.

    Args:
        path: the ``output_dir`` of the run.
        output: where to write it; None: ``report.html`` in there.

    Raises:
        DataError: there is no run.json that can be read.
        OutputError: something is there that is no report.
        WriteError: the file cannot be written.
    """
    with _told():
        page, problems = write_report(
            _path(path, "give the output_dir of a run"),
            None if output is None else _path(output, "give the path of an HTML file"),
        )
    if problems:
        warnings.warn("; ".join(problems), stacklevel=2)
    return page


def write_report(run_dir: Path, output: Path | None) -> tuple[Path, list[str]]:
    """The page that was written, and what could not be shown in it."""
    demand_supported(for_analysis=True)
    from ensemble.analysis.report.page import write_report as write

    if output is None:
        page = RunDir(run_dir).report_page
        if page.is_dir():
            raise OutputError(f"{page} is a folder; remove it, or name a file with --output")
        return page, write(run_dir, page)  # a link there was not named by anybody, and is not followed
    target = output_file(output)
    if target.exists() and not is_report(target):
        raise OutputError(f"{output}: is there already and is no report; choose another name")
    return output, write(run_dir, target)


class _Shown:
    """Shows a notebook what is printed, and completes to public names."""

    def _repr_html_(self) -> str:
        return f'<pre style="white-space: pre-wrap">{escape(repr(self))}</pre>'

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_")]


class Run(_Shown):
    """A run's directory, read anew at each look.  Printed, it is what ``ensemble status`` shows."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._rundir = RunDir(self.path)

    @property
    @_told()
    def report(self) -> RunReport:
        """What run.json says.

        Raises:
            DataError: it is not there yet, is damaged, or was written by another version.
        """
        return RunReport.read(self._rundir.run_json)

    @property
    @_told()
    def status(self) -> RunStatus:
        """How far it is, or how it ended.

        Raises:
            DataError: as for ``report``.
        """
        return RunStatus.of(self.path)

    @property
    def members(self) -> tuple[str, ...]:
        """The names of those whose predictions are complete."""
        try:
            members = self.report.members
        except DataError:  # files of an earlier run, perhaps with other settings
            return ()
        complete = (one.name for one in members if one.status == "complete")
        return tuple(name for name in complete if self._rundir.predictions(name).exists())

    @_told()
    def predictions(self, member: str) -> pd.DataFrame:
        """A member's probabilities: a column per label, rows in the table's order, ids as text in the index.

        Raises:
            DataError: they are not complete or were changed since, or there is no such member.
        """
        if member not in self.members:
            raise DataError(
                f"{self.path}: no predictions of {quoted(str(member))}"
                f"{did_you_mean(str(member), self.members)}; complete are: {', '.join(self.members) or 'none'}"
            )
        return _frame(self._rundir.predictions(member))

    @property
    @_told()
    def ensemble(self) -> pd.DataFrame:
        """The merged probabilities, as ``predictions`` has a member's.

        Raises:
            DataError: nothing has been merged.
        """
        if not self._rundir.ensemble.exists():
            raise DataError(f"{self.path}: there is no ensemble.csv; its run has merged nothing yet")
        return _frame(self._rundir.ensemble)

    @property
    @_told()
    def scores(self) -> pd.DataFrame:
        """Metrics of the ensemble and its members by the true labels, with 95 % bootstrap intervals.

        The columns are ``member``, ``metric``, ``value`` and ``interval``, which is (low, high).

        Raises:
            DataError: the true labels are not known, or the run is not complete.
        """
        demand_supported(for_analysis=True)
        import pandas as pd

        from ensemble.analysis.compare import compare as compare_sides

        result = compare_sides(self.path, self.path)
        if not result.metrics:
            raise DataError(result.remarks or [f"{self.path}: its config names no true labels"])
        rows = [
            (one.name, one.metric, one.first.value, (one.first.low, one.first.high)) for one in result.metrics
        ]
        return pd.DataFrame(rows, columns=["member", "metric", "value", "interval"])

    def __repr__(self) -> str:
        try:
            return Redactor(os.environ)("\n".join(lines("status", self.status, Page())))
        except DataError as error:  # a notebook shows it all the same
            return str(error)


class Preview(_Shown):
    """A run that has been checked and planned and not started.  Printed, it is what the command shows.

    Attributes:
        config: with all defaults.
        plan: where each member would run, and how long all would take.
        problems: why members fit nowhere, or not on some node of a cluster, a sentence each; empty where all fit.
    """

    def __init__(self, view: str, prepared: Prepared) -> None:
        self._view = view
        self._prepared = prepared
        self.config: RunConfig = prepared.config
        self.plan: Plan = prepared.plan
        of_nodes = (text for node in prepared.nodes for text in node.problems)
        self.problems: tuple[str, ...] = (*prepared.plan.problems, *of_nodes)

    def __repr__(self) -> str:
        redactor = self._prepared.loaded.redactor
        return redactor("\n".join(lines(self._view, self._prepared, Page())))


def _preview(
    view: str, config: ConfigFiles, overrides: Overrides | None, predictions_in: Path | None = None
) -> Preview:
    from ensemble.pipeline.prepare import prepare

    loaded = _load(config, overrides)
    with _told(loaded.redactor):
        return Preview(view, prepare(loaded, view == "validate", predictions_in))


def _load(config: object, overrides: Overrides | None) -> LoadedConfig:
    demand_supported()
    with _told():
        listed = config if isinstance(config, Sequence) and not isinstance(config, str | bytes) else [config]
        if not listed:
            raise ConfigError("config: the list is empty; give the path of a YAML file")
        sources = [_source(one, "give the path of a YAML file, or a dict") for one in listed]
        return load(sources, () if overrides is None else _texts(overrides))


def _source(given: object, advice: str) -> ConfigSource:
    """The path of a YAML file, or a mapping in its place."""
    if isinstance(given, MappingConfig):
        return given
    return mapping_config(given) if isinstance(given, Mapping) else _path(given, advice)


def _count(name: str, given: object) -> int | None:
    """A whole number of at least 1, whatever its type is; None as it is."""
    if given is None:
        return None
    try:
        count = 0 if isinstance(given, bool) else operator.index(cast(SupportsIndex, given))
    except TypeError:
        count = 0
    if count < 1:
        raise ConfigError(f"{name}: give a whole number of at least 1, not {quoted(str(given))}")
    return count


def _fit_sources(given: object) -> list[ConfigSource]:
    """Configs or CSVs; a mapping without the key ``models`` holds paths by their names."""
    advice = "give the path of a config or of a CSV"
    if isinstance(given, Mapping) and "models" not in given:
        return [*_files(given, advice)]
    listed = given if isinstance(given, Sequence) and not isinstance(given, str | bytes) else [given]
    return [_source(one, advice) for one in listed]


def _files(given: object, advice: str) -> list[Path]:
    """A path, several, or paths by their names, which become ``NAME=path``."""
    if isinstance(given, Mapping):
        return [Path(f"{name}={_path(path, advice)}") for name, path in given.items()]
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        return [_path(path, advice) for path in given]
    return [_path(given, advice)]


def _path(given: object, advice: str) -> Path:
    if not isinstance(given, str | os.PathLike):
        raise ConfigError(f"{quoted(repr(given))} is no path; {advice}")
    return Path(given)


def _texts(overrides: Overrides) -> Sequence[str]:
    if not isinstance(overrides, Mapping):
        is_list = isinstance(overrides, Sequence) and not isinstance(overrides, str)
        if is_list and all(isinstance(text, str) for text in overrides):
            return overrides
        raise ConfigError(
            'overrides: give a mapping or a list of texts, such as {"limit": 100} or ["limit=100"]'
        )
    texts = []
    for key, value in overrides.items():
        if not isinstance(key, str) or "=" in key:
            raise ConfigError(f"overrides: {quoted(repr(key))} is no key; write it like models.gemma2.weight")
        try:
            texts.append(f"{key}={json.dumps(value, ensure_ascii=False, default=_plain)}")  # YAML takes JSON
        except (TypeError, ValueError, AttributeError, RecursionError):
            raise ConfigError(
                f"overrides: {key} holds {quoted(repr(value))}; give numbers, texts, lists and mappings"
            ) from None
    return texts


def _plain(value: Any) -> Any:
    """What is no JSON by itself: paths, and numbers and arrays of numpy."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value.tolist()


def _frame(path: Path) -> pd.DataFrame:
    import pandas as pd

    from ensemble.pipeline.prediction_files import read_as_written

    file = read_as_written(path)
    index = pd.Index(file.ids.to_pandas(), name=file.id_column)
    return pd.DataFrame(file.values, columns=list(file.labels), index=index)
