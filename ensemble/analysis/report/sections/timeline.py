"""Show the workers of each device over time, and the memory, clocks and temperatures of the GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, NamedTuple

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ensemble.analysis.report.base import ReportData, Section, html, shortened, table
from ensemble.analysis.report.pictures import MUTED, SERIES, picture
from ensemble.common import gpus
from ensemble.common.text import duration
from ensemble.pipeline.run_report import RunReport
from ensemble.scheduling.device_pool import TelemetryCurve

_TICK_SECONDS = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3_600, 10_800, 43_200, 259_200)


class _Bar(NamedTuple):
    """Hold a worker on a device; ``times`` are when each phase begins, and the end, since the run's start."""

    lane: tuple[str, int]  # the device and a number within it
    member: int
    times: tuple[float, float, float, float]


class Timeline(Section):
    title: ClassVar[str] = "What ran where"

    def html(self, data: ReportData) -> Markup | None:
        report = data.report
        names = gpus.device_names(report.devices) | {"cpu": "CPU"}
        bars = list(_bars(report))
        for device in sorted(bar.lane[0] for bar in bars):  # of a node, or of an earlier run's machine
            names.setdefault(device, device.replace("cpu", "CPU", 1))
        content = html("<p>No worker ran: the predictions of all members were there.</p>")
        if bars:
            content = _picture(report, bars, names)
        return content + _devices(report, names)


def _bars(report: RunReport) -> Iterator[_Bar]:
    """Yield what each worker did when; a worker that stood by counts from when it got the device."""
    ends: dict[tuple[str, int], float] = {}
    workers = [(number, worker) for number, member in enumerate(report.members) for worker in member.workers]
    for number, worker in sorted(workers, key=lambda item: item[1].leased_after_seconds):
        begin = worker.leased_after_seconds
        loading = max(begin, worker.started_after_seconds + (worker.start_seconds or 0.0))
        loaded = loading + (worker.load_seconds or 0.0)
        end = loaded + worker.predict_seconds
        if worker.life_seconds is not None:
            end = max(loaded, begin + worker.life_seconds)
        for device in worker.devices or ("cpu",):
            lane = (device, 0)
            while ends.get(lane, 0.0) > begin:  # workers that share a device are drawn below each other
                lane = (device, lane[1] + 1)
            ends[lane] = end
            yield _Bar(lane, number, (begin, loading, loaded, end))


def _picture(report: RunReport, bars: list[_Bar], names: Mapping[str, str]) -> Markup:
    order = list(names)
    lanes = sorted({bar.lane for bar in bars}, key=lambda lane: (order.index(lane[0]), lane))[:60]
    curves = [device for device in report.devices if device.uuid in report.device_memory][:16]
    seconds = max(bar.times[-1] for bar in bars)
    members = sorted({bar.member for bar in bars})
    heights = [24 + 22 * len(lanes), *(85 for _ in curves)]  # in pixels
    step = next((step for step in _TICK_SECONDS if seconds <= 6 * step), _TICK_SECONDS[-1])

    def draw(figure: Figure) -> None:
        first, *others = figure.subplots(
            len(heights), 1, sharex=True, squeeze=False, height_ratios=heights
        ).ravel()
        for bar in bars:
            if bar.lane in lanes:
                colour = SERIES[bar.member % len(SERIES)]
                # Pale while the worker starts, stronger while it loads, solid while it computes.
                for begin, end, alpha in zip(bar.times, bar.times[1:], (0.25, 0.5, 1.0), strict=False):
                    place = lanes.index(bar.lane)
                    first.barh(place, end - begin, left=begin, height=0.72, color=colour, alpha=alpha)
        first.set_yticks(range(len(lanes)), ["" if number else names[device] for device, number in lanes])
        first.set_ylim(len(lanes) - 0.4, -0.6)
        first.tick_params(axis="y", length=0)
        first.grid(axis="y", visible=False)
        for axes, device in zip(others, curves, strict=True):
            curve = report.device_memory[device.uuid]
            times, used = ([point[place] for point in curve.points] for place in (0, 1))
            axes.plot(times, np.array(used) / 2**30, color=SERIES[0], drawstyle="steps-post")
            if curve.baseline_bytes is not None:
                axes.axhline(curve.baseline_bytes / 2**30, color=MUTED, linewidth=0.8, linestyle=":")
            axes.set_ylim(0, device.total_bytes / 2**30 or None)
            axes.set_ylabel("GiB")
            axes.set_title(names[device.uuid], loc="left")
        last = [first, *others][-1]
        last.set_xlim(0, seconds * 1.01)
        ticks = np.arange(0.0, seconds, step)
        last.set_xticks(ticks, [duration(tick) for tick in ticks])
        last.set_xlabel("since the run's start")
        handles = [Patch(color=SERIES[number % len(SERIES)]) for number in members]
        # Matplotlib leaves names with an underscore at the start out of a legend.
        labels = [f"\u200b{shortened(report.members[number].name, 16)}" for number in members]
        figure.legend(handles, labels, loc="outside upper left", ncols=3)

    text = (
        "Each bar is a worker process on its device: pale while Python and the libraries start, stronger while it "
        "loads the model, solid while it computes."
    )
    if curves:
        text += " Below: used memory of each GPU, by all programs; dotted: before the first worker."
    earlier = [member.name for member in report.members if member.workers and not member.chunks]
    if earlier:
        text += f" Computed by an earlier run, with times since its start: {', '.join(earlier)}."
    height = 45 + 16 * -(-len(members) // 3) + sum(heights) + 20 * len(curves)
    return picture(draw, "Workers and memory of the devices over time", text, height)


def _devices(report: RunReport, names: Mapping[str, str]) -> Markup:
    """Return what is known of each device: releases of its memory, heat, power and clocks."""
    rows = []
    for device in dict.fromkeys([*(release.device for release in report.releases), *report.device_telemetry]):
        releases = [release for release in report.releases if release.device == device]
        late = sum(not release.is_free for release in releases)
        curve = report.device_telemetry.get(device, TelemetryCurve())
        powers = [point.power_watts for point in curve.points if point.power_watts is not None]
        clocks = [point.sm_clock_mhz for point in curve.points if point.sm_clock_mhz is not None]
        heat = curve.max_temperature_celsius
        causes = sorted(curve.throttled_by.items(), key=lambda cause: -cause[1])
        rows.append(
            [
                names.get(device, device),
                len(releases) or "",
                f"{max(release.seconds for release in releases):.1f} s" if releases else "",
                html('<span class="bad">{{ late }}</span>', late=late) if late else "",
                "" if heat is None else f"{heat} °C",
                f"{max(powers):.0f} W" if powers else "",
                f"{max(clocks):,} of {curve.max_sm_clock_mhz or 0:,} MHz" if clocks else "",
                duration(curve.throttled_seconds) if curve.points else "",
                "; ".join(f"{cause} {duration(seconds)}" for cause, seconds in causes),
            ]
        )
    headers = ("device", "releases", "slowest", "never freed", "hottest", "most power", "highest clock")
    return table([*headers, "throttled", "by"], rows, left=(0, 8))
