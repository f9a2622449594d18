"""Files that nodes need: what tells one copy from another, and which of a member's strings are paths of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Of a larger file so many samples of this size tell it from another.
_SAMPLE_BYTES = 1 << 20
_SAMPLES = 16
_THREADS = 8
# What a file counts for in a pack beside its content.
_FILE_BYTES = 1 << 10


@dataclass(frozen=True)
class Copy:
    """What a file holds: its size in bytes, and a digest of all or, of a large one, of samples of it."""

    size: int
    digest: str


@dataclass(frozen=True)
class Piece:
    """Bytes of a file on their way to nodes; ``whole`` is what the file holds in all."""

    path: str
    offset: int
    data: bytes
    whole: Copy


def copy_of(path: str | Path) -> Copy:
    """Raises OSError where it cannot be read."""
    found = hashlib.blake2b(digest_size=32)
    with open(path, "rb") as file:  # noqa: PTH123  takes text as it is
        size = os.fstat(file.fileno()).st_size
        if size <= _SAMPLES * _SAMPLE_BYTES:
            starts = [0]
            length = size
        else:
            starts = [(size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1) for sample in range(_SAMPLES)]
            length = _SAMPLE_BYTES
        for start in starts:
            file.seek(start)
            found.update(file.read(length))
    return Copy(size, found.hexdigest())


def copies_of(paths: Iterable[str]) -> dict[str, Copy]:
    """What these files hold, by path, each once; without those that are not there.

    Raises:
        OSError: one is there and cannot be read.
    """

    def there(path: str) -> Copy | None:
        return copy_of(path) if os.path.isfile(path) else None  # noqa: PTH113

    names = [*dict.fromkeys(paths)]
    with ThreadPoolExecutor(_THREADS) as pool:  # hashlib lets other threads run while it hashes
        found = zip(names, pool.map(there, names), strict=True)
        return {path: copy for path, copy in found if copy is not None}


def packs(copies: Mapping[str, Copy], most_bytes: int) -> Iterator[list[Piece]]:
    """All that these files hold, about so many bytes at a time: a part of a large one, or many small ones.

    Raises:
        OSError: one cannot be read.
    """
    pack, room = list[Piece](), most_bytes
    for path, whole in copies.items():
        offset = 0
        with open(path, "rb") as file:  # noqa: PTH123  takes text as it is
            while True:
                data = file.read(min(room, whole.size - offset))
                pack.append(Piece(path, offset, data, whole))
                offset += len(data)
                room -= len(data) + _FILE_BYTES
                if room <= 0:
                    yield pack
                    pack, room = [], most_bytes
                if offset == whole.size:
                    break
                if not data:
                    raise OSError(f"{path} became shorter while it was read")
    if pack:
        yield pack


def files_of(source: str) -> Iterator[Path]:
    """The files that a member's source is made of, by absolute path: its own, or all those below it.

    Not those below folders that are hidden, such as .git and .cache.
    """
    path = Path(source).absolute()
    if path.is_file():
        yield path
    elif path.is_dir():
        for folder, folders, names in os.walk(path, followlinks=True):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                if (file := Path(folder, name)).is_file():
                    yield file


def with_paths(value: Any, paths: Mapping[str, str]) -> Any:
    """The same value with other paths, wherever one of these texts stands by itself.

    In lists only texts with a slash: there are columns that are called as some file is.
    """
    if isinstance(value, str):
        return paths.get(value, value)
    if isinstance(value, Mapping):
        return {key: with_paths(item, paths) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [one if isinstance(one, str) and "/" not in one else with_paths(one, paths) for one in value]
    return value
