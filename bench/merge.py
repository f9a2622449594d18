"""The merge of large tables, beside reading the same files with pyarrow and merging them with pandas.

``python -m bench.merge --rows 2000000 --members 5`` makes complete predictions, then lets everybody have them in
turn, each in a fresh process: seconds from the first byte read to the last one written, and the most memory that
the process ever held.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.csv as pa_csv

from bench.contests import ROOT
from bench.merge_files import make_files
from bench.processes import Failed
from bench.rounds import say
from bench.sections import show
from bench.table import Spread

_MIB = 1 << 20
_READING = "pyarrow_reads"
_CONTESTANTS = {
    "ours": "this project: ensemble.csv",
    "ours_in_full": "this project: ensemble.csv, scores, submission",
    "ours_in_another_order": "this project: the same, submission in another order",
    _READING: "pyarrow reads the members' CSVs, and that is all",
    "pandas_merges": "pandas: read_csv, merge by id, mean, to_csv",
}
_CLOSE = 1e-12


@dataclass(frozen=True)
class _Sample:
    seconds: float
    cpu_seconds: float
    peak_bytes: int


def compare(rows: int, members: int, labels: int, repeats: int) -> list[dict[str, object]]:
    """Measure everybody ``repeats`` times, in turn, and compare what they wrote.

    Returns:
        a row per contestant: seconds and CPU seconds, the ratio to pyarrow's reading (the median of the rounds'),
        and the peak of memory in MiB.

    Raises:
        Failed: a contestant failed, or computed something else.
    """
    samples: dict[str, list[_Sample]] = {name: [] for name in _CONTESTANTS}
    with tempfile.TemporaryDirectory(prefix="ensemble merge ") as made:
        folder = Path(made)
        say(f"merge: making {members} members' predictions of {rows:,} rows and {labels} labels ...")
        megabytes = make_files(folder, rows, members, labels) / 1e6
        for number in range(repeats):
            for name, found in samples.items():
                found.append(_measure(name, folder))
                say(f"merge: round {number + 1} of {repeats}: {name}: {found[-1].seconds:.2f} s")
            _check(folder)
    return [
        {"who": f"{title} ({members} x {megabytes / members:,.0f} MB)" if name == _READING else title}
        | _figures(samples[name], samples[_READING])
        for name, title in _CONTESTANTS.items()
    ]


def _measure(name: str, folder: Path) -> _Sample:
    # A first merge: giving back the blocks of an earlier one's file takes the kernel a while.
    for earlier in (folder / name).glob("*.csv"):
        earlier.unlink()
    command = [sys.executable, "-m", "bench.merge_contestants", name, str(folder)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    # As of ``python -m ensemble``.
    variables = {**os.environ, "PYTHONPATH": path, "ARROW_DEFAULT_MEMORY_POOL": "system"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    if done.returncode:
        raise Failed(f"{name} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return _Sample(**json.loads(done.stdout))


def _check(folder: Path) -> None:
    """Both wrote the same ids, and means that differ by rounding only."""
    expected = pa_csv.read_csv(folder / "pandas.csv")
    for name in ("ours", "ours_in_full", "ours_in_another_order"):
        found = pa_csv.read_csv(folder / name / "ensemble.csv")
        if found.column_names != expected.column_names or not found.column(0).equals(expected.column(0)):
            raise Failed(f"{name}: other columns or ids than pandas'")
        for label in found.column_names[1:]:
            apart = np.abs(found.column(label).to_numpy() - expected.column(label).to_numpy()).max()
            if not apart <= _CLOSE:
                raise Failed(f"{name}: label {label} is {apart:.1e} from pandas' mean")


def _figures(samples: Sequence[_Sample], reading: Sequence[_Sample]) -> dict[str, object]:
    seconds = [sample.seconds for sample in samples]
    cpu = [sample.cpu_seconds for sample in samples]
    pairs = list(zip(samples, reading, strict=True))
    return {
        "s": Spread.of(seconds).text(2),
        "CPU s": Spread.of(cpu).text(2),
        "time / reading": Spread.of([one.seconds / other.seconds for one, other in pairs]).text(2),
        "CPU / reading": Spread.of([one.cpu_seconds / other.cpu_seconds for one, other in pairs]).text(2),
        "peak MiB": f"{max(sample.peak_bytes for sample in samples) / _MIB:,.0f}",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: prints a markdown table.

    Returns:
        0; 1 where something failed.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.merge", description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000, metavar="N")
    parser.add_argument("--members", type=int, default=5, metavar="M")
    parser.add_argument("--labels", type=int, default=3, metavar="L")
    parser.add_argument("--repeats", type=int, default=3, metavar="K", help="rounds; 3 where nothing is said")
    options = parser.parse_args(arguments)
    return show(lambda: compare(options.rows, options.members, options.labels, options.repeats))


if __name__ == "__main__":
    sys.exit(main())
