"""How a run ended: what its report says as an error, which decides the exit code of ``run``."""

from __future__ import annotations

from ensemble.common.errors import RESUMES, MembersFailed, TimeLimitReached
from ensemble.common.text import plural, were
from ensemble.pipeline.run_report import MemberReport, RunReport
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
    """Say in a sentence why a member failed, and where to read on."""
    log = f"; its log: {failure.log_path}" if failure.log_path else ""
    return f"member {failure.member} failed: {failure.message}{log}"


def rows_of(report: RunReport, member: MemberReport) -> int:
    """Return how many rows a member is to have, as far as that is known."""
    return report.rows if member.cascade is None else member.cascade.rows


def _reached_text(report: RunReport, member: MemberReport) -> str:
    """Say how many rows a member has at the end of the time limit, and how many were lost."""
    if member.cascade is not None and not member.cascade.is_selected:
        return f"{member.name} none, as `when` has not selected its rows"
    rows = plural(rows_of(report, member), "row")
    text = f"{member.name} {report.merged_rows.get(member.name, 0):,} of {rows}"
    notes = []
    if member.partial_rows:
        notes.append(f"{member.partial_rows:,} of them in some of its views only")
    if member.lost_rows:
        lost = plural(member.lost_rows, "more row")
        notes.append(
            f"at least {lost} {were(member.lost_rows)} computed, but lost: the limit ended their chunk"
        )
    return f"{text} ({'; '.join(notes)})" if notes else text
