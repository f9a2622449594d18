"""What is shown at the end of a run: the table of its members, what is worth knowing of each, and its files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ensemble.cli.layout import Table
from ensemble.common.errors import RESUMES, MembersFailed, TimeLimitReached
from ensemble.common.text import duration, plural, shown_path
from ensemble.pipeline.results import ENSEMBLE_ROW
from ensemble.pipeline.run_report import MemberReport, RunReport
from ensemble.scheduling.state import Failure

_HEADERS = ["member", "rows", "seconds", "tokens/s", "real tokens", "peak memory"]
_SHOWN_GAPS = 4
_SHOWN_ROWS = 5
# Before the log loss of a row of which more is said below.
_MARK = "! "


def view(report: RunReport) -> Iterator[str | Table]:
    """Rows, time, speed, share of real tokens and peak memory per member; scores where the truth is known."""
    rows = [[*_cells(report, one), *_scores(report, one.name)] for one in report.members]
    totals = []
    if ENSEMBLE_ROW in report.scores:
        totals.append([ENSEMBLE_ROW, *[""] * (len(_HEADERS) - 1), *_scores(report, ENSEMBLE_ROW)])
    yield Table([*_HEADERS, *(["log loss", "accuracy"] if report.scores else [])], rows, totals)
    if method := report.ensemble.get("method"):
        yield f"merge method: {method}"
    yield _no_better(report)
    for tell in (_truncated, _repeated, _oom, _float32):
        yield from map(tell, report.members)
    for member in report.members:
        yield _bad_rows(member, report.on_bad_row)
    if gaps := report.idle_gaps:
        each = [f"{gap.seconds:.1f} s ({gap.after} to {gap.before})" for gap in gaps[:_SHOWN_GAPS]]
        more = f", {len(gaps) - _SHOWN_GAPS} more in run.json" if len(gaps) > _SHOWN_GAPS else ""
        yield f"idle between members: {', '.join(each)}{more}"
    yield _left_out(report)
    for name, path in report.files.items():
        yield f"{name}: {shown_path(Path(path))}"


def failure_text(failure: Failure) -> str:
    """One failed member in a sentence: why, and where to read on."""
    log = f"; its log: {failure.log_path}" if failure.log_path else ""
    return f"member {failure.member} failed: {failure.message}{log}"


def raise_unless_complete(report: RunReport) -> None:
    """Say as an error that a run has merged nothing, or not all.

    Raises:
        MembersFailed: members failed that nothing may be merged without.
        TimeLimitReached: its time was over before it had computed every row.
    """
    if report.status == "time_limit":
        parts = [
            f"{one.name} {report.merged_rows.get(one.name, 0):,} of {plural(report.rows, 'row')}"
            for one in report.members
        ]
        filled = report.filled_rows
        coverage = (
            f"stopped at time_limit: {', '.join(parts)}; {plural(filled, 'row')} that no member reached "
            f"{_were(filled)} filled in. Ensemble and submission are complete files; {RESUMES}"
        )
        raise TimeLimitReached([coverage, *filter(None, [report.reckoning])])
    if report.status != "complete":
        raise MembersFailed([failure_text(failure) for failure in report.failures])


def _cells(report: RunReport, member: MemberReport) -> list[str]:
    if member.phase == "failed":
        return [member.name, "failed", "", "", "", ""]
    # What the merge found may be more than a worker had time to tell.
    rows, workers = member.progress.rows_done, member.workers_now
    if member.phase != "done":
        return [
            member.name,
            f"{max(rows, report.merged_rows.get(member.name, 0)):,}",
            "unfinished",
            "",
            "",
            "",
        ]
    if not workers:
        how = "reused" if member.replicas else "given"  # to no worker at all
        return [member.name, f"{report.rows:,}", how, "", "", ""]
    seconds, counters = member.progress.seconds or 0.0, member.counters
    gpu = [one.peak_gpu_memory_bytes for one in workers if one.peak_gpu_memory_bytes is not None]
    peaks = gpu or [one.peak_memory_bytes for one in workers if one.peak_memory_bytes is not None]
    return [
        member.name,
        f"{rows:,}",
        duration(seconds).removesuffix(" s"),
        f"{counters.tokens / seconds:,.0f}" if seconds else "",
        f"{counters.tokens / counters.padded_tokens:.1%}" if counters.padded_tokens else "",
        f"{max(peaks) / 2**30:.2f} GiB{' GPU' if gpu else ''}" if peaks else "",
    ]


def _scores(report: RunReport, name: str) -> list[str]:
    if not report.scores:
        return []
    if (score := report.scores.get(name)) is None:
        return ["", ""]
    return [f"{_MARK if score.no_better_than_prior else ''}{score.log_loss:.4f}", f"{score.accuracy:.1%}"]


def _no_better(report: RunReport) -> str:
    """Members that know no more of the labels than how often each occurs."""
    found = {name: score for name, score in report.scores.items() if score.no_better_than_prior}
    if not found:
        return ""
    first = next(iter(found.values()))
    said = ", ".join(f"{name} {score.log_loss:.4f} (+/- {score.margin:.4f})" for name, score in found.items())
    return (
        f"{_MARK}no better than always predicting how often each label occurs (log loss "
        f"{first.prior_log_loss:.4f} on these {first.rows:,} rows; +/-: two standard errors of the difference): "
        f"{said}. Look at label_map, the prompt and the checkpoint"
    )


def _truncated(member: MemberReport) -> str:
    cut, rows = member.counters.truncated_rows, member.counters.rows
    if not cut:
        return ""
    length = max(one.max_length for one in member.workers_now if one.max_length is not None)
    return f"{member.name}: {cut:,} of {plural(rows, 'row')} {_were(cut)} cut at max_length {length:,}"


def _repeated(member: MemberReport) -> str:
    repeated, rows = member.counters.repeated_rows, member.counters.rows
    if not repeated:
        return ""
    repeat = "repeats another row's text" if repeated == 1 else "repeat another row's text"
    return f"{member.name}: {repeated:,} of {rows:,} rows {repeat} and {_were(repeated)} not computed again"


def _oom(member: MemberReport) -> str:
    if not (events := member.counters.oom_events):
        return ""
    return (
        f"{member.name}: {plural(events, 'batch')} ran out of memory and ran again in halves; "
        "a lower max_num_batched_tokens avoids this"
    )


def _float32(member: MemberReport) -> str:
    if not (rows := member.counters.recomputed_rows):
        return ""
    types = {one.dtype for one in member.workers_now if one.dtype is not None}
    # A quantized model may compute in another type than its other weights have.
    dtype = types.pop() if len(types) == 1 and types <= {"float16", "bfloat16"} else "half precision"
    return (
        f"{member.name}: {plural(rows, 'row')} overflowed {dtype} and {_were(rows)} computed again in float32"
    )


def _bad_rows(member: MemberReport, policy: str) -> str:
    """Where the policy is not ``uniform``, a member with such rows is merged only if its time was over."""
    rows = [int(row) + 1 for row in member.bad_rows]
    if not rows or member.failure is not None:
        return ""
    what = "equal probabilities" if policy == "uniform" else "left to the other members"
    shown = ("row " if len(rows) == 1 else "rows ") + ", ".join(f"{row:,}" for row in rows[:_SHOWN_ROWS])
    shown += f" and {len(rows) - _SHOWN_ROWS:,} more" if len(rows) > _SHOWN_ROWS else ""
    return (
        f"{member.name}: {plural(len(rows), 'row')} could not be computed ({what}, on_bad_row: {policy}): "
        f"{shown}; run.json says why"
    )


def _left_out(report: RunReport) -> str:
    """What was merged where members had failed, with the shares that the others have then."""
    if not report.left_out:
        return ""
    merged = {one.name: one.weight for one in report.members if one.name not in report.left_out}
    shares = ", ".join(f"{name} {weight / sum(merged.values()):.3g}" for name, weight in merged.items())
    reasons = "; ".join(failure_text(one) for one in report.failures if one.member in report.left_out)
    return f"merged without {', '.join(sorted(report.left_out))}, by the weights {shares}: {reasons}"


def _were(count: int) -> str:
    return "was" if count == 1 else "were"
