"""Run a program of the user in its worker: write a file of rows, run it, and read the file that it leaves."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.errors import DataError, MemberError
from ensemble.common.files import cannot_write, is_parquet, remove_folder
from ensemble.common.logged_command import CommandFailed, LoggedCommand, with_values
from ensemble.common.protocol import CommonSpec, Counters, Ready
from ensemble.common.shards import CACHE_FOLDER
from ensemble.common.text import quoted
from ensemble.data.formats import format_of_predictions
from ensemble.data.input_file import is_binary
from ensemble.data.predictions_csv import read_predictions
from ensemble.data.published_table import PublishedTable
from ensemble.members.predictor import Prediction, Predictor, Report

_CALL = "call-"  # how the name of a call's folder begins; behind it is the worker's process
_ADVICE = (
    "let the command write the ids of {rows} to {out}, before it ends, with a column for each label (out_columns "
    "maps others)"
)
_VALUES_ADVICE = "let its command write probabilities, or say with activation what the values are"


def import_libraries() -> Mapping[str, str]:
    return {"numpy": np.__version__, "pyarrow": pa.__version__}


def make_predictor(common: CommonSpec, settings: Mapping[str, Any], table: PublishedTable) -> Predictor:
    return CommandPredictor(common, settings, table)


class CommandPredictor(Predictor):
    """Run the user's command for some rows at a time, each time in an empty folder."""

    def __init__(self, common: CommonSpec, settings: Mapping[str, Any], table: PublishedTable) -> None:
        self._common, self._settings, self._table = common, settings, table
        self._device = "cuda" if common.gpus else "cpu"
        folder = Path(common.shards_dir, common.jobs[0].folder, CACHE_FOLDER).absolute()
        self._folder = folder / f"{_CALL}{os.getpid()}"
        column_by_label = {label: column for column, label in settings["out_columns"].items()}
        self._columns = [column_by_label.get(label, label) for label in common.labels]

    def load(self) -> Ready:
        for folder in self._folder.parent.glob(f"{_CALL}*"):  # of workers that were killed, or have failed
            if not Path("/proc", folder.name.removeprefix(_CALL)).exists():
                remove_folder(folder)
        return Ready(device=self._device)

    def predict(self, rows: npt.NDArray[np.int64], report: Report) -> Prediction:
        settings = self._settings
        rows_file = self._folder / f"rows.{settings['rows_format']}"
        out = self._folder / "out" / f"predictions.{settings['out_format']}"
        remove_folder(self._folder)
        self._folder.mkdir(parents=True)
        words = [word["key"] + word["rest"] for word in settings["command"]]
        of_placeholders = {
            "rows": str(rows_file),
            "out": str(out),
            "device": self._device,
            "seed": str(self._common.seed),
            "labels": json.dumps(self._common.labels),
            "max_rows": str(len(rows)),
        }
        command = LoggedCommand(
            command=with_values(words, of_placeholders),
            out=out.parent,
            log=Path("/proc/self/fd/1").readlink(),
            resumes=False,
            environment=settings["environment"],
            settings=settings,
        )
        try:
            self._write(rows_file, np.sort(rows))
            is_done = command.run(report, self.is_stopped)
            values = self._read(out, rows) if is_done else np.full((len(rows), len(self._columns)), np.nan)
        except CommandFailed as failure:
            raise (ChildProcessError if failure.was_killed else MemberError)(str(failure)) from None
        except DataError as error:
            raise MemberError([f"{problem}; {_ADVICE}" for problem in error.problems]) from None
        remove_folder(self._folder)  # what has failed stays for the user to look at
        return Prediction(values, counters=Counters(batches=1), advice=_VALUES_ADVICE, is_partial=not is_done)

    def _write(self, path: Path, rows: npt.NDArray[np.int64]) -> None:
        columns = [*self._settings["columns"], *self._table.inputs]
        write = format_of_predictions(path).write
        assert write is not None
        for name in columns:
            if is_binary(self._table.schema.field(name).type) and not is_parquet(path):
                raise MemberError(
                    f"column {quoted(name)} holds bytes; set format: parquet, or columns without it"
                )
        try:
            write(path, columns, self._table.batches(rows, columns))
        except OSError as error:
            path.unlink(missing_ok=True)
            raise MemberError(cannot_write("{rows}", path, error)) from None

    def _read(self, out: Path, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the values of the file that the command has left, [rows, labels]; raise DataError."""
        file = read_predictions(out, self._settings["id_column"], self._columns, may_lack=True)
        ids = pa.chunked_array([pa.array(self._table.ids(rows), pa.string())])
        return file.join(ids, table="{rows}")[0]
