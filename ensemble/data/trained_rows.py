"""Write and read the file that says which rows a trained member has seen, by digests of what it reads of them."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ensemble.common.errors import DataError
from ensemble.common.files import atomic_path
from ensemble.common.text import error_text
from ensemble.data.digests import RowDigests, find_rows, with_another

# Stands for the fold of a row that every fold's model was trained on.
IN_ALL_FOLDS: Final = -1
# Stands for the fold of a row that no model was trained on.
NEW: Final = -2


@dataclass(frozen=True)
class TrainedRows:
    """Hold the rows that a member was trained on; the same digest may come more than once.

    Attributes:
        digests: of the cells that the member reads, as ``InputTable.row_digests`` has them: uint64 [rows, 2].
        folds: int64 [rows], of the one fold whose model has not seen the row; ``IN_ALL_FOLDS``: all have.
    """

    digests: RowDigests
    folds: npt.NDArray[np.int64]


def write_trained_rows(path: Path, rows: TrainedRows) -> None:
    """Write the file whole or not at all; raise WriteError if it cannot be written."""
    with atomic_path(path) as temporary, temporary.open("wb") as stream:
        np.savez(stream, digests=rows.digests, folds=rows.folds)


def read_trained_rows(path: Path) -> TrainedRows:
    """Read what ``write_trained_rows`` wrote; raise DataError if the file is missing or broken."""
    with _arrays_in(path) as arrays:
        return TrainedRows(arrays["digests"], arrays["folds"])


def fold_count(path: Path) -> int:
    """Return the number of folds in the file; 0 if it is missing or broken."""
    with contextlib.suppress(DataError), _arrays_in(path) as arrays:  # here the digests are not read
        return int(arrays["folds"].max(initial=-1)) + 1
    return 0


def folds_of(path: Path, digests: RowDigests) -> npt.NDArray[np.int64]:
    """Return the fold whose model has not seen a row, ``IN_ALL_FOLDS`` or ``NEW``, int64 [rows].

    In the training table itself each row has its own fold; in other tables a row that stands in several folds has
    been seen by every model.
    """
    stored = read_trained_rows(path)
    if np.array_equal(digests, stored.digests[: len(digests)]):
        return stored.folds[: len(digests)]
    folds = np.where(with_another(stored.digests, stored.folds), IN_ALL_FOLDS, stored.folds)
    positions = find_rows(digests, stored.digests)
    return np.where(positions >= 0, folds[positions], NEW)


@contextlib.contextmanager
def _arrays_in(path: Path) -> Iterator[Mapping[str, npt.NDArray[Any]]]:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            yield arrays
    except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: cannot be read ({error_text(error)}); train the member again") from error
