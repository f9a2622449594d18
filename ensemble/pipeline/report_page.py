"""Write report.html at the end of a run, in another process; its failure never ends the run."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ensemble.common.files import open_log
from ensemble.common.python_process import python_command, python_environment
from ensemble.common.text import duration, shown_path
from ensemble.pipeline.run_dir import RunDir, head, log
from ensemble.pipeline.run_report import RunReport

DIGEST: Final = "ensemble-digest"  # the name of the page's <meta>
# Under a time limit, the page is not begun if less time is left.
MIN_SECONDS: Final = 12.0
# Of a process that hangs: several times what it takes for millions of rows on a slow machine.
_MAX_SECONDS = 600.0
_POLL_SECONDS = 0.05


def page_digest(report: RunReport) -> str:
    """Return a digest of what a page shows, without times and speeds; a page with an equal digest stays.

    Whether the table exists is a part of it, as a page without the table lacks texts.
    """
    members = [
        (member.name, member.weight, member.status, member.fingerprint, member.bad_rows, member.failure)
        for member in report.members
    ]
    merge = report.rules if report.allowed_labels is None else (report.rules, report.allowed_labels)
    results = report.status, report.rows, report.merged_rows, report.filled_rows, report.scores, merge
    config = report.config, report.overrides, report.ensemble, report.versions.get("ensemble")
    has_table = bool(report.table) and Path(report.table).exists()
    return hashlib.sha256(repr((members, results, config, has_table)).encode()).hexdigest()


def is_report(page: Path) -> bool:
    """Return whether a file is the report of a run."""
    return f'name="{DIGEST}"'.encode() in head(page)


def write_page(
    rundir: RunDir,
    report: RunReport,
    is_enabled: bool,
    seconds_left: float,
    is_stopped: Callable[[], bool],
    say: Callable[[str], None],
) -> Path | None:
    """Write the page from the directory's files, in another process; a page of the same results stays.

    Args:
        is_enabled: whether the config asks for a page; a page of other results is removed in any case.
        seconds_left: until the time limit; infinite without a limit.
        is_stopped: returns whether a signal has come; then only the writing of the page ends.

    Returns:
        the page; None if it was not written, for which ``say`` gets the reason.
    """
    page = rundir.report_page
    if f'name="{DIGEST}" content="{page_digest(report)}"'.encode() in head(page):
        return page
    with contextlib.suppress(OSError):  # it shows other results
        page.unlink(missing_ok=True)
    if not is_enabled:
        return None
    if seconds_left < MIN_SECONDS:
        why = "time_limit leaves no time for it"
    else:
        say("the report is being written")
        # Two seconds are for the end of the process and of the run.
        command = python_command("ensemble.analysis.report.__main__")
        command += [str(rundir.root.resolve()), str(rundir.report_page.absolute()), str(os.getpid())]
        why = run_apart(command, rundir.report_log, min(_MAX_SECONDS, seconds_left - 2), is_stopped)
    if not why:
        return page
    log.warning("the report was not written: %s", why)
    say(
        f"the report was not written: {why}. The results are complete; `ensemble report "
        f"{shlex.quote(shown_path(rundir.root))}` writes it"
    )
    return None


def run_apart(
    command: list[str], log_path: Path, seconds: float, is_stopped: Callable[[], bool], content: bytes = b""
) -> str:
    """Run a command that reads ``content``, and return why it failed; empty if it did not."""
    try:
        with open_log(log_path) as output, tempfile.TemporaryFile() as stdin:
            log_start = output.seek(0, os.SEEK_END)
            stdin.write(content)
            stdin.seek(0)
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **python_environment()},
                start_new_session=True,  # the terminal's Ctrl-C is this process's to handle
            )
    except OSError as error:
        return f"no process could be started for it ({error.strerror or error})"
    why, end = "", time.monotonic() + seconds
    while process.poll() is None and not why:
        if is_stopped():
            why = "a signal stopped it"
        elif time.monotonic() > end:
            why = f"it was not done after {duration(seconds)}"
        time.sleep(_POLL_SECONDS)
    if why:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it is stuck in the kernel
            process.wait(10)
        return why
    if process.returncode == 0:
        return ""
    see_log = f"; {shown_path(log_path)} says more"
    if process.returncode < 0:
        return f"its process was killed by {signal.Signals(-process.returncode).name}{see_log}"
    lines = log_path.read_bytes()[log_start:].decode("utf-8", "replace").strip().splitlines()
    return f"{lines[-1][:300] if lines else 'its process failed'}{see_log}"
