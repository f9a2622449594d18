"""Write and read the file that says which rows a trained member has seen, by digests of what it reads of them."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ensemble.common.errors import DataError
from ensemble.common.files import atomic_path
from ensemble.common.text import error_text
from ensemble.data.digests import RowDigests

# Stands for the fold of a row that every fold's model was trained on.
IN_ALL_FOLDS: Final = -1


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
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            digests, folds = arrays["digests"], arrays["folds"]
    except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: cannot be read ({error_text(error)}); train the member again") from error
    return TrainedRows(digests, folds)
