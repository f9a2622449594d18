"""Hold the results of ``tune``: every trial, the fastest of each member, and the overlay for the config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from ensemble.analysis.metrics import Interval
from ensemble.common.text import plural
from ensemble.config import TuningConfig
from ensemble.members.base import RanWith

# The reference took so many times as long at the end, or the inverse: speeds say little, or nothing.
_NOISY = 1.25
_MOVED = 2.0


@dataclass(frozen=True)
class Trial:
    """Hold settings that were tried: ``keys`` of the member, as in the YAML.

    Attributes:
        is_precision: whether it is of the first group, which changes numbers most.
        failure: why there is no result, in a sentence; empty if there is one.
        seconds: for computing the sample.
        load_seconds: of the checkpoint, without the start of Python.
        whole_seconds: about, for loading and for computing the whole table.
        peak_bytes: of the worker's process on a CPU, else of the GPU.
        mean, largest, changed: see ``distances``, from the reference; ``metrics`` are minus those of the reference.
        is_within: whether it is as near to the reference as was asked for.
        lacking: rows of the sample that could not be computed and are left out here; ``why_lacking`` says why.
    """

    name: str
    keys: Mapping[str, Any]
    is_precision: bool = False
    failure: str = ""
    seconds: float | None = None
    load_seconds: float | None = None
    whole_seconds: float | None = None
    tokens_per_second: float | None = None
    rows_per_second: float | None = None
    peak_bytes: int | None = None
    mean: float = 0.0
    largest: float = 0.0
    changed: float = 0.0
    metrics: Mapping[str, Interval] = field(default_factory=dict)
    ran_with: RanWith = field(default_factory=RanWith)
    is_within: bool = False
    lacking: int = 0
    why_lacking: str = ""
    values: npt.NDArray[np.float64] | None = field(default=None, repr=False, compare=False)

    @property
    def cost(self) -> float:
        return float("inf") if self.whole_seconds is None else self.whole_seconds


@dataclass(frozen=True)
class MemberTuning:
    """Hold the trials of a member.

    Attributes:
        reference: the name of the trial that the others are compared with; empty if none gave a result.
        best: the name of the fastest within the tolerance; empty if nothing was chosen.
        keys: to change in the config; None removes a key.
        again: the reference's time at the end divided by its time at first; None if it was not measured.
    """

    name: str
    trials: tuple[Trial, ...]
    reference: str = ""
    best: str = ""
    keys: Mapping[str, Any] = field(default_factory=dict)
    again: float | None = None

    @property
    def lost_references(self) -> tuple[str, ...]:
        """Return the trials that would have been the reference if they had given a result, the widest first."""
        names = (trial.name for trial in self.trials)
        return tuple(takewhile(lambda name: name != self.reference, names)) if self.reference else ()

    @property
    def has_moved(self) -> bool:
        """Return whether the machine's speed changed so much that nothing can be chosen."""
        return self.again is not None and not 1 / _MOVED <= self.again <= _MOVED

    @property
    def is_noisy(self) -> bool:
        """Return whether the machine's speed changed so much that speeds say little."""
        return self.again is not None and not 1 / _NOISY <= self.again <= _NOISY


@dataclass(frozen=True)
class Tuning:
    """Hold the trials of all members; ``skipped`` have no settings to choose, and all of it took ``seconds``."""

    members: tuple[MemberTuning, ...]
    skipped: tuple[str, ...]
    rows: int
    tolerance: float
    seconds: float
    tuned_on: TuningConfig

    @property
    def has_result(self) -> bool:
        """Return whether settings were chosen for any member."""
        return any(member.best for member in self.members)

    def overlay(self) -> str:
        """Return the YAML to give after the config's own files."""
        models = [{"name": member.name, **member.keys} for member in self.members if member.keys]
        document: dict[str, Any] = {"models": models} if models else {}
        document["tuned_on"] = self.tuned_on.model_dump(mode="json", exclude_none=True)
        lines = [
            f"# By `ensemble tune` on {self.tuned_on.date}: the fastest settings that change a row's",
            f"# probabilities by {self.tolerance:g} or less, in the mean over {plural(self.rows, 'row')}.",
            "# It takes effect as the last of the files in `ensemble run CONFIG THIS_FILE`.",
        ]
        for member in self.members:
            how = member.best or "nothing tried gave a result"
            if member.best:
                is_reference = member.best == member.reference
                how += ", the reference itself" if is_reference else f", compared with {member.reference}"
            if member.has_moved:
                how = f"nothing chosen, as the reference took {member.again:.2g} times as long at the end"
            if member.is_noisy:
                how += "; while speeds changed, so measure again"
            lines.append(f"# {member.name}: {how}")
        return "\n".join([*lines, yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)])
