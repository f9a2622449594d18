"""The report at the end of a run: when it is written, and that nothing that goes wrong with it is the run's."""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ensemble
from ensemble.pipeline import report_page
from ensemble.pipeline.report_page import page_digest, write_page
from ensemble.pipeline.run_dir import RunDir
from tests.cli.reports import member, report
from tests.faults.machine import small_disk
from tests.project import LABELS, ROOT, Project, python_path
from tests.sampling import one_in

pytestmark = pytest.mark.usefixtures("warm")
RESULTS = ("run.json", "ensemble.csv", "submission.csv", "predictions/gemma.csv", "config.yaml")
HINT = "`ensemble report runs/first` writes it"


def broken(folder: Path, code: str) -> dict[str, str]:
    """An environment in which to import Matplotlib is to run this code."""
    package = folder / "broken" / "matplotlib"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(code)
    return {"PYTHONPATH": python_path(folder / "broken", ROOT)}


@pytest.mark.long
def test_a_run_writes_it_once_and_again_only_for_other_results(project: Project) -> None:
    project.write_config(project.config(report=True))
    page = project.folder / "runs/first/report.html"
    # What a user has set for Matplotlib is not for this page, nor needs it a home.
    surroundings = {"MPLBACKEND": "no such backend", "HOME": "/proc/no/home"}
    done = project.ensemble("run", "config.yaml", environment=surroundings)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("report: runs/first/report.html\n")
    text, first = page.read_text(encoding="utf-8"), page.stat()
    assert "<title>Run report: " in text
    assert "could not be made" not in text

    done = project.ensemble("run", "config.yaml")  # which has nothing to do
    assert done.stdout.endswith("report: runs/first/report.html\n")
    assert (page.stat().st_ino, page.stat().st_mtime_ns) == (first.st_ino, first.st_mtime_ns)

    other = ("--set", "models.gemma.weight=3")
    done = project.ensemble("run", "config.yaml", *other)  # which computes nothing, and merges anew
    assert page.stat().st_ino != first.st_ino
    assert "models.gemma.weight=3" in page.read_text(encoding="utf-8")

    done = project.ensemble("report", "runs/first", "-o", "elsewhere.html", environment={"MPLBACKEND": "no"})
    assert (done.returncode, done.stdout) == (0, "report: elsewhere.html\n"), done.stderr
    assert (project.folder / "elsewhere.html").read_bytes() == page.read_bytes()

    # What shows other results than the directory holds does not stay.
    done = project.ensemble("run", "config.yaml", "--set", "report=false")
    assert done.returncode == 0
    assert not page.exists()
    assert "report: " not in done.stdout


@pytest.mark.long
@pytest.mark.fault(41)
def test_a_broken_library_costs_the_report_and_nothing_else(project: Project, tmp_path: Path) -> None:
    project.write_config(project.config())
    assert project.ensemble("run", "config.yaml").returncode == 0
    before = {name: (project.folder / "runs/first" / name).read_bytes() for name in RESULTS[1:-1]}
    project.write_config(project.config(report=True))
    variables = broken(tmp_path, "raise ImportError('no Matplotlib here')")
    done = project.ensemble("run", "config.yaml", environment=variables)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert (
        "the report was not written: ImportError: no Matplotlib here; runs/first/logs/report.log says more. "
        f"The results are complete; {HINT}"
    ) in text
    assert project.run_json()["status"] == "complete"
    assert {name: (project.folder / "runs/first" / name).read_bytes() for name in before} == before
    assert not (project.folder / "runs/first/report.html").exists()
    done = project.ensemble("report", "runs/first", environment=variables)
    assert (done.returncode, done.stdout) == (2, ""), done.stdout
    assert "no Matplotlib here" in done.stderr
    (project.folder / "runs/first/report.html/in the way").mkdir(parents=True)
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 2, done.stdout
    assert "report.html is a folder" in " ".join(done.stderr.split())
    done = project.ensemble("report", "runs/first")
    assert done.returncode == 2
    assert "report.html is a folder; remove it, or name a file with --output" in " ".join(done.stderr.split())


