"""The table of members at the end of a run, and what is said of a failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ensemble.cli.layout import Table
from ensemble.common.errors import RESUMES
from ensemble.common.text import duration, plural
from ensemble.merging.merge import ENSEMBLE_ROW
from ensemble.merging.metrics import Score
from ensemble.scheduling.state import Failure, Gap, MemberState

_SHOWN_GAPS = 4
# Before the log loss of a row that ``no_better_text`` speaks of.
_MARK = "! "


def members_table(
    members: Sequence[MemberState], scores: Mapping[str, Score], merged_rows: Mapping[str, int]
) -> Table:
    """Rows, time, speed, share of real tokens and peak memory per member; scores where the truth is known.

    Args:
        merged_rows: by member, what the merge found, which may be more than a worker had time to tell.
    """
    headers = ["member", "rows", "seconds", "tokens/s", "real tokens", "peak memory"]
    rows = [[*_member_cells(state, merged_rows), *_score_cells(scores, state.plan.name)] for state in members]
    totals = []
    if ENSEMBLE_ROW in scores:
        totals.append([ENSEMBLE_ROW, *[""] * (len(headers) - 1), *_score_cells(scores, ENSEMBLE_ROW)])
    return Table([*headers, *(["log loss", "accuracy"] if scores else [])], rows, totals)


def failure_text(failure: Failure) -> str:
    """One failed member in a sentence: why, and where to read on."""
    log = f"; its log: {failure.log_path}" if failure.log_path else ""
    return f"member {failure.member} failed: {failure.message}{log}"


def oom_text(state: MemberState) -> str:
    """What is said of a member whose batches did not all fit into memory; empty where they did."""
    events = state.counters.oom_events
    if not events:
        return ""
    return (
        f"{state.plan.name}: {plural(events, 'batch')} ran out of memory and ran again in halves; "
        "a lower max_num_batched_tokens avoids this"
    )


def float32_text(state: MemberState) -> str:
    """What is said of a member with rows that overflowed its type; empty where none did."""
    rows = state.counters.recomputed_rows
    if not rows:
        return ""
    types = {record.ready.dtype for record in state.workers if record.ready is not None}
    # A quantized model may compute in another type than its other weights have.
    dtype = types.pop() if len(types) == 1 and types <= {"float16", "bfloat16"} else "half precision"
    were = "was" if rows == 1 else "were"
    return f"{state.plan.name}: {plural(rows, 'row')} overflowed {dtype} and {were} computed again in float32"


def bad_rows_text(state: MemberState, policy: str) -> str:
    """What is said of a member that has rows which it could not compute; empty where it has none.

    Args:
        policy: ``on_bad_row``; where it is not ``uniform``, such a member is merged only if its time was over.
    """
    rows = sorted(state.bad_rows)
    if not rows or state.failure is not None:
        return ""
    count = plural(len(rows), "row")
    what = "equal probabilities" if policy == "uniform" else "left to the other members"
    shown = ("row " if len(rows) == 1 else "rows ") + ", ".join(f"{row + 1:,}" for row in rows[:5])
    shown += f" and {len(rows) - 5:,} more" if len(rows) > 5 else ""
    name = state.plan.name
    return f"{name}: {count} could not be computed ({what}, on_bad_row: {policy}): {shown}; run.json says why"


def no_better_text(scores: Mapping[str, Score]) -> str:
    """What is said of members that know no more of the labels than how often each occurs; empty where all do."""
    found = [(name, score) for name, score in scores.items() if score.no_better_than_prior]
    if not found:
        return ""
    prior, rows = found[0][1].prior_log_loss, found[0][1].rows
    said = ", ".join(f"{name} {score.log_loss:.4f} (+/- {score.margin:.4f})" for name, score in found)
    return (
        f"{_MARK}no better than always predicting how often each label occurs (log loss {prior:.4f} on these "
        f"{rows:,} rows; +/-: two standard errors of the difference): {said}. Look at label_map, the prompt and "
        "the checkpoint"
    )


def left_out_text(left_out: Sequence[Failure], members: Sequence[MemberState]) -> str:
    """What was merged where members had failed, with the shares that the others have then."""
    names = {failure.member for failure in left_out}
    merged = {one.plan.name: one.plan.model.weight for one in members if one.plan.name not in names}
    shares = ", ".join(f"{name} {weight / sum(merged.values()):.3g}" for name, weight in merged.items())
    reasons = "; ".join(failure_text(failure) for failure in left_out)
    return f"merged without {', '.join(sorted(names))}, by the weights {shares}: {reasons}"


def coverage_text(members: Sequence[MemberState], merged_rows: Mapping[str, int], filled_rows: int) -> str:
    """How far a run came that its time limit ended."""
    parts = [
        f"{one.plan.name} {merged_rows.get(one.plan.name, 0):,} of {plural(len(one.plan.order), 'row')}"
        for one in members
    ]
    were = "was" if filled_rows == 1 else "were"
    return (
        f"stopped at time_limit: {', '.join(parts)}; {plural(filled_rows, 'row')} that no member reached {were} "
        f"filled in. Ensemble and submission are complete files; {RESUMES}"
    )


def truncation_text(state: MemberState) -> str:
    """What is said of a member that cut rows at max_length; empty where it did not."""
    cut = state.counters.truncated_rows
    rows = state.counters.rows
    if not cut:
        return ""
    length = max(record.ready.max_length or 0 for record in state.workers if record.ready is not None)
    were = "was" if cut == 1 else "were"
    return f"{state.plan.name}: {cut:,} of {plural(rows, 'row')} {were} cut at max_length {length:,}"


def repeated_text(state: MemberState) -> str:
    """What is said of a member with rows that it computed once for several; empty where there were none."""
    repeated = state.counters.repeated_rows
    rows = state.counters.rows
    if not repeated:
        return ""
    repeat = "repeats another row's text and was" if repeated == 1 else "repeat another row's text and were"
    return f"{state.plan.name}: {repeated:,} of {rows:,} rows {repeat} not computed again"


def gaps_text(gaps: Sequence[Gap]) -> str:
    """For how long devices computed nothing between members; empty where nobody followed another."""
    if not gaps:
        return ""
    each = [f"{gap.seconds:.1f} s ({gap.after} to {gap.before})" for gap in gaps[:_SHOWN_GAPS]]
    more = f", {len(gaps) - _SHOWN_GAPS} more in run.json" if len(gaps) > _SHOWN_GAPS else ""
    return f"idle between members: {', '.join(each)}{more}"


def _member_cells(state: MemberState, merged_rows: Mapping[str, int]) -> list[str]:
    if state.failure is not None:
        return [state.plan.name, "failed", "", "", "", ""]
    if not state.finished:
        rows = max(state.rows_done, merged_rows.get(state.plan.name, 0))
        return [state.plan.name, f"{rows:,}", "unfinished", "", "", ""]
    if not state.workers:
        how = "reused" if state.plan.needs_worker else "given"
        return [state.plan.name, f"{len(state.plan.order):,}", how, "", "", ""]
    seconds = state.predicting_seconds(state.finished_at or 0.0)
    computed, real = state.counters.padded_tokens, state.counters.tokens
    return [
        state.plan.name,
        f"{state.rows_done:,}",
        duration(seconds).removesuffix(" s"),
        f"{real / seconds:,.0f}",
        f"{real / computed:.1%}" if computed else "",
        _peak_memory(state),
    ]


def _peak_memory(state: MemberState) -> str:
    closed = [record.closed for record in state.workers if record.closed is not None]
    gpu = [report.peak_gpu_memory_bytes for report in closed if report.peak_gpu_memory_bytes is not None]
    peaks = gpu or [report.peak_memory_bytes for report in closed]
    return f"{max(peaks) / 2**30:.2f} GiB{' GPU' if gpu else ''}" if peaks else ""


def _score_cells(scores: Mapping[str, Score], name: str) -> list[str]:
    if not scores:
        return []
    if name not in scores:
        return ["", ""]
    mark = _MARK if scores[name].no_better_than_prior else ""
    return [f"{mark}{scores[name].log_loss:.4f}", f"{scores[name].accuracy:.1%}"]
