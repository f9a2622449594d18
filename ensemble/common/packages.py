"""Compare Python and the installed packages with the supported ranges.

pyproject.toml alone has the bounds. Outside of them wrong numbers have been seen (docs/reference/releases.md).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from ensemble.common.errors import ConfigError

DISTRIBUTION = "ensemble-runner"
OLDEST_PYTHON = (3, 11)
# The command line cannot start without these.
COMMAND_LINE = ("typer", "rich", "pydantic", "pyyaml", "numpy", "pyarrow", "jinja2")
# The commands of ensemble.analysis need these; no run imports them.
ANALYSIS = ("pandas", "scikit-learn", "scipy", "matplotlib")
# The modules of packages whose module has another name.
MODULES = {"pillow": "PIL"}
# transformers installs these, and checks their versions itself when it is imported.
_BROUGHT = ("tokenizers", "safetensors")


@dataclass(frozen=True)
class Requirement:
    """Name a package that this one requires, and its supported versions."""

    name: str
    minimum: str = ""
    below: str = ""  # the first version that is too new
    extra: str = ""  # that requires it; "" for none

    @property
    def range(self) -> str:
        minimum = f">={self.minimum}" if self.minimum else ""
        return f"{minimum},<{self.below}" if self.below else minimum

    @property
    def install(self) -> str:
        return f"pip install '{self.name}{self.range}'"

    def wrong(self, version: str) -> str:
        """Return what is wrong with a version, such as "older than 5.0"; empty if it is in range."""
        if _release(version) < _release(self.minimum):
            return f"older than {self.minimum}"
        if self.below and _release(version) >= _release(self.below):
            return f"newer than what was tried (before {self.below})"
        return ""


def unsupported(
    names: Collection[str] | None = None, needed: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yield a sentence for each installed package that is outside of its range.

    Args:
        names: only these; None: all that a run cannot do without.
        needed: packages of extras to check, too, with the key that needs each.
    """
    needed = needed or {}
    for requirement in own_requirements():
        name = requirement.name
        if requirement.extra:
            is_relevant = name in needed
        else:
            is_relevant = name not in ANALYSIS if names is None else name in names
        version = installed_versions([name]).get(name) if is_relevant else None
        problem = requirement.wrong(version) if version is not None else ""
        if problem:
            reason = f", which {needed[name]} needs" if name in needed else ""
            yield f"{name} {version} is {problem}{reason}; {requirement.install}"


def demand_supported(for_analysis: bool = False) -> None:
    """Raise ConfigError if a package that every run needs, or that ``ensemble.analysis`` needs, is out of range."""
    problems = [*unsupported(), *(unsupported(ANALYSIS) if for_analysis else ())]
    if problems:
        raise ConfigError(problems)


@cache  # called by the command line, by every command with a config, and by the checks of extras
def own_requirements() -> tuple[Requirement, ...]:
    """Return what this package requires; empty without a pyproject.toml and an installation."""
    texts: list[str] = []
    project: dict[str, Any] = {}
    # A checkout on PYTHONPATH has no metadata, or that of another copy that is installed, too.
    pyproject = Path(__file__).resolve().parents[2] / "pyproject.toml"
    with suppress(OSError, ValueError, KeyError):
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    if project.get("name") == DISTRIBUTION:
        texts += project["dependencies"]
        for extra, lines in project["optional-dependencies"].items():
            texts += [f"{text}; extra == '{extra}'" for text in lines]
    else:
        with suppress(metadata.PackageNotFoundError):
            texts = metadata.requires(DISTRIBUTION) or []
    requirements = [parse_requirement(text) for text in texts]
    if texts:
        requirements += [Requirement(name) for name in _BROUGHT]
    by_name: dict[str, Requirement] = {}
    for requirement in filter(None, requirements):
        by_name.setdefault(requirement.name, requirement)
    return tuple(by_name.values())


def parse_requirement(text: str) -> Requirement | None:
    """Parse a line of a distribution's requirements; None for developers' packages and for other text."""
    line, _, marker = text.partition(";")
    name = re.match(r"[A-Za-z0-9._-]+", line)
    extra = re.search(r"extra\s*==\s*[\"']([\w-]+)[\"']", marker)
    if name is None or (extra is not None and extra[1] == "dev"):
        return None
    bounds = dict(re.findall(r"(>=|<)\s*(\d+(?:\.\d+)*)", line))
    return Requirement(name[0].lower(), bounds.get(">=", ""), bounds.get("<", ""), extra[1] if extra else "")


def installed_versions(names: Collection[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed, by name."""
    versions: dict[str, str] = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(name)
            if version:  # None if the package is half uninstalled
                versions[name] = version
    return versions


def _release(version: str) -> list[int]:
    # Only the numbers: the 2.6.0a0 of NVIDIA's images has what 2.6 has.
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and not numbers[-1]:
        numbers.pop()  # 2.6 is 2.6.0
    return numbers