@pytest.mark.long
@pytest.mark.fault(41)
def test_a_full_disk_costs_the_report_alone_until_there_is_room(project: Project, tmp_path: Path) -> None:
    """A real one: it has room for what a run writes, and half of what the page needs."""
    rows = [[row_id, "0.5", "0.3", "0.2"] for row_id in project.ids]
    project.write_csv("given.csv", ["id", *LABELS], rows)
    member = {"name": "given", "task_type": "csv", "path": "given.csv"}
    project.write_config(project.config(models=[member], defaults=None))
    with small_disk(project.folder / "runs", "16m") as disk:
        assert project.ensemble("run", "config.yaml").returncode == 0
        results = {name: (disk / "first" / name).read_bytes() for name in ("ensemble.csv", "submission.csv")}
        elsewhere = tmp_path / "page.html"
        assert project.ensemble("report", "runs/first", "-o", str(elsewhere)).returncode == 0
        project.write_config(project.config(models=[member], defaults=None, report=True))
        left = os.statvfs(disk)
        half = elsewhere.stat().st_size // 2
        assert half > sum(map(len, results.values()))
        (disk / "ballast").write_bytes(bytes(left.f_bavail * left.f_bsize - half))
        done = project.ensemble("run", "config.yaml")
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.search(
            r"report was not written: cannot write .*runs/first/report\.html.* \(No space left on device\)"
            r".*The results are complete; .* writes it",
            " ".join(done.stdout.split()),
        ), done.stdout
        assert project.run_json()["status"] == "complete"
        assert {name: (disk / "first" / name).read_bytes() for name in results} == results
        assert [*disk.rglob("*report*")] == [disk / "first/logs/report.log"], "no half of a page"
        (disk / "ballast").unlink()
        done = project.ensemble("run", "config.yaml")
        assert done.stdout.endswith("report: runs/first/report.html\n"), done.stdout
        page = (disk / "first/report.html").read_text(encoding="utf-8")
        assert page.rstrip().endswith("</html>")


@pytest.mark.long
@pytest.mark.fault(41)
@pytest.mark.parametrize(
    ("number", "times"),
    [
        (signal.SIGINT, 2),
        *one_in(3, [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGKILL, 1)]),
    ],
)
def test_a_signal_ends_the_report_and_not_the_run(
    project: Project, tmp_path: Path, number: signal.Signals, times: int
) -> None:
    project.write_config(project.config())
    assert project.ensemble("run", "config.yaml").returncode == 0
    project.write_config(project.config(report=True))
    mark = tmp_path / "it hangs"
    hang = f"import pathlib, time\npathlib.Path({str(mark)!r}).touch()\ntime.sleep(600)"
    variables = {**os.environ, **broken(tmp_path, hang)}
    process = subprocess.Popen(
        [sys.executable, "-m", "ensemble", "run", "config.yaml"],
        cwd=project.folder,
        env=variables,
        stdout=subprocess.PIPE,
        text=True,
    )
    while not mark.exists():
        assert process.poll() is None
        time.sleep(0.01)
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.02)
    output, _ = process.communicate()
    assert project.run_json()["status"] == "complete"
    if number == signal.SIGKILL:  # of the whole run: then no process that makes a report is left either
        assert process.returncode == -number
        return
    assert process.returncode == 0
    text = " ".join(output.split())
    assert "ensemble: runs/first/ensemble.csv" in text, "the summary"
    assert f"not written: a signal stopped it. The results are complete; {HINT}" in text


