"""Commands: they call the functions of the API, and say what they return by printing and by exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from ensemble import api
from ensemble.cli.help import argument, calls, described_by, option, repeatable
from ensemble.cli.layout import page_width, wrapped
from ensemble.cli.views import show, show_json
from ensemble.common.errors import EnsembleError, Interrupted
from ensemble.common.protocol import Activation
from ensemble.common.text import plural
from ensemble.common.version import __version__

if TYPE_CHECKING:
    from ensemble.commands.doctor import Finding

app = typer.Typer(
    no_args_is_help=True,
    # As `python -m ensemble` it would change how the shell completes "python".
    add_completion=Path(sys.argv[0]).name != "__main__.py",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run several Hugging Face models over one table, each in a process of its own, and merge them.",
)

# Options of several commands.  Without a ``help`` they are described by the first command that has them.
ConfigArgument = Annotated[list[Path], argument("CONFIG")]
SetOption = Annotated[list[str], repeatable("--set", "KEY=VALUE")]
LimitOption = Annotated[int | None, option("--limit", "N", min=1, help="Use only the first N rows.")]
RunDirArgument = Annotated[Path, argument("RUN_DIR", help="The output_dir of a run.")]
JsonOption = Annotated[bool, option("--json", help="Print one JSON object instead; keys: docs/running.md.")]
QuietOption = Annotated[bool, option("--quiet -q")]
ForceOption = Annotated[bool, option("--force", help="Replace an existing file.")]
LabelsOption = Annotated[Path | None, option("--labels", "TABLE")]
LabelColumnOption = Annotated[str | None, option("--label-column", "NAME")]
IdColumnOption = Annotated[str | None, option("--id-column", "NAME")]
ActivationOption = Annotated[Activation | None, option("--activation")]
PartialOption = Annotated[bool, option("--partial")]


@app.command()
@described_by(api.run)
def run(
    config: ConfigArgument,
    overrides: SetOption,
    limit: LimitOption = None,
    fresh: Annotated[bool, option("--fresh")] = False,
    reuse: Annotated[Path | None, option("--reuse", "RUN_DIR")] = None,
    quiet: QuietOption = False,
    verbose: Annotated[bool, option("--verbose -v")] = False,
) -> None:
    api.run(config, _limited(overrides, limit), fresh=fresh, reuse=reuse, quiet=quiet, verbose=verbose)


@app.command()
def status(run_dir: RunDirArgument, as_json: JsonOption = False) -> None:
    """Show how far the run in RUN_DIR is, or how it ended."""
    from ensemble.commands.status import RunStatus

    run_status = RunStatus.of(run_dir)
    if as_json:
        show_json("status", run_status)
    else:
        show("status", run_status, sys.stdout)


@app.command()
@described_by(api.report)
def report(
    path: RunDirArgument, output: Annotated[Path | None, option("--output -o", "HTML")] = None
) -> None:
    print(f"report: {api.report(path, output)}")


@app.command()
@described_by(api.validate)
def validate(
    config: ConfigArgument,
    overrides: SetOption,
    limit: LimitOption = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    preview = api.validate(config, _limited(overrides, limit))
    if as_json:
        show_json("plan", preview.prepared)
    elif not quiet:
        show("validate", preview.prepared, sys.stdout)


@app.command()
@described_by(api.plan)
def plan(
    config: ConfigArgument,
    overrides: SetOption,
    limit: LimitOption = None,
    predictions_from: Annotated[Path | None, option("--predictions-from", "RUN_DIR")] = None,
    as_json: JsonOption = False,
) -> None:
    preview = api.plan(config, _limited(overrides, limit), predictions_from=predictions_from)
    if as_json:
        show_json("plan", preview.prepared)
    else:
        show("plan", preview.prepared, sys.stdout)
    if preview.problems:
        _print_errors(preview.problems)
        raise typer.Exit(2)


@app.command()
def init(
    table: Annotated[Path, argument("TABLE", help="The table: CSV, TSV, Parquet or JSON lines.")],
    models: Annotated[
        list[str],
        argument("MODEL", help="Folders of checkpoints or adapters, or CSVs of predictions made elsewhere."),
    ],
    sample: Annotated[
        Path | None,
        option("--sample", "CSV", help="Sample submission (default: sample_submission.csv beside TABLE)."),
    ] = None,
    output: Annotated[Path, option("--output -o", "YAML", help="File to write.")] = Path("config.yaml"),
    force: ForceOption = False,
) -> None:
    """Write a first config for TABLE and MODELS, and validate it. Guesses columns, labels and lengths."""
    with api.imports():
        from ensemble.commands.init import write_first_config
    first = write_first_config(table, models, sample, output, force)
    for text in (f"{output}: written; look through it", *(f"guess: {guess}" for guess in first.guesses)):
        print(*wrapped(text, page_width(sys.stdout)), sep="\n")
    try:
        show("validate", api.validate([output]).prepared, sys.stdout)
    except EnsembleError as error:
        advice = f"{output} does not pass validate yet; fix these problems, then validate it again"
        raise type(error)([advice, *error.problems]) from error


@app.command()
@described_by(api.rehearse)
def rehearse(
    config: ConfigArgument,
    overrides: SetOption,
    rows: Annotated[int | None, option("--rows", "N", min=1)] = None,
    lengths_from: Annotated[Path | None, option("--lengths-from", "TABLE")] = None,
    sample: Annotated[int | None, option("--sample-rows", "N", min=1)] = None,
    quiet: QuietOption = False,
) -> None:
    rehearsal = api.rehearse(
        config, overrides, rows=rows, lengths_from=lengths_from, sample=sample, quiet=quiet
    )
    if rehearsal.problems:
        if quiet:
            _print_errors(rehearsal.problems)
        raise typer.Exit(1)


@app.command()
@described_by(api.tune)
def tune(
    config: ConfigArgument,
    overrides: SetOption,
    rows: Annotated[int | None, option("--rows", "N", min=1)] = None,
    tolerance: Annotated[float | None, option("--tolerance", "X", min=0)] = None,
    write: Annotated[Path | None, option("--write", "YAML")] = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> None:
    tuning = api.tune(
        config, overrides, rows=rows, tolerance=tolerance, write=write, force=force, quiet=quiet
    )
    if not tuning.has_result:
        if quiet:
            _print_errors(["no settings could be chosen for any member; without --quiet tune says why"])
        raise typer.Exit(1)


@app.command()
@described_by(api.merge)
def merge(
    files: Annotated[list[str], argument("[NAME=]CSV")],
    output: Annotated[Path, option("--output -o", "CSV")],
    weight: Annotated[
        list[str], repeatable("--weight", "NAME=NUMBER", help="Weight of a file; give one for each file.")
    ],
    labels: Annotated[list[str], repeatable("--label", "NAME")],
    overrides: SetOption,
    method: Annotated[str | None, option("--method -m", "METHOD")] = None,
    weights: Annotated[Path | None, option("--weights", "YAML")] = None,
    id_column: IdColumnOption = None,
    activation: ActivationOption = None,
    partial: PartialOption = False,
    quiet: QuietOption = False,
) -> None:
    if weight and len(weight) != len(files):
        raise typer.BadParameter("--weight: give one for each file")
    sets = [f"models.{text.replace('=', '.weight=', 1)}" for text in weight] + overrides
    api.merge(
        files,
        output,
        sets,
        method=method,
        weights=weights,
        id_column=id_column,
        labels=labels,
        activation=activation,
        partial=partial,
        quiet=quiet,
    )


@app.command()
@calls(api.compare)
def compare(
    first: Annotated[Path, argument("A")],
    second: Annotated[Path, argument("B")],
    metrics: Annotated[list[str], repeatable("--metric", "NAME")],
    labels: LabelsOption = None,
    label_column: LabelColumnOption = None,
    id_column: IdColumnOption = None,
    activation: ActivationOption = None,
) -> None: ...


@app.command()
@calls(api.fit)
def fit(
    sources: Annotated[list[Path], argument("CONFIG|[NAME=]CSV...")],
    overrides: SetOption,
    labels: LabelsOption = None,
    label_column: LabelColumnOption = None,
    id_column: IdColumnOption = None,
    metric: Annotated[str, option("--metric", "NAME")] = "log_loss",
    method: Annotated[
        Literal["simplex", "greedy", "stacking"] | None, option("--method", show_default=False)
    ] = None,
    calibration: Annotated[Literal["none", "temperature", "vector"], option("--calibration")] = "none",
    merge_method: Annotated[Literal["mean", "geometric_mean"] | None, option("--merge-method")] = None,
    activation: ActivationOption = None,
    folds: Annotated[int, option("--folds", "N", min=2)] = 5,
    seed: Annotated[int, option("--seed", "N", min=0)] = 0,
    partial: PartialOption = False,
    output: Annotated[Path, option("--output -o", "YAML")] = Path("weights.yaml"),
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> None: ...


@app.command()
def doctor(
    sets: SetOption,
    config: Annotated[
        list[Path] | None, argument("CONFIG", help="Config of a run to check this machine for.")
    ] = None,
    quiet: Annotated[bool, option("--quiet -q", help="Print problems only.")] = False,
) -> None:
    """Check whether runs can start on this machine. Checks Python, packages, GPUs, torch, memory, disk, the hub."""
    from ensemble.commands.doctor import examine

    if sets and not config:
        raise typer.BadParameter("--set changes a CONFIG; name one")
    problems = 0
    for finding in examine(config or (), sets):
        problems += finding.mark == "problem"
        if finding.mark == "problem" or not quiet:
            print(*_finding_lines(finding, page_width(sys.stdout)), sep="\n")
    if not quiet:
        print(f"{plural(problems, 'problem')} to fix: no run can start" if problems else "A run can start.")
    if problems:
        raise typer.Exit(2)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"ensemble {__version__}")
        raise typer.Exit


def main() -> NoReturn:
    """Run the command line; every error of this package becomes its sentences and its exit code."""
    code, problems = 0, tuple[str, ...]()
    api.own_process()
    try:
        app()
    except EnsembleError as error:
        code, problems = error.exit_code, error.problems
        if "--json" in sys.argv:
            print(json.dumps({"problems": problems}, indent=2))
    except Interrupted as stopped:
        code, problems = stopped.exit_code, (str(stopped),)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as leaving:  # how typer ends a command, and a wrong one
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    _print_errors(problems)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more, or it was closed
            stream.flush()
    # Not sys.exit: a thread of Arrow's CSV reader that is still about when Python tears down its C++ objects has
    # been seen to abort the process, exit code -6, after everything was said and done.
    os._exit(code)


def _limited(overrides: list[str], limit: int | None) -> list[str]:
    return overrides if limit is None else [*overrides, f"limit={limit}"]


def _finding_lines(finding: Finding, width: int | None) -> list[str]:
    """Return what ``doctor`` found in lines of at most 100 columns, its advice on lines of its own."""
    width, indent = min(width or 100, 100), " " * 9
    lines = wrapped(finding.text, width, f"{finding.mark:9}", indent)
    return lines + (wrapped(finding.advice, width, f"{indent}-> ", f"{indent}   ") if finding.advice else [])


def _print_errors(problems: Sequence[str]) -> None:
    for problem in problems:
        first, *others = wrapped(problem, page_width(sys.stderr), "error: ")
        if sys.stderr.isatty() and "NO_COLOR" not in os.environ:
            first = first.replace("error:", "\x1b[31merror:\x1b[0m", 1)
        print(first, *others, sep="\n", file=sys.stderr, flush=True)
