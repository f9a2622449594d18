"""The memory of each GPU over time, how it came back between members, and how the GPUs were doing."""

from __future__ import annotations

from typing import ClassVar

from markupsafe import Markup
from matplotlib.figure import Figure

from ensemble.analysis.report.base import ReportData, Section, html, table
from ensemble.analysis.report.pictures import (
    BAD,
    GOOD,
    MUTED,
    SERIES,
    device_names,
    picture,
    thinned,
    time_axis,
)
from ensemble.common.text import duration, gib, plural
from ensemble.pipeline.run_report import RunReport

_PANEL_PIXELS = 110
_MAX_PANELS = 16


class Memory(Section):
    title: ClassVar[str] = "Memory of the devices"

    def html(self, data: ReportData) -> Markup | None:
        report = data.report
        parts = [*filter(None, (_memory(report), _releases(report), _peaks(report), _telemetry(report)))]
        return Markup().join(parts) if parts else None


def _memory(report: RunReport) -> Markup | None:
    curves = {
        device: curve
        for device in report.devices
        if (curve := report.device_memory.get(device.uuid)) is not None and len(curve.points) > 1
    }
    if not curves:
        return None
    names, seconds = device_names(report), max(curve.points[-1][0] for curve in curves.values())

    def draw(figure: Figure) -> None:
        panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (device, curve) in zip(panels, shown.items(), strict=True):
            points = thinned(curve.points)
            times, used = [time for time, _ in points], [size / 2**30 for _, size in points]
            axes.fill_between(times, used, color=SERIES[0], alpha=0.25, linewidth=0, step="post")
            axes.plot(times, used, color=SERIES[0], drawstyle="steps-post")
            if curve.baseline_bytes is not None:
                axes.axhline(curve.baseline_bytes / 2**30, color=MUTED, linewidth=0.8, linestyle=":")
            for one in report.releases:
                if one.device == device.uuid and one.after_seconds is not None:
                    colour, end = GOOD if one.is_free else BAD, one.after_seconds + one.seconds
                    axes.axvspan(one.after_seconds, end, color=colour, alpha=0.2, linewidth=0)
                    axes.axvline(end, color=colour, linewidth=1)
            axes.set_ylim(0, device.total_bytes / 2**30 or None)
            axes.set_xlim(0, seconds)
            axes.set_title(names[device.uuid], loc="left")
            axes.set_ylabel("GiB")
        time_axis(panels[-1].xaxis, seconds)

    shown = dict([*curves.items()][:_MAX_PANELS])
    text = (
        "Used memory of each GPU, up to all that it has, by all programs; dotted: before the first worker. Shaded: "
        "from a worker's end until its memory was back (green line), or until nobody waited longer (red)."
    )
    return picture(draw, "Used memory of each device over time", text, 50 + _PANEL_PIXELS * len(shown))


def _releases(report: RunReport) -> Markup | None:
    if not report.releases:
        return None
    names = device_names(report)
    rows = []
    for uuid in dict.fromkeys(one.device for one in report.releases):
        own = [one for one in report.releases if one.device == uuid]
        late = sum(not one.is_free for one in own)
        rows.append(
            (
                names.get(uuid, uuid),
                len(own),
                f"{max(one.seconds for one in own):.1f} s",
                html('<span class="{{ kind }}">{{ late }}</span>', kind="bad" if late else "", late=late),
            )
        )
    return table(("device", "releases", "the longest took", "never came back"), rows)


def _peaks(report: RunReport) -> Markup | None:
    """What was planned for each replica and what its workers took."""
    rows = []
    for member in report.members:
        gpu = [one.peak_gpu_memory_bytes for one in member.workers if one.peak_gpu_memory_bytes is not None]
        host = [one.peak_memory_bytes for one in member.workers if one.peak_memory_bytes is not None]
        if gpu or host:
            planned = member.forecast.peak_bytes if member.forecast is not None else None
            cells = (planned, max(gpu, default=None), max(host, default=None))
            rows.append((member.name, *("" if size is None else gib(size) for size in cells)))
    if not rows:
        return None
    return table(("member", "planned peak", "peak on a GPU", "peak of the process"), rows)


def _telemetry(report: RunReport) -> Markup | None:
    names = device_names(report)
    rows, throttled = [], []
    for uuid, curve in report.device_telemetry.items():
        powers = [point.power_watts for point in curve.points if point.power_watts is not None]
        clocks = [point.sm_clock_mhz for point in curve.points if point.sm_clock_mhz is not None]
        if not curve.points:
            continue
        hottest = curve.max_temperature_celsius
        rows.append(
            (
                names.get(uuid, uuid),
                "" if hottest is None else f"{hottest} °C",
                f"{max(powers):.0f} W" if powers else "",
                f"{max(clocks):,} of {curve.max_sm_clock_mhz or 0:,} MHz" if clocks else "",
                duration(curve.throttled_seconds) if curve.throttled_seconds else "never",
            )
        )
        throttled += [
            f"{names.get(uuid, uuid)}: {cause} {duration(seconds)}"
            for cause, seconds in sorted(curve.throttled_by.items(), key=lambda one: -one[1])
        ]
    if not rows:
        return None
    parts = [
        html("<h3>Clocks, power and heat</h3>"),
        table(("device", "hottest", "most power", "highest clock seen", "throttled"), rows),
    ]
    if throttled:
        note = f"{plural(len(throttled), 'reason')} to be slower: {'; '.join(throttled)}"
        parts.append(html('<p class="note">{{ note }}</p>', note=note))
    return Markup().join(parts)
