"""Python and the installed packages against the supported range."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Iterator, Mapping

from ensemble.cli.doctor.finding import Finding
from ensemble.cli.layout import NO_BREAK
from ensemble.common.packages import OLDEST_PYTHON, Requirement


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
        elif version is not None and (wrong := requirement.wrong(version)):
            text = f"{name} {version} is {wrong}{why}"
            yield Finding("problem" if is_needed else "note", text, requirement.install)
        elif version is not None:
            good.append(f"{name}{NO_BREAK}{version}")
    if good:
        yield Finding("ok", ", ".join(good))
