"""Show each member's speed, its padding, the lengths of its rows, and how many rows were cut."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from matplotlib.figure import Figure

from ensemble.analysis.report.base import ReportData, Section, html
from ensemble.analysis.report.pictures import SERIES, picture
from ensemble.common.errors import DataError
from ensemble.common.text import duration, gib, plural, rate
from ensemble.pipeline.run_report import MemberReport

_BINS = 40


class Throughput(Section):
    title: ClassVar[str] = "Throughput and lengths"

    def html(self, data: ReportData) -> Markup | None:
        members = [member for member in data.report.members if member.workers]
        nulls = [
            f"{plural(count, 'row')} in {name}" for name, count in data.report.null_texts.items() if count
        ]
        lengths, no_lengths = Markup(), ""
        try:
            lengths = _lengths(data.table_texts.sizes())
        except DataError as error:
            no_lengths = str(error)
        if not (members or lengths or no_lengths or nulls):
            return None
        cuts = [_cut(member) for member in members]
        return self.render(
            speeds=[_speed(member) for member in members],
            lengths=lengths,
            no_lengths=no_lengths,
            cuts=[row for row in cuts if row],
            nulls=nulls,
        )


def _speed(member: MemberReport) -> list[str]:
    counters = member.worker_counters
    seconds = member.seconds if member.chunks else None
    if not member.chunks and member.computed_before:
        seconds = member.computed_before[-1].seconds
    seconds = seconds or counters.predict_seconds
    busy = [worker.forward_share for worker in member.workers if worker.forward_share is not None]
    readies = [worker.ready for worker in member.workers if worker.ready is not None]
    peaks = (
        0 if member.forecast is None else member.forecast.peak_bytes,
        member.peak("peak_gpu_allocated_bytes"),
        member.peak("peak_gpu_memory_bytes"),
        member.peak("peak_memory_bytes"),
    )
    return [
        member.name,
        str(member.replicas),
        f"{counters.rows:,}",
        duration(seconds) if seconds else "",
        rate(counters.rows / seconds) if seconds else "",
        f"{counters.tokens / seconds:,.0f}" if seconds and counters.tokens else "",
        f"{counters.tokens / counters.padded_tokens:.1%}" if counters.padded_tokens else "",
        f"{counters.rows / counters.batches:.1f}" if counters.batches else "",
        f"{sum(busy) / len(busy):.0%}" if busy else "",
        *(gib(size) if size else "" for size in peaks),
        ", ".join(dict.fromkeys(ready.dtype for ready in readies if ready.dtype)),
        ", ".join(dict.fromkeys(ready.attn_implementation for ready in readies if ready.attn_implementation)),
    ]


def _lengths(lengths: npt.NDArray[np.int64]) -> Markup:
    """Draw how many rows have how many bytes of text, [rows]."""
    if not len(lengths) or not lengths.max():
        return Markup()
    half, most, nearly_all, top, longest = np.quantile(lengths, (0.5, 0.9, 0.99, 0.995, 1.0))
    top = top or longest
    width = max(1.0, np.ceil(top / _BINS))  # whole bytes, or some bars would have more lengths than others
    edges = np.arange(0.0, top + width, width)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.hist(np.minimum(lengths, top), bins=edges.tolist(), color=SERIES[0])
        axes.set(xlabel="bytes of text that members read of a row", ylabel="rows", xlim=(0, edges[-1]))
        axes.grid(axis="x", visible=False)

    text = (
        f"Bytes of text in a row: 50 % of the rows have up to {half:,.0f}, 90 % up to {most:,.0f}, 99 % up to "
        f"{nearly_all:,.0f}, the longest {longest:,.0f}. The last bar has all that are longer."
    )
    return picture(draw, "How long the rows are", text, 170)


def _cut(member: MemberReport) -> list[object]:
    """Return the row of a member in the table of cut texts; empty if it cuts none."""
    counters, readies = member.worker_counters, (worker.ready for worker in member.workers)
    limits = [ready.max_length for ready in readies if ready is not None and ready.max_length is not None]
    if not counters.rows or not limits:
        return []
    cut, computed = counters.truncated_rows, counters.rows - counters.repeated_rows
    of_rows = f" of {counters.rows:,} computed last" if member.reused_rows else ""
    share = f"{cut:,}{of_rows} ({cut / counters.rows:.1%})"
    return [
        member.name,
        f"{max(limits):,}",
        html('<span class="bad">{{ share }}</span>', share=share) if cut else share,
        f"{counters.cut_tokens / cut:,.0f}" if cut and counters.cut_tokens else "",
        f"{counters.tokens / computed:,.0f}" if computed else "",
        f"{counters.repeated_rows:,}",
    ]
