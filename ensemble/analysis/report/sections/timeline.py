"""What ran where: the workers of each device over time, and the memory, clocks and heat of the GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ensemble.analysis.report.base import ReportData, Section, html, table
from ensemble.analysis.report.pictures import BAD, GOOD, MUTED, PAPER, SERIES, picture
from ensemble.analysis.report.wording import shortened
from ensemble.common import gpus
from ensemble.common.text import duration, gib
from ensemble.pipeline.run_report import RunReport

# How solid a member's colour is in each phase.
_ALPHA = {"start": 0.25, "load": 0.5, "compute": 1.0}
_LANE_PIXELS = 22
_MEMORY_PIXELS = 85
# Of many devices the first ones are drawn.
_MAX_LANES = 60
_MAX_CURVES = 16
_MAX_POINTS = 600
# Characters of a name that would fill the whole width.
_CHARACTERS = 55


@dataclass(frozen=True)
class _Span:
    """A phase of a worker, in seconds since the run's start; ``lane`` is a device and a number within it."""

    lane: tuple[str, int]
    member: int
    phase: str
    begin: float
    end: float


class Timeline(Section):
    title: ClassVar[str] = "What ran where"

    def html(self, data: ReportData) -> Markup | None:
        report, spans, names = data.report, _spans(data.report), _device_names(data.report)
        content = html("<p>No worker ran: the predictions of all members were there.</p>")
        if spans:
            content = _picture(report, spans, names)
        return content + _idle(report, names) + _devices(report, names) + _peaks(report)


def _device_names(report: RunReport) -> dict[str, str]:
    """Return short names of the devices, in the report's order: GPU 0, GPU 1 on node-b, CPU."""
    used = {device for member in report.members for worker in member.workers for device in worker.devices}
    cpus = {device: device.replace("cpu", "CPU", 1) for device in sorted(used) if device.startswith("cpu")}
    return gpus.device_names(report.devices) | {"cpu": "CPU"} | cpus


def _spans(report: RunReport) -> list[_Span]:
    """Return what each worker did when; a worker that stood by counts from when it got the device."""
    spans: list[_Span] = []
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
            phases = (("start", begin, loading), ("load", loading, loaded), ("compute", loaded, end))
            spans += [_Span(lane, number, *phase) for phase in phases if phase[2] > phase[1]]
    return spans


def _picture(report: RunReport, spans: Sequence[_Span], names: Mapping[str, str]) -> Markup:
    order = {device: place for place, device in enumerate(names)}
    lanes = sorted({span.lane for span in spans}, key=lambda lane: (order.get(lane[0], len(order)), lane))
    lanes = lanes[:_MAX_LANES]
    curves = [
        device
        for device in report.devices
        if device.uuid in report.device_memory and len(report.device_memory[device.uuid].points) > 1
    ][:_MAX_CURVES]
    seconds = max(span.end for span in spans)
    members = [number for number, member in enumerate(report.members) if member.workers]
    heights = [24 + _LANE_PIXELS * len(lanes), *(_MEMORY_PIXELS for _ in curves)]

    def draw(figure: Figure) -> None:
        grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        _draw_lanes(grid[0], report, spans, lanes, seconds)
        labels = ["" if number else names.get(device, device) for device, number in lanes]
        grid[0].set_yticks(range(len(lanes)), labels)
        for axes, device in zip(grid[1:], curves, strict=True):
            _draw_memory(axes, report, device.uuid)
            axes.set_ylim(0, device.total_bytes / 2**30 or None)
            axes.set_title(names[device.uuid], loc="left")
        grid[-1].set_xlim(0, seconds * 1.01)
        _time_axis(grid[-1], seconds)
        handles = [Patch(color=SERIES[number % len(SERIES)]) for number in members]
        # Matplotlib leaves names with an underscore at the start out of a legend.
        labels = [f"\u200b{shortened(report.members[number].name, 16)}" for number in members]
        figure.legend(handles, labels, loc="outside upper left", ncols=3)

    text = (
        "Each bar is a worker process on its device: pale while Python and the libraries start, stronger while it "
        "loads the model, solid while it computes."
    )
    if report.releases:
        text += " Hatched: the device's memory is being freed (red: it was not)."
    if curves:
        text += " Below: used memory of each GPU, by all programs; dotted: before the first worker."
    earlier = [member.name for member in report.members if member.workers and not member.chunks]
    if earlier:
        text += f" Computed by an earlier run, with times since its start: {', '.join(earlier)}."
    height = 45 + 16 * -(-len(members) // 3) + sum(heights) + 20 * len(curves)
    return picture(draw, "Workers and memory of the devices over time", text, height)


def _draw_lanes(
    axes: Axes, report: RunReport, spans: Sequence[_Span], lanes: Sequence[tuple[str, int]], seconds: float
) -> None:
    places = {lane: place for place, lane in enumerate(lanes)}
    for span in spans:
        if span.lane not in places:
            continue
        place, length, colour = places[span.lane], span.end - span.begin, SERIES[span.member % len(SERIES)]
        axes.barh(place, length, left=span.begin, height=0.72, color=colour, alpha=_ALPHA[span.phase])
        room = int(_CHARACTERS * length / seconds)
        if span.phase == "compute" and room > 3:
            name = shortened(report.members[span.member].name, room)
            axes.text(span.begin + length / 2, place, name, color=PAPER, ha="center", va="center")
    for release in report.releases:
        if release.after_seconds is not None and (release.device, 0) in places:
            colour = MUTED if release.is_free else BAD
            left, place = release.after_seconds, places[release.device, 0]
            (bar,) = axes.barh(place, release.seconds, left=left, height=0.84, color="none", edgecolor=colour)
            bar.set(hatch="//////", linewidth=0.5)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)


