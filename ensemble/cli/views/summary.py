"""What is shown at the end of a run: the table of its members, what is worth knowing of each, and its files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ensemble.cli.layout import Table
from ensemble.common.errors import EnsembleError
from ensemble.common.gpus import Device
from ensemble.common.text import duration, plural, rate, shown_path, were
from ensemble.config.schema import RuleConfig
from ensemble.merging.methods import METHODS
from ensemble.merging.methods.base import MergeMethod
from ensemble.merging.scoring import Interval
from ensemble.pipeline.ending import failure_text, rows_of
from ensemble.pipeline.results import ENSEMBLE_ROW
from ensemble.pipeline.run_report import MemberReport, NodeReport, RunReport
from ensemble.scheduling.device_pool import TelemetryCurve

_HEADERS = "member,rows,seconds,tokens/s,rows/s,real tokens,peak memory,log loss,accuracy,RMSE".split(",")
_SHOWN_GAPS = 4
_SHOWN_ROWS = 5
_SHOWN_CHARACTERS = 80  # of a rule's condition
# Before the log loss of a row of which more is said below.
_MARK = "! "


def view(report: RunReport) -> Iterator[str | Table]:
    rows = [
        [member.name, *_cells(report, member), *_scores(report, member.name)] for member in report.members
    ]
    totals = []
    if ENSEMBLE_ROW in report.scores:
        totals.append([ENSEMBLE_ROW, *[""] * 6, *_scores(report, ENSEMBLE_ROW)])
    yield Table(_HEADERS, rows, totals)
    yield against_best(report)
    yield fitted_text(report)
    if ENSEMBLE_ROW in report.files and report.ensemble.get("method"):
        yield f"merge method: {report.ensemble['method']}"
    yield _poor(report)
    for member in report.members:
        yield from _notes(report, member)
        yield cascade_text(report, member)
    for number, rule in enumerate(report.rules):
        yield rule_text(number, rule.config, rule.rows, report.rows)
    if report.idle_gaps:
        gaps = [f"{gap.seconds:.1f} s ({gap.after} to {gap.before})" for gap in report.idle_gaps]
        more = f", {len(gaps) - _SHOWN_GAPS} more in run.json" if len(gaps) > _SHOWN_GAPS else ""
        yield f"idle between members: {', '.join(gaps[:_SHOWN_GAPS])}{more}"
    for node in report.nodes:
        yield node_text(node)
    for device in report.devices:
        curve = report.device_telemetry.get(device.uuid)
        if curve is not None and curve.throttled_seconds:
            yield _throttled(device, curve)
    yield tuning_text(report)
    if report.left_out:
        reasons = [failure_text(failure) for failure in report.failures if failure.member in report.left_out]
        yield f"merged without {', '.join(report.left_out)}: {'; '.join(reasons)}"
    for name, path in report.files.items():
        yield f"{name}: {shown_path(Path(path))}"


def _cells(report: RunReport, member: MemberReport) -> list[str]:
    rows, workers, counters = member.progress.rows_done, member.workers_now, member.counters
    if member.phase == "failed":
        cells = ["failed"]
    elif member.phase != "done":
        # The merge may find more rows than a worker had time to report.
        cells = [f"{max(rows, report.merged_rows.get(member.name, 0)):,}", "unfinished"]
    elif not workers:
        rows = report.merged_rows.get(member.name, rows_of(report, member)) * max(1, len(member.views))
        cells = [f"{rows:,}", "reused" if member.replicas else "given"]
    else:
        seconds = member.progress.seconds or 0.0
        peaks = [
            worker.peak_gpu_memory_bytes for worker in workers if worker.peak_gpu_memory_bytes is not None
        ]
        where = " GPU" if peaks else ""
        peaks = peaks or [
            worker.peak_memory_bytes for worker in workers if worker.peak_memory_bytes is not None
        ]
        cells = [
            f"{rows:,}",
            duration(seconds).removesuffix(" s"),
            f"{counters.tokens / seconds:,.0f}" if seconds and counters.tokens else "",
            rate(counters.rows / seconds) if seconds and not counters.tokens else "",
            f"{counters.tokens / counters.padded_tokens:.1%}" if counters.padded_tokens else "",
            f"{max(peaks) / 2**30:.2f} GiB{where}" if peaks else "",
        ]
    return cells + [""] * (6 - len(cells))


def _scores(report: RunReport, name: str) -> list[str]:
    score = report.scores.get(name)
    if score is None:
        return []
    mark = _MARK if score.no_better_than_prior else ""
    return [
        "" if score.log_loss is None else f"{mark}{score.log_loss:.4f}",
        "" if score.accuracy is None else f"{score.accuracy:.1%}",
        "" if score.rmse is None else f"{score.rmse:.4g}",
    ]


def _poor(report: RunReport) -> str:
    """Return which members are no better than the labels' frequencies; empty if all are."""
    poor = {name: score for name, score in report.scores.items() if score.no_better_than_prior}
    if not poor:
        return ""
    texts = []
    for name, score in poor.items():
        above = score.above_prior  # an older run.json lacks it
        interval = "" if above is None else f" ({above.value:+.4f}, {above.low:+.4f} to {above.high:+.4f})"
        texts.append(f"{name} {score.log_loss:.4f}{interval}")
    first = next(iter(poor.values()))
    return (
        f"{_MARK}no better than always predicting how often each label occurs (log loss {first.prior_log_loss:.4f} "
        f"on these {first.rows:,} rows; in brackets the difference with its 95 % interval): {', '.join(texts)}. "
        "Check the labels (label_map, a file's columns), the prompt and the checkpoint"
    )


