"""What is shown at the end of a run: the table of its members, what is worth knowing of each, and its files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ensemble.cli.layout import Table
from ensemble.common.errors import EnsembleError
from ensemble.common.gpus import Device
from ensemble.common.text import duration, plural, rate, shown_path, were
from ensemble.config.schema import RuleConfig
from ensemble.config.values import weight_text
from ensemble.merging.methods import METHODS
from ensemble.merging.methods.base import MergeMethod
from ensemble.merging.scoring import Interval, Score
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
    """Rows, time, speed, share of real tokens and peak memory per member; scores where the truth is known."""
    rows = [_row(report, one.name, _cells(report, one)) for one in report.members]
    totals = [_row(report, ENSEMBLE_ROW)] if ENSEMBLE_ROW in report.scores else []
    yield Table(_HEADERS, rows, totals)
    yield against_best(report)
    yield fitted_text(report)
    if ENSEMBLE_ROW in report.files and (method := report.ensemble.get("method")):
        yield f"merge method: {method}"
    if poor := {name: score for name, score in report.scores.items() if score.no_better_than_prior}:
        first = next(iter(poor.values()))
        said = [f"{name} {score.log_loss:.4f}{_above_prior(score)}" for name, score in poor.items()]
        yield (
            f"{_MARK}no better than always predicting how often each label occurs (log loss "
            f"{first.prior_log_loss:.4f} on these {first.rows:,} rows; in brackets the difference with its 95 % "
            f"interval): {', '.join(said)}. Check the labels (label_map, a file's columns), the prompt and the "
            "checkpoint"
        )
    # By subject: the same of all members, then the next.
    for notes in zip(*(_notes(report, one) for one in report.members), strict=True):
        yield from notes
    yield from (cascade_text(report, one) for one in report.members if one.cascade is not None)
    for number, rule in enumerate(report.rules):
        yield rule_text(number, rule.config, rule.rows, report.rows)
    if gaps := report.idle_gaps:
        each = [f"{gap.seconds:.1f} s ({gap.after} to {gap.before})" for gap in gaps[:_SHOWN_GAPS]]
        more = f", {len(gaps) - _SHOWN_GAPS} more in run.json" if len(gaps) > _SHOWN_GAPS else ""
        yield f"idle between members: {', '.join(each)}{more}"
    yield from (text for node in report.nodes if (text := node_text(node)))
    for device in report.devices:
        curve = report.device_telemetry.get(device.uuid)
        if curve is not None and curve.throttled_seconds:
            yield _throttled(device, curve)
    yield tuning_text(report)
    if left_out := report.left_out:
        weights = {one.name: one.weight for one in report.members if one.name not in left_out}
        plain = [weight for weight in weights.values() if isinstance(weight, int | float)]
        if len(plain) == len(weights):
            weights = {name: weight / sum(plain) for name, weight in zip(weights, plain, strict=True)}
        shares = [f"{name} {weight_text(weight, 3)}" for name, weight in weights.items()]
        reasons = "; ".join(failure_text(one) for one in report.failures if one.member in left_out)
        yield f"merged without {', '.join(left_out)}, by the weights {', '.join(shares)}: {reasons}"
    for name, path in report.files.items():
        yield f"{name}: {shown_path(Path(path))}"


def against_best(report: RunReport) -> str:
    """Whether the ensemble is better than its best member, and what to do if not; empty where nobody knows."""
    gain, score, method = report.gain, report.scores.get(ENSEMBLE_ROW), _method(report)
    if gain is None or score is None or not method.gives_probabilities:
        return ""
    is_regression = score.rmse is not None  # whose numbers are of any size
    value = f"RMSE {score.rmse:.4g}" if is_regression else f"log loss {score.log_loss:.4f}"

    def shown(number: float) -> str:
        # 0.0 added to -0.0 is 0.0, which has no sign.
        return f"{number + 0.0:.4g}" if is_regression else f"{round(number, 4) + 0.0:.4f}"

    weights = {one.name: one.weight for one in report.members if one.name in report.merged_rows}
    is_worse, size = gain.gain < 0, shown(abs(gain.gain))
    is_none, may_be_chance, interval, advice = not float(size), False, "", ""
    how = "neither better nor worse" if is_none else f"{size} {'worse' if is_worse else 'better'}"
    if gain.of == "squared error":
        how += " in squared error"
    if gain.low is not None and gain.high is not None and gain.low < gain.high:
        ends = (-gain.high, -gain.low) if is_worse else (gain.low, gain.high)
        may_be_chance = ends[0] <= 0 and not is_none
        chance = ", which may be chance" if may_be_chance else ""
        interval = f" (95 % interval {shown(ends[0])} to {shown(ends[1])}{chance})"
    if is_worse and not is_none and not may_be_chance:
        are_equal = all(weight == next(iter(weights.values())) for weight in weights.values())
        loser, others = ("equal weights lose", "weights") if are_equal else ("these weights lose", "others")
        if method.fit_options:
            loser, others = f"{report.ensemble['method']} loses", "weights"
        options = [
            method.fit_options,
            "--method greedy --calibration none --metric rmse" if is_regression else "",
        ]
        command = " ".join(filter(None, ["python -m ensemble fit CONFIG", *options]))
        advice = f": {loser} to it; `{command}` earns {others}"
    member = gain.best_member + (" (weight 0)" if weights.get(gain.best_member) == 0 else "")
    rules = " with the same rules" if report.rules else ""
    return f"{ENSEMBLE_ROW}: {value}, {how} than its best member {member}{rules}{interval}{advice}"


def fitted_text(report: RunReport) -> str:
    """What the ensemble is worth on rows that its weights were not fitted on; empty where it is not known."""
    return "" if report.fitted_on is None else f"{ENSEMBLE_ROW}: {report.fitted_on.text}"


def _method(report: RunReport) -> type[MergeMethod]:
    """The method that merged; what is so of most of them for one of a package that is not there any more."""
    try:
        return METHODS.load(str(report.ensemble.get("method", "mean")))
    except EnsembleError:
        return MergeMethod


def tuning_text(report: RunReport) -> str:
    """Which tuning its settings are from, and what is said of it; empty without one."""
    if (tuned := report.tuned_on) is None:
        return ""
    of = "; ".join(text for text in report.warnings if text.startswith("tuned_on: "))
    text = f"settings of `tune` on {tuned['date']}: {', '.join(dict.fromkeys(tuned['devices']))}"
    return f"{text}, {plural(tuned['rows'], 'row')}, tolerance {tuned['tolerance']:g}" + (
        f"\n! {of}" if of else ""
    )


def node_text(node: NodeReport) -> str:
    """When a node came and was lost; empty of one that was there all the time."""
    parts = []
    if node.joined_after_seconds is not None:
        parts.append(f"joined after {duration(node.joined_after_seconds)}")
    if node.lost_after_seconds is not None:
        parts.append(f"was lost after {duration(node.lost_after_seconds)} ({node.why_lost})")
    return f"node {node.name} {' and '.join(parts)}" if parts else ""


def cascade_text(report: RunReport, member: MemberReport) -> str:
    """What a member with ``when`` saw, and what that cost or gained."""
    if (own := member.cascade) is None:
        return ""
    if not own.is_selected:
        return f"{member.name}: `when` has not selected its rows yet: the members before it have not ended"
    share = f" ({100 * own.rows / report.rows:.1f} %)" if report.rows else ""
    text = f"{member.name}: `when` selected {own.rows:,} of {plural(report.rows, 'row')}{share}"
    if (found := own.comparison) is None:
        return text
    if not member.has_weight:
        return f"{text}; with weight 0 it makes no difference"
    difference, over_all = found.difference, found.difference_over_all
    better = "lower" if difference.value < 0 else "higher"
    chance = "" if difference.excludes_zero else ", which may be chance"
    accuracy = ""
    if found.accuracy is not None and found.accuracy_without is not None:
        accuracy = f"; accuracy {found.accuracy:.1%} with it and {found.accuracy_without:.1%} without it"
    return (
        f"{text}; on {plural(found.rows, 'row')} that it gave the ensemble's log loss is {found.log_loss:.4f} "
        f"with it and {found.log_loss_without:.4f} without it, {_size(difference, better)}{chance}; over all rows "
        f"{_size(over_all, better)}{accuracy}"
    )


def _above_prior(score: Score) -> str:
    """How far the log loss is above the prior's; empty for a run.json that lacks it."""
    above = score.above_prior
    return "" if above is None else f" ({above.value:+.4f}, {above.low:+.4f} to {above.high:+.4f})"


