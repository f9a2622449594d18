"""Commands made of the API's functions: an option is described once, in the function's docstring."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

import typer

Command = TypeVar("Command", bound=Callable[..., None])

_SECTION = re.compile(r"^(Args|Note|Raises):$", re.MULTILINE)
_ARGUMENT = re.compile(r"^(\w[\w, ]*): ", re.MULTILINE)


def described_by(function: Callable[..., object]) -> Callable[[Command], Command]:
    """Describe a command, and those of its options that have no help, by a function with the same arguments."""
    sections = _SECTION.split(inspect.getdoc(function) or "")
    description = sections[0].strip()
    arguments: dict[str, str] = {}
    if "Args" in sections:
        text = inspect.cleandoc(sections[sections.index("Args") + 1])
        _, *parts = _ARGUMENT.split(text)
        arguments = {
            name: " ".join(words.split()) for name, words in zip(parts[::2], parts[1::2], strict=True)
        }

    def describe(command: Command) -> Command:
        hints = get_type_hints(command, include_extras=True)
        for name, hint in hints.items():
            for option in getattr(hint, "__metadata__", ()):
                if option.help is None:
                    option.help = arguments[name]
        command.__doc__ = description
        command.__annotations__ = hints  # typer reads them again
        return command

    return describe


def calls(function: Callable[..., object]) -> Callable[[Command], Callable[..., None]]:
    """Make a command that calls a function with its own options; see ``described_by``."""

    def make(command: Command) -> Callable[..., None]:
        @functools.wraps(described_by(function)(command))
        def call(**options: Any) -> None:
            function(**options)

        return call

    return make


def option(flags: str, metavar: str | None = None, **settings: Any) -> Any:
    """Declare an option, such as ``--output -o``; without ``help`` it has that of the API's argument."""
    return typer.Option(*flags.split(), metavar=metavar, readable=False, **settings)


def repeatable(flag: str, metavar: str, **settings: Any) -> Any:
    """Declare an option that may be given several times; see ``option``."""
    return option(flag, metavar, default_factory=list, show_default=False, **settings)


def argument(metavar: str, **settings: Any) -> Any:
    """Declare an argument; without ``help`` it has that of the API's argument."""
    return typer.Argument(metavar=metavar, readable=False, show_default=False, **settings)
