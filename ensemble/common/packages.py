"""The supported range: Python and the packages that this one asks for, and what is installed of them.

The bounds stand in pyproject.toml alone.  Outside of them numbers have been seen to be wrong without a word
(docs/releases.md), so that nothing runs there.  Asks importlib.metadata and imports none of the packages.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "ensemble-runner"
OLDEST_PYTHON = (3, 11)
# What the command line itself cannot start without.
COMMAND_LINE = ("typer", "rich", "pydantic", "pyyaml", "numpy", "pyarrow", "jinja2")
# transformers brings these; which versions go with it is its own to check, when it is imported.
_BROUGHT = ("tokenizers", "safetensors")
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?")
_MINIMUM, _BELOW = re.compile(r">=\s*(\d+(?:\.\d+)*)"), re.compile(r"<\s*(\d+(?:\.\d+)*)")
_EXTRA = re.compile(r"extra\s*==\s*[\"']([\w-]+)[\"']")


@dataclass(frozen=True)
class Requirement:
    """A package, its lowest version and the first that is too new ("" for any), and its extra ("" for none)."""

    name: str
    minimum: str = ""
    below: str = ""
    extra: str = ""

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
        names: only these; None: all that a run cannot do without.
        needed: packages of extras, too, with what needs each.
    """
    needed = needed or {}
    asked = [
        one
        for one in own_requirements()
        if (one.name in needed if one.extra else names is None or one.name in names)
    ]
    versions = installed_versions([one.name for one in asked])
    for one in asked:
        version = versions.get(one.name)
        if version is not None and (wrong := one.wrong(version)):
            why = f", which {needed[one.name]} needs" if one.name in needed else ""
            yield f"{one.name} {version} is {wrong}{why}; {one.install}"


@cache  # asked by the command line, by every command with a config, and by the checks of extras
def own_requirements() -> tuple[Requirement, ...]:
    """What this package asks for; empty where neither a pyproject.toml nor an installation says so."""
    # A checkout on PYTHONPATH has no metadata, or that of another copy which is installed besides.
    texts = _of_checkout(Path(__file__).resolve().parents[2] / "pyproject.toml")
    if texts is None:
        try:
            texts = metadata.requires(DISTRIBUTION) or []
        except metadata.PackageNotFoundError:
            return ()
    found: dict[str, Requirement] = {}
    for requirement in (*map(parse_requirement, texts), *map(Requirement, _BROUGHT)):
        if requirement is not None:
            found.setdefault(requirement.name, requirement)
    return tuple(found.values())


def parse_requirement(text: str) -> Requirement | None:
    """A line of a distribution's requirements; None for those of developers only and for what is no such line."""
    line, _, marker = text.partition(";")
    found, extra = _REQUIREMENT.match(line), _EXTRA.search(marker)
    if found is None or (extra and extra[1] == "dev"):
        return None
    minimum, below = _MINIMUM.search(line), _BELOW.search(line)
    return Requirement(
        found[1].lower(), minimum[1] if minimum else "", below[1] if below else "", extra[1] if extra else ""
    )


def installed_versions(names: Collection[str]) -> dict[str, str]:
    """Version by name of those that are installed."""
    versions: dict[str, str] = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {name: version for name, version in versions.items() if version}  # None: half uninstalled


def _of_checkout(pyproject: Path) -> list[str] | None:
    import tomllib  # only a checkout has the file

    try:
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        if project["name"] != DISTRIBUTION:
            return None
        extras = project.get("optional-dependencies", {})
        of_extras = [f"{text}; extra == '{extra}'" for extra, texts in extras.items() for text in texts]
        return [*project["dependencies"], *of_extras]
    except (OSError, ValueError, KeyError):
        return None


def _release(version: str) -> tuple[int, ...]:
    # Only the numbers: NVIDIA's images call what they ship 2.6.0a0, and it has what 2.6 has.
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and not numbers[-1]:
        numbers.pop()  # 2.6 is 2.6.0
    return tuple(numbers)
