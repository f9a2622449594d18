"""How long a start takes: a worker's, beside bare imports and loading, and a run's, until its first worker.

``python -m bench.startup`` measures each in turn, in fresh processes.  The package is compiled first, as pip does.
"""

from __future__ import annotations

import argparse
import compileall
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.contests import ROOT
from bench.processes import Failed, cpu_seconds
from bench.rounds import say
from bench.sections import show
from bench.table import Spread
from ensemble.common.digests import FileDigests
from ensemble.common.protocol import Load, Ready, Start
from ensemble.common.shards import ORDER_FILE
from ensemble.jobs.work import Work
from ensemble.pipeline.load import load as load_config
from ensemble.pipeline.prepare import prepare
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.run import worker_spec
from ensemble.pipeline.run_dir import RunDir
from ensemble.planning.plan import ModelPlan
from ensemble.scheduling.launchers.local import LocalWorker

CONFIG = ROOT / "configs" / "demo.yaml"
# What a script would begin with that knows its model's class.
_BARE = """
import json, pathlib, sys
import torch
import transformers
name, = json.loads(pathlib.Path(sys.argv[1], "config.json").read_text())["architectures"]
model = getattr(transformers, name).from_pretrained(sys.argv[1])
print("loaded", flush=True)
"""
_BARE_TITLE = "bare: import torch and the model's class, load the weights"
_WORKER_TITLE = "a worker, from its start to ready"
_COMMAND_TITLE = "a run, from its command to its first worker"
_MAX_RATIO = 1.15
_MAX_SECONDS = 0.5
_GIVE_UP_SECONDS = 300.0
_LOOK_SECONDS = 0.001


@dataclass(frozen=True)
class _Sample:
    """Wall seconds until what is waited for, and CPU seconds of the process that was started."""

    seconds: float
    cpu_seconds: float


def compare(repeats: int, warm: bool = True) -> list[dict[str, object]]:
    """Measure each ``repeats`` times, in turn.

    Args:
        warm: do each once before, for the page cache.

    Returns:
        a row each: seconds and CPU seconds (median, least to most), a worker's ratio to the bare script (the
        median of the rounds'), what either may be at most.

    Raises:
        Failed: a process ended before it was there.
    """
    with tempfile.TemporaryDirectory(prefix="ensemble start ") as made:
        folder = Path(made)
        environment = {**os.environ, "PYTHONPATH": str(_compiled(folder / "package"))}
        prepared = prepare(load_config(CONFIG, [f"output_dir={folder / 'worker'}"]))
        member = prepared.plan.models[0]
        start = published(prepared, member)
        model = member.model.model_dump()["model_name_or_path"]
        ways: dict[str, Callable[[], _Sample]] = {
            _BARE_TITLE: lambda: _bare(model, environment),
            _WORKER_TITLE: lambda: _worker(start, environment, folder / "worker.log"),
            _COMMAND_TITLE: lambda: _command(folder, environment),
        }
        samples: dict[str, list[_Sample]] = {title: [] for title in ways}
        for number in range(0 if warm else 1, repeats + 1):
            for title, measure in ways.items():
                sample = measure()
                if number:
                    samples[title].append(sample)
                    say(f"start-up: round {number} of {repeats}: {title}: {sample.seconds:.2f} s")
    return _rows(samples)


def _rows(samples: Mapping[str, Sequence[_Sample]]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for title, found in samples.items():
        seconds = [sample.seconds for sample in found]
        row: dict[str, object] = {
            "what": title,
            "s": Spread.of(seconds).text(2),
            "CPU s": Spread.of([sample.cpu_seconds for sample in found]).text(2),
            "time / bare": "",
            "at most": "",
            "verdict": "",
        }
        if title == _WORKER_TITLE:
            pairs = zip(found, samples[_BARE_TITLE], strict=True)
            ratios = [one.seconds / other.seconds for one, other in pairs]
            row |= {"time / bare": Spread.of(ratios).text(2), "at most": f"{_MAX_RATIO} x bare"}
            row["verdict"] = "ok" if median(ratios) <= _MAX_RATIO else "MISSED"
        elif title == _COMMAND_TITLE:
            row["at most"] = f"{_MAX_SECONDS} s"
            row["verdict"] = "ok" if median(seconds) <= _MAX_SECONDS else "MISSED"
        rows.append(row)
    return rows


def _compiled(folder: Path) -> Path:
    """A copy of the package with its bytecode, to be first on Python's path."""
    shutil.copytree(ROOT / "ensemble", folder / "ensemble", ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(folder / "ensemble", quiet=1)
    return folder


def published(prepared: Prepared, member: ModelPlan) -> Start:
    """The table and the order where a worker looks for them, and what it is told."""
    rundir = RunDir(prepared.config.output_dir)
    rundir.create()
    shards_dir = rundir.work_dir / "parts of the start-up benchmark"
    shards_dir.mkdir(parents=True)
    fingerprint = prepared.causes(member, member.jobs[0], FileDigests(False))
    work = Work(member.name, fingerprint, shards_dir, np.zeros(prepared.table.rows, np.bool_))
    rundir.table.parent.mkdir(exist_ok=True)
    prepared.table.publish(rundir.table)
    with (shards_dir / ORDER_FILE).open("wb") as file:
        np.save(file, member.order)
    return Start(worker_spec(prepared, rundir, member, [work]))


def _bare(model: str, environment: Mapping[str, str]) -> _Sample:
    before, began = cpu_seconds(), time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", _BARE, model],
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    with process.stdout as lines:
        line = lines.readline()
        seconds = time.monotonic() - began
        process.kill()
    process.wait()
    if line != b"loaded\n":
        raise Failed(f"the bare script could not load {model}")
    return _Sample(seconds, cpu_seconds() - before)


def _worker(start: Start, environment: Mapping[str, str], log: Path) -> _Sample:
    before, began = cpu_seconds(), time.monotonic()
    worker = LocalWorker(environment, log)
    try:
        worker.send(start)
        worker.send(Load())
        events: list[Any] = []
        while worker.is_open and not any(isinstance(event, Ready) for event in events):
            if not select.select([worker.events_fd], [], [], _GIVE_UP_SECONDS)[0]:
                break
            events = worker.receive()
        seconds = time.monotonic() - began
    finally:
        worker.close()
    if not any(isinstance(event, Ready) for event in events):
        raise Failed(f"the worker never got ready:\n{log.read_text(errors='replace')[-2000:]}")
    return _Sample(seconds, cpu_seconds() - before)


def _command(folder: Path, environment: Mapping[str, str]) -> _Sample:
    output_dir = Path(tempfile.mkdtemp(dir=folder))
    log = folder / "command.log"
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "ensemble", "run", CONFIG, "--set", f"output_dir={output_dir / 'run'}"],
            cwd=folder,
            env=dict(environment),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not children.read_text():
            if process.poll() is not None or time.monotonic() - began > _GIVE_UP_SECONDS:
                raise Failed(f"the run started no worker:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(_LOOK_SECONDS)
        seconds = time.monotonic() - began
        # Behind the program's name in brackets; its own alone, without the worker's.
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
    finally:
        process.send_signal(signal.SIGTERM)  # it ends its worker
        process.wait()
    return _Sample(seconds, ticks / os.sysconf("SC_CLK_TCK"))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: prints a markdown table.

    Returns:
        0; 1 where something failed.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.startup", description=__doc__)
    parser.add_argument("--repeats", type=int, default=7, metavar="K", help="rounds; 7 where nothing is said")
    options = parser.parse_args(arguments)
    return show(lambda: compare(options.repeats))


if __name__ == "__main__":
    sys.exit(main())
