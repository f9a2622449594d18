"""Which tests run: ``make test`` takes a fixed sample, ``make test-all`` a share of the rest, ``test-release`` all.

The commit chooses the share, so that landings with all eight shares have run all tests.
"""

from __future__ import annotations

import os
import subprocess
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Literal

import pytest

Part = Literal["usual", "rest", "all"]

# Set by the option --part before any test is imported.
part: Part = "usual"
# The same few examples every time, unless this asks for so many new ones of every property.
EXAMPLES: Final = int(os.environ.get("ENSEMBLE_TEST_EXAMPLES") or 0)
# What takes long is divided into so many shares; this variable chooses one, from 0 on, where the commit shall not.
SHARES: Final = 8
SHARE: Final = "ENSEMBLE_TEST_SHARE"
# Of the examples of a property, or of the points of a sweep, one in so many is in the sample.
SAMPLED: Final = 4


def chosen_share() -> int:
    """Return the share that the environment names, or else the one of the commit that is checked out.

    Where there is neither, as in an unpacked source distribution, it is share 0.

    Raises:
        ValueError: the environment names no share.
    """
    if chosen := os.environ.get(SHARE):
        if chosen not in map(str, range(SHARES)):
            raise ValueError(f"{SHARE}={chosen}: there are the shares 0 to {SHARES - 1}")
        return int(chosen)
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
        )
    except FileNotFoundError:
        return 0
    return int(head.stdout, 16) % SHARES if head.returncode == 0 else 0


def share_of(test: str) -> int:
    """Return the share that a test belongs to, by its name: the same on every machine."""
    return zlib.crc32(test.encode()) % SHARES


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """Cases for ``pytest.mark.parametrize``, of which the first and every ``count``-th after it are usual."""
    return [
        case if place % count == 0 else pytest.param(*_values(case), marks=pytest.mark.long)
        for place, case in enumerate(cases)
    ]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)


def shares(count: int) -> list[Any]:
    """Numbers of the shares of a sweep that takes every ``count``-th point, from its own number on."""
    return one_in(count, range(count))


def tries(examples: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For a property that is tried on so many examples, a part of which are the sample."""
    from hypothesis import (
        HealthCheck,
        settings,
    )  # not with this module, which every process of pytest imports

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        chosen = settings(
            max_examples=EXAMPLES or (-(-examples // SAMPLED) if part == "usual" else examples),
            derandomize=not EXAMPLES,
            database=None,
            deadline=None,
            suppress_health_check=[
                HealthCheck.too_slow,
                HealthCheck.data_too_large,
                HealthCheck.large_base_example,
            ],
        )
        marked: Callable[..., Any] = pytest.mark.sampled(chosen(test))
        return marked

    return decorate


if __name__ == "__main__":
    print(chosen_share())  # noqa: T201
