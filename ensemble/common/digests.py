"""What files hold, as digests: each file read once, and none that changes meanwhile."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from ensemble.common.errors import CheckpointError
from ensemble.common.files import FileState, file_state, unreadable

_BUFFER_BYTES = 4_096
_THREADS = 8
_hash = partial(hashlib.blake2b, digest_size=32)
# The pieces of a large file that tell it from another.
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

    def together(self, folder: Path, files: Mapping[Path, Samples | None]) -> str:
        """One digest of many files, by their names within the folder; arguments and errors as for ``digest``."""
        # hashlib lets other threads run while it hashes.
        with ThreadPoolExecutor(_THREADS) as pool:
            digests = pool.map(self.digest, files, files.values())
            names = (os.path.relpath(path, folder) for path in files)
            return digest_of(sorted(zip(names, digests, strict=True)))

    def digest(self, path: Path, samples: Samples | None = None) -> str:
        """A digest of all that a file holds.

        Args:
            samples: of a large file, which is enough unless the run asks for every byte.

        Raises:
            CheckpointError: it cannot be read, or changed since the run started.
        """
        samples = None if self._whole else samples
        key, name = (os.path.realpath(path), samples is None), str(path.absolute())
        state = file_state(path)
        if key not in self._known:
            file: Any
            try:
                with path.open("rb", buffering=_BUFFER_BYTES) as file:
                    found = _hash(b"".join(samples(file))) if samples else hashlib.file_digest(file, _hash)
            except OSError as error:
                raise CheckpointError(unreadable(path, error)) from error
            if state is not None:
                self._known[key] = FileDigest(found.hexdigest(), state)
        seen = self._known.get(key)
        if seen is None or not state == file_state(path) == seen.state == self._before.get(name, state):
            raise CheckpointError(
                f"{path} changed while the run started; run the same command again when it is complete"
            )
        self.seen[name] = seen
        return seen.digest


def digest_of(value: object) -> str:
    """A digest of a value as YAML can hold it, in any order of its keys."""
    return _hash(json.dumps(_plain(value)).encode()).hexdigest()


def _plain(value: object) -> object:
    # YAML has keys that are numbers, and dates; JSON would refuse the one and cannot sort the other.
    if isinstance(value, Mapping):
        return {"keys": sorted([repr(key), _plain(item)] for key, item in value.items())}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else [type(value).__name__, repr(value)]
