"""A run of many rows, members and GPUs whose workers only pretend to compute: ``python -m bench.scale``.

All but the computing is the project's own: the table is read, checked and published, 512 workers get their chunks
from the scheduler, shards come back and are gathered into predictions, and these are merged.  For each phase there
are seconds, CPU seconds of the run's process without those that were pretended, and its memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import yaml

from bench.processes import Failed
from bench.rounds import say
from bench.sections import show

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
# What is watched of a run: a function, and what it does.
_PHASES = {
    "ensemble.pipeline.prepare:read_table": "read and check the table",
    "ensemble.pipeline.prepare:_plan": "plan",
    "ensemble.pipeline.run:find_works": "digests of rows",
    "ensemble.data.table:InputTable.publish": "publish the table",
    "ensemble.scheduling.scheduler:Scheduler.run": "scheduling",
    "ensemble.scheduling.scheduler:Scheduler._start_workers": "- starting workers",
    "ensemble.scheduling.scheduler:Scheduler._end": "- ending workers",
    "ensemble.pipeline.run:_Run.on_change": "- run.json and display",
    "ensemble.pipeline.results:ResultWriter.write_predictions": "predictions of a member (beside scheduling)",
    "ensemble.pipeline.results:ResultWriter.merge": "merge",
}
_SAMPLE_SECONDS = 0.1
_ROWS_AT_A_TIME = 1 << 16
_WORDS = np.array("a few short words of some language that nobody speaks are enough for this table".split())


@dataclass(eq=False)
class Phase:
    """What a part of a run took, all its calls together.

    ``cpu_seconds`` are those of its thread alone, without what was pretended.
    """

    calls: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    process_seconds: float = 0.0
    anonymous_bytes: int = 0


@dataclass
class Meter:
    """Measures the functions of ``_PHASES`` while a run goes on, and the memory of this process."""

    pretended_seconds: Callable[[], float]
    phases: dict[str, Phase] = field(default_factory=dict)
    most_anonymous_bytes: int = 0
    most_resident_bytes: int = 0
    _open: list[Phase] = field(default_factory=list)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        put_back = []
        for place, name in _PHASES.items():
            module, _, path = place.partition(":")
            *owners, attribute = path.split(".")
            owner = import_module(module)
            for one in owners:
                owner = getattr(owner, one)
            function = getattr(owner, attribute)
            put_back.append((owner, attribute, function))
            setattr(owner, attribute, self._measured(name, function))
        over = threading.Event()
        thread = threading.Thread(target=self._sample, args=(over,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            for owner, attribute, function in put_back:
                setattr(owner, attribute, function)

    def _measured(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def measured(*arguments: Any, **named: Any) -> Any:
            phase = self.phases.setdefault(name, Phase())
            self._open.append(phase)
            pretended = self.pretended_seconds()
            began = time.monotonic(), time.thread_time(), time.process_time()
            try:
                return function(*arguments, **named)
            finally:
                self._open.remove(phase)
                phase.calls += 1
                phase.seconds += time.monotonic() - began[0]
                phase.cpu_seconds += time.thread_time() - began[1]
                phase.process_seconds += time.process_time() - began[2]
                if threading.current_thread() is threading.main_thread():
                    phase.cpu_seconds -= self.pretended_seconds() - pretended

        return measured

    def _sample(self, over: threading.Event) -> None:
        while not over.wait(_SAMPLE_SECONDS):
            anonymous, resident = _memory()
            self.most_anonymous_bytes = max(self.most_anonymous_bytes, anonymous)
            self.most_resident_bytes = max(self.most_resident_bytes, resident)
            for phase in [*self._open]:
                phase.anonymous_bytes = max(phase.anonymous_bytes, anonymous)


def _memory() -> tuple[int, int]:
    """Of this process: bytes of its own, and with those of mapped files, which the kernel may take back."""
    found = {"RssAnon": 0, "RssShmem": 0, "VmRSS": 0}
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name in found:
            found[name] = int(value.split()[0]) * 1024
    return found["RssAnon"] + found["RssShmem"], found["VmRSS"]


def make_table(path: Path, rows: int) -> None:
    """A Parquet file of short texts, with ids that are numbers."""
    from pyarrow import parquet

    schema, words = pa.schema({"id": pa.int64(), "text": pa.string()}), pa.array(_WORDS)
    generator = np.random.default_rng(0)
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for start in range(0, rows, _ROWS_AT_A_TIME):
            count = min(_ROWS_AT_A_TIME, rows - start)
            ends = np.concatenate([[0], np.cumsum(generator.integers(1, 6, count))])
            chosen = words.take(pa.array(generator.integers(0, len(words), ends[-1])))
            lists = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), chosen)
            texts = pa.compute.binary_join(lists, " ")
            writer.write_table(pa.table([pa.array(np.arange(start, start + count)), texts], schema=schema))


def run(folder: Path, rows: int, nodes: int, gpus: int, members: int, labels: int, chunk_seconds: float,
        time_limit: float | None = None) -> dict[str, Any]:  # fmt: skip
    """Make a table in a folder and run members over it; what was measured.

    Raises:
        Failed: the run failed, or merged something else than its members gave.
    """
    from bench import pretended
    from ensemble.cli.progress import PlainDisplay
    from ensemble.common.extensions import SettingsByName
    from ensemble.config.load import load_config
    from ensemble.members.registry import KINDS
    from ensemble.merging.methods import METHODS
    from ensemble.pipeline import run as road

    table = folder / "table.parquet"
    say(f"making a table of {rows:,} rows ...")
    make_table(table, rows)
    (folder / "model.py").write_text("def predict(frame, context):\n    return None\n", encoding="utf-8")
    config = {
        "data": {"path": str(table), "id_column": "id"},
        "labels": [f"label_{number}" for number in range(labels)],
        "models": [
            {
                "name": f"m{number}",
                "task_type": "python",
                "predict": f"{folder / 'model.py'}:predict",
                "columns": ["text"],
                "num_gpus": 1,
                "kwargs": {"member": number},
            }
            for number in range(members)
        ],
        "launcher": {"pretended": {"nodes": nodes, "gpus": gpus, "chunk_seconds": chunk_seconds}},
        "output_dir": str(folder / "run"),
        "report": False,
        **({} if time_limit is None else {"time_limit": time_limit}),
    }
    place = folder / "config.yaml"
    place.write_text(yaml.safe_dump(config), encoding="utf-8")
    pretended.register()
    loaded = load_config([place], [], SettingsByName(METHODS), SettingsByName(KINDS))
    meter = Meter(lambda: pretended.last_tally.pretending_seconds)
    began = (time.monotonic(), time.process_time())
    with meter.measuring():
        report = road.run(loaded, PlainDisplay(sys.stderr))
    seconds, cpu_seconds = time.monotonic() - began[0], time.process_time() - began[1]
    tally = pretended.last_tally
    if report.status != "complete":
        raise Failed(f"the run ended as {report.status}")
    _check(folder / "run" / "ensemble.csv", rows, members, labels)
    scheduling = meter.phases["scheduling"]
    own = scheduling.cpu_seconds - tally.sealing_seconds + tally.helped_seconds
    return {
        "rows": rows,
        "members": members,
        "workers at a time": tally.most_running,
        "chunks": tally.chunks,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds - tally.pretending_seconds,
        "pretending_seconds": tally.pretending_seconds,
        "sealing_seconds": tally.sealing_seconds,
        "helped_seconds": tally.helped_seconds,
        "shard_bytes": tally.shard_bytes,
        "events": tally.events,
        "turns": tally.turns,
        "calls": tally.calls,
        "dispatch_cpu_seconds": own,
        "core_per_100_chunks": 100 * own / tally.chunks,
        "chunks_per_second": tally.chunks / scheduling.seconds,
        "anonymous_bytes": meter.most_anonymous_bytes,
        "resident_bytes": meter.most_resident_bytes,
        "kernel_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "run_json_bytes": (folder / "run" / "run.json").stat().st_size,
        "phases": {name: vars(phase) for name, phase in meter.phases.items()},
    }


def _check(path: Path, rows: int, members: int, labels: int) -> None:
    """The merged file holds each row once, in order, with the mean of what members gave."""
    from bench.pretended import probabilities

    found = 0
    with pa_csv.open_csv(path) as batches:
        for batch in batches:
            numbers = np.arange(found, found + len(batch))
            if not np.array_equal(batch.column(0).to_numpy(), numbers):
                raise Failed(f"{path}: other ids than the table's near row {found:,}")
            means = np.mean([probabilities(numbers, one, labels) for one in range(members)], axis=0)
            values = np.stack([column.to_numpy() for column in batch.columns[1:]], axis=1)
            if not np.abs(values - means).max() < 1e-12:
                raise Failed(f"{path}: other values than the members' mean near row {found:,}")
            found += len(batch)
    if found != rows:
        raise Failed(f"{path}: {found:,} rows instead of {rows:,}")


def compare(
    rows: int = 2_000_000, nodes: int = 64, gpus: int = 8, members: int = 5, labels: int = 2,
    chunk_seconds: float = 5.0, time_limit: float | None = None, repeats: int = 1, folder: Path | None = None,
) -> list[dict[str, object]]:  # fmt: skip
    """Run it once, in a process of its own, and say what each phase took.

    Raises:
        Failed: it failed.
    """
    del repeats  # it takes long, and what is counted is CPU seconds
    with tempfile.TemporaryDirectory(prefix="ensemble scale ", dir=folder) as name:
        command = [
            sys.executable,
            "-m",
            "bench.scale",
            "--in",
            name,
            "--rows",
            str(rows),
            "--nodes",
            str(nodes),
        ]
        command += ["--gpus", str(gpus), "--members", str(members), "--labels", str(labels)]
        command += ["--chunk-seconds", str(chunk_seconds)]
        command += [] if time_limit is None else ["--time-limit", str(time_limit)]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": name}
        if subprocess.run(command, env=environment, stdout=sys.stderr).returncode:
            raise Failed("the run of pretended workers failed")
        found = json.loads((Path(name) / "found.json").read_text(encoding="utf-8"))
    return table_of(found)


def table_of(found: dict[str, Any]) -> list[dict[str, object]]:
    """What was measured, a line for each phase."""
    lines: list[dict[str, object]] = []
    for name, one in found["phases"].items():
        is_alone = name.startswith("-") or "scheduling" in name
        cpu_seconds = one["cpu_seconds"] if is_alone else one["process_seconds"]
        cpu_seconds = found["dispatch_cpu_seconds"] if name == "scheduling" else cpu_seconds
        what = f"{name}, {one['calls']:,} times" if one["calls"] > 1 else name
        lines.append({"what": what, "s": one["seconds"], "CPU s": cpu_seconds,
                      "of its own, MiB": f"{one['anonymous_bytes'] / MIB:,.0f}"})  # fmt: skip
    shards = found["shard_bytes"] / 1e6
    lines.append(
        {"what": f"{found['chunks']:,} shards kept ({shards:,.0f} MB)", "CPU s": found["sealing_seconds"]}
    )
    lines.append({"what": "all", "s": found["seconds"], "CPU s": found["cpu_seconds"],
                  "of its own, MiB": f"{found['anonymous_bytes'] / MIB:,.0f}"})  # fmt: skip
    lines.append({"what": f"dispatch: % of a core for 100 chunks a second, {found['workers at a time']} workers, "
                          f"{found['chunks_per_second']:.0f} chunks/s",
                  "CPU s": f"{100 * found['core_per_100_chunks']:.1f} %"})  # fmt: skip
    within = {name: one["cpu_seconds"] for name, one in found["phases"].items() if name.startswith("-")}
    within["- for each chunk"] = found["dispatch_cpu_seconds"] - sum(within.values())
    lines += [
        {"what": name, "CPU s": f"{10_000 * seconds / found['chunks']:.1f} %"}
        for name, seconds in within.items()
    ]
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: prints a markdown table.

    Returns:
        0; 1 where something failed.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000, metavar="N")
    parser.add_argument("--nodes", type=int, default=64, metavar="N")
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help="of each node")
    parser.add_argument("--members", type=int, default=5, metavar="M")
    parser.add_argument("--labels", type=int, default=2, metavar="L")
    parser.add_argument(
        "--chunk-seconds", type=float, default=5.0, metavar="S", help="of each chunk of 4,096 rows"
    )
    parser.add_argument("--time-limit", type=float, metavar="S", help="as of the config")
    parser.add_argument("--folder", type=Path, help="where there is room for it; the system's temporary one")
    parser.add_argument(
        "--in", type=Path, dest="place", metavar="FOLDER", help="the process that this command starts"
    )
    parser.add_argument("--profile", type=Path, metavar="FILE", help="with --in: what cProfile finds")
    options = parser.parse_args(arguments)
    asked = (
        options.rows,
        options.nodes,
        options.gpus,
        options.members,
        options.labels,
        options.chunk_seconds,
        options.time_limit,
    )
    if options.place is None:
        return show(lambda: compare(*asked, folder=options.folder))
    if options.profile is None:
        found = run(options.place, *asked)
    else:
        import cProfile

        profile = cProfile.Profile()
        found = profile.runcall(run, options.place, *asked)
        profile.dump_stats(options.profile)
    (options.place / "found.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
