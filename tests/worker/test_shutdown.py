"""SIGTERM to processes that do what a worker does at the worst of times."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ensemble.common.python_process import python_environment
from tests.waiting import PATIENCE_SECONDS, wait_until

BEGIN = """
import sys, time
from pathlib import Path
from ensemble.common.files import atomic_path
from ensemble.worker import __main__ as worker, session
"""
# As main() ends for a worker.
END = """
except session.Terminated:
    worker.end_by(15)
"""
WRITES_A_PART = """
worker.end_on_sigterm()
try:
    with atomic_path(Path(sys.argv[1]) / "part.csv") as temporary:
        temporary.write_text("half")
        print("ready", flush=True)
        time.sleep(1000)
"""
# In C, with the interpreter's lock released, for minutes: Python's own handlers wait for the end of it.
IS_DEEP_IN_A_LIBRARY = """
import hashlib
worker.end_on_sigterm()
try:
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)
"""
TAKES_ITS_TIME = "worker.END_SECONDS = 1000" + IS_DEEP_IN_A_LIBRARY
SWALLOWS_IT = """
worker.end_on_sigterm()
try:
    while True:
        try:
            print("ready", flush=True)
            time.sleep(1000)
        except BaseException:
            pass
"""


@pytest.mark.parametrize(
    ("body", "is_once_enough"),
    [(WRITES_A_PART, True), (IS_DEEP_IN_A_LIBRARY, True), (SWALLOWS_IT, True), (TAKES_ITS_TIME, False)],
    ids=["writes a part", "is deep in a library", "swallows it", "a second one"],
)
def test_sigterm(body: str, is_once_enough: bool, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN + body + END, str(tmp_path)],
        stdout=subprocess.PIPE,
        env=python_environment(),
        text=True,
    )
    assert process.stdout is not None

    def ends_by_another() -> bool:
        process.send_signal(signal.SIGTERM)
        return process.poll() is not None

    with process:
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            # Signals that are waiting to be delivered count as one, so a second one is sent until it arrives.
            if not is_once_enough:
                wait_until(ends_by_another, "the end")
            assert process.wait(PATIENCE_SECONDS) == -signal.SIGTERM, "the parent sees what ended it"
        finally:
            process.kill()
    assert list(tmp_path.iterdir()) == []
