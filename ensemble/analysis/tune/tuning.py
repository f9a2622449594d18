"""What ``tune`` has found: every trial, the fastest of each member, and the overlay that says it."""

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

_NOISY = 1.25  # times as long as the same took before
_MOVED = 2.0  # times as long, or as short: then speeds say nothing


@dataclass(frozen=True)
class MetricDifference:
    """A metric of a candidate minus that of the reference, on the same rows."""

    metric: str
    greater_is_better: bool
    difference: Interval


@dataclass(frozen=True)
class Trial:
    """Settings that were tried.

    Attributes:
        name: in words.
        keys: of the member, as the YAML has them.
        is_precision: whether it is of the first group, which changes numbers most.
        rows: that were computed.
        failure: why there is no result, in a sentence; empty where there is one.
        seconds: of computing the sample's rows; None without a result.
        load_seconds: of the checkpoint, without the start of Python.
        whole_seconds: of loading and computing the whole table, about.
        tokens_per_second: None where the member has no tokens.
        peak_bytes: of the worker's process on a CPU, else of the GPU.
        mean, largest: over the rows, of each row's largest difference of a probability from the reference; of
            regression, of values in standard deviations of the reference's.
        changed: share of rows whose first label is another.
        is_within: whether it is as near to the reference as was asked for.
        lacking: rows of the sample that could not be computed, and count for nothing here.
        why_lacking: in a sentence; empty where there are none.
    """

    name: str
    keys: Mapping[str, Any]
    is_precision: bool = False
    rows: int = 0
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
    metrics: tuple[MetricDifference, ...] = ()
    ran_with: RanWith = field(default_factory=RanWith)
    is_within: bool = False
    lacking: int = 0
    why_lacking: str = ""
    values: npt.NDArray[np.float64] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class MemberTuning:
    """What was found of a member.

    Attributes:
        reference: the name of the trial that the others are held against; empty where none gave a result.
        best: the name of the fastest within the tolerance; empty where nothing was chosen.
        keys: what is to be changed in the config for it; None: the key is to be left out.
        again: what computing took the reference once all was tried, by what it had taken at first: how far speeds
            may be off here; None where it was not measured.
    """

    name: str
    trials: tuple[Trial, ...]
    reference: str = ""
    best: str = ""
    keys: Mapping[str, Any] = field(default_factory=dict)
    again: float | None = None

    @property
    def lost_references(self) -> tuple[str, ...]:
        """What would have been the reference, wider first, if it had given a result."""
        names = (trial.name for trial in self.trials)
        return tuple(takewhile(lambda name: name != self.reference, names)) if self.reference else ()

    @property
    def is_reference_best(self) -> bool:
        return bool(self.best) and self.best == self.reference

    @property
    def has_moved(self) -> bool:
        """Say whether the reference took so much longer or less at the end that nothing can be chosen."""
        return self.again is not None and not 1 / _MOVED <= self.again <= _MOVED

    @property
    def is_noisy(self) -> bool:
        """Whether the same took so much longer or less at the end that its speeds say little."""
        return self.again is not None and not 1 / _NOISY <= self.again <= _NOISY


@dataclass(frozen=True)
class Tuning:
    """What was found of all members.

    Attributes:
        busy: that other programs computed on this machine before it began, in a sentence; empty where none did.
        seconds: that all of it took.
        tuned_on: the record of it.
    """

    members: tuple[MemberTuning, ...]
    skipped: tuple[str, ...]
    busy: str
    rows: int
    tolerance: float
    seconds: float
    tuned_on: TuningConfig

    @property
    def has_result(self) -> bool:
        """Say whether settings were chosen for any member."""
        return any(member.best for member in self.members)

    def overlay(self) -> str:
        """The YAML that says it, to be given behind the config's own files."""
        models = [{"name": member.name, **member.keys} for member in self.members if member.keys]
        document: dict[str, Any] = {"models": models} if models else {}
        document["tuned_on"] = self.tuned_on.model_dump(mode="json", exclude_none=True)
        lines = [
            f"# By `ensemble tune` on {self.tuned_on.date}: the fastest settings that change a row's",
            f"# probabilities by {self.tolerance:g} or less, in the mean over {plural(self.rows, 'row')}.",
            "# It takes effect as the last of the files in `ensemble run CONFIG THIS_FILE`.",
        ]
        for member in self.members:
            how = "nothing tried gave a result" if not member.best else member.best
            if member.best:
                how += (
                    ", the reference itself"
                    if member.is_reference_best
                    else f", held against {member.reference}"
                )
            if member.has_moved:
                how = f"nothing chosen, as the reference took {member.again:.2g} times as long at the end"
            if member.is_noisy:
                how += "; while speeds changed, so measure again"
            lines.append(f"# {member.name}: {how}")
        return "\n".join([*lines, yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)])
