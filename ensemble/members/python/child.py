"""A function of the user's own in its worker: imported, set up once, called with a frame of some rows at a time.

Its module is imported when the worker starts, perhaps while another member still has the device; ``setup`` is
called when the device is its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ensemble.common.errors import MemberError
from ensemble.common.host import usable_cpus
from ensemble.common.protocol import CommonSpec, Counters, Ready
from ensemble.common.torch_errors import is_out_of_memory, one_line
from ensemble.members.predictor import Prediction, Predictor, Report

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd

    from ensemble.data.published_table import PublishedTable

_TO_RETURN = (
    "return probabilities as an array [rows, labels], a frame with the labels as columns, or a list of rows"
)


@dataclass
class Context:
    """What the user's functions get beside the rows.

    Attributes:
        device: "cuda:0", or "cpu"; CUDA shows a process its own devices only, from 0 on.
        gpus: how many devices there are; 0: the CPU.
        labels: the config's, in its order.
        kwargs: those of the config.
        cache_dir: a folder that the processes of a member share, until its predictions are complete.
        seed: the config's; ``random`` and ``numpy.random`` have got it before ``setup``.
        cpu_threads: what a process should use, of a CPU that several may share.
        state: what ``setup`` has returned.
        report: to be called with the number of rows done of those at hand, where one call takes minutes: a process
            without a finished call or such a word for ``hang_timeout`` counts as hung.
    """

    device: str
    gpus: int
    labels: tuple[str, ...]
    kwargs: Mapping[str, Any]
    cache_dir: Path
    seed: int
    cpu_threads: int
    state: Any = None
    report: Callable[[int], None] = field(default=lambda rows: None)


def import_libraries() -> Mapping[str, str]:
    import numpy as np
    import pandas as pd
    import pyarrow as pa

    return {"numpy": np.__version__, "pandas": pd.__version__, "pyarrow": pa.__version__}


def make_predictor(common: CommonSpec, settings: Mapping[str, Any], table: PublishedTable) -> Predictor:
    return FunctionPredictor(common, settings, table)


class FunctionPredictor(Predictor):
    """Made, it has imported the user's module.

    Raises:
        ValueError: there is no such function in it.
        BaseException: whatever the module raises.
    """

    def __init__(self, common: CommonSpec, settings: Mapping[str, Any], table: PublishedTable) -> None:
        self._table, self._settings = table, settings
        self._batch_size: int | None = settings["batch_size"]  # less where torch has run out of memory
        self._context = Context(
            device="cuda:0" if common.gpus else "cpu",
            gpus=common.gpus,
            labels=common.labels,
            kwargs=settings["kwargs"],
            cache_dir=Path(common.shards_dir) / "cache",
            seed=common.seed,
            cpu_threads=usable_cpus(),
        )
        sys.dont_write_bytecode = True  # a run writes nothing beside the user's files
        module = _imported(settings["module"], settings["file"])
        self._predict = _function(module, settings["function"], "predict")
        self._setup = None if settings["setup"] is None else _function(module, settings["setup"], "setup")

    def load(self) -> Ready:
        import numpy as np

        self._context.cache_dir.mkdir(parents=True, exist_ok=True)
        random.seed(self._context.seed)
        np.random.seed(self._context.seed)  # the one that libraries share
        if self._setup is not None:
            self._context.state = self._setup(self._context)
        return Ready(device=self._context.device)

    def predict(self, rows: npt.NDArray[np.int64], report: Report) -> Prediction:
        import numpy as np

        values = np.full((len(rows), len(self._context.labels)), np.nan)
        bad_rows: dict[int, str] = {}
        start = calls = failures = 0
        was_alone, largest = False, 0
        while start < len(rows):
            frame = self._frame(rows[start : start + (self._batch_size or len(rows))])
            stop = start + len(frame)
            self._context.report = partial(_report, report, start, len(frame))
            ids = frame.index.copy()  # the frame is the user's to change
            result, lack = None, ""
            try:
                result = self._predict(frame, self._context)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                lack = one_line(error)
            if not lack:
                values[start:stop] = _values(result, ids, self._context.labels)
                calls += 1
                start, was_alone, largest = stop, False, max(largest, len(frame))
            else:
                # Outside the except block: there the error would still hold the tensors of the failed call.
                del result
                _empty_cache()
                failures += 1
                if was_alone:  # once more, with the cache emptied, has been of no use
                    bad_rows[start] = f"its function ran out of memory with this row alone: {lack}"
                    start, was_alone = stop, False
                    self._batch_size = largest or self._batch_size  # it was this row that no size could fit
                else:
                    was_alone = len(frame) == 1
                    self._batch_size = max(1, len(frame) // 2)
            report(start)
        return Prediction(values, bad_rows, Counters(batches=calls, oom_events=failures))

    def _frame(self, rows: npt.NDArray[np.int64]) -> pd.DataFrame:
        """These rows; a column's type does not depend on which they are."""
        import pandas as pd

        ids = pd.Index(self._table.ids(rows), dtype=object, name=self._settings["id_column"])
        taken = self._table.take(rows)
        cells = {name: self._column(name, taken) for name in self._settings["columns"]}
        # By its own dtype: pandas 3 would make its "str" of objects that are text, pandas 2 would not.
        columns = {name: pd.Series(one, index=ids, dtype=one.dtype) for name, one in cells.items()}
        return pd.DataFrame(columns, index=ids)

    def _column(self, name: str, taken: Sequence[Mapping[str, object]]) -> npt.NDArray[Any]:
        """Text with "" for what is missing, numbers with NaN; all else as Python has it, with None."""
        import numpy as np
        import pyarrow as pa

        cells = [row[name] for row in taken]
        field, lacks = self._table.schema.field(name), self._table.has_nulls[name]
        is_json = (field.metadata or {}).get(b"ensemble") == b"json"
        if pa.types.is_floating(field.type) or (pa.types.is_integer(field.type) and lacks):
            return np.array([np.nan if cell is None else cell for cell in cells], dtype=np.float64)
        if pa.types.is_integer(field.type):
            return np.array(cells, dtype=np.uint64 if pa.types.is_uint64(field.type) else np.int64)
        if pa.types.is_boolean(field.type) and not lacks:
            return np.array(cells, dtype=np.bool_)
        is_text = pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
        found = np.empty(len(cells), dtype=object)
        for place, cell in enumerate(cells):  # NumPy would make something of lists
            found[place] = "" if cell is None and is_text and not is_json else cell
        return found


