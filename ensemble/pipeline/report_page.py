"""The report of a run, report.html, at its end: a process of its own makes it, and nothing of that ends the run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ensemble.common.files import open_log
from ensemble.common.host import oom_kills
from ensemble.common.python_process import python_command, python_environment
from ensemble.common.text import duration, shown_path
from ensemble.pipeline.run_dir import RunDir, head, log
from ensemble.pipeline.run_report import RunReport

MAKER: Final = "ensemble.analysis.report.__main__"
DIGEST: Final = "ensemble-digest"  # the name of the page's <meta>
# Under a time limit: with less than this left it is not begun.
MIN_SECONDS: Final = 10.0
# Of a time limit, for the end of the process and of the run behind it.
_MARGIN_SECONDS = 2.0
# A process that hangs must not hold up a run for ever: several times what it takes, also on a slow machine.
_MAX_SECONDS = 120.0
_MAX_SECONDS_PER_VALUE = 1e-4  # a value is a row of a member
_TOLD_AFTER_SECONDS = 5.0
_WAIT_SECONDS = 0.1
_REAP_SECONDS = 10.0
_LOG_BYTES = 4_096


def page_digest(report: RunReport) -> str:
    """What a report is made of, but for when and how fast the run went: the same again, and nothing has changed.

    Whether the table can be read belongs to it: what its absence left out is shown once it is back.
    """
    members = [
        (one.name, one.weight, one.status, one.fingerprint, one.bad_rows, one.failure and one.failure.message)
        for one in report.members
    ]
    results = (report.merged_rows, report.filled_rows, [*map(str, report.scores.items())], report.ensemble)
    is_table_there = bool(report.table) and Path(report.table).exists()
    rules = [str(one) for one in report.rules]
    asked = rules, report.config, report.overrides, report.versions.get("ensemble")
    told = json.dumps([is_table_there, report.status, report.rows, members, results, asked], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()


def is_report(page: Path) -> bool:
    """Whether a file is a report of some run."""
    return f'name="{DIGEST}"'.encode() in head(page)


def write_page(
    rundir: RunDir,
    report: RunReport,
    is_wanted: bool,
    seconds_left: float,
    is_stopped: Callable[[], bool],
    say: Callable[[str], None],
) -> Path | None:
    """Have the page made of what stands in the directory; one of the same results stays as it is.

    Args:
        report: the run's last one, as it is in run.json.
        is_wanted: whether the config asks for it; if not, one of other results is removed all the same.
        seconds_left: of the time limit; infinite without one.
        is_stopped: whether a signal has come, which ends this and nothing else.
        say: takes a sentence for the user.

    Returns:
        the page; None where there is none, about which something has been said unless none is wanted.
    """
    page = rundir.report_page
    found = re.search(rf'name="{DIGEST}" content="([0-9a-f]{{64}})"'.encode(), head(page))
    if found is not None and found[1].decode() == page_digest(report):
        return page
    with contextlib.suppress(OSError):  # it shows what is no longer so
        page.unlink(missing_ok=True)
    if not is_wanted:
        return None
    max_seconds = _MAX_SECONDS + _MAX_SECONDS_PER_VALUE * report.rows * len(report.members)
    seconds_left -= _MARGIN_SECONDS
    if seconds_left < MIN_SECONDS:
        why = "time_limit leaves no time for it"
    else:
        why = _made(rundir, min(max_seconds, seconds_left), is_stopped, say)
        if not why:
            return page
    log.warning("the report was not written: %s", why)
    say(
        f"the report was not written: {why}. The results are complete; `python -m ensemble report "
        f"{shlex.quote(shown_path(rundir.root))}` writes it"
    )
    return None


def _made(
    rundir: RunDir, max_seconds: float, is_stopped: Callable[[], bool], say: Callable[[str], None]
) -> str:
    """Why the page could not be made; empty where it was."""
    kills, began, is_told = oom_kills(), time.monotonic(), False
    where = f"; {shown_path(rundir.report_log)} says more"
    try:
        with open_log(rundir.report_log) as output:
            log_start = output.seek(0, os.SEEK_END)
            process = subprocess.Popen(
                [
                    *python_command(MAKER),
                    str(rundir.root.resolve()),
                    str(rundir.report_page.absolute()),
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **python_environment()},
                start_new_session=True,  # the terminal's Ctrl-C is this process's to handle
            )
    except OSError as error:
        return f"no process could be started for it ({error.strerror or error})"
    why = ""
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_WAIT_SECONDS)
                break
            passed = time.monotonic() - began
            if is_stopped():
                why = "a signal stopped it"
            elif passed > max_seconds:
                is_log_empty = rundir.report_log.stat().st_size == log_start
                why = f"it was not done after {duration(max_seconds)}{'' if is_log_empty else where}"
            elif passed > _TOLD_AFTER_SECONDS and not is_told:
                is_told = True
                say("the report is being written")
            if why:
                break
    finally:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: nobody waits for it
            process.wait(_REAP_SECONDS)
    if why or process.returncode == 0:
        return why
    if process.returncode < 0:
        with contextlib.suppress(ValueError):
            why = f"its process was killed by {signal.Signals(-process.returncode).name}"
        if process.returncode == -signal.SIGKILL and oom_kills() > kills:
            why += ", probably because the machine ran out of memory"
        return (why or "its process was killed") + where
    said = ""
    with contextlib.suppress(OSError), rundir.report_log.open("rb") as file:
        file.seek(max(log_start, file.seek(0, os.SEEK_END) - _LOG_BYTES))
        lines = file.read().decode("utf-8", "replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{said[:300] or 'its process failed'}{where}"
