"""Show how runs end: the table of the members, notes about each, and the files that were written."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ensemble.cli.layout import Table
from ensemble.common.remote_files import address_of
from ensemble.common.text import duration, listed, percent_of, plural, rate, shown_path, were, written
from ensemble.config import RunConfig
from ensemble.config.schema import RuleConfig
from ensemble.config.values import takes_time_left, weight_text
from ensemble.merging.scoring import Interval
from ensemble.pipeline.ending import answer_texts, failure_text, gain_text, rows_of
from ensemble.pipeline.results import ENSEMBLE_ROW
from ensemble.pipeline.run_report import CascadeReport, MemberReport, RunReport

if TYPE_CHECKING:
    from ensemble.commands.merge_files import Merged

_HEADERS = "member,rows,seconds,tokens/s,rows/s,real tokens,peak memory,log loss,accuracy,RMSE".split(",")
_SHOWN_GAPS = 4
_SHOWN_ROWS = 5
_SHOWN_CHARACTERS = 80  # of a rule's condition
# Before the log loss of a row of which more is said below.
_MARK = "! "


def summary(report: RunReport) -> Iterator[str | Table]:
    """Yield what has come of a run."""
    rows = [
        [member.name, *_cells(report, member), *_scores(report, member.name)] for member in report.members
    ]
    totals = (
        [[ENSEMBLE_ROW, *[""] * 6, *_scores(report, ENSEMBLE_ROW)]] if ENSEMBLE_ROW in report.scores else []
    )
    yield Table([*_HEADERS, *_metrics(report)], rows, totals)
    yield from (f"! {remark}" for remark in report.metric_remarks)
    yield gain_text(report)
    yield fitted_text(report)
    yield from answer_texts(report)
    if ENSEMBLE_ROW in report.files and (method := report.ensemble.get("method")):
        weights = {member.name: weight_text(member.weight) for member in report.members}
        if len({*weights.values()}) > 1:
            method += "; weights: " + ", ".join(f"{name} {weight}" for name, weight in weights.items())
        yield f"merge method: {method}"
    yield _poor(report)
    for member in report.members:
        yield from (f"{member.name}: {note}" for note in _notes(report, member))
    if report.allowed_labels is not None:
        yield report.allowed_labels.text
    for number, rule in enumerate(report.rules):
        yield rule_text(number, rule.config, rule.rows, report.rows)
    if report.idle_gaps:
        gaps = [f"{gap.seconds:.1f} s ({gap.after} to {gap.before})" for gap in report.idle_gaps]
        more = f", {len(gaps) - _SHOWN_GAPS} more in run.json" if len(gaps) > _SHOWN_GAPS else ""
        yield f"idle between members: {', '.join(gaps[:_SHOWN_GAPS])}{more}"
    yield from node_texts(report)
    if report.tuned_on is not None:
        tuned = report.tuned_on
        devices = ", ".join(dict.fromkeys(tuned["devices"]))
        rows_text = plural(tuned["rows"], "row")
        yield f"settings of `tune` on {tuned['date']}: {devices}, {rows_text}, tolerance {tuned['tolerance']:g}"
        yield from (f"! {warning}" for warning in report.warnings if warning.startswith("tuned_on: "))
    if report.left_out:
        reasons = [failure_text(failure) for failure in report.failures if failure.member in report.left_out]
        yield f"merged without {', '.join(report.left_out)}: {'; '.join(reasons)}"
    for name, path in report.files.items():
        yield f"{name}: {shown_path(Path(path))}"


def _cells(report: RunReport, member: MemberReport) -> list[str | int]:
    """Return the six cells from the rows to the peak memory."""
    if member.failure is not None:
        return [member.failure.outcome, *[""] * 5]
    if member.phase != "done":
        # The merge may find more rows than a worker had time to report.
        return [max(member.rows_done, report.merged_rows.get(member.name, 0)), "unfinished", *[""] * 4]
    if not member.workers_now:
        if member.replicas:
            return [member.rows, "reused", *[""] * 4]
        # Its file may have rows that `when` leaves out.
        return [report.merged_rows.get(member.name, member.rows), "given", *[""] * 4]
    where, peak_bytes = " GPU", member.peak("peak_gpu_memory_bytes")
    if not peak_bytes:
        where, peak_bytes = "", member.peak("peak_memory_bytes")
    return [
        member.rows_done,
        duration(member.seconds or 0.0).removesuffix(" s"),
        written(member.tokens_per_second, ",.0f"),
        rate(member.rows_per_second),
        percent_of(member.counters.tokens, member.counters.padded_tokens, 1),
        f"{peak_bytes / 2**30:.2f} GiB{where}" if peak_bytes else "",
    ]


def _metrics(report: RunReport) -> list[str]:
    """Return the names of the config's metrics that have values."""
    return [*dict.fromkeys(name for score in report.scores.values() for name in score.metrics)]


