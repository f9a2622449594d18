"""Files and folders: reading JSON, writing whole files or none, noticing changes, and sentences for failures."""

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

TEMPORARY = ".tmp-"
# Bytes, and the times at which content and entry last changed, in nanoseconds.  The last one no program can set:
# it shows a file that was replaced and put back, or written to with its old time restored (POSIX, sys/stat.h).
# Not the inode: file systems that live in user space may number a file anew while it is the same.
FileState: TypeAlias = tuple[int, int, int]


class HubFile(NamedTuple):
    """A file that tells whether a folder of the Hugging Face hub can be had."""

    folder: str
    name: str
    revision: str | None


class FilesChanged(Exception):
    """Files from which numbers were to be made are no longer those that the run has begun with; names them."""


def unreadable(path: Path | str, error: OSError, otherwise: str = "copy it again") -> str:
    """The sentence for something that is there and cannot be read.

    Args:
        error: what reading it raised.
        otherwise: what to do where neither rights nor links are to blame.
    """
    file = Path(os.fsdecode(error.filename)) if error.filename else Path(path)
    if not isinstance(error, PermissionError):
        return dangling_link(file) or f"{path} cannot be read ({error.strerror or error}); {otherwise}"
    # Asked of os.path, which answers also where the folder above may not be entered.
    right = "r" if os.path.isfile(file) else "rx"  # noqa: PTH113
    folders = reversed(file.absolute().parents)
    closed = next((folder for folder in folders if not os.access(folder, os.X_OK)), file)
    user = str(os.getuid())  # one may have no name here, as in many containers
    with contextlib.suppress(KeyError, OSError):
        user = getpass.getuser()
    return (
        f"{path} cannot be read ({error.strerror} for user {user}); allow it, for example with "
        f"chmod a+{right} {closed}, or run as its owner"
    )


def dangling_link(path: Path) -> str | None:
    """The sentence for a link to nothing; None for anything else."""
    with contextlib.suppress(OSError):
        if path.is_symlink() and not path.exists():
            return (
                f"{path} is a link to {path.readlink()}, which is not there; copy the files and not the links "
                "(cp -rL; the hub's cache keeps the files themselves in its blobs folder)"
            )
    return None


def cannot_write(key: str, path: Path, error: OSError) -> str:
    """The sentence for a place that cannot be written."""
    return f"{key}: cannot write to {path} ({error.strerror or error}); choose another directory or free it"


def unwritable_reason(key: str, path: Path) -> str | None:
    """Why a directory could not be made and written, as far as that shows without touching the disk."""
    at = path
    while not at.exists() and at != at.parent:
        at = at.parent
    if not at.is_dir():
        return f"{key}: {path} cannot be a directory, because {at} is a file; choose another directory"
    if not os.access(at, os.W_OK | os.X_OK):
        return f"{key}: cannot write to {path} ({at} is not writable); choose another directory"
    return None


def output_file(path: Path, inputs: Iterable[Path] = (), may_replace: bool = True) -> Path:
    """Where a file that a user names is to be written: behind links, which stay as they are.

    Args:
        inputs: files that the same command reads.
        may_replace: a regular file that is there already.

    Raises:
        OutputError: what is there must not be replaced: a folder, a device, a pipe or one of the inputs.
    """
    target = Path(os.path.realpath(path))
    try:
        mode = target.lstat().st_mode
    except OSError:  # nothing is there; what else is wrong with the place shows when it is written
        return target
    if stat.S_ISDIR(mode):
        raise OutputError(f"{path}: is a directory; name a file in it")
    if not stat.S_ISREG(mode):
        what = "leads to no file" if stat.S_ISLNK(mode) else "is a device or a pipe, and no file"
        raise OutputError(f"{path}: {what}; choose another name")
    for one in inputs:
        with contextlib.suppress(OSError):
            if target.samefile(one):
                raise OutputError(f"{path}: is one of the files that are read; choose another name")
    if not may_replace:
        raise OutputError(f"{path} is there already; --force replaces it, --output names another file")
    return target


