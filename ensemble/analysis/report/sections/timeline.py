"""What ran where: the workers of each device over time, and for how long nobody computed there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ensemble.analysis.report.base import ReportData, Section, html, table
from ensemble.analysis.report.pictures import (
    BAD,
    MUTED,
    PAPER,
    SERIES,
    device_names,
    picture,
    shown_name,
    time_axis,
)
from ensemble.common.text import duration, plural
from ensemble.pipeline.run_report import RunReport

# How solid a member's colour is in each phase; "ready" stands by for a device, or waits for its release.
_ALPHA = {"start": 0.3, "ready": 0.1, "load": 0.55, "compute": 1.0}
_LANE_PIXELS = 26
_MAX_LANES = 60
_MIN_NAME_SHARE = 0.09  # of the width: a shorter bar has no room for a name


@dataclass(frozen=True)
class Span:
    """A phase of a worker on a device, in seconds since the run's start; ``lane`` counts up within the device."""

    device: str
    lane: int
    member: int
    phase: str
    begin: float
    end: float
    is_behind: bool  # while another worker has the device


class Timeline(Section):
    title: ClassVar[str] = "What ran where"

    def html(self, data: ReportData) -> Markup | None:
        report = data.report
        spans = spans_of(report)
        if not spans:
            return html("<p>No worker ran: the predictions of all members were there.</p>")
        names = device_names(report)
        order = [*names]
        lanes = sorted(
            {(span.device, span.lane) for span in spans},
            key=lambda one: (order.index(one[0]) if one[0] in names else len(order), one),
        )
        left_out = len(lanes) - _MAX_LANES
        lanes = lanes[:_MAX_LANES]
        releases = [one for one in report.releases if one.after_seconds is not None]

        def draw(figure: Figure) -> None:
            axes = _draw(figure, report, spans, lanes)
            for one in releases:
                if (one.device, 0) in lanes and one.after_seconds is not None:
                    axes.barh(
                        lanes.index((one.device, 0)),
                        one.seconds,
                        left=one.after_seconds,
                        height=0.84,
                        color="none",
                        edgecolor=MUTED if one.is_free else BAD,
                        hatch="//////",
                        linewidth=0.5,
                    )

        earlier = [one.name for one in report.members if one.workers and not one.chunks]
        text = (
            "Each bar is a worker process on its device: pale while Python and the libraries start, paler where it "
            "waits for the device, stronger while it loads the model, solid while it computes."
        )
        if releases:
            text += " Hatched: the device's memory is coming back (red: it did not)."
        if left_out > 0:
            text += f" {plural(left_out, 'more worker')} beside these are left out."
        if earlier:
            text += f" {', '.join(earlier)}: done by an earlier run, with times since that one's start."
        height = 70 + _LANE_PIXELS * len(lanes) + 18 * (len(report.members) // 4)
        parts = [picture(draw, self.title, text, height, narrow_height=height + 12 * len(report.members))]
        if report.idle_gaps:
            total = sum(gap.seconds for gap in report.idle_gaps)
            parts.append(html("<h3>Waits between members</h3>"))
            longest = sorted(report.idle_gaps, key=lambda gap: -gap.seconds)[:10]
            rows = [
                (names.get(gap.device, gap.device), gap.after, gap.before, f"{gap.seconds:.1f} s")
                for gap in longest
            ]
            parts.append(table(("device", "after", "before", "idle"), rows, left=(0, 1, 2)))
            shown = f", the longest {len(rows)}" if len(rows) < len(report.idle_gaps) else ""
            parts.append(
                html(
                    '<p class="note">{{ total }} in which a device computed nothing between two members'
                    "{{ shown }}.</p>",
                    total=duration(total),
                    shown=shown,
                )
            )
        return Markup().join(parts)


def spans_of(report: RunReport) -> list[Span]:
    """What each worker did when; of a worker of an earlier run as far as it is known."""
    spans: list[Span] = []
    ends: dict[tuple[str, int], float] = {}
    workers = [(number, one) for number, member in enumerate(report.members) for one in member.workers]
    for number, worker in sorted(workers, key=lambda one: one[1].leased_after_seconds):
        begin, leased = worker.started_after_seconds, worker.leased_after_seconds
        started = begin + (worker.start_seconds or 0.0)
        loads = max(leased, started)
        loaded = loads + (worker.load_seconds or 0.0)
        life = worker.life_seconds
        end = max(loaded, loaded + worker.predict_seconds if life is None else leased + life)
        for device in worker.devices or ("cpu",):
            # Beside others that hold the device at the same time; who stands by for it lies over who has it.
            lane = 0
            while ends.get((device, lane), 0.0) > leased:
                lane += 1
            free_from = ends.get((device, lane), 0.0)
            ends[device, lane] = end
            for phase, since, until in (
                ("start", begin, started),
                ("ready", started, loads),
                ("load", loads, loaded),
                ("compute", loaded, end),
            ):
                middle = min(max(since, free_from), until)
                for start, stop, is_behind in ((since, middle, True), (middle, until, False)):
                    if stop > start:
                        spans.append(Span(device, lane, number, phase, start, stop, is_behind))
    return spans


def _draw(figure: Figure, report: RunReport, spans: Sequence[Span], lanes: Sequence[tuple[str, int]]) -> Axes:
    axes = figure.add_subplot()
    seconds = max(span.end for span in spans)
    is_wide = figure.get_figwidth() > 4
    for place, lane in enumerate(lanes):
        for span in spans:
            if (span.device, span.lane) != lane:
                continue
            colour, length = SERIES[span.member % len(SERIES)], span.end - span.begin
            height, y = (0.14, place + 0.46) if span.is_behind else (0.72, place)
            axes.barh(y, length, left=span.begin, height=height, color=colour, alpha=_ALPHA[span.phase])
            is_long = length > seconds * (_MIN_NAME_SHARE if is_wide else 2 * _MIN_NAME_SHARE)
            if span.phase == "compute" and is_long:
                name = report.members[span.member].name
                most = int(length / seconds * (90 if is_wide else 40))
                text = name if len(name) <= most else f"{name[: most - 1]}…"
                axes.text(span.begin + length / 2, place, text, color=PAPER, ha="center", va="center")
    names = device_names(report)
    axes.set_yticks(range(len(lanes)), ["" if lane else names.get(device, device) for device, lane in lanes])
    axes.set_ylim(len(lanes) - 0.3, -0.6)
    axes.set_xlim(0, seconds * 1.01)
    axes.grid(axis="y", visible=False)
    time_axis(axes.xaxis, seconds)
    shown = [number for number, member in enumerate(report.members) if member.workers]
    handles = [Patch(color=SERIES[number % len(SERIES)]) for number in shown]
    figure.legend(
        handles,
        [shown_name(report.members[number].name) for number in shown],
        loc="outside upper left",
        ncols=4 if is_wide else 2,
        frameon=False,
    )
    return axes
