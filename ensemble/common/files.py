"""Read JSON, write whole files or none, notice changed files, and word what fails."""

from __future__ import annotations

import contextlib
import getpass
import glob
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

from ensemble.common.errors import OutputError, WriteError
from ensemble.common.text import listed

PARQUET_EXTENSIONS = (".parquet", ".pq")
TEMPORARY = ".tmp-"
# A log that grows beyond the first keeps the second.
MAX_LOG_BYTES, KEPT_LOG_BYTES = 96 << 20, 64 << 20
# Size in bytes, and the times at which content and entry last changed, in nanoseconds. No program can set the
# second time: it shows a file that was replaced and put back, or whose old time was restored (POSIX, sys/stat.h).
# The inode is left out, because file systems in user space may change it for the same file.
FileState: TypeAlias = tuple[int, int, int]


class HubFile(NamedTuple):
    """Name a file that shows whether a folder of the Hugging Face hub is accessible."""

    folder: str
    name: str
    revision: str | None


class FilesChanged(Exception):
    """Report that files of a run have changed since it began, by name."""


def is_parquet(path: Path) -> bool:
    return path.suffix.lower() in PARQUET_EXTENSIONS


def unreadable(path: Path | str, error: OSError, otherwise: str = "copy it again") -> str:
    """Return the sentence for a file that exists and cannot be read.

    ``otherwise`` says what to do if neither permissions nor links are to blame.
    """
    file = Path(os.fsdecode(error.filename)) if error.filename else Path(path)
    if not isinstance(error, PermissionError):
        return dangling_link(file) or f"{path} cannot be read ({error.strerror or error}); {otherwise}"
    # os.path answers even if the folder above may not be entered.
    right = "r" if os.path.isfile(file) else "rx"  # noqa: PTH113
    folders = reversed(file.absolute().parents)
    closed = next((folder for folder in folders if not os.access(folder, os.X_OK)), file)
    user = str(os.getuid())  # users may have no name, as in many containers
    with contextlib.suppress(KeyError, OSError):
        user = getpass.getuser()
    return (
        f"{path} cannot be read ({error.strerror} for user {user}); allow it, for example with "
        f"chmod a+{right} {closed}, or run as its owner"
    )


def dangling_link(path: Path) -> str | None:
    """Return the sentence for a link to nothing; None for anything else."""
    with contextlib.suppress(OSError):
        if path.is_symlink() and not path.exists():
            return (
                f"{path} is a link to {path.readlink()}, which is not there; copy the files and not the links "
                "(cp -rL; the hub's cache keeps the files themselves in its blobs folder)"
            )
    return None


def cannot_write(key: str, path: Path, error: OSError) -> str:
    """Return the sentence for a path that cannot be written."""
    return f"{key}: cannot write to {path} ({error.strerror or error}); choose another directory or free it"


def without_links(path: Path) -> Path:
    """Return the absolute path that links lead to, also of links in a circle, for which ``Path.resolve`` fails."""
    return Path(os.path.realpath(path))


def unwritable_reason(key: str, path: Path) -> str | None:
    """Return why a directory cannot be made or written, as far as that shows without touching the disk."""
    for folder in (path, *path.parents):
        if folder.is_symlink() and not folder.exists():
            return (
                f"{key}: {folder} is a link to {folder.readlink()}, which leads to no directory; remove the link, "
                "or choose another directory"
            )
    parent = _existing_parent(path)
    if not parent.is_dir():
        return f"{key}: {path} cannot be a directory, because {parent} is a file; choose another directory"
    if not os.access(parent, os.W_OK | os.X_OK):
        return f"{key}: cannot write to {path} ({parent} is not writable); choose another directory"
    return None


