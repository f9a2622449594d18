"""Compare Python and the installed packages with the supported ranges.

pyproject.toml alone has the bounds. Outside of them wrong numbers have been seen (docs/releases.md).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

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
    """A package that this one requires."""

    name: str
    minimum: str = ""
    below: str = ""  # the first version that is too new
    extra: str = ""  # that requires it; "" for none

    @property
    def range(self) -> str:
        return ",".join([f">={self.minimum}"] * bool(self.minimum) + [f"<{self.below}"] * bool(self.below))

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
        names: only these, such as ``ANALYSIS``; None: all that a run cannot do without.
        needed: packages of extras to check, too, with what needs each.
    """
    needed = needed or {}
    for requirement in own_requirements():
        name = requirement.name
        if requirement.extra:
            is_relevant = name in needed
        elif names is None:
            is_relevant = name not in ANALYSIS
        else:
            is_relevant = name in names
        version = installed_versions([name]).get(name) if is_relevant else None
        problem = requirement.wrong(version) if version is not None else ""
        if problem:
            reason = f", which {needed[name]} needs" if name in needed else ""
            yield f"{name} {version} is {problem}{reason}; {requirement.install}"


def demand_supported(for_analysis: bool = False) -> None:
    """Check the versions of the packages that every run needs, and if asked those for ``ensemble.analysis``.

    Raises:
        ConfigError: packages are outside of their ranges.
    """
    problems = list(unsupported())
    if for_analysis:
        problems += unsupported(ANALYSIS)
    if problems:
        raise ConfigError(problems)


@cache  # called by the command line, by every command with a config, and by the checks of extras
def own_requirements() -> tuple[Requirement, ...]:
    """Return what this package requires; empty without a pyproject.toml and an installation."""
    texts: list[str] = []
    with suppress(metadata.PackageNotFoundError):
        texts = metadata.requires(DISTRIBUTION) or []
    # A checkout on PYTHONPATH has no metadata, or that of another copy that is installed, too.
    pyproject = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if pyproject.is_file():
        import tomllib

        with suppress(OSError, ValueError, KeyError):
            project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
            if project["name"] == DISTRIBUTION:
                extras = project["optional-dependencies"].items()
                texts = list(project["dependencies"])
                texts += [f"{text}; extra == '{extra}'" for extra, lines in extras for text in lines]
    requirements = [parse_requirement(text) for text in texts]
    if texts:
        requirements += [Requirement(name) for name in _BROUGHT]
    by_name: dict[str, Requirement] = {}
    for requirement in requirements:
        if requirement is not None:
            by_name.setdefault(requirement.name, requirement)
    return tuple(by_name.values())


def parse_requirement(text: str) -> Requirement | None:
    """Parse a line of a distribution's requirements; None for developers' packages and for other text."""

    def first_group(pattern: str, part: str) -> str:
        match = re.search(pattern, part)
        return match[1] if match else ""

    line, _, marker = text.partition(";")
    name = first_group(r"^([A-Za-z0-9._-]+)", line).lower()
    extra = first_group(r"extra\s*==\s*[\"']([\w-]+)[\"']", marker)
    version = r"\s*(\d+(?:\.\d+)*)"
    if not name or extra == "dev":
        return None
    return Requirement(
        name=name,
        minimum=first_group(">=" + version, line),
        below=first_group("<" + version, line),
        extra=extra,
    )


def installed_versions(names: Collection[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed, by name."""
    versions: dict[str, str] = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            # `package.version` parses the whole description, half a millisecond for each package.
            package = metadata.distribution(name)
            match = re.search(r"^Version: *(\S+)", package.read_text("METADATA") or "", re.MULTILINE)
            version = match[1] if match else package.version
            if version:  # None if it is half uninstalled
                versions[name] = version
    return versions


def _release(version: str) -> list[int]:
    # Only the numbers: the 2.6.0a0 of NVIDIA's images has what 2.6 has.
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and not numbers[-1]:
        numbers.pop()  # 2.6 is 2.6.0
    return numbers
