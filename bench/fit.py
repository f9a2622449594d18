"""``python -m bench.fit``: what ``ensemble fit`` takes of CSVs of ten members, a million rows and three labels.

Prints a table for docs/reference/benchmark-tables.md: seconds by the clock and of CPU, and the peak of resident
memory of processes that read the CSVs and fit.  The members have noise of their own, so that each of them gets a
weight.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from ensemble.data.csv_file import write_csv

_SEED = 5
_LABELS = ("a", "b", "c")
# The weights alone: no cross-validation, no table of what each member is worth.
_READ = "from pathlib import Path; from ensemble.analysis.predictions import read_files; import glob, time; " \
    "p = read_files(sorted(map(Path, glob.glob('m*.csv'))), None, Path('truth.csv'))"  # fmt: skip
_WEIGHTS = "; from ensemble.analysis.weights import mean_loss, minimize_on_simplex; t = time.process_time(); " \
    "w = minimize_on_simplex(mean_loss([*p.members.values()], p.labelled), len(p.members)); " \
    "print(f'{time.process_time() - t:.1f} s of CPU', w)"  # fmt: skip


def make_files(folder: Path, rows: int, members: int) -> None:
    """``m0.csv`` and so on, and ``truth.csv``."""
    random = np.random.default_rng(_SEED)
    ids = pa.array(np.arange(rows)).cast(pa.string())
    logits = random.normal(size=(rows, len(_LABELS))) * 2
    truth = (logits + random.gumbel(size=logits.shape)).argmax(axis=1)
    write_csv(folder / "truth.csv", ["id", "label"], [[ids, pa.array(_LABELS).take(pa.array(truth))]])
    for number in range(members):
        scores = logits + random.normal(size=logits.shape) * (2 + 0.1 * number)
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        columns = [pa.array(column) for column in shares.T]
        write_csv(folder / f"m{number:02d}.csv", ["id", *_LABELS], [[ids, *columns]])


def measured(command: Sequence[str], folder: Path) -> tuple[float, float, float]:
    """Seconds by the clock, seconds of CPU, and the peak of resident memory in GiB."""
    started = time.monotonic()
    process = subprocess.Popen(command, cwd=folder, stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)}: exit code {process.returncode}")
    return time.monotonic() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20


def main() -> None:
    """Measure one thing after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--members", type=int, default=10)
    parser.add_argument("--only", default="", help="what to measure, by a part of its name")
    chosen = parser.parse_args()
    root = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_files(folder, chosen.rows, chosen.members)
        files = [f"m{number:02d}.csv" for number in range(chosen.members)]
        fit = [sys.executable, "-m", "ensemble", "fit", *files, "--labels", "truth.csv", "--force"]
        cases = {
            "reading the CSVs": [sys.executable, "-c", _READ],
            "reading, and the weights alone": [sys.executable, "-c", _READ + _WEIGHTS],
            "fit": fit,
            "fit --calibration temperature": [*fit, "--calibration", "temperature"],
            "fit --calibration vector": [*fit, "--calibration", "vector"],
            "fit --calibration temperature --merge-method geometric_mean": [
                *fit, "--calibration", "temperature", "--merge-method", "geometric_mean",
            ],
            "fit --metric accuracy (greedy)": [*fit, "--metric", "accuracy"],
            "fit --metric auc (greedy)": [*fit, "--metric", "auc"],
            "fit --method stacking": [*fit, "--method", "stacking"],
        }  # fmt: skip
        print("| what | s | CPU s | peak GiB |\n|---|---|---|---|")
        for what, command in cases.items():
            if chosen.only in what:
                seconds, cpu, memory = measured(command, folder)
                print(f"| {what} | {seconds:.0f} | {cpu:.0f} | {memory:.2f} |", flush=True)


if __name__ == "__main__":
    main()
