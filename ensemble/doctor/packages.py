"""Python and the installed packages against the lower bounds that this package itself asks for.

Asks importlib.metadata and imports none of them.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ensemble.doctor.finding import NO_BREAK, Finding

DISTRIBUTION = "ensemble-runner"
OLDEST_PYTHON = (3, 10)
# transformers brings these; which versions go with it is its own to check, when it is imported.
_BROUGHT = ("tokenizers", "safetensors")
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*\(?(?:>=\s*(\d+(?:\.\d+)*))?")
_EXTRA = re.compile(r"extra\s*==\s*[\"']([\w-]+)[\"']")


@dataclass(frozen=True)
class Requirement:
    """A package, the lowest version that will do ("" for any), and the extra it belongs to ("" for none)."""

    name: str
    minimum: str = ""
    extra: str = ""

    @property
    def install(self) -> str:
        bound = f">={self.minimum}" if self.minimum else ""
        return f"pip install '{self.name}{bound}'"


def python_findings(version: tuple[int, int], shown: str) -> Iterator[Finding]:
    """Whether this Python is new enough.

    Args:
        version: major and minor.
        shown: the version in full.
    """
    if version < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        yield Finding(
            "problem",
            f"Python {shown} is too old",
            f"use Python {oldest} or newer, in an environment of its own",
        )
    else:
        yield Finding("ok", f"Python {shown} ({sys.executable}), {platform.platform(terse=True)}")


def package_findings(
    requirements: Iterable[Requirement], installed: Mapping[str, str], needed: Mapping[str, str]
) -> Iterator[Finding]:
    """What is missing or too old, and the versions of the rest.

    Args:
        requirements: what this package asks for.
        installed: version by name of those that are there.
        needed: packages of extras that the config needs, and which key needs them; ``validate`` misses those
            that are not there.
    """
    good = []
    for requirement in requirements:
        name, version = requirement.name, installed.get(requirement.name)
        is_needed = not requirement.extra or name in needed
        why = f", which {needed[name]} needs" if name in needed else ""
        if version is None and not requirement.extra:
            yield Finding("problem", f"{name} is not installed", requirement.install)
        elif version is not None and _release(version) < _release(requirement.minimum):
            text = f"{name} {version} is older than {requirement.minimum}{why}"
            yield Finding("problem" if is_needed else "note", text, requirement.install)
        elif version is not None:
            good.append(f"{name}{NO_BREAK}{version}")
    if good:
        yield Finding("ok", ", ".join(good))


def own_requirements() -> list[Requirement]:
    """What this package asks for; empty where neither a pyproject.toml nor an installation says so."""
    # A checkout on PYTHONPATH has no metadata, or that of another copy which is installed besides.
    texts = _of_checkout(Path(__file__).resolve().parents[2] / "pyproject.toml")
    if texts is None:
        try:
            texts = metadata.requires(DISTRIBUTION) or []
        except metadata.PackageNotFoundError:
            return []
    found: dict[str, Requirement] = {}
    for requirement in map(parse_requirement, texts):
        if requirement is not None:
            found.setdefault(requirement.name, requirement)
    return [*found.values(), *(Requirement(name) for name in _BROUGHT if name not in found)]


def parse_requirement(text: str) -> Requirement | None:
    """A line of a distribution's requirements; None for those of developers only and for what is no such line."""
    found, extra = _REQUIREMENT.match(text), _EXTRA.search(text)
    if found is None or (extra and extra[1] == "dev"):
        return None
    return Requirement(found[1], found[2] or "", extra[1] if extra else "")


def installed_versions(names: Collection[str]) -> dict[str, str]:
    """Version by name of those that are installed."""
    versions = {}
    for name in names:
        try:
            version: str | None = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if version:  # None where an uninstallation went only half way
            versions[name] = version
    return versions


def _of_checkout(pyproject: Path) -> list[str] | None:
    if sys.version_info < (3, 11):
        return None
    import tomllib

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
