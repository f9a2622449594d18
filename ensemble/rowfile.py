"""The file that says which rows a piece of work is of: a line of JSON, then each row's digest, 16 bytes apiece.

One lies beside a member's parts and one beside its sealed predictions, so that their rows are found again in
another table.  The line holds the fingerprint of the work and the SHA-256 of what follows.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ensemble.fingerprint import Fingerprint
from ensemble.rundir import atomic_path
from ensemble.tables.rowdigest import DIGEST_BYTES, RowDigests

_LONGEST_LINE = 4_096


@dataclass(frozen=True)
class RowFile:
    """A file of row digests, as its first line describes it; ``rows`` is how many its table has."""

    path: Path
    fingerprint: Fingerprint
    rows: int
    sha256: str

    @classmethod
    def at(cls, path: Path) -> RowFile | None:
        """The file's first line; None where there is no such file, or it is of another scheme, or cut short."""
        try:
            with path.open("rb") as file:
                line = file.readline(_LONGEST_LINE)
                expected = path.stat().st_size - len(line)
            document = json.loads(line)
            fingerprint = Fingerprint.from_dict(document["fingerprint"])
            rows, sha256 = int(document["rows"]), str(document["sha256"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        if fingerprint is None or rows * DIGEST_BYTES != expected:
            return None
        return cls(path, fingerprint, rows, sha256)

    def digests(self) -> RowDigests | None:
        """The rows' digests, [rows, 2]; None where they are not what the first line says."""
        try:
            content = self.path.read_bytes().partition(b"\n")[2]
        except OSError:
            return None
        if hashlib.sha256(content).hexdigest() != self.sha256 or len(content) != self.rows * DIGEST_BYTES:
            return None
        return np.frombuffer(content, "<u8").reshape(-1, 2)


def write_row_file(path: Path, fingerprint: Fingerprint, digests: RowDigests) -> None:
    """Write the file, unless it is there already.

    Raises:
        WriteError: the disk is full or the like.
    """
    there = RowFile.at(path)
    content = np.ascontiguousarray(digests, "<u8").data.cast("B")
    sha256 = hashlib.sha256(content).hexdigest()
    if there is not None and (there.fingerprint, there.sha256) == (fingerprint, sha256):
        return
    line = json.dumps({"fingerprint": fingerprint.to_dict(), "rows": len(digests), "sha256": sha256})
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(f"{line}\n".encode())
        file.write(content)
