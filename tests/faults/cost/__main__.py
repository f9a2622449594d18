"""What the safety of a run costs where nothing goes wrong: ``python -m tests.faults.cost``.

The demo's two models over its table, several times over, with and without fsync and hashing, in turn.  Prints the
medians and their ratio.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv

ROOT = Path(__file__).resolve().parents[3]
WITHOUT = Path(__file__).parent


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.cost")
    parser.add_argument("--times", type=int, default=20, help="how many copies of the demo's 2,000 rows")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each kind")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table = _long_table(folder, options.times)
        seconds: dict[str, list[float]] = {"with": [], "without": []}
        _run(folder, table, "with")  # the first one reads everything from the disk
        for _ in range(options.repeats):
            for kind, found in seconds.items():
                found.append(_run(folder, table, kind))
    print(f"{options.times * 2000:,} rows, two members, {options.repeats} runs of each kind, interleaved")
    for kind, found in seconds.items():
        spread = f"{min(found):.1f} to {max(found):.1f}"
        print(f"{kind:8} fsync and hashing: median {statistics.median(found):6.2f} s ({spread})")
    pairs = [one / other for one, other in zip(seconds["with"], seconds["without"], strict=True)]
    ratio = statistics.median(pairs)
    print(f"ratio, median of pairs: {ratio:.3f} ({min(pairs):.3f} to {max(pairs):.3f})")


def _long_table(folder: Path, times: int) -> Path:
    demo = pa_csv.read_csv(ROOT / "demo" / "test.csv")
    copies = []
    for copy in range(times):
        ids = pa.array([f"{copy}-{one}" for one in demo.column("id").to_pylist()])
        copies.append(demo.set_column(demo.column_names.index("id"), "id", ids))
    path = folder / "long.csv"
    pa_csv.write_csv(pa.concat_tables(copies), path)
    return path


def _run(folder: Path, table: Path, kind: str) -> float:
    output = folder / "run"
    shutil.rmtree(output, ignore_errors=True)
    path = [str(ROOT), *([str(WITHOUT)] if kind == "without" else [])]
    settings = [f"data.path={table}", f"output_dir={output}", "submission=null"]
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "ensemble", "run", str(ROOT / "configs" / "demo.yaml"), "--quiet"]
        + [word for setting in settings for word in ("--set", setting)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        cwd=folder,
        check=True,
    )
    return time.monotonic() - began


if __name__ == "__main__":
    main()
