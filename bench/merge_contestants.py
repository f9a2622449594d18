"""``python -m bench.merge_contestants NAME FOLDER``: one way to read or merge what ``merge_files`` made.

Each takes place in a process of its own, which prints its seconds, CPU seconds and the most memory it ever held.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path


def _ours(folder: Path) -> Callable[[], object]:
    """From complete predictions to files, as a run does it whose members are done."""
    from ensemble.pipeline.load import load as load_config
    from ensemble.pipeline.prepare import prepare
    from ensemble.pipeline.results import ResultWriter
    from ensemble.pipeline.resume import find_works
    from ensemble.pipeline.run_dir import RunDir
    from ensemble.pipeline.run_report import Results
    from ensemble.pipeline.selection import Selections

    prepared = prepare(load_config(folder.with_suffix(".yaml")))
    rundir = RunDir(prepared.config.output_dir)
    works = find_works(prepared, rundir, lambda text: None)
    assert all(work.is_complete for work in works.values())
    prepared.table.forget_columns()
    writer = ResultWriter(prepared, rundir, works, Selections(prepared, rundir, works), Results())
    return lambda: writer.merge(prepared.config.models)


def _pyarrow_reads(folder: Path) -> Callable[[], object]:
    import pyarrow.csv as pa_csv

    files = sorted((folder.parent / "ours/predictions").glob("*.csv"))

    def read() -> None:
        for file in files:
            pa_csv.read_csv(file)

    return read


def _pandas_merges(folder: Path) -> Callable[[], object]:
    import pandas as pd

    config = json.loads((folder.parent / "ours.yaml").read_text(encoding="utf-8"))
    weights = [model["weight"] for model in config["models"]]
    files = sorted((folder.parent / "ours/predictions").glob("*.csv"))

    def merge() -> None:
        frames = [pd.read_csv(file) for file in files]
        labels = list(frames[0].columns[1:])
        total = frames[0][["id"]]
        for index, frame in enumerate(frames):
            renamed = frame.rename(columns={label: f"{label}.{index}" for label in labels})
            total = total.merge(renamed, on="id", how="left", validate="one_to_one")
        if total.isna().to_numpy().any():
            raise SystemExit("a row is missing")
        shares = [weight / sum(weights) for weight in weights]
        for label in labels:
            total[label] = sum(share * total[f"{label}.{index}"] for index, share in enumerate(shares))
        total[["id", *labels]].to_csv(folder.parent / "pandas.csv", index=False)

    return merge


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    prepare_it = {"pyarrow_reads": _pyarrow_reads, "pandas_merges": _pandas_merges}.get(name, _ours)
    measured = prepare_it(folder / name)
    began, cpu_began = time.perf_counter(), time.process_time()
    measured()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak is not None
    found = {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_bytes": int(peak[1]) * 1024}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
