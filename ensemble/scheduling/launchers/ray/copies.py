"""Compare copies of files, cut them into pieces, and replace their paths in a member's settings."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A larger file is compared by so many samples of this size.
_SAMPLE_BYTES = 1 << 20
_SAMPLES = 16
THREADS = 8
# What a file counts for in a pack beside its content.
_FILE_BYTES = 1 << 10


@dataclass(frozen=True)
class Copy:
    """Describe a file's content: its size in bytes, and a digest of it, or of samples if it is large."""

    size: int
    digest: str


@dataclass(frozen=True)
class Piece:
    """Hold bytes of a file on their way to nodes; ``whole`` describes the whole file."""

    path: str
    offset: int
    data: bytes
    whole: Copy


def copy_of(path: str | Path) -> Copy:
    """Return a file's content; raises OSError if it cannot be read."""
    digest = hashlib.blake2b(digest_size=32)
    with open(path, "rb") as file:  # noqa: PTH123  takes text as it is
        size = os.fstat(file.fileno()).st_size
        starts, length = [0], size
        if size > _SAMPLES * _SAMPLE_BYTES:
            starts = [(size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1) for sample in range(_SAMPLES)]
            length = _SAMPLE_BYTES
        for start in starts:
            file.seek(start)
            digest.update(file.read(length))
    return Copy(size, digest.hexdigest())


def copies_of(paths: Iterable[str]) -> dict[str, Copy]:
    """Return the content of these files, by path, without files that do not exist; raises as ``copy_of``."""
    names = [path for path in dict.fromkeys(paths) if os.path.isfile(path)]  # noqa: PTH113
    with ThreadPoolExecutor(THREADS) as pool:  # hashlib lets other threads run while it hashes
        return dict(zip(names, pool.map(copy_of, names), strict=True))


def packs(copies: Mapping[str, Copy], max_bytes: int) -> Iterator[list[Piece]]:
    """Yield these files in order, about ``max_bytes`` at a time: parts of large files, or many small ones.

    Raises:
        OSError: a file cannot be read.
    """
    pack: list[Piece] = []
    left_bytes = max_bytes
    for path, whole in copies.items():
        offset = 0
        with open(path, "rb") as file:  # noqa: PTH123  takes text as it is
            while True:
                data = file.read(min(left_bytes, whole.size - offset))
                pack.append(Piece(path, offset, data, whole))
                offset += len(data)
                left_bytes -= len(data) + _FILE_BYTES
                if left_bytes <= 0:
                    yield pack
                    pack, left_bytes = [], max_bytes
                if offset == whole.size:
                    break
                if not data:
                    raise OSError(f"{path} became shorter while it was read")
    if pack:
        yield pack


def files_of(source: str) -> Iterator[str]:
    """Yield the files of a member's source by absolute path: the file itself, or all files below a folder.

    Hidden folders, such as .git and .cache, are left out.
    """
    path = Path(source).absolute()
    if path.is_file():
        yield str(path)
    for folder, folders, names in os.walk(path, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(folder, name)
            if file.is_file():
                yield str(file)


def with_paths(value: Any, paths: Mapping[str, str]) -> Any:
    """Return the value with these texts replaced wherever one stands by itself.

    In lists only texts with a slash are replaced: a column can have the name of a file.
    """
    if isinstance(value, str):
        return paths.get(value, value)
    if isinstance(value, Mapping):
        return {key: with_paths(item, paths) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [
            item if isinstance(item, str) and "/" not in item else with_paths(item, paths) for item in value
        ]
    return value
