"""The environments that the supported range is tried in, and those that must be refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ensemble.common.packages import own_requirements

# What the tests need, besides the package and its extras.
# setuptools builds the packages that extend this one, as pyproject.toml asks.
TOOLS = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist", "setuptools>=77")
EXTRAS = ("bitsandbytes", "peft", "pillow", "ray")


@dataclass(frozen=True)
class Environment:
    """A Python and the packages that are not as in ``.venv``.

    Attributes:
        python: major and minor of an interpreter that is built from nothing; "" for one that lies over ``.venv``
            and holds only what differs from it.
        packages: as pip takes them.
        refused: what every run must say here, and then exit with 2; "" where everything must work.
    """

    name: str
    packages: tuple[str, ...]
    python: str = ""
    refused: str = ""


def _lowest(of: Sequence[str] = ()) -> tuple[str, ...]:
    """Every package at its lower bound, or these alone."""
    return tuple(
        f"{own_requirement.name}=={own_requirement.minimum}"
        for own_requirement in own_requirements()
        if own_requirement.minimum
        and own_requirement.extra != "bench"
        and (not of or own_requirement.name in of)
    )


def _today() -> tuple[str, ...]:
    """Every package as new as pip finds it."""
    return tuple(
        f"{own_requirement.name}{own_requirement.range}"
        for own_requirement in own_requirements()
        if own_requirement.extra != "bench"
    )


OVERLAYS = (
    # What commands are made of is at its lower bound, too: without compiling and in seconds.
    Environment(
        "transformers-5.0", ("transformers==5.0.0", *_lowest(["typer", "rich", "pydantic", "jinja2"]))
    ),
    Environment("transformers-5.5", ("transformers==5.5.0",)),
    Environment("transformers-5.12", ("transformers==5.12.1",)),
    Environment("transformers-5.24", ("transformers==5.24.0",)),
)
# Every change is tried with one of these; all others are for `make test-releases`.
IN_CI = ("transformers-5.0", "transformers-5.12", "transformers-5.24")
ENVIRONMENTS = (
    Environment("oldest", (*_lowest(), *TOOLS), python="3.11"),
    Environment(
        "kaggle",
        (
            *(
                "torch==2.10.0",
                "transformers==5.0.0",
                "numpy<2.1",
                "pyarrow<19",
                "ipykernel==6.17.1",
                "nbconvert",
            ),
            *(*_today(), *TOOLS),
        ),
        python="3.12",
    ),
    *OVERLAYS,
    Environment("newest", (*_today(), *TOOLS), python="3.13"),
    Environment("refused-typer", ("typer==0.18.0",), refused="typer 0.18.0 is older than"),
    Environment(
        "refused-transformers", ("transformers==4.57.6",), refused="transformers 4.57.6 is older than"
    ),
)
