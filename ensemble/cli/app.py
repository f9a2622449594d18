"""Commands, printing and exit codes; no logic."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, NoReturn

import typer

from ensemble import __version__
from ensemble.cli.layout import Page, Table
from ensemble.common.errors import (
    ConfigError,
    DeviceError,
    EnsembleError,
    Interrupted,
    MembersFailed,
    TimeLimitReached,
)
from ensemble.common.redact import guard_output
from ensemble.common.text import plural

# Commands import what they need when they run: --help and a typo in a key shall answer at once.
if TYPE_CHECKING:
    from rich.console import Console

    from ensemble.config import LoadedConfig

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run several Hugging Face models over one table, each in a process of its own, and merge them.",
)

ConfigArgument = Annotated[
    Path, typer.Argument(metavar="CONFIG", readable=False, help="The run's YAML file.")
]
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
    Path | None, typer.Argument(metavar="CONFIG", readable=False, help="A run to check this machine for.")
]
ProblemsOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print problems only.")]
RunDirArgument = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", readable=False, help="The output_dir of a run.")
]
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

    Work that an earlier run in the same output_dir has done is kept: the same command resumes where it stopped.
    """
    loaded = _load(config, sets, limit)
    from ensemble.cli.progress import choose_display
    from ensemble.cli.summary import (
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
        truncation_text,
    )
    from ensemble.common.host import process_age_seconds
    from ensemble.common.text import shown_path
    from ensemble.pipeline.run import run as run_config

    display = choose_display(sys.stdout, quiet, _console)
    result = run_config(loaded, display, fresh, process_age_seconds())
    if not quiet:
        tells = (truncation_text, repeated_text, oom_text, float32_text)
        _show([members_table(result.members, result.results.scores, result.results.merged_rows)])
        _show([no_better_text(result.results.scores)])
        _show(tell(state) for tell in tells for state in result.members)
        _show(bad_rows_text(state, loaded.config.on_bad_row) for state in result.members)
        _show([gaps_text(result.gaps)])
        _show([left_out_text(result.left_out, result.members)] if result.left_out else [])
        _show(f"{name}: {shown_path(path)}" for name, path in result.results.files.items())
    results = result.results
    if failures := result.failures:
        raise MembersFailed([failure_text(failure) for failure in failures])
    if result.status == "time_limit":
        coverage = coverage_text(result.members, results.merged_rows, results.filled_rows)
        raise TimeLimitReached([coverage, *filter(None, [result.reckoning])])


@app.command()
def status(run_dir: RunDirArgument) -> None:
    """Show how far a run in RUN_DIR (its output_dir) is, how fast it goes and how it ended; it may be running."""
    from ensemble.cli.status import status_report

    report = status_report(run_dir)
    _show([*([report.table] if report.table is not None else []), *report.lines])


@app.command()
def validate(
    config: ConfigArgument,
    sets: SetOption,
    limit: LimitOption = None,
    quiet: QuietOption = False,
) -> None:
    """Check CONFIG: keys, paths, columns, ids, labels and templates, without loading a model."""
    loaded = _load(config, sets, limit)
    from ensemble.cli.validate_view import validation_lines
    from ensemble.pipeline.validate import prepare

    prepared = prepare(loaded)
    _show(() if quiet else validation_lines(prepared))


@app.command()
def plan(config: ConfigArgument, sets: SetOption, limit: LimitOption = None) -> None:
    """Show what CONFIG would take: memory per model, what fits on which GPU, where each runs, and the time."""
    loaded = _load(config, sets, limit)
    from ensemble.cli.plan_view import memory_table, opening_lines, placement_lines
    from ensemble.pipeline.validate import prepare

    prepared = prepare(loaded, must_fit=False)
    _show([*opening_lines(prepared), memory_table(prepared), *placement_lines(prepared)])
    if prepared.plan.problems:
        raise DeviceError(prepared.plan.problems)


@app.command()
def doctor(sets: SetOption, config: OptionalConfigArgument = None, quiet: ProblemsOption = False) -> None:
    """Check this machine: Python, packages, driver, GPUs, torch on each of them, memory, disk, the hub."""
    from ensemble.cli.doctor import examine

    if sets and config is None:
        raise typer.BadParameter("--set changes a CONFIG; name one")
    problems, page = 0, Page.of(sys.stdout)
    for finding in examine(config, sets):
        problems += finding.mark == "problem"
        for line in finding.lines(page) if finding.mark == "problem" or not quiet else ():
            print(line)
    if not quiet:
        _show([f"{plural(problems, 'problem')} to fix: no run can start" if problems else "A run can start."])
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
        _complain(error.problems)
        return error.exit_code
    except Interrupted as stopped:
        _complain([str(stopped)])
        return stopped.exit_code
    except KeyboardInterrupt:
        return 130
    except SystemExit as leaving:  # how typer ends a command, and a wrong one
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    return 0


def _show(parts: Iterable[str | Table]) -> None:
    """Print sentences and tables as they fit where the output goes; empty sentences are left out."""
    page = Page.of(sys.stdout)
    for part in parts:
        for line in (
            part.lines(page) if isinstance(part, Table) else page.wrapped(part, later="  ") if part else ()
        ):
            print(line, flush=True)


def _complain(problems: Iterable[str]) -> None:
    page = Page.of(sys.stderr)
    red, plain = ("\x1b[31m", "\x1b[0m") if _is_terminal(sys.stderr) else ("", "")
    for problem in problems:
        first, *others = page.wrapped(problem, "error: ", later="  ")
        for line in (first.replace("error:", f"{red}error:{plain}", 1), *others):
            print(line, file=sys.stderr, flush=True)


def _is_terminal(stream: IO[str] | None) -> bool:
    return stream is not None and stream.isatty() and "NO_COLOR" not in os.environ


def _console() -> Console:
    """For the bars, which are drawn on terminals only."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def _load(config: Path, sets: list[str], limit: int | None) -> LoadedConfig:
    from ensemble.common.import_guards import import_numpy
    from ensemble.common.packages import unsupported
    from ensemble.pipeline.loading import load

    if found := [*unsupported()]:
        raise ConfigError(found)

    loaded = load(config, [*sets, *([f"limit={limit}"] if limit is not None else [])])
    guard_output(loaded.redactor)  # now that its own secrets are known
    import_numpy()
    return loaded
