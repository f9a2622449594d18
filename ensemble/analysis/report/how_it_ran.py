"""Show how a run went: its end, trainings, workers over time, speeds, faults, settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ensemble.analysis.report.base import ReportData, Section, html, number, shortened
from ensemble.analysis.report.pictures import SERIES, picture
from ensemble.common import gpus
from ensemble.common.errors import DataError
from ensemble.common.gpus import device_names
from ensemble.common.text import duration, gib, plural, rate, shown_path
from ensemble.pipeline.run_report import MemberReport, RunReport
from ensemble.pipeline.training_dir import TrainingDir
from ensemble.training.records import MemberRecord, PartRecord, TrainingReport, read_record

_ENDINGS = {
    "complete": ("Complete", "good"),
    "time_limit": ("Stopped at its time limit, with a complete submission", ""),
    "failed": ("Failed", "bad"),
    "interrupted": ("Interrupted", "bad"),
    "running": ("Still running when this page was written", ""),
}
_TICK_SECONDS = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3_600, 10_800, 43_200, 259_200)
_LENGTH_BINS = 40
_MAX_FAULTS = 50
_MAX_ROWS = 20
_KINDS = {
    "error": "an error",
    "death": "its process died",
    "hang": "it hung",
    "memory": "out of host memory",
    "lasting": "an error that lasts",
}
_COUNTERS = {
    "oom_events": ("batch", "ran out of memory and ran again smaller"),
    "recomputed_rows": ("row", "came out non-finite and ran again in float32"),
    "float32_rows": ("row", "ran in float32 at once, as most rows before them had to"),
}


class Header(Section):
    title: ClassVar[str] = "Run"

    def html(self, data: ReportData) -> Markup:
        report = data.report
        ending, kind = _ENDINGS[report.status]
        devices = [
            f"{device.title}, {gib(device.total_bytes)}" if device.is_gpu else device.title
            for device in report.devices
        ]
        if report.driver_version is not None:
            devices.append(f"driver {report.driver_version}")
        rules = [f"{rule.config.action} in {plural(rule.rows, 'row')}" for rule in report.rules]
        return self.render(
            title=data.title,
            ending=ending,
            kind=kind,
            seconds=report.timing.get("total_seconds", 0.0),
            report=report,
            merge=[report.ensemble.get("method", ""), *rules],
            devices=devices,
            table_path=shown_path(Path(report.table)) if report.table else "",
            time=datetime.fromisoformat,
        )


class Trainings(Section):
    title: ClassVar[str] = "Trainings"

    def html(self, data: ReportData) -> Markup | None:
        names = {member.name for member in data.report.members}
        members = [member for member in _trained_members(data.run_dir) if member.name in names]
        if not members:
            return None
        devices = device_names(data.report.devices)
        rows = [[member.name, *_training_cells(part, devices)] for member in members for part in member.parts]
        texts = [f"{member.name}: {member.failure}" for member in members if member.failure]
        for member in members:
            said = [note for part in member.parts for note in part.progress.get("notes", ())]
            texts += [f"{member.name}: {note}" for note in dict.fromkeys(said)]
        faults = [
            (fault.member, duration(fault.after_seconds), fault.message, fault.remedy)
            for member in members
            for fault in member.faults
        ]
        return self.render(rows=rows, texts=texts, faults=faults)


def _trained_members(run_dir: Path) -> tuple[MemberRecord, ...]:
    """Return the members that were trained for a run, or for the run of their out-of-fold predictions."""
    for folder in (run_dir, run_dir.parent.parent):
        files = TrainingDir(folder)
        report = read_record(files.records, TrainingReport)
        if report is not None and run_dir in (folder, files.oof_run):
            return report.members
    return ()


def _training_cells(part: PartRecord, devices: dict[str, str]) -> list[str]:
    progress = part.progress
    steps, epochs, loss = progress.get("steps"), progress.get("epoch"), progress.get("loss")
    return [
        part.text,
        part.status if part.seconds is None else duration(part.seconds),
        f"{part.attempts}" if part.attempts else "",
        ", ".join(devices.get(device, device) for device in part.devices),
        f"{steps:,}" if isinstance(steps, int) else "",
        f"{epochs:g}" if isinstance(epochs, int | float) and epochs else "",
        number(loss) if isinstance(loss, int | float) else "",
        str(progress.get("rung", "")),
    ]


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
        return self.render(picture=_timeline_picture(report, bars, names) if bars else "")


def _bars(report: RunReport) -> Iterator[_Bar]:
    """Yield what each worker did when; a worker that stood by counts from when it got the device."""
    ends: dict[tuple[str, int], float] = {}
    workers = [(place, worker) for place, member in enumerate(report.members) for worker in member.workers]
    for place, worker in sorted(workers, key=lambda item: item[1].leased_after_seconds):
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
            yield _Bar(lane, place, (begin, loading, loaded, end))


def _timeline_picture(report: RunReport, bars: list[_Bar], names: Mapping[str, str]) -> Markup:
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
        figure.legend(handles, labels, loc="outside upper left", ncols=2)

    text = (
        "Each bar is a worker process on its device: pale while Python and the libraries start, stronger while it "
        "loads the model, solid while it computes."
    )
    earlier = [member.name for member in report.members if member.workers and not member.chunks]
    if earlier:
        text += f" Computed by an earlier run, with times since its start: {', '.join(earlier)}."
    height = 69 + 16 * -(-len(members) // 2) + 22 * len(lanes)
    return picture(draw, "Workers of the devices over time", text, height)


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
        cuts = [_cut_cells(member) for member in members]
        return self.render(
            speeds=[_speed_cells(member) for member in members],
            lengths=lengths,
            no_lengths=no_lengths,
            cuts=[row for row in cuts if row],
            nulls=nulls,
        )


def _speed_cells(member: MemberReport) -> list[str]:
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
    width = max(
        1.0, np.ceil(top / _LENGTH_BINS)
    )  # whole bytes, or some bars would have more lengths than others
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


def _cut_cells(member: MemberReport) -> list[object]:
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


class Faults(Section):
    title: ClassVar[str] = "Faults survived"

    def html(self, data: ReportData) -> Markup:
        members = data.report.members
        faults = sorted(
            (fault for member in members for fault in member.faults), key=lambda fault: fault.after_seconds
        )
        fault_rows = [
            (
                duration(fault.after_seconds),
                f"{fault.member}-{fault.replica}",
                _KINDS.get(fault.kind, fault.kind),
                fault.message,
                "" if fault.rows is None else f"{fault.rows[1] - fault.rows[0]:,}",
                fault.remedy,
            )
            for fault in faults[:_MAX_FAULTS]
        ]
        remarks, counts, bad_rows = [], [], []
        for member in members:
            counters = member.worker_counters
            for name, (noun, text) in _COUNTERS.items():
                if getattr(counters, name):
                    remarks.append(f"{member.name}: {plural(getattr(counters, name), noun)} {text}")
            if member.bad_rows:
                counts.append(f"{plural(len(member.bad_rows), 'row')} of {member.name}")
            for row, reason in list(member.bad_rows.items())[:_MAX_ROWS]:
                bad_rows.append((member.name, f"{int(row) + 1:,}", reason))
        return self.render(
            faults=fault_rows,
            more=len(faults) - _MAX_FAULTS,
            remarks=remarks,
            counts=counts,
            policy=data.report.on_bad_row,
            bad_rows=bad_rows,
        )


class Settings(Section):
    title: ClassVar[str] = "Settings and files"

    def html(self, data: ReportData) -> Markup:
        return self.render(report=data.report)
