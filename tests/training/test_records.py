"""The files that trainings leave beside their checkpoints."""

from __future__ import annotations

from pathlib import Path

from ensemble.common.digests import FileDigest
from ensemble.training.records import (
    MemberRecord,
    PartRecord,
    Seal,
    TrainingReport,
    read_record,
    write_record,
)


def test_whatever_a_command_tells_of_its_progress_is_kept_and_read_again(tmp_path: Path) -> None:
    told = {
        "step": 3,
        "loss": float("inf"),
        "tokens": 10**30,
        "note": "é",
        "cut": "\ud83d",
        "more": [{"a": None}],
    }
    record = PartRecord(0, "done", 1, 2.5, ("cpu",), told)
    kept = PartRecord(0, "done", 1, 2.5, ("cpu",), {**told, "cut": "?"})
    seal = tmp_path / "fold-0.json"
    write_record(seal, Seal({"seed": "0"}, record, {"a": FileDigest("12", (1, 2, 3))}))
    assert read_record(seal, Seal) == Seal({"seed": "0"}, kept, {"a": FileDigest("12", (1, 2, 3))})
    report = tmp_path / "training.json"
    write_record(report, TrainingReport("running", 1.0, (MemberRecord("a", "models/a", (record,)),)))
    assert read_record(report, TrainingReport) == TrainingReport(
        "running", 1.0, (MemberRecord("a", "models/a", (kept,)),)
    )
