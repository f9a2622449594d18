"""Declare the options of commands that call functions of the API; docstrings of these functions describe them."""

from __future__ import annotations

import ast
import copy
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import typer

from ensemble.common.protocol import Activation

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
    "id_column": Annotated[str | None, option("--id-column", "NAME")],
    "metric": Annotated[str, option("--metric", "NAME")],
    "method": Annotated[
        Literal["equal", "best_member", "simplex", "greedy", "stacking", "auto"] | None,
        option("--method", show_default=False),
    ],
    "calibration": Annotated[Literal["none", "temperature", "vector"], option("--calibration")],
    "merge_method": Annotated[Literal["mean", "geometric_mean"] | None, option("--merge-method")],
    "weights": Annotated[Path | None, option("--weights", "YAML")],
    "activation": Annotated[Activation | None, option("--activation")],
    "fold": Annotated[int | None, option("--fold", "N", min=0)],
    "folds": Annotated[int, option("--folds", "N", min=2)],
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
