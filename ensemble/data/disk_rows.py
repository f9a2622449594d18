"""Rows that came in another order than the table's, kept on disk until their turn: memory holds one member's."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ensemble.common.errors import WriteError

_ITEM_BYTES = 8


class SpilledRows:
    """Values in a file without a name, which is gone when nobody has it open, however the process ends.

    Args:
        values: float64 [rows, labels]; not needed any more afterwards.
        folder: where there is room for them.
        start: the row that is read first.

    Raises:
        WriteError: the disk is full or the like.
    """

    def __init__(self, values: npt.NDArray[np.float64], folder: Path, start: int = 0) -> None:
        self._rows = len(values)
        self._start = start
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
            for column in values.T:
                self._file.write(np.ascontiguousarray(column).data)
            self._file.flush()
        except OSError as error:
            raise WriteError(
                f"cannot write to {folder} ({error.strerror or error}); make room there, or change output_dir"
            ) from error

    def close(self) -> None:
        self._file.close()

    def read(self, values: npt.NDArray[np.float64]) -> None:
        """Read the next rows into float64 [rows, labels], each column in one piece.

        Raises:
            OSError: the file was cut short.
        """
        for label, column in enumerate(values.T):
            place = (label * self._rows + self._start) * _ITEM_BYTES
            if os.preadv(self._file.fileno(), [column.data], place) != column.nbytes:
                raise OSError("a temporary file has been cut short")
        self._start += len(values)

    def rewind(self) -> None:
        """Begin again with the first row."""
        self._start = 0
