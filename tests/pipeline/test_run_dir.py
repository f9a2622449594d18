"""A name in a run directory stands for a complete file; one run at a time holds the directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ensemble.common.errors import DataError, OutputError, OutputInUse
from ensemble.common.files import atomic_path, unwritable_reason, write_text
from ensemble.pipeline.run_dir import RunDir, hold
from ensemble.pipeline.run_report import RunReport


def test_a_file_appears_only_when_complete(tmp_path: Path) -> None:
    target = tmp_path / "out.csv"
    target.write_text("old")

    def write_half() -> None:
        with atomic_path(target) as temporary:
            temporary.write_text("half")
            assert target.read_text() == "old"
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
    write_text(target, "new")
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_clear_removes_what_an_earlier_run_left_and_nothing_else(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    rundir.clear()
    keep = rundir.root / "notes.txt"
    old = [rundir.ensemble, rundir.run_json, rundir.predictions("m"), rundir.root / ".run.json.tmp-12"]
    for path in [*old, keep]:
        path.write_text("x")
    rundir.clear()
    assert keep.exists()
    assert not any(path.exists() for path in old)


def test_clear_does_not_follow_links_out_of_the_directory(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious.txt").write_text("x")
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    rundir.predictions_dir.symlink_to(outside)
    rundir.clear()
    assert (outside / "precious.txt").exists()
    assert not rundir.predictions_dir.is_symlink()


@pytest.mark.fault(20, 21)
def test_the_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    code = (
        "import sys, pathlib\nfrom ensemble.pipeline.run_dir import RunDir, hold\n"
        "with hold(RunDir(pathlib.Path(sys.argv[1]))):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(OutputInUse, match=f"process {other.pid} on"), hold(rundir):
            pass
        other.kill()
    with hold(rundir):
        pass


@pytest.mark.fault(15)
def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert unwritable_reason("output_dir", tmp_path / "new/er") is None
    assert "is a file" in (unwritable_reason("output_dir", tmp_path / "file/run") or "")
    with pytest.raises(OutputError, match="output_dir: cannot write to"):
        RunDir(Path("/proc/run")).create()


def test_a_config_in_place_of_a_run_directory(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("data: {path: test.csv}\n", encoding="utf-8")
    with pytest.raises(
        DataError, match=r"config\.yaml: there is no run\.json .*; name the output_dir of a run"
    ):
        RunReport.read(tmp_path / "config.yaml" / "run.json")


@pytest.mark.parametrize("text", ["[]", '{"members": [3]}'])
def test_a_report_that_is_none_is_said_without_names_of_classes(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(DataError) as raised:
        RunReport.read(tmp_path / "run.json")
    assert "instance of" not in str(raised.value)
    assert "there is no run.json" in str(raised.value)