def against_best(report: RunReport) -> str:
    """Return whether the ensemble is better than its best member, with advice if not; empty if not known."""
    gain, score = report.gain, report.scores.get(ENSEMBLE_ROW)
    try:
        method = METHODS.load(str(report.ensemble.get("method", "mean")))
    except EnsembleError:  # its package is not installed any more
        method = MergeMethod  # type: ignore[type-abstract]
    if gain is None or score is None or not method.gives_probabilities:
        return ""
    is_regression = score.rmse is not None  # whose numbers are of any size
    value = f"RMSE {score.rmse:.4g}" if is_regression else f"log loss {score.log_loss:.4f}"

    def shown(number: float) -> str:
        # 0.0 added to -0.0 is 0.0, which has no sign.
        return f"{number + 0.0:.4g}" if is_regression else f"{round(number, 4) + 0.0:.4f}"

    size, better = shown(abs(gain.gain)), "worse" if gain.gain < 0 else "better"
    is_none = float(size) == 0
    comparison = "neither better nor worse" if is_none else f"{size} {better}"
    if is_regression:
        comparison += " in squared error"
    interval = advice = ""
    if gain.low is not None and gain.high is not None and gain.low < gain.high:
        difference = Interval(gain.gain, gain.low, gain.high).size
        may_be_chance = difference.low <= 0 and not is_none
        chance = ", which may be chance" if may_be_chance else ""
        interval = f" (95 % interval {shown(difference.low)} to {shown(difference.high)}{chance})"
        if gain.gain < 0 and not is_none and not may_be_chance:
            options = [method.fit_options]
            if is_regression:
                options.append("--method greedy --calibration none --metric rmse")
            command = " ".join(["python -m ensemble fit CONFIG", *filter(None, options)])
            advice = f"; `{command}` finds better weights"
    rules = " with the same rules" if report.rules else ""
    return f"{ENSEMBLE_ROW}: {value}, {comparison} than its best member {gain.best_member}{rules}{interval}{advice}"


def fitted_text(report: RunReport) -> str:
    """Return the ensemble's score on rows that its weights were not fitted on; empty if it is not known."""
    return "" if report.fitted_on is None else f"{ENSEMBLE_ROW}: {report.fitted_on.text}"


def tuning_text(report: RunReport) -> str:
    """Return which tuning the settings are from, and its warnings; empty without one."""
    tuned = report.tuned_on
    if tuned is None:
        return ""
    devices = ", ".join(dict.fromkeys(tuned["devices"]))
    text = f"settings of `tune` on {tuned['date']}: {devices}, {plural(tuned['rows'], 'row')}, "
    warnings = [f"\n! {warning}" for warning in report.warnings if warning.startswith("tuned_on: ")]
    return text + f"tolerance {tuned['tolerance']:g}" + "".join(warnings)


def node_text(node: NodeReport) -> str:
    """Return when a node came and was lost; empty for a node that was there all the time."""
    parts = []
    if node.joined_after_seconds is not None:
        parts.append(f"joined after {duration(node.joined_after_seconds)}")
    if node.lost_after_seconds is not None:
        parts.append(f"was lost after {duration(node.lost_after_seconds)} ({node.why_lost})")
    return f"node {node.name} {' and '.join(parts)}" if parts else ""


def cascade_text(report: RunReport, member: MemberReport) -> str:
    """Return which rows ``when`` selected, and what they gained; empty for a member without ``when``."""
    cascade = member.cascade
    if cascade is None:
        return ""
    if not cascade.is_selected:
        return f"{member.name}: `when` has not selected its rows yet: the members before it have not ended"
    share = f" ({100 * cascade.rows / report.rows:.1f} %)" if report.rows else ""
    text = f"{member.name}: `when` selected {cascade.rows:,} of {plural(report.rows, 'row')}{share}"
    comparison = cascade.comparison
    if comparison is None:
        return text
    if not member.has_weight:
        return f"{text}; with weight 0 it makes no difference"
    chance = "" if comparison.difference.excludes_zero else ", which may be chance"
    return (
        f"{text}; on {plural(comparison.rows, 'row')} that it gave the ensemble's log loss is "
        f"{comparison.log_loss:.4f} with it and {comparison.log_loss_without:.4f} without it, "
        f"{_change(comparison.difference)}{chance}; over all rows "
        f"{_change(comparison.difference_over_all)}"
    )