Run = Callable[..., tuple[Path | None, list[str]]]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Writes a page by a process that runs other code."""
    rundir, ran = RunDir(tmp_path / "run"), report(member())
    rundir.create()
    rundir.tidy()

    def run(
        code: str, left: float = math.inf, is_stopped: Callable[[], bool] = lambda: False, wanted: bool = True
    ) -> tuple[Path | None, list[str]]:
        monkeypatch.setattr(report_page, "python_command", lambda module: [sys.executable, "-c", code])
        messages: list[str] = []
        page = write_page(rundir, ran, wanted, left, is_stopped, messages.append)
        return page, [text for text in messages if text != "the report is being written"]

    return run


DIGEST = f'<meta name="ensemble-digest" content="{page_digest(report(member()))}">'
WRITES = f"import sys, pathlib; pathlib.Path(sys.argv[2]).write_text('{DIGEST}')"


@pytest.mark.fault(41)
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import time; time.sleep(600)", r"it was not done after 0\.1 s\. "),
        ("import os; os.kill(os.getpid(), 9)", "its process was killed by SIGKILL; "),
        ("import os; os.abort()", "its process was killed by SIGABRT; "),
        ("raise MemoryError('no room')", "MemoryError: no room; "),
        ("raise SystemExit(3)", "its process failed; "),
        ("import sys; sys.exit('cannot write x (No space left)')", r"cannot write x \(No space left\); "),
    ],
)
def test_a_process_that_fails_or_hangs(
    made: Run, monkeypatch: pytest.MonkeyPatch, code: str, why: str
) -> None:
    if "sleep" in code:
        monkeypatch.setattr(report_page, "_MAX_SECONDS", 0.1)
    page, (message,) = made(code)
    assert page is None
    assert re.match(f".* not written: {why}", message), message


def test_the_time_limit_and_what_stands_already(made: Run, tmp_path: Path) -> None:
    page, (message,) = made(WRITES, left=report_page.MIN_SECONDS - 0.1)
    assert page is None
    assert "not written: time_limit leaves no time for it. The results" in message
    assert made(WRITES, wanted=False) == (None, [])
    path = tmp_path / "run/report.html"
    assert made(WRITES, left=60.0) == (path, [])
    assert made("raise SystemExit(1)", left=0.0) == (path, [])  # nobody was asked
    assert made("raise SystemExit(1)", wanted=False) == (path, [])  # it is right, whoever wrote it
    path.write_text(DIGEST.replace('content="', 'content="0'))
    assert made("raise SystemExit(1)")[0] is None
    assert not path.exists()


def test_the_advice_can_be_pasted(tmp_path: Path) -> None:
    rundir, message = RunDir(tmp_path / "it's a run"), list[str]()
    rundir.create()
    rundir.tidy()
    assert write_page(rundir, report(member()), True, 0.0, lambda: False, message.append) is None
    command = re.findall("`(.*)`", message[0])[0]
    assert shlex.split(command)[-2:] == ["report", str(rundir.root)]


def test_no_process_is_an_answer_too(made: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def popen(*arguments: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", popen)
    page, (message,) = made("")
    assert page is None
    assert "no process could be started for it (Resource temporarily unavailable)" in message


def test_the_function(tmp_path: Path) -> None:
    with pytest.raises(ensemble.DataError, match=r"there is no run\.json that can be read"):
        ensemble.report(tmp_path)
    report(member()).write(tmp_path / "run.json")
    assert ensemble.report(str(tmp_path)) == tmp_path / "report.html"
    with pytest.raises(ensemble.WriteError, match=r"no/page\.html"):
        ensemble.report(tmp_path, tmp_path / "no/page.html")
    with pytest.raises(ensemble.OutputError, match=r"run\.json: is there already and is no report"):
        ensemble.report(tmp_path, tmp_path / "run.json")
    os.mkfifo(tmp_path / "pipe.html")
    with pytest.raises(ensemble.OutputError, match=r"pipe\.html: is a device or a pipe"):
        ensemble.report(tmp_path, tmp_path / "pipe.html")
    (tmp_path / "link.html").symlink_to("report.html")
    ensemble.report(tmp_path, tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "No worker ran" in page
    assert "no member&#39;s predictions are complete" in page


def test_the_digest_goes_by_results_and_not_by_speed() -> None:
    first = page_digest(report(member()))
    assert page_digest(report(member(chunks=0), timing={"total_seconds": 1.0}, pid=8)) == first
    for other in (
        report(member(weight=2.0)),
        report(member(fingerprint="0" * 64)),
        report(member(), config="# other"),
        report(member(), status="time_limit"),
        report(member(), versions={"ensemble": "0.2.0"}),
        report(member(), filled_rows=3),
    ):
        assert page_digest(other) != first