def user_cache_folder() -> Path | None:
    """Where this package keeps for a user what can be made anew, by the XDG Base Directory Specification; it need
    not be there.  None: there is no place for it."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
        folder = folder if folder.is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # nobody's home
        return None
    return folder / "ensemble"


def free_bytes(path: Path) -> int | None:
    """What is left on the disk on which a path is, or will be; None: not known."""
    at = path.absolute()
    with contextlib.suppress(OSError):
        while not at.exists() and at != at.parent:
            at = at.parent
        return shutil.disk_usage(at).free
    return None


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path in the same directory, which becomes ``path`` when the block ends without an error.

    The name stands for a complete file even after a power loss.

    Raises:
        WriteError: the disk is full, the directory is gone, or the like.
    """
    # Random, because two runs in two containers may have the same number and one submission.path.
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
        raise WriteError(
            f"cannot write {path} ({reason}); make room there or choose another place"
        ) from error
    finally:
        with contextlib.suppress(
            OSError
        ):  # such as of a name that is too long; the first error is what is said
            temporary.unlink()


def open_log(path: Path) -> BinaryIO:
    """Open a log to append to it; a link in its place is removed and not followed."""
    remove_link(path)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666), "ab")


def create_empty(temporary: Path) -> None:
    """Make an empty file under a name that could be guessed: no link that waits there is written through."""
    temporary.unlink(missing_ok=True)
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))


def remove_link(path: Path) -> None:
    """Remove a symbolic link, and a name of a file that has another name elsewhere."""
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_nlink > 1):
            path.unlink()


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(directory)  # an error of a descriptor lacks it
        raise
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a small text file so that its name appears only when it is complete."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def remove_temporary_files(target: Path) -> None:
    """Remove what killed processes left of a file that they were writing; not what a living one writes."""
    for leftover in target.parent.glob(f".{glob.escape(target.name)}{TEMPORARY}*"):
        pid = leftover.name.rpartition(TEMPORARY)[2].partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            leftover.unlink(missing_ok=True)


def load_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no JSON.
        TypeError: it holds another value than an object.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(document, dict):
        raise TypeError("not a JSON object")
    return document


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is none, or anything else."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return load_json(path)
    return {}


def file_state(path: str | Path) -> FileState | None:
    """The state of a file, or of what a link leads to; None: there is none."""
    with contextlib.suppress(OSError, ValueError):
        found = os.stat(path)  # noqa: PTH116  takes text as it is
        return found.st_size, found.st_mtime_ns, found.st_ctime_ns
    return None


def folder_states(folder: str | Path) -> dict[str, FileState]:
    """The states of the files right below a folder, by absolute path; none where there is no such folder."""
    try:
        names = os.listdir(folder)  # noqa: PTH208  takes text as it is
    except OSError:
        return {}
    paths = [os.path.abspath(os.path.join(folder, name)) for name in names]  # noqa: PTH100, PTH118
    return {p: state for p in paths if os.path.isfile(p) and (state := file_state(p))}  # noqa: PTH113


def changed_files(before: Mapping[str, Sequence[int]]) -> list[str]:
    """Those of the files that are gone or not as they were, by path."""
    return [path for path, state in before.items() if file_state(path) != tuple(state)]


def check_unchanged(before: Mapping[str, Sequence[int]]) -> None:
    """Raises ``FilesChanged`` where not all files are as they were."""
    if found := changed_files(before):
        raise FilesChanged(changed_text(found))


def changed_text(paths: Iterable[str]) -> str:
    """The sentence for files that changed while a run was going on."""
    return (
        f"{listed(sorted(paths), 3, str)} changed during the run (replaced, written to, touched, removed, or "
        "given other rights or links); nothing is made of old and new files together: run the same command again "
        "when they are complete"
    )
