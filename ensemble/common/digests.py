"""What files hold, as digests: each file read once, and none that changes meanwhile."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

from ensemble.common.errors import CheckpointError
from ensemble.common.files import FileState, file_state, unreadable

_BUFFER_BYTES = 4_096
_READ_BYTES = 1 << 20
_THREADS = 8
Samples: TypeAlias = Callable[[BinaryIO], Iterator[bytes]]


@dataclass(frozen=True)
class FileDigest:
    """What a file held, as a digest, and the state in which it did."""

    digest: str
    state: FileState


class FileDigests:
    """Digests of files, each of them read once: members may share a base.

    Args:
        whole: read every byte of weights, too.
        before: the states, by absolute path, in which files must still be that something was read of before.

    Attributes:
        seen: every file that was asked for, by absolute path.
    """

    def __init__(self, whole: bool, before: Mapping[str, FileState] | None = None) -> None:
        self._whole = whole
        self._before = before or {}
        self._known: dict[tuple[str, bool], FileDigest] = {}
        self.seen: dict[str, FileDigest] = {}

    def for_another(self) -> FileDigests:
        """The same knowledge, for somebody who has not asked for any file yet."""
        other = FileDigests(self._whole, self._before)
        other._known = self._known
        return other

    def every_byte(self, path: Path) -> str:
        """A digest of all that a file holds.

        Raises:
            CheckpointError: it cannot be read, or changed since the run started.
        """
        return self._digest(path, None)

    def sampled(self, path: Path, samples: Samples) -> str:
        """A digest of a part of a large file; of every byte where the run asks for that.

        Args:
            samples: gives the pieces that tell one file from another.

        Raises:
            CheckpointError: as above.
        """
        return self._digest(path, None if self._whole else samples)

    def together(self, folder: Path, files: Mapping[Path, Samples | None]) -> str:
        """One digest of many files, by their names within the folder.

        Args:
            files: with the samples of those that need not be read to the last byte.

        Raises:
            CheckpointError: as above, of one of them.
        """
        # hashlib lets other threads run while it hashes.
        with ThreadPoolExecutor(_THREADS) as pool:
            digests = pool.map(
                lambda path: (
                    self.every_byte(path) if (one := files[path]) is None else self.sampled(path, one)
                ),
                files,
            )
            named = zip((os.path.relpath(path, folder) for path in files), digests, strict=True)
            return digest_of(sorted(named))

    def _digest(self, path: Path, samples: Samples | None) -> str:
        key, place = (os.path.realpath(path), samples is None), str(path.absolute())
        state = file_state(path)
        if key not in self._known:
            found = hashlib.blake2b(digest_size=32)
            try:
                with path.open("rb", buffering=_BUFFER_BYTES if samples is not None else 0) as file:
                    for piece in pieces(file) if samples is None else samples(file):
                        found.update(piece)
            except OSError as error:
                raise CheckpointError(unreadable(path, error)) from error
            if state is not None:
                self._known[key] = FileDigest(found.hexdigest(), state)
        seen = self._known.get(key)
        if seen is None or not state == file_state(path) == seen.state == self._before.get(place, state):
            raise CheckpointError(
                f"{path} changed while the run started; run the same command again when it is complete"
            )
        self.seen[place] = seen
        return seen.digest


def pieces(file: BinaryIO) -> Iterator[bytes]:
    """All that a file holds from where it is, bit by bit."""
    while piece := file.read(_READ_BYTES):
        yield piece


def digest_of(value: object) -> str:
    """A digest of a value as YAML can hold it, in any order of its keys."""
    return hashlib.blake2b(json.dumps(_plain(value)).encode(), digest_size=32).hexdigest()


def _plain(value: object) -> object:
    # YAML has keys that are numbers, and dates; JSON would refuse the one and cannot sort the other.
    if isinstance(value, Mapping):
        return {"keys": sorted([repr(key), _plain(item)] for key, item in value.items())}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else [type(value).__name__, repr(value)]