def _empty_cache() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _imported(name: str, file: str | None) -> ModuleType:
    if file is None:
        return importlib.import_module(name)
    # Behind all others: a file of the user's does not stand in for an installed module.
    sys.path.append(str(Path(file).parent))
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"predict: {file} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # what is pickled says that it comes from there
    spec.loader.exec_module(module)
    return module


def _function(module: ModuleType, name: str, role: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if not callable(found):
        what = "has nothing of that name" if found is None else f"has a {type(found).__name__} of that name"
        raise ValueError(f"{role}: {name} must be a function, and {module.__file__} {what}")
    function: Callable[..., Any] = found
    return function


def _report(report: Report, start: int, most: int, done: int) -> None:
    report(start + min(max(0, int(done)), most))


def _values(result: Any, index: pd.Index, labels: tuple[str, ...]) -> npt.NDArray[np.float64]:
    """What the user's function has returned, as float64 [rows, labels].

    Raises:
        MemberError: it is of a type, or has columns, that would be as wrong for other rows.
        ValueError: it has another number of rows, or other ids, than it was called with.
    """
    import numpy as np
    import pandas as pd

    if isinstance(result, pd.DataFrame):
        names = {str(name): name for name in result.columns}
        if missing := [label for label in labels if label not in names]:
            raise MemberError(
                f"its function returned a frame without columns for {', '.join(missing)}; it has "
                f"{', '.join(names) or 'none'}"
            )
        if result.columns.has_duplicates:
            raise MemberError("its function returned a frame in which columns have the same name")
        result = result[[names[label] for label in labels]]
        # By position where it has numbered its rows anew.
        if not isinstance(result.index, pd.RangeIndex) and not result.index.equals(index):
            if result.index.has_duplicates or set(result.index) != set(index):
                raise ValueError(
                    "its function returned a frame with other ids than it was called with; return one row for "
                    "each, with the same index"
                )
            result = result.loc[index]
        result = result.to_numpy()
    elif not isinstance(result, np.ndarray | list | tuple) and not hasattr(result, "__array__"):
        raise MemberError(f"its function returned {type(result).__name__}; {_TO_RETURN}")
    try:
        values = np.asarray(result, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"its function returned what cannot be read as numbers ({error}); {_TO_RETURN}"
        ) from error
    expected = (len(index), len(labels))
    if values.ndim == 2:
        is_lasting = values.shape[0] == expected[0] and values.shape[1] != expected[1]
    else:
        is_lasting = len(index) > 1  # a single row may have lost a dimension
    if is_lasting:
        raise MemberError(
            f"its function returned an array of shape {values.shape} for {expected[0]} rows and {expected[1]} "
            f"labels; {_TO_RETURN}"
        )
    if values.shape != expected:
        raise ValueError(
            f"its function returned an array of shape {values.shape} for {expected[0]} rows and {expected[1]} "
            "labels; return one row for each"
        )
    return values
