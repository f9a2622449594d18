"""Report how a run ended: the error, which decides the exit code of ``run``, and the gain of the ensemble."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ensemble.common.errors import RESUMES, EnsembleError, MembersFailed, TimeLimitReached
from ensemble.common.text import plural, were
from ensemble.merging.methods import METHODS
from ensemble.merging.scoring import Interval
from ensemble.pipeline.results import ENSEMBLE_ROW
from ensemble.pipeline.run_report import MemberReport, RunReport
from ensemble.pipeline.training_dir import TrainingDir
from ensemble.scheduling.records import Failure


def raise_unless_complete(report: RunReport) -> None:
    """Raise ``MembersFailed`` if a run has merged nothing, or ``TimeLimitReached`` if not all."""
    if report.status == "time_limit":
        members = ", ".join(_reached_text(report, member) for member in report.members)
        filled = report.filled_rows
        coverage = (
            f"stopped at time_limit: {members}; {plural(filled, 'row')} that no member reached "
            f"{were(filled)} filled in. Ensemble and submission are complete files; {RESUMES}"
        )
        raise TimeLimitReached([coverage, *filter(None, [report.explanation])])
    if report.status != "complete":
        raise MembersFailed([failure_text(failure) for failure in report.failures])


def failure_text(failure: Failure) -> str:
    """Return a sentence about why a member failed or is left out, and which log to read."""
    log = f"; its log: {failure.log_path}" if failure.log_path else ""
    return f"member {failure.member} {failure.outcome}: {failure.message}{log}"


def gain_text(report: RunReport) -> str:
    """Return whether the ensemble is better than its best member, with advice if not; empty if not known."""
    gain, score = report.gain, report.scores.get(ENSEMBLE_ROW)
    if gain is None or score is None:
        return ""
    if score.rmse is None:
        value, number, of, options = f"log loss {score.log_loss:.4f}", "z.4f", "", ""
    else:  # numbers of any size
        value, number, of = f"RMSE {score.rmse:.4g}", "z.4g", " in squared error"
        options = " --method greedy --calibration none --metric rmse"
    size = f"{abs(gain.gain):{number}} {'worse' if gain.gain < 0 else 'better'}{of}"
    text = f"{ENSEMBLE_ROW}: {value}, {size} than its best member {gain.best_member}"
    if report.rules:
        text += " with the same rules"
    if gain.low is None or gain.high is None:
        return text
    difference = Interval(gain.gain, gain.low, gain.high)
    low, high = difference.size.low, difference.size.high
    chance = "" if difference.excludes_zero else ", which may be chance"
    text += f" (95 % interval {low:{number}} to {high:{number}}{chance})"
    # `ensemble train` itself names the command that fits to its out-of-fold predictions.
    run_dir = Path(report.files.get(ENSEMBLE_ROW, ".")).parent
    is_out_of_fold = TrainingDir(run_dir.parent.parent).oof_run == run_dir
    if gain.gain < 0 and not chance and not is_out_of_fold:
        with contextlib.suppress(EnsembleError):  # the method's package is not installed any more
            method = METHODS.load(str(report.ensemble.get("method", "mean")))
            options = f"{method.fit_options}{options}".strip()
            text += f"; `{f'ensemble fit CONFIG {options}'.strip()}` finds better weights"
    return text


def answer_texts(report: RunReport) -> Iterator[str]:
    """Yield the scores of the answers in each column of the submission."""
    for column, scores in report.answers.items():
        shown = ", ".join(f"{metric.replace('_', ' ')} {value:.4f}" for metric, value in scores.items())
        yield f"answers in {column}: {shown}"


def rows_of(report: RunReport, member: MemberReport) -> int:
    """Return how many rows a member is to have, as far as that is known."""
    return report.rows if member.cascade is None else member.cascade.rows


def _reached_text(report: RunReport, member: MemberReport) -> str:
    """Return how many rows a member has at the end of the time limit, and how many were lost."""
    if member.cascade is not None and not member.cascade.is_selected:
        return f"{member.name} none, as `when` has not selected its rows"
    rows = plural(rows_of(report, member), "row")
    text = f"{member.name} {report.merged_rows.get(member.name, 0):,} of {rows}"
    notes = []
    partial_rows = report.partial_rows.get(member.name)
    if partial_rows:
        notes.append(f"{partial_rows:,} of them in some of its views only")
    if member.lost_rows:
        lost = plural(member.lost_rows, "more row")
        notes.append(
            f"at least {lost} {were(member.lost_rows)} computed, but lost: the limit ended their chunk"
        )
    return f"{text} ({'; '.join(notes)})" if notes else text
