"""The supported range: Python and the packages that this one asks for, and what is installed of them.

The bounds stand in pyproject.toml alone.  Outside of them numbers have been seen to be wrong (docs/releases.md).
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
# What the command line itself cannot start without.
COMMAND_LINE = ("typer", "rich", "pydantic", "pyyaml", "numpy", "pyarrow", "jinja2")
# What the commands of ensemble.analysis need and no run imports.
ANALYSIS = ("pandas", "scikit-learn", "scipy", "matplotlib")
# What is imported of packages whose modules have other names than themselves.
MODULES = {"pillow": "PIL"}
# transformers brings these; which versions go with it is its own to check, when it is imported.
_BROUGHT = ("tokenizers", "safetensors")


@dataclass(frozen=True)
class Requirement:
    """A package that this one asks for."""

    name: str
    minimum: str = ""
    below: str = ""  # the first version that is too new
    extra: str = ""  # that asks for it; "" for none

    @property
    def range(self) -> str:
        return ",".join([f">={self.minimum}"] * bool(self.minimum) + [f"<{self.below}"] * bool(self.below))

    @property
    def install(self) -> str:
        return f"pip install '{self.name}{self.range}'"

    def wrong(self, version: str) -> str:
        """What is wrong with a version, such as "older than 5.0"; empty where nothing is."""
        if _release(version) < _release(self.minimum):
            return f"older than {self.minimum}"
        if self.below and _release(version) >= _release(self.below):
            return f"newer than what was tried (before {self.below})"
        return ""


def unsupported(
    names: Collection[str] | None = None, needed: Mapping[str, str] | None = None
) -> Iterator[str]:
    """A sentence for each package that is installed outside of its range.

    Args:
        names: only these, such as ``ANALYSIS``; None: all that a run cannot do without.
        needed: packages of extras, too, with what needs each.
    """
    needed = needed or {}
    for one in own_requirements():
        is_asked = one.name not in ANALYSIS if names is None else one.name in names
        is_asked = one.name in needed if one.extra else is_asked
        version = installed_versions([one.name]).get(one.name) if is_asked else None
        if version is not None and (wrong := one.wrong(version)):
            why = f", which {needed[one.name]} needs" if one.name in needed else ""
            yield f"{one.name} {version} is {wrong}{why}; {one.install}"


def demand_supported(for_analysis: bool = False) -> None:
    """Find what is installed within its range: what every run needs, and for ``ensemble.analysis`` what that does.

    Raises:
        ConfigError: with a sentence for each package that is not.
    """
    if found := [*unsupported(), *(unsupported(ANALYSIS) if for_analysis else ())]:
        raise ConfigError(found)


@cache  # asked by the command line, by every command with a config, and by the checks of extras
def own_requirements() -> tuple[Requirement, ...]:
    """What this package asks for; empty where neither a pyproject.toml nor an installation says so."""
    texts: list[str] = []
    with suppress(metadata.PackageNotFoundError):
        texts = metadata.requires(DISTRIBUTION) or []
    # A checkout on PYTHONPATH has no metadata, or that of another copy which is installed besides.
    pyproject = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if pyproject.is_file():
        import tomllib

        with suppress(OSError, ValueError, KeyError):
            project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
            if project["name"] == DISTRIBUTION:
                extras = project["optional-dependencies"].items()
                texts = [f"{text}; extra == '{extra}'" for extra, named in extras for text in named]
                texts[:0] = project["dependencies"]
    found: dict[str, Requirement] = {}
    for requirement in (*map(parse_requirement, texts), *map(Requirement, _BROUGHT if texts else ())):
        if requirement is not None:
            found.setdefault(requirement.name, requirement)
    return tuple(found.values())


def parse_requirement(text: str) -> Requirement | None:
    """A line of a distribution's requirements; None for those of developers only and for what is no such line."""

    def found(pattern: str, where: str) -> str:
        match = re.search(pattern, where)
        return match[1] if match else ""

    line, _, marker = text.partition(";")
    name, extra = (
        found(r"^([A-Za-z0-9._-]+)", line).lower(),
        found(r"extra\s*==\s*[\"']([\w-]+)[\"']", marker),
    )
    version = r"\s*(\d+(?:\.\d+)*)"
    if not name or extra == "dev":
        return None
    return Requirement(name, found(">=" + version, line), found("<" + version, line), extra)


def installed_versions(names: Collection[str]) -> dict[str, str]:
    """Version by name of those that are installed."""
    versions: dict[str, str] = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            # Its own `version` takes apart the whole description, half a millisecond for each package.
            package = metadata.distribution(name)
            found = re.search(r"^Version: *(\S+)", package.read_text("METADATA") or "", re.MULTILINE)
            if version := found[1] if found else package.version:  # None: half uninstalled
                versions[name] = version
    return versions


def _release(version: str) -> list[int]:
    # Only the numbers: NVIDIA's images call what they ship 2.6.0a0, and it has what 2.6 has.
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and not numbers[-1]:
        numbers.pop()  # 2.6 is 2.6.0
    return numbers