def _scores(report: RunReport, name: str) -> list[str]:
    score = report.scores.get(name)
    if score is None:
        return []
    mark = _MARK if score.no_better_than_prior else ""
    return [
        mark + written(score.log_loss, ".4f"),
        written(score.accuracy, ".1%"),
        written(score.rmse, ".4g"),
        *(written(score.metrics.get(metric), ".4f") for metric in _metrics(report)),
    ]


def _poor(report: RunReport) -> str:
    """Return which members are no better than the labels' frequencies; empty if all are."""
    poor = {name: score for name, score in report.scores.items() if score.no_better_than_prior}
    if not poor:
        return ""
    first = next(iter(poor.values()))
    losses = ", ".join(f"{name} {score.log_loss:.4f}" for name, score in poor.items())
    return (
        f"{_MARK}no better than always predicting how often each label occurs (log loss {first.prior_log_loss:.4f} "
        f"on these {first.rows:,} rows): {losses}. Check the labels (label_map, a file's columns), the prompt and "
        "the checkpoint"
    )


def fitted_text(report: RunReport) -> str:
    """Return the ensemble's score on rows that its weights were not fitted on; empty if it is not known."""
    return "" if report.fitted_on is None else f"{ENSEMBLE_ROW}: {report.fitted_on.text}"


def node_texts(report: RunReport) -> Iterator[str]:
    """Yield of each node of a cluster that joined or was lost when that was; a node may come back."""
    for name in dict.fromkeys(change.node for change in report.nodes):
        parts = []
        for change in report.nodes:
            if change.node == name:
                when = f"after {duration(change.after_seconds)}"
                parts.append(f"was lost {when} ({change.why})" if change.is_lost else f"joined {when}")
        yield f"node {name} {' and '.join(parts)}"


def inputs_text(names: Sequence[str]) -> str:
    """Return in words whose predictions a member reads."""
    return f"reads the predictions of {', '.join(names)}"


def rule_text(number: int, rule: RuleConfig, count: int, rows: int) -> str:
    """Return a rule, and how many rows it is for."""
    condition = textwrap.shorten(rule.when, _SHOWN_CHARACTERS, placeholder=" ...")
    return f"rules[{number}]: {rule.action} in {count:,} of {plural(rows, 'row')}, by {condition}"


