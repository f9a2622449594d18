"""How often a property is tried."""

from __future__ import annotations

import os
from typing import Final

from hypothesis import HealthCheck, settings

# The same few examples every time, unless this asks for so many new ones of every property.
ASKED_FOR: Final = int(os.environ.get("ENSEMBLE_TEST_EXAMPLES") or 0)


def tries(examples: int) -> settings:
    """Settings for a property that is tried on so many examples in the usual run of the tests."""
    return settings(
        max_examples=ASKED_FOR or examples,
        derandomize=not ASKED_FOR,
        database=None,
        deadline=None,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.large_base_example,
        ],
    )
