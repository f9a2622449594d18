"""The same work on this machine and over two raylets of a Ray cluster on it: ``python -m bench.cluster``.

A function of our own takes seconds of CPU for each chunk, in two workers at a time: processes of this machine, or
one on each of two nodes with folders of their own, to which the table goes and from which shards come back.  What
Ray, its agents and the way to and fro take is what the runs over the cluster take longer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from bench.processes import Failed, measure
from bench.rounds import say
from bench.sections import show
from bench.table import Spread

ROOT = Path(__file__).resolve().parents[1]
AT_MOST = 1.05
WORKERS = 2
# Rows of a chunk: of a small table each has 64 KiB of text at least (``planning.chunks``).
_CHUNK_ROWS, _ROW_BYTES = 64, 1024 - 32
_TRIAL_ITERATIONS = 1_000_000
_MODEL = """
import hashlib

import numpy as np


def predict(frame, context):
    for text in frame["text"]:
        hashlib.pbkdf2_hmac("sha256", text.encode(), b"", context.kwargs["iterations"])
    first = frame["text"].str.slice(0, 6).astype(int).to_numpy() / 1e6
    return np.stack([first, 1 - first], axis=1)
"""


def compare(chunks: int = 16, chunk_seconds: float = 5.0, repeats: int = 3) -> list[dict[str, object]]:
    """Run both ways in turn, and compare what they wrote byte by byte.

    Raises:
        Failed: a run failed, or wrote something else; or Ray is not installed.
    """
    if find_spec("ray") is None:
        raise Failed("Ray is missing: pip install -e '.[ray]', or leave this out with --only")
    iterations = int(_iterations_a_second() * chunk_seconds / _CHUNK_ROWS)
    reports: dict[str, list[dict[str, Any]]] = {"local": [], "ray": []}
    with tempfile.TemporaryDirectory(prefix="ensemble cluster ") as name:
        folder = Path(name)
        with (folder / "table.csv").open("w", encoding="utf-8") as file:
            file.write("id,text\n")
            for row in range(chunks * _CHUNK_ROWS):
                file.write(f"{row},{row:06d}{'x' * (_ROW_BYTES - 6)}\n")
        (folder / "model.py").write_text(_MODEL, encoding="utf-8")
        with _cluster(folder) as address:
            for number in range(repeats):
                for way in reports:
                    launcher = "local" if way == "local" else {"ray": {"address": address}}
                    reports[way].append(_run(folder, way, launcher, iterations))
                    say(f"round {number + 1} of {repeats}: {way}: {reports[way][-1]['seconds']:.1f} s")
                if (folder / "local" / "ensemble.csv").read_bytes() != (
                    folder / "ray" / "ensemble.csv"
                ).read_bytes():
                    raise Failed("the run over the cluster wrote other results")
    return _rows(reports, chunk_seconds)


def _rows(reports: dict[str, list[dict[str, Any]]], chunk_seconds: float) -> list[dict[str, object]]:
    members = {way: [one["members"][0] for one in found] for way, found in reports.items()}
    count = members["local"][0]["chunks"]
    computing = {way: [one["seconds"] for one in found] for way, found in members.items()}
    whole = {way: [one["seconds"] for one in found] for way, found in reports.items()}
    in_computing = Spread.of([ray / here for here, ray in zip(*computing.values(), strict=True)])
    each = [WORKERS * (ray - here) / count for here, ray in zip(*computing.values(), strict=True)]
    verdict = "ok" if in_computing.middle <= AT_MOST else "MISSED"
    few = len(whole["local"]) < 2 or chunk_seconds < 5.0
    return [
        {
            "what": "the whole run, from its command",
            "local, s": Spread.of(whole["local"]).text(2),
            "two raylets, s": Spread.of(whole["ray"]).text(2),
            "ratio": Spread.of([ray / here for here, ray in zip(*whole.values(), strict=True)]).text(3),
        },
        {
            "what": f"computing {count} chunks of about {chunk_seconds:g} s, {WORKERS} workers",
            "local, s": Spread.of(computing["local"]).text(2),
            "two raylets, s": Spread.of(computing["ray"]).text(2),
            "ratio": in_computing.text(3),
            "more for each chunk, s": Spread.of(each).text(3),
            "at most": AT_MOST,
            "": "not judged" if few else verdict,
        },
    ]


def _iterations_a_second() -> float:
    began = time.process_time()
    hashlib.pbkdf2_hmac("sha256", b"x" * _ROW_BYTES, b"", _TRIAL_ITERATIONS)
    return _TRIAL_ITERATIONS / (time.process_time() - began)


def _run(folder: Path, way: str, launcher: object, iterations: int) -> dict[str, Any]:
    """A run from its beginning; its run.json, and ``seconds`` of the whole command."""
    config = {
        "data": {"path": str(folder / "table.csv"), "id_column": "id"},
        "labels": ["a", "b"],
        "models": [
            {
                "name": "m",
                "task_type": "python",
                "predict": f"{folder / 'model.py'}:predict",
                "columns": ["text"],
                "replicas": WORKERS,
                "kwargs": {"iterations": iterations},
            }
        ],
        "launcher": launcher,
        "output_dir": str(folder / way),
        "report": False,
    }
    (folder / f"{way}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [sys.executable, "-m", "ensemble", "run", f"{way}.yaml", "--fresh"]
    measured = measure([command], folder, _environment(), folder / f"{way}.log")
    report: dict[str, Any] = json.loads((folder / way / "run.json").read_text(encoding="utf-8"))
    return {**report, "seconds": measured.seconds}


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"}


@contextmanager
def _cluster(folder: Path) -> Iterator[str]:
    """Two nodes with a core and a folder each; their cluster's address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.ray.cluster"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(),
        cwd=ROOT,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        address = ""
        for name in ("head", "second"):
            (folder / name).mkdir()
            order = {
                "do": "add",
                "name": name,
                "cpus": 1,
                "gpus": 0,
                "environment": {"TMPDIR": str(folder / name)},
            }
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            if not (line := process.stdout.readline()):
                raise Failed("a node of the cluster did not start")
            address = json.loads(line)["address"]
        yield address
    finally:
        process.communicate(timeout=60)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: prints a markdown table.

    Returns:
        0; 1 where something failed.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description=__doc__)
    parser.add_argument("--chunks", type=int, default=16, metavar="N")
    parser.add_argument("--chunk-seconds", type=float, default=5.0, metavar="S", help="of CPU, each")
    parser.add_argument("--repeats", type=int, default=3, metavar="K", help="rounds; 3 where nothing is said")
    options = parser.parse_args(arguments)
    return show(lambda: compare(options.chunks, options.chunk_seconds, options.repeats))


if __name__ == "__main__":
    sys.exit(main())