def _change(difference: Interval) -> str:
    size = difference.size
    better = "lower" if difference.value < 0 else "higher"
    return f"{size.value:.4f} {better} (95 % interval {size.low:.4f} to {size.high:.4f})"


def rule_text(number: int, rule: RuleConfig, count: int, rows: int) -> str:
    """Return a rule, and how many rows it is for."""
    when = " ".join(rule.when.split())
    if len(when) > _SHOWN_CHARACTERS:
        when = f"{when[:_SHOWN_CHARACTERS]}..."
    return f"rules[{number}]: {rule.action} in {count:,} of {plural(rows, 'row')}, by {when}"


def _notes(report: RunReport, member: MemberReport) -> Iterator[str]:
    """Yield a sentence on each thing that is worth knowing of a member's rows."""
    name, counters, workers = member.name, member.counters, member.workers_now
    # What became of rows that an earlier run computed is not known.
    of_rows = f"{plural(counters.rows, 'row')}{' computed now' if member.reused_rows else ''}"
    if counters.truncated_rows:
        count = counters.truncated_rows
        length = max(worker.max_length for worker in workers if worker.max_length is not None)
        mean = ""
        if counters.cut_tokens:
            mean = f", by {plural(round(counters.cut_tokens / count), 'token')} on average"
        yield f"{name}: {count:,} of {of_rows} {were(count)} cut at max_length {length:,}{mean}"
    if counters.repeated_rows:
        count = counters.repeated_rows
        repeat = "repeats" if count == 1 else "repeat"
        yield f"{name}: {count:,} of {of_rows} {repeat} another row's text and {were(count)} not computed again"
    if counters.oom_events:
        key = "max_num_batched_tokens" if counters.tokens else "batch_size"
        batches = plural(counters.oom_events, "batch")
        yield f"{name}: {batches} ran out of memory and ran again in halves; a lower {key} avoids this"
    if counters.recomputed_rows:
        count = counters.recomputed_rows
        rows = plural(count, "row")
        yield f"{name}: {rows} overflowed half precision and {were(count)} computed again in float32"
    if counters.float32_rows:
        yield (
            f"{name}: {plural(counters.float32_rows, 'row')} {were(counters.float32_rows)} computed in float32 at "
            "once, as most of a chunk had overflowed half precision"
        )
    computed = counters.rows - counters.bad_rows
    if computed and counters.other_mass:
        share = counters.other_mass / computed
        yield f"{name}: {share:.1%} of the probability behind its prompts fell on tokens of no label"
    if counters.shared_tokens and counters.tokens:
        share = counters.shared_tokens / counters.tokens
        yield f"{name}: {share:.1%} of its tokens stand at the beginning of all rows, computed once"
    # Where the policy is not ``uniform``, a member with such rows is merged only if its time was over.
    if member.failure is None and member.bad_rows:
        policy = report.on_bad_row
        instead = "equal probabilities" if policy == "uniform" else "left to the other members"
        numbers = [f"{int(row) + 1:,}" for row in member.bad_rows]
        shown = f"row{'s' if len(numbers) > 1 else ''} {', '.join(numbers[:_SHOWN_ROWS])}"
        if len(numbers) > _SHOWN_ROWS:
            shown += f" and {len(numbers) - _SHOWN_ROWS:,} more"
        yield (
            f"{name}: {plural(len(numbers), 'row')} could not be computed ({instead}, on_bad_row: {policy}): "
            f"{shown}; run.json says why"
        )
    if member.views and member.partial_rows:
        rows_of_views = ", ".join(f"{title} {seen.rows or 0:,}" for title, seen in member.views.items())
        count = member.partial_rows
        yield (
            f"{name}: {plural(count, 'row')} lack{'s' if count == 1 else ''} some of {len(member.views)} views and "
            f"{were(count)} averaged over the others ({rows_of_views} rows)"
        )


def _throttled(device: Device, curve: TelemetryCurve) -> str:
    """Return for how long a GPU was throttled, why, and what to do."""
    causes = sorted(curve.throttled_by.items(), key=lambda cause: -cause[1])
    shown = ", ".join(f"{cause} {duration(seconds)}" for cause, seconds in causes)
    advice = "nvidia-smi -q -d PERFORMANCE shows more"
    if "thermal" in curve.throttled_by:
        advice = "see to its cooling"
        if curve.max_temperature_celsius is not None:
            advice += f": it came to {curve.max_temperature_celsius} °C"
    elif set(curve.throttled_by) == {"power cap"}:
        advice = "nvidia-smi -q -d POWER shows its limit"
    return (
        f"{device.title} was throttled for {duration(curve.throttled_seconds)} of {duration(curve.seconds)} "
        f"({shown}); {advice}"
    )
