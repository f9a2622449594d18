"""How fast each member was, and how much of what was computed was padding."""

from __future__ import annotations

from typing import ClassVar

from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from ensemble.analysis.report.base import ReportData, Section, html, table
from ensemble.analysis.report.pictures import MUTED, SERIES, picture, shown_name
from ensemble.common.protocol import Counters
from ensemble.common.text import duration, rate
from ensemble.pipeline.run_report import MemberReport

_HEADERS = (
    *("member", "replicas", "rows", "computing", "rows/s", "tokens/s", "real tokens", "rows a batch"),
    *("busy", "type", "attention"),
)


class Throughput(Section):
    title: ClassVar[str] = "Throughput and padding"

    def html(self, data: ReportData) -> Markup | None:
        members = [member for member in data.report.members if member.workers]
        if not members:
            return None
        counted = {one.name: sum(one.workers, Counters()) for one in members}
        drawn = [one for one in members if counted[one.name].padded_tokens]

        def draw(figure: Figure) -> None:
            axes = figure.add_subplot()
            for place, member in enumerate(drawn):
                counters = counted[member.name]
                colour = SERIES[data.report.members.index(member) % len(SERIES)]
                real, padding = counters.tokens, counters.padded_tokens - counters.tokens
                axes.barh(place, real, color=colour, height=0.6)
                axes.barh(place, padding, left=real, color=colour, alpha=0.3, height=0.6)
                share = counters.tokens / counters.padded_tokens
                axes.annotate(
                    f" {share:.1%} real",
                    (real + padding, place),
                    va="center",
                    color=MUTED,
                )
            axes.set_yticks(range(len(drawn)), [shown_name(one.name, 16) for one in drawn])
            axes.set_ylim(len(drawn) - 0.4, -0.6)
            axes.margins(x=0.2)
            axes.grid(axis="y", visible=False)
            axes.xaxis.set_major_locator(MaxNLocator(5))
            axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
            axes.set_xlabel("tokens computed")

        rows = [_row(member, counted[member.name]) for member in members]
        # Such as tokens, where no member reads any.
        shown = [place for place, cells in enumerate(zip(*rows, strict=True)) if any(cells)]
        headers = [_HEADERS[place] for place in shown]
        left = [place for place, header in enumerate(headers) if header in ("member", "type", "attention")]
        parts = [table(headers, [[row[place] for place in shown] for row in rows], left=left)]
        if drawn:
            text = "Tokens that were computed: solid those of texts, pale the padding of shorter rows in a batch."
            parts.insert(0, picture(draw, "Tokens and padding by member", text, 60 + 28 * len(drawn)))
        parts.append(
            html(
                '<p class="note">Busy: the share of a worker\'s life in forward passes. Computing: from the first '
                "chunk to the last; of a member that an earlier run computed, in that run.</p>"
            )
        )
        return Markup().join(parts)


def _row(member: MemberReport, counters: Counters) -> tuple[str, ...]:
    seconds = member.progress.seconds if member.chunks else None
    if not member.chunks and member.computed_before:
        seconds = member.computed_before[-1].seconds
    seconds = seconds or counters.predict_seconds or None
    busy = [one.forward_share for one in member.workers if one.forward_share is not None]

    def several(name: str) -> str:
        return ", ".join(dict.fromkeys(str(value) for one in member.workers if (value := getattr(one, name))))

    return (
        member.name,
        str(member.replicas),
        f"{counters.rows:,}",
        "" if seconds is None else duration(seconds),
        "" if seconds is None else rate(counters.rows / seconds),
        "" if seconds is None or not counters.tokens else f"{counters.tokens / seconds:,.0f}",
        f"{counters.tokens / counters.padded_tokens:.1%}" if counters.padded_tokens else "",
        f"{counters.rows / counters.batches:.1f}" if counters.batches else "",
        f"{sum(busy) / len(busy):.0%}" if busy else "",
        several("dtype"),
        several("attn_implementation"),
    )
