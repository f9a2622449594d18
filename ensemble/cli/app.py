"""Commands, printing and exit codes; no logic."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from ensemble.cli.json_views import plan_json, print_json, problems_as_json, status_json
from ensemble.cli.layout import Page
from ensemble.cli.views import show
from ensemble.common.errors import ConfigError, DeviceError, EnsembleError, Interrupted
from ensemble.common.redact import guard_output
from ensemble.common.text import plural
from ensemble.common.version import __version__

# Commands import what they need when they run: --help and a typo in a key shall answer at once.
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ensemble.config import ConfigSource, LoadedConfig

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run several Hugging Face models over one table, each in a process of its own, and merge them.",
)

ConfigArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="CONFIG",
        readable=False,
        help="YAML file of the run; later files override earlier ones.",
    ),
]
SetOption = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        default_factory=list,
        show_default=False,
        help="Override a key, for example models.gemma2.weight=0.5.",
    ),
]
LimitOption = Annotated[
    int | None, typer.Option("--limit", metavar="N", min=1, help="Use only the first N rows.")
]
OptionalConfigArgument = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="CONFIG",
        readable=False,
        show_default=False,
        help="Config of a run to check this machine for.",
    ),
]
ProblemsOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print problems only.")]
TableArgument = Annotated[
    Path,
    typer.Argument(metavar="TABLE", readable=False, help="The table: CSV, TSV, Parquet or JSON lines."),
]
ModelsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL", help="Folders of checkpoints or adapters, or CSVs of predictions made elsewhere."
    ),
]
SampleOption = Annotated[
    Path | None,
    typer.Option(
        "--sample", metavar="CSV", help="Sample submission (default: sample_submission.csv beside TABLE)."
    ),
]
OutputOption = Annotated[Path, typer.Option("--output", "-o", metavar="YAML", help="File to write.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]
RunDirArgument = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", readable=False, help="The output_dir of a run.")
]
RowsOption = Annotated[
    int | None,
    typer.Option("--rows", metavar="N", min=1, help="Rows of the whole run (default: those of the table)."),
]
LengthsOption = Annotated[
    Path | None,
    typer.Option(
        "--lengths-from",
        metavar="TABLE",
        readable=False,
        help="Table to take the rows from, for example train.csv.",
    ),
]
PredictionsOption = Annotated[
    Path | None,
    typer.Option(
        "--predictions-from",
        metavar="RUN_DIR",
        help="Run whose predictions tell how many rows `when` selects.",
    ),
]
SampleRowsOption = Annotated[
    int | None,
    typer.Option(
        "--sample-rows", metavar="N", min=1, help="Rows to compute (default: enough to measure the speed)."
    ),
]
FirstSideArgument = Annotated[
    Path,
    typer.Argument(metavar="A", readable=False, help="The output_dir of a run, or a CSV of predictions."),
]
SecondSideArgument = Annotated[
    Path | None,
    typer.Argument(metavar="B", readable=False, help="The run or CSV to compare with, for the same rows."),
]
MetricsOption = Annotated[
    list[str],
    typer.Option(
        "--metric",
        metavar="NAME",
        default_factory=list,
        show_default=False,
        help="log_loss, accuracy, macro_f1, auc, brier, ece, quadratic_kappa, map@K or rmse; repeatable.",
    ),
]
ActivationOption = Annotated[
    Literal["softmax", "sigmoid", "none"] | None,
    typer.Option(
        "--activation",
        help="Values of the CSVs: probabilities that sum to 1 (softmax), one per label (sigmoid), or any numbers.",
    ),
]
SourcesArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="CONFIG|[NAME=]CSV...",
        readable=False,
        help="YAML files of a run (later files override earlier ones), or CSVs of members' predictions.",
    ),
]
LabelsOption = Annotated[
    Path | None,
    typer.Option(
        "--labels",
        metavar="TABLE",
        readable=False,
        help="Table with the true labels, if the run's table has none.",
    ),
]
LabelColumnOption = Annotated[
    str | None,
    typer.Option(
        "--label-column",
        metavar="NAME",
        help="Column of the true labels (default: label, or a column per label).",
    ),
]
IdColumnOption = Annotated[
    str | None,
    typer.Option(
        "--id-column", metavar="NAME", help="Column of the ids (default: id, else the first column)."
    ),
]
MetricOption = Annotated[str, typer.Option("--metric", metavar="NAME", help="Metric to optimize.")]
FitMethodOption = Annotated[
    Literal["simplex", "greedy", "stacking"] | None,
    typer.Option(
        "--method",
        show_default=False,
        help="Weights that minimize log loss (simplex), greedy selection for any metric, or a logistic "
        "regression (default: simplex for log_loss, greedy for other metrics).",
    ),
]
CalibrationOption = Annotated[
    Literal["none", "temperature", "vector"],
    typer.Option(
        "--calibration",
        help="Calibration of each member: one temperature, or a scale and bias per label (vector).",
    ),
]
MergeMethodOption = Annotated[
    Literal["mean", "geometric_mean"] | None,
    typer.Option(
        "--merge-method",
        help="Merge method that the weights of CSVs are for (default: mean); a CONFIG names its own.",
    ),
]
FoldsOption = Annotated[
    int, typer.Option("--folds", metavar="N", min=2, help="Number of cross-validation folds.")
]
SeedOption = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Random seed for the folds.")]
PageOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="HTML", help="File to write (default: RUN_DIR/report.html)."),
]
FreshOption = Annotated[bool, typer.Option("--fresh", help="Start over; do not resume an earlier run.")]
ReuseOption = Annotated[
    Path | None,
    typer.Option("--reuse", metavar="RUN_DIR", help="Another run, whose rows need not be computed again."),
]
FilesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="[NAME=]CSV",
        help="Predictions: an id and a column per label (default name: the file's, without its ending).",
    ),
]
MergedOption = Annotated[Path, typer.Option("--output", "-o", metavar="CSV", help="File to write.")]
MethodOption = Annotated[
    str | None, typer.Option("--method", "-m", metavar="METHOD", help="mean (the default), median, vote, ...")
]
WeightOption = Annotated[
    list[str],
    typer.Option(
        "--weight",
        metavar="NAME=NUMBER",
        default_factory=list,
        show_default=False,
        help="Weight of a file; give one for each file.",
    ),
]
WeightsOption = Annotated[
    Path | None,
    typer.Option(
        "--weights", metavar="YAML", readable=False, help="Weights and calibration, as fit writes them."
    ),
]
LabelOption = Annotated[
    list[str],
    typer.Option(
        "--label",
        metavar="NAME",
        default_factory=list,
        show_default=False,
        help="Label column to merge (default: all).",
    ),
]
PartialOption = Annotated[bool, typer.Option("--partial", help="Files may lack rows that others have.")]
TuneRowsOption = Annotated[
    int | None,
    typer.Option(
        "--rows",
        metavar="N",
        min=1,
        help="Rows of the sample (default: 256, or more if those take too little time).",
    ),
]
ToleranceOption = Annotated[
    float | None,
    typer.Option(
        "--tolerance",
        metavar="X",
        min=0,
        help="Largest allowed difference from float32's probabilities: the mean over rows of each row's largest "
        "difference (default: 0.02).",
    ),
]
WriteOption = Annotated[
    Path | None,
    typer.Option("--write", metavar="YAML", help="File for the settings found, for `run CONFIG YAML`."),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead; keys: docs/running.md.")
]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Also print what the log records.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]


@app.command()
def run(
    config: ConfigArgument,
    sets: SetOption,
    limit: LimitOption = None,
    fresh: FreshOption = False,
    reuse: ReuseOption = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Run every model of CONFIG and merge the probabilities.

    Work that an earlier run in the same output_dir has done is kept: the same command resumes where it stopped.
    """
    loaded = _load(config, sets, limit)
    from ensemble.cli.progress import choose_display, log_shown
    from ensemble.cli.views.summary import raise_unless_complete
    from ensemble.common.host import process_age_seconds
    from ensemble.pipeline.run import run as run_config

    display = choose_display(sys.stdout, quiet)
    with log_shown(display) if verbose else contextlib.nullcontext():
        report = run_config(loaded, display, fresh, process_age_seconds(), reuse=reuse)
    if not quiet:
        show("summary", report, sys.stdout)
    raise_unless_complete(report)


