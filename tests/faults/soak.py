"""Runs that are killed at random moments for minutes, and gone on with until they are done.

    python -m tests.faults.soak --minutes 10

Each round is a run from the start, in fresh processes: now and then its parent or a worker gets SIGKILL, or the
parent a signal to end; the same command again goes on.  In the end its files must be, byte for byte, those of a run
that nothing disturbed, and no process may be left.  Ends with 1 where that is not so.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.chunky import chunky_config, results, write_chunky_table
from tests.faults.inject import Fault, Injected
from tests.leftovers import left_processes
from tests.project import Project, make_models

ROWS = 48
MEMBERS = ("a", "b")
# What may befall the parent, most often what nothing can be done about.
ENDINGS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Tally:
    """What happened."""

    rounds: int = 0
    runs: int = 0
    harm: collections.Counter[str] = field(default_factory=collections.Counter)
    complaints: list[str] = field(default_factory=list)


class Soak:
    """One project, over which runs go again and again.

    Args:
        folder: an empty one.
        chooser: what is harmed and when.
    """

    def __init__(self, folder: Path, chooser: random.Random) -> None:
        self._chooser = chooser
        self._project = Project(folder / "project", make_models(folder / "models"))
        self._project.folder.mkdir()
        write_chunky_table(self._project, ROWS)
        members = [self._member(name) for name in MEMBERS]
        # So many retries, because chunks cut in halves are other batches, which can differ in a last digit.
        self._project.write_config(chunky_config(self._project, models=members, retries=100))
        # A forward pass takes a while, so that kills come in the midst of chunks, too.
        slow = Injected(folder, Fault("sleep", seconds=0.2))
        self._environment = {**os.environ, **slow.environment, "OMP_NUM_THREADS": "1"}
        self.tally = Tally()
        began = time.monotonic()
        assert self._start().wait() == 0
        self._seconds = time.monotonic() - began
        self._expected = self._results()

    def _member(self, name: str) -> dict[str, Any]:
        models = self._project.models
        folder = models / ("gemma" if name == "a" else "llama")
        return {"name": name, "model_name_or_path": str(folder), "weight": 1.0 + (name == "a")}

    def _results(self) -> dict[str, bytes]:
        names = ["ensemble.csv", "submission.csv", *(f"predictions/{name}.csv" for name in MEMBERS)]
        return results(self._project, names=names)

    def round(self) -> None:
        """One run to its end, however often it takes."""
        for name in ("runs", "out"):
            shutil.rmtree(self._project.folder / name, ignore_errors=True)
        for attempt in itertools.count(1):
            code = self._harmed_run()
            self.tally.runs += 1
            if code == 0:
                break
            if code not in {-signal.SIGKILL, *(128 + number for number in ENDINGS)}:
                self._complain(f"attempt {attempt} ended with {code}")
            if attempt > 50:
                self._complain("it does not come to an end")
                break
        self.tally.rounds += 1
        if code == 0 and self._results() != self._expected:
            self._complain("its files are not those of an undisturbed run")
        if left := [path for path in self._project.folder.rglob("*") if ".tmp-" in path.name]:
            self._complain(f"it leaves {left}")

    def _harmed_run(self) -> int:
        """The exit code of a run that is harmed at random moments, at most until it has had its usual time."""
        process = self._start()
        began = time.monotonic()
        for at in self._moments():
            while process.poll() is None and time.monotonic() < began + at:
                time.sleep(0.005)
            if process.poll() is not None:
                break
            self._harm(process)
        code = process.wait()
        if left := left_processes(set()):
            self._complain(f"processes outlive their run: {left}")
        return code

    def _moments(self) -> Iterator[float]:
        at = 0.0
        while at < self._seconds:
            at += self._chooser.expovariate(4 / self._seconds)
            yield at

    def _harm(self, process: subprocess.Popen[bytes]) -> None:
        workers = [
            int(stat.parent.name)
            for stat in Path("/proc").glob("[1-9]*/stat")
            if _parent(stat) == str(process.pid)
        ]
        if workers and self._chooser.random() < 0.5:
            os.kill(self._chooser.choice(workers), signal.SIGKILL)
            self.tally.harm["SIGKILL to a worker"] += 1
        else:
            number = self._chooser.choice(ENDINGS)
            process.send_signal(number)
            self.tally.harm[f"{number.name} to the parent"] += 1

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ensemble", "run", "config.yaml", "--quiet"]
        return subprocess.Popen(
            command, cwd=self._project.folder, env=self._environment, stderr=subprocess.DEVNULL
        )

    def _complain(self, text: str) -> None:
        self.tally.complaints.append(f"round {self.tally.rounds + 1}: {text}")
        print(self.tally.complaints[-1], flush=True)


def _parent(stat: Path) -> str:
    try:
        return stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
    except OSError:  # it has gone meanwhile
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill runs at random moments until they are done.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory(prefix="ensemble soak ") as folder:
        soak = Soak(Path(folder), random.Random(options.seed))
        until = time.monotonic() + 60 * options.minutes
        while time.monotonic() < until:
            soak.round()
            print(f"{soak.tally.rounds} rounds, {soak.tally.runs} runs", flush=True)
    tally = soak.tally
    print(
        f"{options.minutes:g} minutes, seed {options.seed}: {tally.rounds} rounds done in {tally.runs} runs"
    )
    for what, count in sorted(tally.harm.items()):
        print(f"  {count:4} x {what}")
    print(f"  {len(tally.complaints)} complaints")
    return 1 if tally.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
