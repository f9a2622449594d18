"""Compute digests of files: each file is read once, and a file that changes meanwhile is refused."""

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
from ensemble.common.files import FileState, file_state, files_below, unreadable

_THREADS = 8
_hash = partial(hashlib.blake2b, digest_size=32)
# Reads those pieces of a large file that tell it from another.
Samples: TypeAlias = Callable[[BinaryIO], Iterator[bytes]]


@dataclass(frozen=True)
class FileDigest:
    """Hold the digest of a file, and the file's state at that time."""

    digest: str
    state: FileState


class FileDigests:
    """Compute digests of files and read each file once, as members may share a base; ``whole``: every byte of it.

    Args:
        before: the states of files that were read earlier, by absolute path; files must still have them.

    Attributes:
        seen: the digests that were returned, by absolute path.
    """

    def __init__(self, whole: bool, before: Mapping[str, FileState] | None = None) -> None:
        self._whole = whole
        self._before = before or {}
        self._cache: dict[tuple[str, bool], FileDigest] = {}
        self.seen: dict[str, FileDigest] = {}

    def for_another(self) -> FileDigests:
        """Return an object that shares what was read, and has seen no file."""
        other = FileDigests(self._whole, self._before)
        other._cache = self._cache
        return other

    def together(self, folder: Path, files: Mapping[Path, Samples | None]) -> str:
        """Return one digest of many files and their names in the folder; see ``digest``."""
        # hashlib lets other threads run while it hashes.
        with ThreadPoolExecutor(_THREADS) as pool:
            digests = pool.map(self.digest, files, files.values())
            names = (os.path.relpath(path, folder) for path in files)
            return digest_of(sorted(zip(names, digests, strict=True)))

    def digest(self, path: Path, samples: Samples | None = None) -> str:
        """Return a digest of a file's content, or of ``samples`` of it unless every byte counts.

        Raises:
            CheckpointError: it cannot be read, or changed since the run started.
        """
        samples = None if self._whole else samples
        key, name = (os.path.realpath(path), samples is None), str(path.absolute())
        state = file_state(path)
        if key not in self._cache:
            file: Any
            try:
                with path.open("rb", buffering=4_096) as file:
                    content = _hash(b"".join(samples(file))) if samples else hashlib.file_digest(file, _hash)
            except OSError as error:
                raise CheckpointError(unreadable(path, error)) from error
            if state is not None:
                self._cache[key] = FileDigest(content.hexdigest(), state)
        seen = self._cache.get(key)
        if seen is None or not state == file_state(path) == seen.state == self._before.get(name, state):
            raise CheckpointError(
                f"{path} changed while the run started; run the same command again when it is complete"
            )
        self.seen[name] = seen
        return seen.digest


def folder_digests(folder: Path) -> dict[str, FileDigest]:
    """Return the digests of all files below a folder, by their paths in it; every byte is read.

    Raises:
        CheckpointError: a file cannot be read, or changes meanwhile.
    """
    digests = FileDigests(whole=True)
    for name in files_below(folder):
        digests.digest(folder / name)
    return {os.path.relpath(path, folder): digest for path, digest in digests.seen.items()}


def has_files(folder: Path, files: Mapping[str, FileDigest]) -> bool:
    """Return whether a folder has exactly these files; those that were not touched are not read again."""
    if {*files} != {*files_below(folder)}:
        return False
    for name, before in files.items():
        path = folder / name
        if file_state(path) != before.state and FileDigests(whole=True).digest(path) != before.digest:
            return False
    return True


def digest_of(value: object) -> str:
    """Return a digest of a value as YAML can have it, whatever the order of its keys."""
    return _hash(json.dumps(_plain(value)).encode()).hexdigest()


def digests_of(values: Mapping[str, object]) -> dict[str, str]:
    return {name: digest_of(value) for name, value in values.items()}


def changed(now: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    """Return the names of digests that were others before, or not there."""
    return [name for name, digest in now.items() if before.get(name) != digest]


def _plain(value: object) -> object:
    # YAML has dates, and keys that are numbers; JSON refuses dates and cannot sort such keys.
    if isinstance(value, Mapping):
        return {"keys": sorted([repr(key), _plain(item)] for key, item in value.items())}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else [type(value).__name__, repr(value)]
