"""Commands, printing and exit codes; no logic."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from ensemble import __version__
from ensemble.errors import (
    ConfigError,
    DeviceError,
    EnsembleError,
    Interrupted,
    MembersFailed,
    TimeLimitReached,
)
from ensemble.redact import Redactor, guard_output

# Commands import what they need when they run: --help and a typo in a key shall answer at once.
if TYPE_CHECKING:
    from rich.console import Console

    from ensemble.config import LoadedConfig

_FILE_WIDTH = 120  # where nothing says how wide the reader's window is
app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run several Hugging Face models over one table, each in a process of its own, and merge them.",
)

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML that describes the run.")]
SetOption = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        default_factory=list,
        show_default=False,
        help="Override a key, such as models.gemma2.weight=0.5.",
    ),
]
LimitOption = Annotated[
    int | None, typer.Option("--limit", metavar="N", min=1, help="Only the first N rows.")
]
OptionalConfigArgument = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help="A run to check it for.")
]
ProblemsOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print problems only.")]
RunDirArgument = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The output_dir of a run.")]
FreshOption = Annotated[bool, typer.Option("--fresh", help="Start over, whatever an earlier run did.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]


@app.command()
def run(
    config: ConfigArgument,
    sets: SetOption,
    limit: LimitOption = None,
    fresh: FreshOption = False,
    quiet: QuietOption = False,
) -> None:
    """Run every model of CONFIG over its table and merge the probabilities.

    What an earlier run in the same output_dir did of the same work is kept: the same command again goes on.
    """
    loaded = _load(config, sets, limit)
    from ensemble.processage import process_age_seconds
    from ensemble.report.progress import choose_display
    from ensemble.report.terminal import (
        bad_rows_text,
        coverage_text,
        failure_text,
        float32_text,
        gaps_text,
        left_out_text,
        members_table,
        no_better_text,
        oom_text,
        repeated_text,
        shown_path,
        truncation_text,
    )
    from ensemble.run import run as run_config

    display = choose_display(sys.stdout, quiet, _console)
    result = run_config(loaded, display, fresh, process_age_seconds())
    console = _console()
    # Whoever read the output may have gone (rich leaves by SystemExit then); the files are there.
    with contextlib.suppress(OSError, SystemExit):
        if not quiet:
            console.print(members_table(result.members, result.results.scores))
            if warning := no_better_text(result.results.scores):
                console.print(warning, markup=False)
            for tell in (truncation_text, repeated_text, oom_text, float32_text):
                for text in filter(None, map(tell, result.members)):
                    console.print(text, markup=False)
            policy = loaded.config.on_bad_row
            for text in filter(None, (bad_rows_text(state, policy) for state in result.members)):
                console.print(text, markup=False)
            if idle := gaps_text(result.gaps):
                console.print(idle, markup=False)
            if result.left_out:
                console.print(left_out_text(result.left_out, result.members), markup=False)
            for name, path in result.results.files.items():
                console.print(f"{name}: {shown_path(path)}", markup=False)
    results = result.results
    if failures := result.failures:
        raise MembersFailed([failure_text(failure) for failure in failures])
    if result.status == "time_limit":
        raise TimeLimitReached(coverage_text(result.members, results.merged_rows, results.filled_rows))


@app.command()
def status(run_dir: RunDirArgument) -> None:
    """Tell what a run in RUN_DIR (its output_dir) has done, does and has still to do; it may be running."""
    from ensemble.report.status import status_report

    console = _console()
    report = status_report(run_dir)
    with contextlib.suppress(OSError, SystemExit):
        console.print(report.table)
        for line in report.lines:
            console.print(line, markup=False)


@app.command()
def validate(
    config: ConfigArgument,
    sets: SetOption,
    limit: LimitOption = None,
    quiet: QuietOption = False,
) -> None:
    """Check CONFIG: keys, paths, columns, ids, labels and templates, without loading a model."""
    loaded = _load(config, sets, limit)
    from ensemble.prepare import prepare
    from ensemble.report.preview import validation_lines

    prepared = prepare(loaded)
    with contextlib.suppress(OSError):
        for line in () if quiet else validation_lines(prepared):
            typer.echo(line)


@app.command()
def plan(config: ConfigArgument, sets: SetOption, limit: LimitOption = None) -> None:
    """Show what CONFIG would take: memory per model, what fits on which GPU, where each runs, and the time."""
    loaded = _load(config, sets, limit)
    from ensemble.prepare import prepare
    from ensemble.report.planned import memory_table, opening_lines, placement_lines

    prepared = prepare(loaded, must_fit=False)
    console = _console()
    with contextlib.suppress(OSError, SystemExit):
        for line in opening_lines(prepared):
            console.print(line, markup=False)
        console.print(memory_table(prepared))
        for line in placement_lines(prepared):
            console.print(line, markup=False)
    if prepared.plan.problems:
        raise DeviceError(prepared.plan.problems)


@app.command()
def doctor(sets: SetOption, config: OptionalConfigArgument = None, quiet: ProblemsOption = False) -> None:
    """Check this machine: Python, packages, driver, GPUs, torch on each of them, memory, disk, the hub."""
    from ensemble.doctor import examine

    if sets and config is None:
        raise typer.BadParameter("--set changes a CONFIG; name one")
    problems = 0
    for finding in examine(config, sets):
        problems += finding.mark == "problem"
        with contextlib.suppress(OSError):
            for line in finding.lines() if finding.mark == "problem" or not quiet else ():
                typer.echo(line)
    with contextlib.suppress(OSError):
        if not quiet:
            typer.echo(f"{problems} to mend: no run can start" if problems else "A run can start.")
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
    guard_output(Redactor(os.environ))
    code = _run_command()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more, or it was closed
            stream.flush()
    # Not sys.exit: a thread of Arrow's CSV reader that is still about when Python tears down its C++ objects has
    # been seen to abort the process, exit code -6, after everything was said and done.
    os._exit(code)


def _run_command() -> int:
    try:
        app()
    except EnsembleError as error:
        for problem in error.problems:
            typer.secho("error: ", fg="red", nl=False, err=True)
            typer.echo(problem, err=True)
        return error.exit_code
    except Interrupted as stopped:
        typer.echo(f"error: {stopped}", err=True)
        return stopped.exit_code
    except KeyboardInterrupt:
        return 130
    except SystemExit as leaving:  # how typer ends a command, and a wrong one
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    return 0


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=_FILE_WIDTH)


def _load(config: Path, sets: list[str], limit: int | None) -> LoadedConfig:
    from ensemble.arrays import import_numpy
    from ensemble.config import load_config
    from ensemble.packages import unsupported

    if found := [*unsupported()]:
        raise ConfigError(found)

    loaded = load_config(config, [*sets, *([f"limit={limit}"] if limit is not None else [])])
    guard_output(loaded.redactor)  # now that its own secrets are known
    import_numpy()
    return loaded
