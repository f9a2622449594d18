"""A fault that holds the interpreter does so, without which a worker would notice its parent's end by itself."""

from __future__ import annotations

import subprocess
import sys

from tests.project import ROOT

# How often another thread has had its turn within 0.3 seconds.
PROGRAM = """
import sys, threading, time
from tests.faults import faulty
turns = 0
def turn():
    global turns
    while True:
        time.sleep(0.01)
        turns += 1
threading.Thread(target=turn, daemon=True).start()
time.sleep(0.05)
before = turns
faulty._do({"deed": sys.argv[1], "seconds": 0.3})
print(turns - before)
"""


def test_no_other_thread_runs_meanwhile() -> None:
    turns = [
        int(subprocess.check_output([sys.executable, "-c", PROGRAM, deed], cwd=ROOT))
        for deed in ("sleep", "sleep with the interpreter")
    ]
    assert turns[0] > 1 >= turns[1]
