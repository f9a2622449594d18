"""Where the checks run: a place with models, the checks' tables, and runs as on another GPU."""

from __future__ import annotations

import csv
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.gpu.place import MAX_LENGTH, Place, python_path

# A borrowed machine may end a command after ten minutes.
DEADLINE_SECONDS = 560.0
# Rows of the even table, a chunk of its own at most; in the long-tailed one there are ``TAILED_ROWS``.
EVEN_ROWS = 120
TAILED_ROWS = 400


class Bench(Place):
    """A folder with models and tables."""

    def measure(
        self,
        name: str,
        *members: Mapping[str, Any],
        table: str = "tailed",
        rows: int = TAILED_ROWS,
        devices: Sequence[str] | None = None,
        capability: str = "",
        max_length: int = MAX_LENGTH,
        workers_per_gpu: int = 1,
    ) -> dict[str, Any]:
        """Run members over a table's first rows; the run.json.

        Args:
            table: ``tailed``, ``even`` or ``long``.
            capability: what the GPU is to say of itself, such as "7.5"; empty: the truth.
            workers_per_gpu: more than one where speeds do not matter, which saves the time of imports.

        Raises:
            Failed: it took too long, ended with an error, or did not use the GPU.
            Skip: the time for all checks was over before its own.
        """
        variables = {}
        if capability:
            variables["TEST_GPU_CAPABILITY"] = capability
            paths = [str(Path(__file__).with_name("capability")), os.environ.get("PYTHONPATH", "")]
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return self.run(
            name,
            *members,
            table=table,
            rows=rows,
            devices=devices,
            environment=variables,
            max_length=max_length,
            workers_per_gpu=workers_per_gpu,
        )

    def kill_after_a_chunk(
        self,
        name: str,
        member: Mapping[str, Any],
        table: str = "tailed",
        devices: Sequence[str] | None = None,
        max_length: int = MAX_LENGTH,
    ) -> None:
        """Kill a run once a chunk of it is on the disk."""
        self.write_config(name, [member], table, TAILED_ROWS, devices, max_length)
        process = subprocess.Popen(
            [sys.executable, "-m", "ensemble", "run", f"{name}.yaml"],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": python_path()},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        work = self.folder / name / "work"
        while process.poll() is None and self.seconds_left > 0 and not any(work.glob("*/[0-9]*.csv")):
            time.sleep(0.01)
        process.kill()
        process.wait()

    def prediction_bytes(self, run: str, member: str) -> bytes:
        return (self.folder / run / "predictions" / f"{member}.csv").read_bytes()

    def probabilities(self, run: str, member: str) -> npt.NDArray[np.float64]:
        with (self.folder / run / "predictions" / f"{member}.csv").open(encoding="utf-8") as file:
            return np.array([[float(cell) for cell in row[1:]] for row in list(csv.reader(file))[1:]])

    def write_tables(self) -> None:
        """``tailed`` has a median of 60 words and a 99th percentile of 400; all rows of ``even`` have 501 tokens.

        Those of ``long`` have 1,000 to 2,047.

        Batches of a long-tailed table end where padding begins, at about 3,000 tokens; those of an even one are
        as large as they may be, which is what the plan reckons with.  A digit is a token to the tokenizer.
        """
        chooser = random.Random(0)
        words = "the of and to in is that for it as was with be by on not he his but at".split()
        lengths = [min(500, max(1, int(chooser.lognormvariate(4.1, 0.8)))) for _ in range(TAILED_ROWS)]
        self._write_table("tailed", [" ".join(chooser.choices(words, k=length)) for length in lengths])
        self._write_table("even", ["".join(chooser.choices("0123456789", k=500)) for _ in range(EVEN_ROWS)])

        lengths = [chooser.randrange(1000, 2047) for _ in range(TAILED_ROWS)]
        self._write_table("long", ["".join(chooser.choices("0123456789", k=length)) for length in lengths])

    def _write_table(self, name: str, texts: Sequence[str]) -> None:
        with (self.folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["id", "text"])
            writer.writerows(enumerate(texts))
