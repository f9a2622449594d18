"""Define the commands: each calls a function of the API, prints the result and sets the exit code.

The docstrings of these functions describe commands and options.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar, cast

import typer

from ensemble import api
from ensemble.cli.layout import page_width, show, show_json, wrapped
from ensemble.common.errors import EnsembleError, Interrupted
from ensemble.common.protocol import Activation
from ensemble.common.text import plural, shown_path
from ensemble.common.version import __version__

Command = TypeVar("Command", bound=Callable[..., None])

_SECTION = re.compile(r"^(Args|Note|Raises):$", re.MULTILINE)
_ARGUMENT = re.compile(r"^(\w[\w, ]*): ", re.MULTILINE)
_AS_FOR = re.compile(r"as for ``(\w+)``")


def option(flags: str, metavar: str | None = None, **settings: Any) -> Any:
    """Declare an option, such as ``--output -o``."""
    return typer.Option(*flags.split(), metavar=metavar, readable=False, **settings)


def argument(metavar: str, **settings: Any) -> Any:
    return typer.Argument(metavar=metavar, readable=False, show_default=False, **settings)


# By the names of arguments of the API's functions.
_OPTIONS: dict[str, Any] = {
    "config": Annotated[list[Path], argument("CONFIG")],
    "sources": Annotated[list[Path], argument("CONFIG|[NAME=]CSV...")],
    "files": Annotated[list[str], argument("[NAME=]CSV")],
    "first": Annotated[Path, argument("A")],
    "second": Annotated[Path, argument("B")],
    "path": Annotated[Path, argument("RUN_DIR")],
    "overrides": Annotated[list[str], option("--set", "KEY=VALUE", show_default=False)],
    "fresh": Annotated[bool, option("--fresh")],
    "retrain": Annotated[bool, option("--retrain")],
    "discard_old": Annotated[bool, option("--discard-old")],
    "reuse": Annotated[Path | None, option("--reuse", "RUN_DIR")],
    "predictions_from": Annotated[Path | None, option("--predictions-from", "RUN_DIR")],
    "rows": Annotated[int | None, option("--rows", "N", min=1)],
    "lengths_from": Annotated[Path | None, option("--lengths-from", "TABLE")],
    "sample": Annotated[int | None, option("--sample-rows", "N", min=1)],
    "tolerance": Annotated[float | None, option("--tolerance", "X", min=0)],
    "write": Annotated[Path | None, option("--write", "YAML")],
    "metrics": Annotated[list[str], option("--metric", "NAME", show_default=False)],
    "labels": Annotated[Path | None, option("--labels", "TABLE")],
    "label_column": Annotated[str | None, option("--label-column", "NAME")],
    "columns": Annotated[list[str], option("--label", "NAME", show_default=False)],
    "id_column": Annotated[str | None, option("--id-column", "NAME")],
    "metric": Annotated[str, option("--metric", "NAME")],
    "group": Annotated[str | None, option("--group", "COLUMN")],
    "method": Annotated[
        Literal["equal", "best_member", "simplex", "greedy", "stacking", "auto"] | None,
        option("--method", show_default=False),
    ],
    "calibration": Annotated[Literal["none", "temperature", "vector", "isotonic"], option("--calibration")],
    "merge_method": Annotated[Literal["mean", "geometric_mean"] | None, option("--merge-method")],
    "weights": Annotated[Path | None, option("--weights", "YAML")],
    "activation": Annotated[Activation | None, option("--activation")],
    "fold": Annotated[int | None, option("--fold", "N", min=0)],
    "folds": Annotated[int, option("--folds", "N", min=2)],
    "folds_from": Annotated[Path | None, option("--folds-from", "TABLE")],
    "seed": Annotated[int, option("--seed", "N", min=0)],
    "partial": Annotated[bool, option("--partial")],
    "output": Annotated[Path, option("--output -o", "YAML")],
    "force": Annotated[bool, option("--force")],
    "quiet": Annotated[bool, option("--quiet -q")],
    "verbose": Annotated[bool, option("--verbose -v")],
}
# By function, what its docstring says of its arguments.
_descriptions: dict[str, dict[str, str]] = {}


def options_of(
    function: Callable[..., object], defaults: dict[str, Any] | None = None, **others: Any
) -> Callable[[Command], Command]:
    """Give a command the arguments of a function as options, described by the function's docstring.

    Args:
        defaults: by argument, where they differ from the function's.
        others: annotated types of more options, or of arguments that are declared otherwise.
    """
    description = inspect.getdoc(function)
    if description is None:  # python -OO, or PYTHONOPTIMIZE=2, leaves docstrings out
        description = ast.get_docstring(cast(ast.FunctionDef, ast.parse(inspect.getsource(function)).body[0]))
    sections = _SECTION.split(description or "")
    descriptions = _descriptions[function.__name__] = {}
    _, *parts = _ARGUMENT.split(inspect.cleandoc(sections[sections.index("Args") + 1]))
    for names, text in zip(parts[::2], parts[1::2], strict=True):
        other = _AS_FOR.match(text)
        for name in names.split(", "):
            descriptions[name] = _descriptions[other[1]][name] if other else " ".join(text.split())
    arguments = {
        name: parameter.default for name, parameter in inspect.signature(function).parameters.items()
    }
    parameters = []
    for name in dict.fromkeys([*arguments, *others]):
        hint = others[name] if name in others else _OPTIONS[name]
        declared = copy.copy(hint.__metadata__[0])
        declared.help = declared.help or descriptions[name]
        default = {**arguments, **(defaults or {})}.get(name)
        annotation = Annotated[hint.__origin__, declared]  # type: ignore[name-defined]
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )

    def give(command: Command) -> Command:
        command.__doc__ = sections[0].strip()
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return give


if TYPE_CHECKING:
    from ensemble.cli.result_objects import Preview
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

_Limit = Annotated[int | None, option("--limit", "N", min=1, help="Use only the first N rows.")]
_Json = Annotated[bool, option("--json", help="Print one JSON object; keys: docs/reference/exit-codes.md.")]
_Quiet = Annotated[bool, option("--quiet -q", help="Print nothing but errors.")]


@app.command()
def demo(
    copy_to: Annotated[
        Path | None, option("--copy", "FOLDER", help="Only write the demo's files into FOLDER; run nothing.")
    ] = None,
) -> None:
    """Run two small models over a table, to see a run and its report. Needs no files: writes ./ensemble-demo."""
    from ensemble.commands.demo import write_demo

    folder = Path("ensemble-demo") if copy_to is None else copy_to
    print(write_demo(folder), flush=True)
    config = folder / "config.yaml"
    command = shlex.join(["ensemble", "run", str(config)])
    if copy_to is not None:
        print(f"next: {command}")
        return
    page = api.run([config]).path / "report.html"
    texts = [f"Open {shown_path(page)} in a browser."] if page.is_file() else []
    texts += [f"To change something, edit {config}, then: {command}"]
    for text in ("", *texts, "For your own table and models: ensemble init TABLE MODEL..."):
        print(*wrapped(text, page_width(sys.stdout)), sep="\n")


@app.command()
@options_of(api.run, limit=_Limit)
def run(limit: int | None, **options: Any) -> None:
    api.run(**_limited(options, limit))


@app.command()
@options_of(api.train)
def train(**options: Any) -> None:
    api.train(**options)


@app.command()
def status(
    run_dir: Annotated[Path, argument("RUN_DIR", help="The output_dir of a run.")], as_json: _Json = False
) -> None:
    """Show how far a run and its trainings are, or how they ended."""
    from ensemble.cli.status import RunStatus, document

    seen = RunStatus.of(run_dir)
    if as_json:
        show_json(document(seen))
    else:
        show("status.status", seen, sys.stdout)


@app.command()
@options_of(api.report, output=Annotated[Path | None, option("--output -o", "HTML")])
def report(**options: Any) -> None:
    print(f"report: {api.report(**options)}")


@app.command()
@options_of(api.validate, limit=_Limit, quiet=_Quiet, as_json=_Json)
def validate(limit: int | None, quiet: bool, as_json: bool, **options: Any) -> None:
    _show_preview("validate", api.validate(**_limited(options, limit)), as_json, quiet)


@app.command()
@options_of(api.plan, limit=_Limit, as_json=_Json)
def plan(limit: int | None, as_json: bool, **options: Any) -> None:
    preview = api.plan(**_limited(options, limit))
    _show_preview("plan", preview, as_json)
    if preview.problems:
        _print_errors(preview.problems)
        raise typer.Exit(2)


@app.command()
def init(
    table: Annotated[Path, argument("TABLE", help="The table: CSV, TSV, Parquet or JSON lines.")],
    models: Annotated[
        list[str],
        argument("MODEL", help="Folders of checkpoints or adapters, your scripts, CSVs of predictions."),
    ],
    sample: Annotated[
        Path | None,
        option("--sample", "CSV", help="Sample submission (default: sample_submission.csv beside TABLE)."),
    ] = None,
    output: Annotated[Path, option("--output -o", "YAML", help="File to write.")] = Path("config.yaml"),
    force: Annotated[bool, option("--force", help="Replace an existing file.")] = False,
    as_json: _Json = False,
) -> None:
    """Write a first config for TABLE and MODELS, and validate it. Guesses columns, labels and lengths."""
    with api.imports():
        from ensemble.commands.init import write_first_config
    guesses = write_first_config(table, models, sample, output, force)
    texts = [f"{output}: written; look through it", *(f"guess: {guess}" for guess in guesses)]
    for text in () if as_json else texts:
        print(*wrapped(text, page_width(sys.stdout)), sep="\n")
    facts, file = {"config": output.absolute(), "guesses": guesses}, shlex.quote(str(output))
    try:
        preview = api.validate([output])
    except EnsembleError as error:
        advice = f"{output} does not pass validate yet; fix these problems, then validate it again"
        if not as_json:
            raise type(error)([advice, *error.problems]) from error
        commands = [f"ensemble validate {file}"]
        show_json({**facts, "problems": error.problems, "warnings": (), "next": commands})
        _print_errors([advice, *error.problems])
        raise typer.Exit(error.exit_code) from error
    if as_json:
        from ensemble.cli.plans import document

        commands = [f"ensemble {command} {file}" for command in ("plan", "run --limit 100", "run")]
        checked = document(preview.prepared)
        show_json({**facts, **{key: checked[key] for key in ("problems", "warnings")}, "next": commands})
    else:
        _show_preview("validate", preview)
        print(f"next: ensemble plan {file}, then ensemble run {file} --limit 100")


@app.command()
@options_of(api.rehearse)
def rehearse(**options: Any) -> None:
    rehearsal = api.rehearse(**options)
    if rehearsal.problems:
        if options["quiet"]:
            _print_errors(rehearsal.problems)
        raise typer.Exit(1)


@app.command()
@options_of(api.tune)
def tune(**options: Any) -> None:
    tuning = api.tune(**options)
    if not tuning.has_result:
        if options["quiet"]:
            _print_errors(["no settings could be chosen for any member; without --quiet tune says why"])
        raise typer.Exit(1)


@app.command()
@options_of(
    api.merge,
    output=Annotated[Path, option("--output -o", "FILE")],
    method=Annotated[str | None, option("--method -m", "METHOD")],
    weight=Annotated[
        list[str],
        option(
            "--weight", "NAME=NUMBER", help="Weight of a file; give one for each file.", show_default=False
        ),
    ],
    labels=Annotated[list[str], option("--label", "NAME", show_default=False)],
)
def merge(files: list[str], weight: list[str] | None, overrides: list[str] | None, **options: Any) -> None:
    weight = weight or []
    if weight and len(weight) != len(files):
        raise typer.BadParameter("--weight: give one for each file")
    sets = [f"models.{text.replace('=', '.weight=', 1)}" for text in weight]
    api.merge(files, overrides=[*sets, *(overrides or [])], **options)


@app.command()
@options_of(api.compare)
def compare(**options: Any) -> None:
    api.compare(**options)


@app.command()
@options_of(api.fit, defaults={"output": Path("weights.yaml")})
def fit(**options: Any) -> None:
    api.fit(**options)


@app.command()
def doctor(
    config: Annotated[
        list[Path] | None, argument("CONFIG", help="Config of a run to check this machine for.")
    ] = None,
    sets: Annotated[
        list[str] | None, option("--set", "KEY=VALUE", help="Override a key.", show_default=False)
    ] = None,
    quiet: Annotated[bool, option("--quiet -q", help="Print problems only.")] = False,
) -> None:
    """Check whether runs can start on this machine. Checks Python, packages, GPUs, torch, memory, disk, the hub."""
    from ensemble.commands.doctor import examine

    if sets and not config:
        raise typer.BadParameter("--set changes a CONFIG; name one")
    problems = 0
    for finding in examine(config or (), sets or (), api.checked_trainings):
        problems += finding.mark == "problem"
        if finding.mark == "problem" or not quiet:
            print(*_finding_lines(finding, page_width(sys.stdout)), sep="\n")
    if not quiet:
        print(f"{plural(problems, 'problem')} to fix: no run can start" if problems else "A run can start.")
    if problems:
        raise typer.Exit(2)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, option("--version", help="Print the version.")] = False) -> None:
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


def _limited(options: dict[str, Any], limit: int | None) -> dict[str, Any]:
    """Add ``--limit`` to the overrides."""
    if limit is not None:
        options["overrides"] = [*(options["overrides"] or ()), f"limit={limit}"]
    return options


def _show_preview(view: str, preview: Preview, as_json: bool = False, quiet: bool = False) -> None:
    if as_json:
        from ensemble.cli.plans import document

        show_json(document(preview.prepared))
    elif not quiet:
        show(f"plans.{view}", preview.prepared, sys.stdout)


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
