"""A user's folder, on an awkward path: a table, two tiny models, a config; and the command run in it."""

from __future__ import annotations

import csv
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from tests.checkpoints import make_checkpoint, make_texts, prime
from tests.faults.forked import client

LABELS = ["winner_a", "winner_b", "tie"]
GEMMA_LABELS = ["tie", "winner_a", "winner_b"]  # not the config's order
ROOT = Path(__file__).resolve().parents[1]


class Project:
    """Files below one folder, which is the working directory of every command."""

    def __init__(self, folder: Path, models: Path) -> None:
        self.folder = folder
        self.models = models
        self.texts: list[str] = []
        self.truth: list[str] = []
        self.ids: list[str] = []

    def write_table(self, rows: int = 300, seed: int = 0) -> None:
        chooser = random.Random(seed)
        self.texts = make_texts(rows, seed=seed)
        self.truth = [chooser.choice(LABELS) for _ in range(rows)]
        self.ids = [f"{index:04d}" for index in range(rows)]
        chooser.shuffle(self.ids)
        cells = zip(self.ids, self.texts, self.truth, strict=True)
        self.write_csv("test.csv", ["id", "text", "label"], [list(row) for row in cells])
        sample = [[row_id, "0.3", "0.3", "0.4"] for row_id in sorted(self.ids)]
        self.write_csv("sample.csv", ["id", "tie", "winner_a", "winner_b"], sample)

    def write_csv(self, name: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Path:
        path = self.folder / name
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([header, *rows])
        return path

    def config(self, **changes: Any) -> dict[str, Any]:
        """The usual config; keyword arguments replace top-level keys (None removes one)."""
        config: dict[str, Any] = {
            "data": {"path": "test.csv", "id_column": "id", "label_column": "label"},
            "labels": LABELS,
            "models": [
                {"name": "gemma", "model_name_or_path": str(self.models / "gemma"), "weight": 0.6},
                {"name": "llama", "model_name_or_path": str(self.models / "llama"), "weight": 0.4},
            ],
            "defaults": {"text_column": "text", "max_length": 128},
            "submission": {"sample": "sample.csv", "path": "out/submission.csv"},
            "output_dir": "runs/first",
            "report": False,  # what it takes is longer than the whole run of two tiny models
        }
        return {key: value for key, value in {**config, **changes}.items() if value is not None}

    def write_config(self, config: Mapping[str, Any], name: str = "config.yaml") -> None:
        # A line for each value, however long the path of the models is: messages name lines.
        text = yaml.safe_dump(dict(config), sort_keys=False, width=1000)
        (self.folder / name).write_text(text, encoding="utf-8")

    def ensemble(
        self, *arguments: str, environment: Mapping[str, str] | None = None, timeout: float = 500
    ) -> subprocess.CompletedProcess[str]:
        """``python -m ensemble ARGUMENTS`` in this folder; from a fork server in tests that use ``warm``."""
        command = [sys.executable, "-m", "ensemble", *arguments]
        variables = {**os.environ, "PYTHONPATH": python_path(ROOT), **(environment or {})}
        if not client.can_be_forked(variables):
            return subprocess.run(
                command, cwd=self.folder, env=variables, capture_output=True, text=True, timeout=timeout
            )
        with (
            tempfile.TemporaryFile() as output,
            tempfile.TemporaryFile() as errors,
            client.Command(
                arguments, self.folder, variables, (None, output.fileno(), errors.fileno())
            ) as forked,
        ):
            forked.go()
            code = forked.wait(timeout)
            printed = []
            for file in (output, errors):
                file.seek(0)
                printed.append(file.read().decode().replace("\r\n", "\n"))
        return subprocess.CompletedProcess(command, code, *printed)

    def start(
        self, *arguments: str, environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start ``python -m ensemble ARGUMENTS`` here, in a fresh process; all that it prints is one text."""
        variables = {"PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1", **(environment or {})}
        return subprocess.Popen(
            [sys.executable, "-m", "ensemble", *arguments],
            cwd=self.folder,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **options,
        )

    def read(self, name: str) -> tuple[list[str], list[list[str]]]:
        """Header and rows of a CSV."""
        with (self.folder / name).open(newline="", encoding="utf-8") as file:
            header, *rows = list(csv.reader(file))
        return header, rows

    def values(self, name: str) -> npt.NDArray[np.float64]:
        """The numbers of a CSV beside its ids, shape (rows, labels)."""
        return np.array([row[1:] for row in self.read(name)[1]], dtype=np.float64)

    def write_pairs(self, rows: int) -> None:
        """A table of two texts a row, ``a`` and ``b``: the first and the second half of ``texts``."""
        self.ids = [f"{(7 * row) % 101:03d}" for row in range(rows)]
        self.texts = make_texts(2 * rows, seed=3)
        labels = [LABELS[row % 3] for row in range(rows)]
        cells = zip(self.ids, self.texts[:rows], self.texts[rows:], labels, strict=True)
        self.write_csv("test.csv", ["id", "a", "b", "label"], [list(row) for row in cells])

    def run_json(self, name: str = "runs/first") -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.folder / name / "run.json").read_text(encoding="utf-8"))
        return document


def python_path(*folders: Path) -> str:
    """These folders, and behind them what PYTHONPATH holds already, such as another release of a library."""
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")]))


def make_models(folder: Path) -> Path:
    prime(make_checkpoint(folder / "gemma", "gemma2", GEMMA_LABELS, seed=1))
    prime(make_checkpoint(folder / "llama", "llama", LABELS, seed=2, pad=None))
    return folder