@app.command()
def status(run_dir: RunDirArgument, as_json: JsonOption = False) -> None:
    """Show how far the run in RUN_DIR is, or how it ended."""
    from ensemble.commands.status import RunStatus

    with problems_as_json(as_json):
        found = RunStatus.of(run_dir)
    if as_json:
        print_json(status_json(found))
    else:
        show("status", found, sys.stdout)


@app.command()
def report(run_dir: RunDirArgument, output: PageOption = None) -> None:
    """Write the report of the run in RUN_DIR as one HTML file.

    A run writes its report at its end, unless its config says report: false. This command writes it again.
    """
    with _prepared_process(for_analysis=True):
        from ensemble.api import write_report

    page, problems = write_report(run_dir, output)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"report: {page}")


@app.command()
def validate(
    config: ConfigArgument,
    sets: SetOption,
    limit: LimitOption = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check CONFIG without loading a model. Checks keys, paths, columns, ids, labels, templates and devices."""
    with problems_as_json(as_json):
        loaded = _load(config, sets, limit)
        from ensemble.pipeline.prepare import prepare

        prepared = prepare(loaded)
    if as_json:
        print_json(plan_json(prepared), loaded.redactor)
    elif not quiet:
        show("validate", prepared, sys.stdout)


@app.command()
def plan(
    config: ConfigArgument,
    sets: SetOption,
    limit: LimitOption = None,
    predictions_from: PredictionsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the memory, devices and time that CONFIG would take. Also shows which GPUs each model fits on."""
    with problems_as_json(as_json):
        loaded = _load(config, sets, limit)
        from ensemble.pipeline.prepare import prepare

        prepared = prepare(loaded, must_fit=False, predictions_in=predictions_from)
    problems = [*prepared.plan.problems, *(text for node in prepared.nodes for text in node.problems)]
    if as_json:
        print_json(plan_json(prepared, problems), loaded.redactor)
    else:
        show("plan", prepared, sys.stdout)
    if problems:
        raise DeviceError(problems)


@app.command()
def init(
    table: TableArgument,
    models: ModelsArgument,
    sample: SampleOption = None,
    output: OutputOption = Path("config.yaml"),
    force: ForceOption = False,
) -> None:
    """Write a first config for TABLE and MODELS, and validate it. Guesses columns, labels and lengths."""
    with _prepared_process():
        from ensemble.commands.init import write_first_config
    made = write_first_config(table, models, sample, output, force)
    page = Page.of(sys.stdout)
    for line in (f"{output}: written, to be looked at", *(f"guess: {guess}" for guess in made.guesses)):
        print(*page.wrapped(line, later="  "), sep="\n")
    try:
        validate([output], [])
    except EnsembleError as error:
        said = f"{output} does not pass validate yet; change it by what is said here, then validate it again"
        raise type(error)([said, *error.problems]) from error


@app.command()
def rehearse(
    config: ConfigArgument,
    sets: SetOption,
    rows: RowsOption = None,
    lengths_from: LengthsOption = None,
    sample_rows: SampleRowsOption = None,
    quiet: QuietOption = False,
) -> None:
    """Run a sample of CONFIG's table and estimate the whole run.

    The estimate covers time, memory and disk for --rows rows. Files of real runs are not touched. The exit code is
    1 if the run would exceed its time_limit or the free disk space.
    """
    loaded = _load(config, sets, None)
    from ensemble.cli.progress import choose_display
    from ensemble.commands.rehearse import rehearse as rehearse_config
    from ensemble.common.host import process_age_seconds

    result = rehearse_config(
        loaded,
        lambda: choose_display(sys.stdout, quiet),
        rows,
        lengths_from,
        sample_rows,
        process_age_seconds(),
    )
    if not quiet:
        show("rehearse", result, sys.stdout)
    elif result.problems:
        print(*(f"error: {problem}" for problem in result.problems), sep="\n", file=sys.stderr)
    if result.problems:
        raise typer.Exit(1)


@app.command()
def tune(
    config: ConfigArgument,
    sets: SetOption,
    rows: TuneRowsOption = None,
    tolerance: ToleranceOption = None,
    write: WriteOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> None:
    """Find each model's fastest settings on this machine.

    Measures precision, quantization, attention, batch size and parallel workers on a sample, each in a fresh
    worker, and keeps settings that do not change the probabilities by more than --tolerance. The same command
    resumes an interrupted tuning. Then: ensemble run CONFIG YAML, with the file that --write wrote.
    """
    loaded = _load(config, sets, None)
    with _prepared_process():
        from ensemble.analysis.tune.command import check_output, overrides_beside
        from ensemble.analysis.tune.command import tune as tune_config
    from ensemble.cli.progress import choose_display

    target = None if write is None else check_output(write, force, config)
    result = tune_config(loaded, choose_display(sys.stdout, quiet), rows, tolerance, target)
    if not quiet:
        show("tune", result, sys.stdout)
        if write is not None and result.has_result:
            given = [text for one in overrides_beside(loaded, result) for text in ("--set", one)]
            print(
                f"{write}: written; run it as `ensemble run {shlex.join(map(str, [*config, write, *given]))}`"
            )
    if not result.has_result:
        if quiet:
            print(
                "error: no settings could be chosen for any member; without --quiet tune says why",
                file=sys.stderr,
            )
        raise typer.Exit(1)


@app.command()
def merge(
    files: FilesArgument,
    output: MergedOption,
    weight: WeightOption,
    label: LabelOption,
    sets: SetOption,
    method: MethodOption = None,
    weights: WeightsOption = None,
    id_column: IdColumnOption = None,
    activation: ActivationOption = None,
    partial: PartialOption = False,
    quiet: QuietOption = False,
) -> None:
    """Merge CSVs of predictions into one, without a config.

    Rows are joined by id, and written in the order of the first file. --set ensemble.power=2 sets a key of the
    merge method.
    """
    with _prepared_process():
        from ensemble.commands.merge_files import merge_files
        from ensemble.pipeline.signals import heed_signals
    if wrong := [one for one in weight if "=" not in one]:
        raise typer.BadParameter(f"--weight {wrong[0]}: write it like NAME=0.5")
    try:
        with heed_signals():  # so that no signal leaves a temporary file
            merged = merge_files(
                files,
                output,
                [*([] if method is None else [f"ensemble.method={method}"]), *sets],
                weights,
                dict(one.split("=", 1) for one in weight),
                id_column,
                label,
                {"partial": partial} | ({} if activation is None else {"activation": activation}),
            )
    except Interrupted as stopped:
        raise Interrupted(stopped.exit_code - 128, "run the same command again") from None
    if not quiet:
        show("merge", merged, sys.stdout)


@app.command()
def compare(
    first: FirstSideArgument,
    metrics: MetricsOption,
    second: SecondSideArgument = None,
    labels: LabelsOption = None,
    label_column: LabelColumnOption = None,
    id_column: IdColumnOption = None,
    activation: ActivationOption = None,
) -> None:
    """Compare two runs, or two CSVs of predictions.

    Shows settings, rows whose prediction changed, metrics, time and memory. Metrics need the true labels, from the
    table of a run or --labels; differences have paired confidence intervals.
    """
    if second is None:
        raise typer.BadParameter(
            f"name what to hold against {first}: another run, or a CSV of predictions; `report` shows one run by "
            f"itself, and `compare {first} {first}` has any --metric of it and its members"
        )
    with _prepared_process(for_analysis=True):
        from ensemble.analysis.compare import compare as compare_sides
    result = compare_sides(first, second, metrics, labels, label_column, id_column, activation)
    show("compare", result, sys.stdout)


@app.command()
def fit(
    sources: SourcesArgument,
    sets: SetOption,
    labels: LabelsOption = None,
    label_column: LabelColumnOption = None,
    id_column: IdColumnOption = None,
    metric: MetricOption = "log_loss",
    method: FitMethodOption = None,
    calibration: CalibrationOption = "none",
    merge_method: MergeMethodOption = None,
    activation: ActivationOption = None,
    folds: FoldsOption = 5,
    seed: SeedOption = 0,
    partial: PartialOption = False,
    output: OutputOption = Path("weights.yaml"),
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> None:
    """Fit weights and calibrations to true labels.

    Writes weights.yaml, and reports on held-out rows whether the weights beat equal weights. The run of CONFIG must
    be complete, and its table must have the labels. Then: ensemble run CONFIG weights.yaml, which merges again.
    """
    with _prepared_process(for_analysis=True):
        from ensemble.analysis.fit import Options
        from ensemble.analysis.weights_file import TruthFile, check_output, fit_sources, write_weights
        from ensemble.pipeline.load import load

    target = check_output(output, force, sources, labels)
    options = Options(metric, method, calibration, folds, seed)

    def loaded(configs: Sequence[ConfigSource]) -> LoadedConfig:
        found = load(configs, sets)
        guard_output(found.redactor)
        return found

    truth = TruthFile(labels, label_column, id_column)
    report, text = fit_sources(
        sources, loaded, truth, options, merge_method, activation, bool(sets), partial, target
    )
    write_weights(target, text)
    if not quiet:
        show("fit", report, sys.stdout)
        print(f"{output}: written")


@app.command()
def doctor(sets: SetOption, config: OptionalConfigArgument = None, quiet: ProblemsOption = False) -> None:
    """Check whether runs can start on this machine. Checks Python, packages, GPUs, torch, memory, disk, the hub."""
    from ensemble.cli.views.doctor import finding_lines
    from ensemble.commands.doctor import examine

    if sets and not config:
        raise typer.BadParameter("--set changes a CONFIG; name one")
    problems, page = 0, Page.of(sys.stdout)
    for finding in examine(config or (), sets):
        problems += finding.mark == "problem"
        if finding.mark == "problem" or not quiet:
            print(*finding_lines(finding, page), sep="\n")
    if not quiet:
        print(f"{plural(problems, 'problem')} to fix: no run can start" if problems else "A run can start.")
    if problems:
        raise typer.Exit(2)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"ensemble {__version__}")
        raise typer.Exit


def main() -> NoReturn:
    """Run the command line; every error of ours becomes its sentences and its exit code."""
    code, problems = 0, tuple[str, ...]()
    try:
        # Typer would change how the shell completes "python".
        if "-completion" in "".join(sys.argv[1:2]) and Path(sys.argv[0]).name == "__main__.py":
            raise ConfigError(
                "shells complete the command `ensemble`, which pip installs; run it with this option"
            )
        app()
    except EnsembleError as error:
        code, problems = error.exit_code, error.problems
    except Interrupted as stopped:
        code, problems = stopped.exit_code, (str(stopped),)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as leaving:  # how typer ends a command, and a wrong one
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    for problem in problems:
        first, *others = Page.of(sys.stderr).wrapped(problem, "error: ", later="  ")
        if sys.stderr.isatty() and "NO_COLOR" not in os.environ:
            first = first.replace("error:", "\x1b[31merror:\x1b[0m", 1)
        print(first, *others, sep="\n", file=sys.stderr, flush=True)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more, or it was closed
            stream.flush()
    # Not sys.exit: a thread of Arrow's CSV reader that is still about when Python tears down its C++ objects has
    # been seen to abort the process, exit code -6, after everything was said and done.
    os._exit(code)


@contextlib.contextmanager
def _prepared_process(for_analysis: bool = False) -> Iterator[None]:
    """Around the first import of numpy and pyarrow; for commands of ``ensemble.analysis``, of what they need, too.

    Raises:
        ConfigError: a package is too old.
    """
    from ensemble.common.packages import demand_supported
    from ensemble.common.python_process import keep_pandas_out, one_thread_for_numpy

    demand_supported(for_analysis)
    if for_analysis:
        os.environ["MPLBACKEND"] = "svg"  # what the user has set may be unknown here, or need a screen
    with one_thread_for_numpy():
        yield
        keep_pandas_out()  # with pyarrow, which imports numpy


def _load(config: Path | Sequence[Path], sets: list[str], limit: int | None) -> LoadedConfig:
    with _prepared_process():
        from ensemble.pipeline.load import load

        loaded = load(config, [*sets, *([f"limit={limit}"] if limit is not None else [])])
        guard_output(loaded.redactor)  # now that its own secrets are known
    return loaded
