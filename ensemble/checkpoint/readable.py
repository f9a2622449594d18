"""Whether the small files of a checkpoint's folder can be read, and are what their names say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from ensemble.access import unreadable

# Parsing takes 30 ms for a MB, and big vocabularies have 30 of them: of a larger file only its two ends are looked
# at, which shows one that was cut short; any other damage stops the worker.
_PARSED_BYTES = 2 << 20
_END_BYTES = 64


def small_file_problems(folder: Path, patterns: Sequence[str]) -> Iterator[str]:
    """A sentence for each file that may not be read, is a link to nothing, or is called JSON and is none.

    Args:
        patterns: of the files' names, such as ``tokenizer*``.
    """
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        try:
            reason = "" if path.is_dir() else _problem(path)
        except OSError as error:
            yield unreadable(path, error)
        else:
            if reason:
                yield f"{path} {reason}; copy it again"


def _problem(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        content = file.read(_PARSED_BYTES if size <= _PARSED_BYTES else _END_BYTES)
        if size > len(content):
            file.seek(-_END_BYTES, 2)
            content += file.read()
    if content.startswith(b"version https://git-lfs"):
        return "is only a git-lfs pointer to the file"
    if path.suffix != ".json":
        return ""
    if not content.strip():
        return "is empty"
    if size > len(content):
        ends = content.strip()
        return "" if ends[:1] + ends[-1:] == b"{}" else "is not JSON, or was cut short"
    try:
        json.loads(content)
    except (ValueError, RecursionError) as error:
        return f"is not JSON ({error})"
    return ""
