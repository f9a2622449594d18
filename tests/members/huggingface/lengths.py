"""The child side of a small kind: the longer a text, the more of the last label; its scale is read from a file."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ensemble.common.protocol import CommonSpec, Counters, Ready
from ensemble.data.published_table import PublishedTable
from ensemble.members.predictor import Prediction, Predictor, Report

HEAVY = ("torch", "transformers", "accelerate", "pandas")


def import_libraries() -> Mapping[str, str]:
    return {"numpy": np.__version__}


def make_predictor(common: CommonSpec, settings: Mapping[str, Any], table: PublishedTable) -> Predictor:
    return Lengths(settings["column"], Path(settings["scale_path"]), common.labels, table)


class Lengths(Predictor):
    def __init__(self, column: str, scale_path: Path, labels: tuple[str, ...], table: PublishedTable) -> None:
        self._column, self._scale_path, self._labels, self._table = column, scale_path, labels, table

    def load(self) -> Ready:
        self._scale = float(self._scale_path.read_text())
        return Ready(notes=(f"imported: {[name for name in HEAVY if name in sys.modules]}",))

    def predict(self, rows: npt.NDArray[np.int64], report: Report) -> Prediction:
        texts = [str(row[self._column]) for row in self._table.take(rows)]
        if "?" in "".join(texts):
            raise LookupError("a text that asks")
        share = np.array([len(text) / self._scale for text in texts])
        values = np.zeros((len(rows), len(self._labels)))
        values[:, 0], values[:, -1] = 1 - share, share
        report(len(rows))
        bad = {place: "no text" for place, text in enumerate(texts) if not text}
        return Prediction(values, bad, Counters(batches=1), advice="raise the scale")

    def close(self) -> None:
        print(f"closed; imported: {[name for name in HEAVY if name in sys.modules]}")  # noqa: T201