def _size(difference: Interval, word: str) -> str:
    size = difference.size
    return f"{size.value:.4f} {word} (95 % interval {size.low:.4f} to {size.high:.4f})"


def rule_text(number: int, rule: RuleConfig, count: int, rows: int) -> str:
    """A rule, and the rows that it is for."""
    when = " ".join(rule.when.split())
    when = when if len(when) <= _SHOWN_CHARACTERS else f"{when[:_SHOWN_CHARACTERS]}..."
    return f"rules[{number}]: {rule.action} in {count:,} of {plural(rows, 'row')}, by {when}"


def _row(report: RunReport, name: str, cells: Sequence[str] = ()) -> list[str]:
    row = [name, *cells]
    if (score := report.scores.get(name)) is not None:
        row += [""] * (_HEADERS.index("log loss") - len(row))
        mark = _MARK if score.no_better_than_prior else ""
        row += [
            "" if score.log_loss is None else f"{mark}{score.log_loss:.4f}",
            "" if score.accuracy is None else f"{score.accuracy:.1%}",
            "" if score.rmse is None else f"{score.rmse:.4g}",
        ]
    return row


def _cells(report: RunReport, member: MemberReport) -> list[str]:
    if member.phase == "failed":
        return ["failed"]
    rows, workers = member.progress.rows_done, member.workers_now
    if member.phase != "done":
        # What the merge found may be more than a worker had time to tell.
        return [f"{max(rows, report.merged_rows.get(member.name, 0)):,}", "unfinished"]
    if not workers:
        own = report.merged_rows.get(member.name, rows_of(report, member))
        rows = own * max(1, len(member.views))  # counted as those that workers have computed
        return [f"{rows:,}", "reused" if member.replicas else "given"]  # to no worker at all
    seconds, counters = member.progress.seconds or 0.0, member.counters
    gpu = [one.peak_gpu_memory_bytes for one in workers if one.peak_gpu_memory_bytes is not None]
    peaks = gpu or [one.peak_memory_bytes for one in workers if one.peak_memory_bytes is not None]
    return [
        f"{rows:,}",
        duration(seconds).removesuffix(" s"),
        f"{counters.tokens / seconds:,.0f}" if seconds and counters.tokens else "",
        rate(counters.rows / seconds) if seconds and not counters.tokens else "",
        f"{counters.tokens / counters.padded_tokens:.1%}" if counters.padded_tokens else "",
        f"{max(peaks) / 2**30:.2f} GiB{' GPU' if gpu else ''}" if peaks else "",
    ]


