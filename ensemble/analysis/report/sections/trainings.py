"""Show how members were trained, fold by fold, and the faults that their trainings survived."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from markupsafe import Markup

from ensemble.analysis.report.base import ReportData, Section, number
from ensemble.common.gpus import device_names
from ensemble.common.text import duration
from ensemble.pipeline.training_dir import TrainingDir
from ensemble.training.records import MemberRecord, PartRecord, TrainingReport, read_record


class Trainings(Section):
    title: ClassVar[str] = "Trainings"

    def html(self, data: ReportData) -> Markup | None:
        names = {member.name for member in data.report.members}
        members = [member for member in _read(data.run_dir) if member.name in names]
        if not members:
            return None
        devices = device_names(data.report.devices)
        rows = [[member.name, *_cells(part, devices)] for member in members for part in member.parts]
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


def _read(run_dir: Path) -> tuple[MemberRecord, ...]:
    """Return the members that were trained for a run, or for the run of their out-of-fold predictions."""
    for folder in (run_dir, run_dir.parent.parent):
        files = TrainingDir(folder)
        report = read_record(files.records, TrainingReport)
        if report is not None and run_dir in (folder, files.oof_run):
            return report.members
    return ()


def _cells(part: PartRecord, devices: dict[str, str]) -> list[str]:
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
