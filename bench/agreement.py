"""Nobody wins by computing something else: contestants' numbers are compared before any ratio is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bench.contests import OURS, TUNED, Ground, Work
from ensemble.analysis.tune import TOLERANCE as TUNED_TOLERANCE

TOLERANCE = 1e-4
# Rows that are all alike would agree whatever was computed: strangers must be so much further apart than equals.
_FURTHER = 20
# The floor's tokens come from rounding each batch to rows of one length: half a token for each row of the last one.
_FLOOR_TOLERANCE = 1e-3
_FLOOR_TOKENS = 100


class Disagreement(Exception):
    """Two contestants have computed different things; the message says by how much."""


def compare(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64], who: str) -> float:
    """How far the same rows are apart at most.

    Args:
        one, other: probabilities, [rows, labels].
        who: names the two in messages.

    Raises:
        Disagreement: by more than 1e-4, or the rows are too much alike to tell.
    """
    if one.shape != other.shape:
        raise Disagreement(f"{who}: {one.shape} and {other.shape} probabilities")
    apart = float(np.abs(one - other).max())
    if not apart <= TOLERANCE:
        raise Disagreement(f"{who}: up to {apart:.1e} apart, more than {TOLERANCE:.0e}")
    strangers = float(np.abs(one - np.roll(one, 1, axis=0)).mean())
    if strangers < _FURTHER * TOLERANCE:
        raise Disagreement(f"{who}: neighbouring rows are only {strangers:.1e} apart, which proves nothing")
    return apart


def check(ground: Ground, work: Work, contestant: str, tokens: int) -> float:
    """Hold a contestant's last run to this project's.

    Args:
        tokens: that this project computed, of all models.

    Returns:
        How far any probability was from this project's, at most; 0 for the floor, which has none.

    Raises:
        Disagreement: it computed something else.
    """
    if contestant == "floor":
        found = ground.floor_tokens(work)
        if abs(found - tokens) > max(_FLOOR_TOLERANCE * tokens, _FLOOR_TOKENS * len(work.models)):
            raise Disagreement(f"the floor computed {found} tokens, this project {tokens}")
        return 0.0
    if contestant == TUNED:
        far = max(_mean_apart(ground, work, model) for model in work.models)
        if not far <= TUNED_TOLERANCE:
            raise Disagreement(
                f"with the settings of tune rows are {far:.1e} apart, more than {TUNED_TOLERANCE}"
            )
        return far
    return max(
        compare(
            ground.probabilities(work, contestant, model),
            ground.probabilities(work, OURS, model),
            f"{contestant} and this project, {model}",
        )
        for model in work.models
    )


def _mean_apart(ground: Ground, work: Work, model: str) -> float:
    ours, tuned = (ground.probabilities(work, who, model) for who in (OURS, TUNED))
    return float(np.abs(ours - tuned).max(axis=1).mean())
