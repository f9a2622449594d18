"""Show a tuning: a table of each member's trials, and the keys to change in the config."""

from __future__ import annotations

import math
from collections.abc import Iterator

import yaml

from ensemble.analysis.tune import MemberTuning, Trial, Tuning
from ensemble.cli.layout import Table
from ensemble.common.text import duration, gib, plural, rate

_HEADERS = ("tokens/s", "rows/s", "load", "peak memory", "whole table", "mean", "largest", "changed", "")
_REMEDY = "run it again once the machine is quiet, with more --rows if the sample takes less than a second"


def view(tuning: Tuning) -> Iterator[str | Table]:
    yield f"by {plural(tuning.rows, 'row')} of every length, in {duration(tuning.seconds)}:"
    for member in tuning.members:
        yield from _member(member, tuning.tolerance)
    for name in tuning.skipped:
        yield f"{name}: has no settings to choose"


def _member(member: MemberTuning, tolerance: float) -> Iterator[str | Table]:
    name, done = member.name, [trial for trial in member.trials if not trial.failure]
    if member.trials:
        yield Table([name, *_HEADERS], [_cells(trial, member) for trial in member.trials], texts=[""])
    metrics = list(dict.fromkeys(metric for trial in done for metric in trial.metrics))
    others = [trial for trial in done if trial.name != member.reference]
    if metrics:
        compared = [[trial.name, *(_difference(trial, metric) for metric in metrics)] for trial in others]
        yield Table([f"minus {member.reference}", *metrics], compared)
    reasons: dict[str, list[str]] = {}
    for trial in member.trials:
        if trial.failure:
            reasons.setdefault(trial.failure, []).append(trial.name)
    yield from (f"{name}: {'; '.join(names)}: {why}" for why, names in reasons.items())
    if not member.reference:
        yield f"! {name}: nothing that was tried gave a result; its settings stay as they are"
        return
    if member.lost_references:
        lost = " and ".join(member.lost_references)
        yield f"! {name}: {lost} gave no result, so all is compared with {member.reference}"
    for trial in done:
        if trial.name == member.reference and trial.why_lacking:
            yield f"! {name}: {trial.why_lacking}; nothing above counts them"
    if member.is_noisy:
        result = "nothing is chosen" if member.has_moved else "the speeds above say little"
        yield (
            f"! {name}: {result}, as {member.reference} took {member.again:.2g} times as long when it was measured "
            f"again at the end; {_REMEDY}"
        )
    if member.has_moved:
        return
    precisions = [trial.is_within for trial in others if trial.is_precision]
    if precisions and not any(precisions):
        yield (
            f"! {name}: no other precision comes within {tolerance:g} of {member.reference}; it is kept, and a "
            "larger --tolerance is yours to choose"
        )
    changes = ", ".join(f"{key}: {_yaml(value)}" for key, value in member.keys.items())
    yield f"{name}: {member.best} is the fastest{f': {changes}' if changes else ', and what the config says'}"


def _cells(trial: Trial, member: MemberTuning) -> list[str]:
    marks = ["<- fastest"] if trial.name == member.best else []
    distances = ["", "", ""]
    if trial.failure:  # the reason, which may be long, is said below
        marks.append("stopped" if trial.rows_per_second else "no result")
    elif trial.name == member.reference:
        marks.append("the reference")
    else:
        distances = [f"{trial.mean:.4f}", f"{trial.largest:.4f}", f"{trial.changed:.1%}"]
        marks += [] if trial.is_within else ["too far"]
    return [
        trial.name,
        "" if trial.tokens_per_second is None else f"{trial.tokens_per_second:,.0f}",
        "" if trial.rows_per_second is None else rate(trial.rows_per_second),
        "" if trial.load_seconds is None else duration(trial.load_seconds),
        "" if trial.peak_bytes is None else gib(trial.peak_bytes),
        "" if trial.whole_seconds is None else duration(trial.whole_seconds),
        *distances,
        ", ".join(marks),
    ]


def _difference(trial: Trial, metric: str) -> str:
    gain = trial.metrics.get(metric)
    return "" if gain is None else f"{gain.value:+.4f} [{gain.low:+.4f}, {gain.high:+.4f}]"


def _yaml(value: object) -> str:
    """Return a value as people write it in one line of YAML."""
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).removesuffix("...\n").strip()