def _notes(report: RunReport, member: MemberReport) -> Iterator[str]:
    """Yield a sentence on each thing that is worth knowing of a member's rows."""
    counters = member.counters
    # What became of rows that an earlier run computed is not known.
    of_rows = f"{plural(counters.rows, 'row')}{' computed now' if member.reused_rows else ''}"
    of_rows += f" of {len(member.views)} views" if member.views else ""
    count = counters.truncated_rows
    if count:
        length = max(worker.ready.max_length or 0 for worker in member.workers if worker.ready is not None)
        mean = plural(round(counters.cut_tokens / count), "token")
        yield f"{count:,} of {of_rows} {were(count)} cut at max_length {length:,}, by {mean} on average"
    count = counters.repeated_rows
    if count:
        repeat = "repeats" if count == 1 else "repeat"
        yield f"{count:,} of {of_rows} {repeat} another row's text and {were(count)} not computed again"
    count = counters.clipped_images
    if count:
        images = f"{plural(count, 'image')} {'has' if count == 1 else 'have'}"
        yield (
            f"{images} 16 or 32 bits a channel; values above 255 are cut, as in transformers, so that they are "
            "nearly white or black: save them with 8 bits, scaled as in training"
        )
    if counters.oom_events:
        key = "max_num_batched_tokens" if counters.tokens else "batch_size"
        batches = plural(counters.oom_events, "batch")
        yield f"{batches} ran out of memory and ran again in halves; a lower {key} avoids this"
    count = counters.recomputed_rows
    if count:
        yield f"{plural(count, 'row')} overflowed half precision and {were(count)} computed again in float32"
    count = counters.float32_rows
    if count:
        rows = plural(count, "row")
        yield f"{rows} {were(count)} computed in float32 at once, as most of a chunk had overflowed half precision"
    computed = counters.rows - counters.bad_rows
    if computed and counters.other_mass:
        share = counters.other_mass / computed
        yield f"{share:.1%} of the probability behind its prompts fell on tokens of no label"
    if counters.shared_tokens and counters.tokens:
        share = counters.shared_tokens / counters.tokens
        yield f"{share:.1%} of its tokens stand at beginnings that rows share, computed once"
    # Where the policy is not ``uniform``, a member with such rows is merged only if its time was over.
    if member.failure is None and member.bad_rows:
        policy = report.on_bad_row
        instead = "equal probabilities" if policy == "uniform" else "left to the other members"
        rows = plural(len(member.bad_rows), "row")
        numbers = listed([f"{int(row) + 1:,}" for row in member.bad_rows], _SHOWN_ROWS, str)
        noun = "row" if len(member.bad_rows) == 1 else "rows"
        yield (
            f"{rows} could not be computed ({instead}, on_bad_row: {policy}): {noun} {numbers}; run.json says why"
        )
    count = report.partial_rows.get(member.name, 0)
    if member.views and count:
        rows_of_views = ", ".join(f"{title} {seen.rows or 0:,}" for title, seen in member.views.items())
        yield (
            f"{plural(count, 'row')} lack{'s' if count == 1 else ''} some of {len(member.views)} views and "
            f"{were(count)} averaged over the others ({rows_of_views} rows)"
        )
    if member.cascade is not None:
        yield _cascade_text(report, member, member.cascade, report.rows)
    for title, view_report in member.views.items():
        if view_report.cascade is not None:
            text = _cascade_text(report, member, view_report.cascade, rows_of(report, member), title)
            yield f"view {title}: {text}"


def _cascade_text(
    report: RunReport, member: MemberReport, cascade: CascadeReport, rows: int, view: str = ""
) -> str:
    """Return which of so many rows ``when`` of a member, or of a view, selected, and what they gained."""
    if not cascade.is_selected:
        before = "views" if view else "members"
        return f"`when` has not selected its rows yet: the {before} before it have not ended"
    text = f"`when` selected {cascade.rows:,} of {plural(rows, 'row')}"
    if takes_time_left(cascade.when):
        text = f"there was time for {cascade.rows:,} of {plural(rows, 'row')}, the closest calls first"
    if rows:
        text += f" ({100 * cascade.rows / rows:.1f} %)"
    comparison = report.comparisons.get(member.name)
    if comparison is None or view:
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


def out_of_fold(subject: tuple[RunReport, Sequence[Path], RunConfig]) -> Iterator[str | Table]:
    """Yield what has come of the run that makes out-of-fold predictions, where these are, and what to do next."""
    report, files, config = subject
    yield from summary(report)
    if files:
        yield f"out-of-fold predictions: {' '.join(map(shown_path, files))}"
    if len(files) == len(config.models):
        yield _next_command(report, files, config)


def _next_command(report: RunReport, files: Sequence[Path], config: RunConfig) -> str:
    """Return the commands that lead to the ensemble; empty where ``fit`` would need to be told more."""
    configs = [shown_path(Path(path)) for path in report.config_files]
    sets = [text for override in report.overrides for text in ("--set", override)]
    if len(files) == 1:
        return f"next: {shlex.join(['ensemble', 'run', *configs, *sets])}"
    data = config.training_data
    is_exclusive = all(member.activation == "softmax" for member in report.members)
    if not is_exclusive or data.label_column is None:
        return ""
    fit = ["ensemble", "fit", *map(shown_path, files), "--labels", shown_path(data.path)]
    if data.label_column != "label":
        fit += ["--label-column", data.label_column]
    return f"next: {shlex.join(fit)} && {shlex.join(['ensemble', 'run', *configs, 'weights.yaml', *sets])}"


def merge(merged: Merged) -> Iterator[str | Table]:
    """Yield what a merge of files has made of which rows and weights."""
    rows = [(name, merged.rows_of[name], weight_text(weight)) for name, weight in merged.weights.items()]
    yield Table(["file", "rows", "weight"], rows)
    yield f"merge method: {merged.method}"
    yield from (f"! {remark}" for remark in merged.remarks)
    path = address_of(merged.path) or shown_path(merged.path)
    yield f"{path}: {plural(merged.rows, 'row')} of {', '.join(merged.labels)}"
