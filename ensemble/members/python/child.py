"""Run a user's function in its worker: import it, set it up once, call it with a frame of some rows at a time.

Its module is imported when the worker starts, perhaps while another member still has the device; ``setup`` is
called once the worker has its device.
"""

from __future__ import annotations

import random
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from ensemble.common.errors import MemberError
from ensemble.common.host import usable_cpus
from ensemble.common.protocol import CommonSpec, Counters, Ready
from ensemble.common.shards import CACHE_FOLDER
from ensemble.common.text import shown_path
from ensemble.common.torch_errors import is_out_of_memory, one_line
from ensemble.common.user_code import function_of, import_module
from ensemble.data.published_table import PublishedTable
from ensemble.members.predictor import Prediction, Predictor, Report

_RETURN_ADVICE = (
    "return probabilities as an array [rows, labels], a frame with the labels as columns, or a list of rows"
)


@dataclass
class Context:
    """Hold what the user's functions get in addition to the rows.

    Attributes:
        device: "cuda:0", or "cpu"; CUDA shows a process only its own devices, numbered from 0.
        gpus: the number of devices; 0: the CPU.
        model: the file or folder of the key ``model``, or what the member's training has left; None: there is none.
        cache_dir: a folder that the processes of a member share, until its predictions are complete.
        seed: the config's; ``random`` and ``numpy.random`` are seeded with it before ``setup``.
        cpu_threads: the threads that a process should use, since several may share the CPU.
        state: the value that ``setup`` has returned.
        report: a function for calls that take minutes: call it with the number of rows done in this call.  A
            process that neither finishes a call nor reports within ``hang_timeout`` counts as hung.
    """

    device: str
    gpus: int
    labels: tuple[str, ...]
    kwargs: Mapping[str, Any]
    cache_dir: Path
    seed: int
    cpu_threads: int
    model: Path | None = None
    state: Any = None
    report: Callable[[int], None] = field(default=lambda rows: None)


def import_libraries() -> Mapping[str, str]:
    return {"numpy": np.__version__, "pandas": pd.__version__, "pyarrow": pa.__version__}


def make_predictor(common: CommonSpec, settings: Mapping[str, Any], table: PublishedTable) -> Predictor:
    return FunctionPredictor(common, settings, table)


class FunctionPredictor(Predictor):
    """Import the user's module, then call its function."""

    def __init__(self, common: CommonSpec, settings: Mapping[str, Any], table: PublishedTable) -> None:
        self._table, self._settings = table, settings
        self._batch_size: int | None = settings["batch_size"]  # less where torch has run out of memory
        self._context = Context(
            device="cuda:0" if common.gpus else "cpu",
            gpus=common.gpus,
            labels=common.labels,
            kwargs=settings["kwargs"],
            cache_dir=Path(common.shards_dir) / common.jobs[0].folder / CACHE_FOLDER,
            seed=common.seed,
            cpu_threads=usable_cpus(),
            model=None if settings["model"] is None else Path(settings["model"]),
        )
        sys.dont_write_bytecode = True  # a run writes nothing beside the user's files
        with _with_place():
            module = import_module(settings["module"], settings["file"])
        self._predict = function_of(module, settings["function"], "predict", ("the frame", "the context"))
        self._setup: Callable[..., Any] = lambda context: None
        if settings["setup"] is not None:
            self._setup = function_of(module, settings["setup"], "setup", ("the context",))

    def load(self) -> Ready:
        self._context.cache_dir.mkdir(parents=True, exist_ok=True)
        random.seed(self._context.seed)
        np.random.seed(self._context.seed)  # the global generator, which libraries use
        with _with_place():
            self._context.state = self._setup(self._context)
        return Ready(device=self._context.device)

    def predict(self, rows: npt.NDArray[np.int64], report: Report) -> Prediction:
        values = np.full((len(rows), len(self._context.labels)), np.nan)
        bad_rows: dict[int, str] = {}
        start = calls = failures = largest = 0
        while start < len(rows):
            frame = self._frame(rows[start : start + (self._batch_size or len(rows))])
            stop = start + len(frame)
            self._context.report = partial(_report_rows, report, start, stop)
            ids = frame.index.copy()  # since the user's function may change the frame
            memory_error = ""
            try:
                with _with_place():
                    result = self._predict(frame, self._context)
                values[start:stop] = _values(result, ids, self._context.labels)
                calls += 1
                largest = max(largest, len(ids))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                memory_error = one_line(error)
            if memory_error:
                # Not in the except block, where the error still holds the tensors of the failed call.
                torch = sys.modules.get("torch")
                if torch is not None and torch.cuda.is_initialized():
                    torch.cuda.empty_cache()
                failures += 1
                if len(ids) > 1:
                    self._batch_size = len(ids) // 2
                    continue
                bad_rows[start] = f"its function ran out of memory with this row alone: {memory_error}"
                self._batch_size = largest or 1  # the other rows fit as before
            start = stop
            if report(start) is False:
                break
        counters = Counters(batches=calls, oom_events=failures)
        return Prediction(values, bad_rows, counters, is_partial=start < len(rows))

    def _frame(self, rows: npt.NDArray[np.int64]) -> pd.DataFrame:
        """Return a frame of these rows; a column has the same type in every frame."""
        ids = pd.Index(self._table.ids(rows), dtype=object, name=self._settings["id_column"])
        records = self._table.take(rows)
        columns = {}
        for name in (*self._settings["columns"], *self._table.inputs):
            cells = self._cells(name, [record[name] for record in records])
            # With a dtype, since pandas 3 would turn text objects into its "str" and pandas 2 would not.
            columns[name] = pd.Series(cells, index=ids, dtype=cells.dtype)
        return pd.DataFrame(columns, index=ids)

    def _cells(self, column: str, cells: Sequence[object]) -> npt.NDArray[Any]:
        """Return text with "" where it is missing, numbers with NaN, and all else as Python objects with None."""
        field, has_nulls = self._table.schema.field(column), self._table.has_nulls[column]
        if pa.types.is_floating(field.type) or (pa.types.is_integer(field.type) and has_nulls):
            return np.array([np.nan if cell is None else cell for cell in cells], dtype=np.float64)
        if pa.types.is_integer(field.type):
            return np.array(cells, dtype=np.uint64 if pa.types.is_uint64(field.type) else np.int64)
        if pa.types.is_boolean(field.type) and not has_nulls:
            return np.array(cells, dtype=np.bool_)
        is_json = (field.metadata or {}).get(b"ensemble") == b"json"
        is_text = pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
        objects = np.empty(len(cells), dtype=object)
        for index, cell in enumerate(cells):  # one by one: NumPy would turn lists into dimensions
            objects[index] = "" if cell is None and is_text and not is_json else cell
        return objects


