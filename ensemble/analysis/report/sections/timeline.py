"""Show the workers of each device over time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, NamedTuple

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ensemble.analysis.report.base import ReportData, Section, shortened
from ensemble.analysis.report.pictures import SERIES, picture
from ensemble.common import gpus
from ensemble.common.text import duration
from ensemble.pipeline.run_report import RunReport

_TICK_SECONDS = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3_600, 10_800, 43_200, 259_200)


class _Bar(NamedTuple):
    """Hold a worker on a device; ``times`` are when each phase begins, and the end, since the run's start."""

    lane: tuple[str, int]  # the device and a number within it
    member: int
    times: tuple[float, float, float, float]


class Timeline(Section):
    title: ClassVar[str] = "What ran where"

    def html(self, data: ReportData) -> Markup:
        report = data.report
        names = gpus.device_names(report.devices) | {"cpu": "CPU"}
        bars = list(_bars(report))
        for device in sorted(bar.lane[0] for bar in bars):  # of a node, or of an earlier run's machine
            names.setdefault(device, device.replace("cpu", "CPU", 1))
        return self.render(picture=_picture(report, bars, names) if bars else "")


def _bars(report: RunReport) -> Iterator[_Bar]:
    """Yield what each worker did when; a worker that stood by counts from when it got the device."""
    ends: dict[tuple[str, int], float] = {}
    workers = [(number, worker) for number, member in enumerate(report.members) for worker in member.workers]
    for number, worker in sorted(workers, key=lambda item: item[1].leased_after_seconds):
        begin = worker.leased_after_seconds
        loading = max(begin, worker.started_after_seconds + (worker.start_seconds or 0.0))
        loaded = loading + (worker.load_seconds or 0.0)
        end = loaded + worker.counters.predict_seconds
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
    seconds = max(bar.times[-1] for bar in bars)
    members = sorted({bar.member for bar in bars})
    step = next((step for step in _TICK_SECONDS if seconds <= 6 * step), _TICK_SECONDS[-1])

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for bar in bars:
            if bar.lane in lanes:
                colour = SERIES[bar.member % len(SERIES)]
                # Pale while the worker starts, stronger while it loads, solid while it computes.
                for begin, end, alpha in zip(bar.times, bar.times[1:], (0.25, 0.5, 1.0), strict=False):
                    place = lanes.index(bar.lane)
                    axes.barh(place, end - begin, left=begin, height=0.72, color=colour, alpha=alpha)
        axes.set_yticks(range(len(lanes)), ["" if number else names[device] for device, number in lanes])
        axes.set_ylim(len(lanes) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, seconds * 1.01)
        ticks = np.arange(0.0, seconds, step)
        axes.set_xticks(ticks, [duration(tick) for tick in ticks])
        axes.set_xlabel("since the run's start")
        handles = [Patch(color=SERIES[number % len(SERIES)]) for number in members]
        # Matplotlib leaves names with an underscore at the start out of a legend.
        labels = [f"\u200b{shortened(report.members[number].name, 16)}" for number in members]
        figure.legend(handles, labels, loc="outside upper left", ncols=3)

    text = (
        "Each bar is a worker process on its device: pale while Python and the libraries start, stronger while it "
        "loads the model, solid while it computes."
    )
    earlier = [member.name for member in report.members if member.workers and not member.chunks]
    if earlier:
        text += f" Computed by an earlier run, with times since its start: {', '.join(earlier)}."
    height = 69 + 16 * -(-len(members) // 3) + 22 * len(lanes)
    return picture(draw, "Workers of the devices over time", text, height)
