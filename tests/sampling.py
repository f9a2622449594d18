"""Which part of the tests runs: ``make test`` takes a fixed sample of what is long, ``make test-all`` the rest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal

import pytest
from hypothesis import HealthCheck, settings

Part = Literal["usual", "rest", "all"]

# Set by the option --part before any test is imported.
part: Part = "usual"
# The same few examples every time, unless this asks for so many new ones of every property.
EXAMPLES: Final = int(os.environ.get("ENSEMBLE_TEST_EXAMPLES") or 0)
# Of the examples of a property, or of the points of a sweep, one in so many is in the sample.
SAMPLED: Final = 4


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