def _notes(report: RunReport, member: MemberReport) -> list[str]:
    """A sentence on each subject, empty where there is nothing to tell."""
    counters, workers = member.counters, member.workers_now
    # Of rows that an earlier run computed nobody has kept what became of them.
    of_rows = f"{plural(counters.rows, 'row')}{' computed now' if member.reused_rows else ''}"
    cut = repeated = halved = overflowed = in_float32 = uncomputed = elsewhere = once = partly = ""
    if count := counters.truncated_rows:
        length = max(one.max_length for one in workers if one.max_length is not None)
        cut = f"{count:,} of {of_rows} {were(count)} cut at max_length {length:,}"
        if counters.cut_tokens:
            cut += f", by {plural(round(counters.cut_tokens / count), 'token')}{' on average' * (count > 1)}"
    if count := counters.repeated_rows:
        repeat = "repeats another row's text" if count == 1 else "repeat another row's text"
        repeated = f"{count:,} of {of_rows} {repeat} and {were(count)} not computed again"
    if count := counters.oom_events:
        halved = (
            f"{plural(count, 'batch')} ran out of memory and ran again in halves; "
            f"a lower {'max_num_batched_tokens' if counters.tokens else 'batch_size'} avoids this"
        )
    if count := counters.recomputed_rows:
        types = {one.dtype for one in workers if one.dtype is not None}
        # A quantized model may compute in another type than its other weights have.
        dtype = types.pop() if len(types) == 1 and types <= {"float16", "bfloat16"} else "half precision"
        rows = plural(count, "row")
        overflowed = f"{rows} overflowed {dtype} and {were(count)} computed again in float32"
    if count := counters.float32_rows:
        in_float32 = (
            f"{plural(count, 'row')} {were(count)} computed in float32 at once, as most of a chunk had "
            "overflowed half precision"
        )
    if (computed := counters.rows - counters.bad_rows) and counters.other_mass:
        share = counters.other_mass / computed
        elsewhere = f"{share:.1%} of the probability behind its prompts fell on tokens of no label"
    if (shared := counters.shared_tokens) and counters.tokens:
        once = (
            f"{shared / counters.tokens:.1%} of its tokens stand at the beginning of all rows, computed once"
        )
    # Where the policy is not ``uniform``, a member with such rows is merged only if its time was over.
    if member.failure is None and (bad := [f"{int(row) + 1:,}" for row in member.bad_rows]):
        policy = report.on_bad_row
        what = "equal probabilities" if policy == "uniform" else "left to the other members"
        shown = f"row{'s' if len(bad) > 1 else ''} {', '.join(bad[:_SHOWN_ROWS])}"
        shown += f" and {len(bad) - _SHOWN_ROWS:,} more" if len(bad) > _SHOWN_ROWS else ""
        uncomputed = (
            f"{plural(len(bad), 'row')} could not be computed ({what}, on_bad_row: {policy}): "
            f"{shown}; run.json says why"
        )
    if member.views and (lacking := member.partial_rows):
        had = ", ".join(f"{name} {one.rows or 0:,}" for name, one in member.views.items())
        partly = (
            f"{plural(lacking, 'row')} lack{'s' if lacking == 1 else ''} some of {len(member.views)} views and "
            f"{were(lacking)} averaged over the others ({had} rows)"
        )
    told = (cut, repeated, halved, overflowed, in_float32, elsewhere, once, uncomputed, partly)
    return [f"{member.name}: {text}" if text else "" for text in told]


def _throttled(device: Device, curve: TelemetryCurve) -> str:
    """For how long a GPU was throttled, why, and what to do."""
    causes = sorted(curve.throttled_by.items(), key=lambda one: -one[1])
    clock, advice = "", "nvidia-smi -q -d PERFORMANCE shows more"
    if curve.throttled_clock_mhz is not None:
        most = f" of {curve.max_sm_clock_mhz:,}" if curve.max_sm_clock_mhz else ""
        clock = f"; its SMs ran at {curve.throttled_clock_mhz:,.0f}{most} MHz meanwhile"
    if "thermal" in curve.throttled_by:
        hottest = curve.max_temperature_celsius
        advice = "see to its cooling" + (f": it came to {hottest} °C" if hottest is not None else "")
    elif set(curve.throttled_by) == {"power cap"}:
        advice = "nvidia-smi -q -d POWER shows its limit"
    return (
        f"{device.title} was throttled for {duration(curve.throttled_seconds)} of "
        f"{duration(curve.seconds)} ({', '.join(f'{cause} {duration(each)}' for cause, each in causes)})"
        f"{clock}; {advice}"
    )