def _existing_parent(path: Path) -> Path:
    """Return the path itself if it exists, else the nearest folder above it that does."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def output_file(path: Path, inputs: Iterable[Path] = (), may_replace: bool = True) -> Path:
    """Return where to write a file that a user names: the end of links, which stay as they are.

    Raises:
        OutputError: the path is a folder, a device, a pipe, one of the inputs, or a file that may not be replaced.
    """
    target = Path(os.path.realpath(path))
    try:
        mode = target.lstat().st_mode
    except OSError:  # there is no such file; other problems show when it is written
        return target
    if stat.S_ISDIR(mode):
        raise OutputError(f"{path}: is a directory; name a file in it")
    if not stat.S_ISREG(mode):
        problem = "leads to no file" if stat.S_ISLNK(mode) else "is a device or a pipe, and no file"
        raise OutputError(f"{path}: {problem}; choose another name")
    for input_path in inputs:
        with contextlib.suppress(OSError):
            if target.samefile(input_path):
                raise OutputError(f"{path}: is one of the files that are read; choose another name")
    if not may_replace:
        raise OutputError(f"{path} is there already; --force replaces it; or choose another name")
    return target


def settings_file(option: str, path: Path, inputs: Iterable[Path], may_replace: bool) -> Path:
    """Return where to write a YAML file that a later run reads; checked before anything is computed.

    Raises:
        OutputError: as ``output_file``, or the folder is not there or cannot be written.
    """
    target = output_file(path, inputs, may_replace)
    if not target.parent.is_dir():
        raise OutputError(f"{option}: {path}: name a file in a folder that is there")
    if reason := unwritable_reason(option, target.parent):
        raise OutputError(reason)
    return target


def free_bytes(path: Path) -> int | None:
    """Return the free space of the disk that has, or will have, a path; None if it is unknown."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(_existing_parent(path.absolute())).free
    return None


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same directory, which becomes ``path`` if the block ends without an error.

    A file of that name is complete, even after a power loss.

    Raises:
        WriteError: the disk is full, the directory is gone, or the like.
    """
    # Random, because runs in two containers may have the same process id and the same submission.path.
    temporary = path.with_name(f".{path.name}{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}")
    try:
        create_empty(temporary)
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        reason = error.strerror or error
        problem = f"cannot write {path} ({reason}); make room there or choose another place"
        raise WriteError(problem) from error
    finally:
        with contextlib.suppress(OSError):  # such as a name that is too long: the first error counts
            temporary.unlink()


def open_log(path: Path) -> BinaryIO:
    """Open a log to append to it; a link of that name is removed and not followed."""
    remove_link(path)
    # Readable for ``keep_log_end``.
    return os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666), "ab")


def keep_log_end(log: int) -> None:
    """Cut the beginning off a log, open by ``open_log``, that has become too long for the disk.

    The file stays the same for all who append to it; what they write at that moment can be lost.
    """
    with contextlib.suppress(OSError):
        status = os.fstat(log)
        if not stat.S_ISREG(status.st_mode) or status.st_size <= MAX_LOG_BYTES:
            return
        end = os.pread(log, KEPT_LOG_BYTES, status.st_size - KEPT_LOG_BYTES)
        os.ftruncate(log, 0)
        os.write(log, b"[this log grew too long: its beginning is gone]\n" + end[end.find(b"\n") + 1 :])


def create_empty(temporary: Path) -> None:
    """Make an empty file under a name that could be guessed, without following a link that waits there."""
    temporary.unlink(missing_ok=True)
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))


def remove_link(path: Path) -> None:
    """Remove a symbolic link, or a hard link of a file that has other names."""
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode) or (stat.S_ISREG(status.st_mode) and status.st_nlink > 1):
            path.unlink()


def remove_folder(path: Path) -> None:
    """Remove a folder with all that is in it, or a file or link in its place; do nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(directory)  # errors of a descriptor lack the name
        raise
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a small text file, whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def remove_temporary_files(target: Path) -> None:
    """Remove temporary files of ``target`` that processes left when they were killed."""
    for leftover in target.parent.glob(f".{glob.escape(target.name)}{TEMPORARY}*"):
        pid = leftover.name.rpartition(TEMPORARY)[2].partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            leftover.unlink(missing_ok=True)


def load_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise OSError, ValueError (no JSON) or TypeError (no object)."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(document, dict):
        raise TypeError("not a JSON object")
    return document


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if that cannot be read."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return load_json(path)
    return {}


def file_state(path: str | Path) -> FileState | None:
    """Return the state of a file, or of the file that a link leads to; None if there is no file."""
    with contextlib.suppress(OSError, ValueError):
        status = os.stat(path)  # noqa: PTH116  takes text as it is
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns
    return None


def folder_states(folder: str | Path) -> dict[str, FileState]:
    """Return the states of the files right below a folder, by absolute path; none without such a folder."""
    try:
        names = os.listdir(folder)  # noqa: PTH208  takes text as it is
    except OSError:
        return {}
    paths = [os.path.abspath(os.path.join(folder, name)) for name in names]  # noqa: PTH100, PTH118
    states = {path: file_state(path) for path in paths if os.path.isfile(path)}  # noqa: PTH113
    return {path: state for path, state in states.items() if state is not None}


def files_below(folder: Path) -> list[str]:
    """Return the paths of all files below a folder, relative to it, sorted; none without such a folder."""
    return sorted(
        os.path.relpath(os.path.join(parent, name), folder)  # noqa: PTH118
        for parent, _, names in os.walk(folder)
        for name in names
    )


def changed_files(before: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the paths of files that are gone or have changed."""
    return [path for path, state in before.items() if file_state(path) != tuple(state)]


def check_unchanged(before: Mapping[str, Sequence[int]]) -> None:
    """Raise ``FilesChanged`` if files are gone or have changed."""
    changed = changed_files(before)
    if changed:
        raise FilesChanged(changed_text(changed))


def changed_text(paths: Iterable[str]) -> str:
    """Return the sentence for files that changed during a run."""
    return (
        f"{listed(sorted(paths), 3, str)} changed during the run (replaced, written to, touched, removed, or "
        "given other rights or links); nothing is made of old and new files together: run the same command again "
        "when they are complete"
    )
