"""Run a program of the user in its worker: write a file of rows, run it, and read the file that it leaves."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.errors import DataError, MemberError
from ensemble.common.files import is_parquet, remove_folder
from ensemble.common.logged_command import CommandFailed, LoggedCommand, OutOfMemory, with_values
from ensemble.common.protocol import CommonSpec, Counters, Ready
from ensemble.common.shards import CACHE_FOLDER
from ensemble.common.text import quoted
from ensemble.data.formats import known_format
from ensemble.data.input_file import is_binary
from ensemble.data.predictions_csv import read_predictions
from ensemble.data.published_table import PublishedTable
from ensemble.members.predictor import Prediction, Predictor, Report

_POLL_SECONDS = 0.1
_CALL = "call-"  # how the name of a call's folder begins; behind it is the worker's process
_ADVICE = (
    "let the command write to {out} a row for each row of {rows}, with its id as it stands there and a column for "
    "each label (out_columns: {COLUMN: LABEL} maps others)"
)
_VALUES_ADVICE = (
    "its command wrote that: let it write probabilities, or say with activation what the values are"
)


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
        settings, places = self._settings, np.argsort(rows)
        rows_file = self._folder / f"rows.{settings['rows_format']}"
        out = self._folder / "out" / f"predictions.{settings['out_format']}"
        remove_folder(self._folder)
        self._folder.mkdir(parents=True)
        values = np.full((len(rows), len(self._columns)), np.nan)
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
            log=self._log(),
            resumes=False,
            environment=settings["environment"],
            settings=settings,
        )
        try:
            self._write(rows_file, rows[places])
            is_done = self._run(command, report)
            if is_done:
                values[places] = self._read(out, rows[places])
        except OutOfMemory as failure:
            raise ChildProcessError(str(failure)) from None
        except CommandFailed as failure:
            raise (ChildProcessError if failure.was_killed else MemberError)(str(failure)) from None
        except DataError as error:
            raise MemberError([f"{problem}; {_ADVICE}" for problem in error.problems]) from None
        remove_folder(self._folder)  # what has failed stays for the user to look at
        return Prediction(values, counters=Counters(batches=1), advice=_VALUES_ADVICE, is_partial=not is_done)

    def _write(self, path: Path, rows: npt.NDArray[np.int64]) -> None:
        """Write the file of rows."""
        file_format, columns = known_format(path), self._settings["columns"]
        assert file_format is not None
        assert file_format.write is not None
        with_bytes = [name for name in columns if is_binary(self._table.schema.field(name).type)]
        if with_bytes and not is_parquet(path):
            raise MemberError(
                f"column {quoted(with_bytes[0])} holds bytes, which a {path.suffix} file cannot hold; set format: "
                "parquet, or name the other columns in columns"
            )
        file_format.write(path, columns, self._table.batches(rows, columns))

    def _run(self, command: LoggedCommand, report: Report) -> bool:
        """Run the command until it has ended well; False: the run is stopped, and the command was killed."""
        running, seen = command.start(), None
        try:
            while running.is_alive():
                if self.is_stopped():
                    return False
                signs = running.signs_of_life()
                if signs != seen:
                    seen = signs
                    report(0)
                time.sleep(_POLL_SECONDS)
        finally:
            running.end()
        running.demand_success()
        return True

    def _read(self, out: Path, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the values of the file that the command has left, [rows, labels]; raise DataError."""
        file = read_predictions(out, self._settings["id_column"], self._columns, may_lack=True)
        ids = pa.chunked_array([pa.array(self._table.ids(rows), pa.string())])
        return file.join(ids, table="{rows}")[0]

    def _log(self) -> Path:
        """Return the file of the worker's own output, or one in the folder of the call."""
        log = Path("/proc/self/fd/1").resolve()
        return log if log.is_file() else self._folder / "log"