def _report_rows(report: Report, start: int, stop: int, done: int) -> None:
    report(min(max(start, start + int(done)), stop))


@contextmanager
def _with_place() -> Iterator[None]:
    """Add the file and line of the user's code to an error that it raises."""
    try:
        yield
    except BaseException as error:
        steps = [(Path(frame.f_code.co_filename), line) for frame, line in walk_tb(error.__traceback__)]
        # Not this file, and not the import system, whose files are "<frozen ...>".
        steps = [step for step in steps if step[0] != Path(__file__) and step[0].is_file()]
        # If all is installed, the function of the config is the best guess.
        for file, line in [step for step in steps if not _is_library(step[0])][-1:] or steps[:1]:
            error.add_note(f"{shown_path(file)}, line {line}")
        raise


def _is_library(file: Path) -> bool:
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(file.parts)
    return is_installed or file.is_relative_to(sysconfig.get_path("stdlib"))


def _values(result: Any, ids: pd.Index, labels: tuple[str, ...]) -> npt.NDArray[np.float64]:
    """Return the result of the user's function as float64 [rows, labels].

    A MemberError says what would be wrong for other rows, too; a ValueError what is wrong in this call.
    """
    if isinstance(result, pd.DataFrame):
        result = _labelled(result, ids, labels)
    elif not isinstance(result, list | tuple) and not hasattr(result, "__array__"):
        raise MemberError(f"its function returned {type(result).__name__}; {_RETURN_ADVICE}")
    try:
        values = np.asarray(result, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"its function returned no numbers ({error}); {_RETURN_ADVICE}") from error
    rows, count = len(ids), len(labels)
    if values.shape != (rows, count):
        # One row may have lost a dimension, or be why others are missing; all else is wrong for all rows.
        is_by_rows = rows == 1 or (values.ndim == 2 and values.shape[1] == count)
        raise (ValueError if is_by_rows else MemberError)(
            f"its function returned an array of shape {values.shape} for {rows} rows and {count} labels; "
            f"{_RETURN_ADVICE}"
        )
    return values


def _labelled(frame: pd.DataFrame, ids: pd.Index, labels: tuple[str, ...]) -> pd.DataFrame:
    """Return a frame's columns of the labels, its rows in the order of ``ids``."""
    frame = frame.rename(columns=str)
    missing = [label for label in labels if label not in frame.columns]
    if missing:
        raise MemberError(
            f"its function returned a frame without columns for {', '.join(missing)}; it has "
            f"{', '.join(frame.columns) or 'none'}"
        )
    frame = frame[list(labels)]
    # A frame with a new RangeIndex is joined by position.
    if isinstance(frame.index, pd.RangeIndex) or frame.index.equals(ids):
        return frame
    if frame.index.has_duplicates or set(frame.index) != set(ids):
        raise ValueError(
            "its function returned a frame with other ids than it was called with; return one row for each, with "
            "the same index"
        )
    return frame.loc[ids]
