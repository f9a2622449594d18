"""What the safety of a run costs where nothing goes wrong: ``python -m bench.safety``.

The demo's two models over its table, several times over, with and without fsync and hashing, in turn.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv

from bench.processes import measure
from bench.rounds import say
from bench.sections import show
from bench.table import Spread

ROOT = Path(__file__).resolve().parents[1]
WITHOUT = Path(__file__).parent / "without_safety"
AT_MOST = 1.02
_KINDS = ("with", "without")


def compare(repeats: int = 5, times: int = 20) -> list[dict[str, object]]:
    """The seconds of whole runs with and without, and the median of the pairs' ratios.

    Args:
        times: how many copies of the demo's 2,000 rows.

    Raises:
        Failed: a run has failed.
    """
    seconds: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table = _long_table(folder, times)
        if repeats > 1:
            _run(folder, table, "with")  # the first one reads everything from the disk
        for number in range(repeats):
            for kind in _KINDS:
                seconds[kind].append(_run(folder, table, kind))
                say(f"round {number + 1} of {repeats}, {kind} fsync and hashing: {seconds[kind][-1]:.1f} s")
    ratio = Spread.of([one / other for one, other in zip(*seconds.values(), strict=True)])
    return [
        {
            "rows, two members": times * 2000,
            "with, s": Spread.of(seconds["with"]).text(2),
            "without, s": Spread.of(seconds["without"]).text(2),
            "ratio": ratio.text(3),
            "at most": AT_MOST,
            "": "not judged" if repeats < 2 else "ok" if ratio.middle <= AT_MOST else "MISSED",
        }
    ]


def _long_table(folder: Path, times: int) -> Path:
    demo = pa_csv.read_csv(ROOT / "demo" / "test.csv")
    copies = []
    for copy in range(times):
        ids = pa.array([f"{copy}-{one}" for one in demo.column("id").to_pylist()])
        # No two rows alike: what is repeated is computed once.
        texts = pa.array([f"{text} {copy}" for text in demo.column("gloss").to_pylist()])
        copied = demo.set_column(demo.column_names.index("id"), "id", ids)
        copies.append(copied.set_column(demo.column_names.index("gloss"), "gloss", texts))
    path = folder / "long.csv"
    pa_csv.write_csv(pa.concat_tables(copies), path)
    return path


def _run(folder: Path, table: Path, kind: str) -> float:
    path = [os.environ.get("PYTHONPATH", ""), str(ROOT), *([str(WITHOUT)] if kind == "without" else [])]
    settings = [f"data.path={table}", f"output_dir={folder / 'run'}", "submission=null", "report=false"]
    command = [sys.executable, "-m", "ensemble", "run", str(ROOT / "configs" / "demo.yaml")]
    command += ["--quiet", "--fresh", *(word for setting in settings for word in ("--set", setting))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    return measure([command], folder, environment, folder / "log").seconds


def main() -> int:
    """The command: prints a markdown table.

    Returns:
        0; 1 where something failed.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.safety", description=__doc__)
    parser.add_argument("--times", type=int, default=20, help="how many copies of the demo's 2,000 rows")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each kind")
    options = parser.parse_args()
    return show(lambda: compare(options.repeats, options.times))


if __name__ == "__main__":
    sys.exit(main())