def _draw_memory(axes: Axes, report: RunReport, device: str) -> None:
    curve = report.device_memory[device]
    size = -(-len(curve.points) // _MAX_POINTS)
    stretches = [curve.points[start : start + size] for start in range(0, len(curve.points), size)]
    points = [*(max(stretch, key=lambda point: point[1]) for stretch in stretches), curve.points[-1]]
    times, used = [time for time, _ in points], [size / 2**30 for _, size in points]
    axes.fill_between(times, used, color=SERIES[0], alpha=0.25, linewidth=0, step="post")
    axes.plot(times, used, color=SERIES[0], drawstyle="steps-post")
    if curve.baseline_bytes is not None:
        axes.axhline(curve.baseline_bytes / 2**30, color=MUTED, linewidth=0.8, linestyle=":")
    for release in report.releases:
        if release.device == device and release.after_seconds is not None:
            end = release.after_seconds + release.seconds
            axes.axvline(end, color=GOOD if release.is_free else BAD, linewidth=1)
    axes.set_ylabel("GiB")


def _time_axis(axes: Axes, seconds: float) -> None:
    """Put ticks at round times, in the unit that fits the length of the run."""
    units = {1.0: "s", 60.0: "min", 3600.0: "h"}
    unit = max(unit for unit in units if unit == 1 or seconds >= 3 * unit)
    ticks = MaxNLocator(nbins=6, steps=[1, 2, 5, 10]).tick_values(0.0, seconds / unit)
    axes.set_xticks([tick * unit for tick in ticks if tick * unit <= seconds * 1.001])
    axes.xaxis.set_major_formatter(lambda value, place: f"{value / unit:g}")
    axes.set_xlabel(f"{units[unit]} since the run's start")


def _idle(report: RunReport, names: Mapping[str, str]) -> Markup:
    if not report.idle_gaps:
        return Markup()
    total = duration(sum(gap.seconds for gap in report.idle_gaps))
    longest = max(report.idle_gaps, key=lambda gap: gap.seconds)
    where = f"{names.get(longest.device, longest.device)} between {longest.after} and {longest.before}"
    text = f"Between two members devices computed nothing for {total} in all"
    return html("<p>{{ text }}.</p>", text=f"{text}, at most for {longest.seconds:.1f} s: {where}")


def _devices(report: RunReport, names: Mapping[str, str]) -> Markup:
    """Return what is known of each device: releases of its memory, heat, power and clocks."""
    rows = []
    for device in dict.fromkeys([*(release.device for release in report.releases), *report.device_telemetry]):
        releases = [release for release in report.releases if release.device == device]
        late = sum(not release.is_free for release in releases)
        rows.append(
            [
                names.get(device, device),
                len(releases) or "",
                f"{max(release.seconds for release in releases):.1f} s" if releases else "",
                html('<span class="bad">{{ late }}</span>', late=late) if late else "",
                *_telemetry(report, device),
            ]
        )
    headers = [
        *("device", "releases", "slowest", "never freed"),
        *("hottest", "most power", "highest clock", "throttled", "by"),
    ]
    return table(headers, rows, left=(0, 8))


def _telemetry(report: RunReport, device: str) -> list[str]:
    curve = report.device_telemetry.get(device)
    if curve is None or not curve.points:
        return [""] * 5
    powers = [point.power_watts for point in curve.points if point.power_watts is not None]
    clocks = [point.sm_clock_mhz for point in curve.points if point.sm_clock_mhz is not None]
    causes = sorted(curve.throttled_by.items(), key=lambda cause: -cause[1])
    return [
        "" if curve.max_temperature_celsius is None else f"{curve.max_temperature_celsius} °C",
        f"{max(powers):.0f} W" if powers else "",
        f"{max(clocks):,} of {curve.max_sm_clock_mhz or 0:,} MHz" if clocks else "",
        duration(curve.throttled_seconds) if curve.throttled_seconds else "never",
        "; ".join(f"{cause} {duration(seconds)}" for cause, seconds in causes),
    ]


def _peaks(report: RunReport) -> Markup:
    """Return the memory that was planned for a replica of each member, and what its workers took."""
    rows = []
    for member in report.members:
        planned = 0 if member.forecast is None else member.forecast.peak_bytes
        gpu = max((worker.peak_gpu_memory_bytes or 0 for worker in member.workers), default=0)
        process = max((worker.peak_memory_bytes or 0 for worker in member.workers), default=0)
        if gpu or process:
            rows.append([member.name, *(gib(size) if size else "" for size in (planned, gpu, process))])
    return table(["member", "planned peak", "peak on a GPU", "peak of the process"], rows)
