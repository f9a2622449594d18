"""Every path in a run directory, the lock on it, and writing so that a name means a complete file.

    output_dir/
      config.yaml              as given
      run.json                 versions, devices, what each worker did, scores
      predictions/<member>.csv id and one column per label, in the table's order; <member>.json: its seal, which
                               says what it was made of; <member>.rows: which rows it is of
      ensemble.csv             the merged predictions
      submission.csv           the sample submission's columns and row order, where one is named
      logs/run.log             what the parent did; logs/<member>-<replica>.log: all a worker printed
      work/                    the table as Arrow; <member>.<fingerprint>/: which rows, their order, parts, bad
                               rows; removed when the member is complete

This module does not know what is in those files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, BinaryIO

from ensemble.errors import OutputError, OutputInUse, WriteError

_TEMPORARY = ".tmp-"
_LOCK_ATTEMPTS = 5


class RunDir:
    """The paths below one ``output_dir``; making one touches nothing on disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        self.run_json = root / "run.json"
        self.predictions_dir = root / "predictions"
        self.ensemble = root / "ensemble.csv"
        self.submission = root / "submission.csv"
        self.logs_dir = root / "logs"
        self.run_log = self.logs_dir / "run.log"
        self.work_dir = root / "work"
        self.table = self.work_dir / "table.arrow"
        self.lock = root / ".lock"

    def predictions(self, member: str) -> Path:
        return self.predictions_dir / f"{member}.csv"

    def seal(self, member: str) -> Path:
        return self.predictions_dir / f"{member}.json"

    def rows(self, member: str) -> Path:
        return self.predictions_dir / f"{member}.rows"

    def log(self, member: str, replica: int) -> Path:
        return self.logs_dir / f"{member}-{replica}.log"

    def parts_dir(self, member: str, fingerprint: str) -> Path:
        return self.work_dir / f"{member}.{fingerprint[:16]}"

    def parts_dirs(self, member: str) -> list[Path]:
        """The folders of a member's parts, whatever they are made of."""
        return [path for path in self.work_dir.glob("*.*") if path.name.rpartition(".")[0] == member]

    def own_places(self) -> tuple[Path, ...]:
        """The folders and files that a run uses, but for its lock."""
        folders = (self.predictions_dir, self.work_dir, self.logs_dir)
        return (*folders, self.config, self.run_json, self.ensemble, self.submission)

    def endangered(
        self, strangers: Sequence[str], inputs: Iterable[Path], target: Path | None
    ) -> Iterator[str]:
        """Why a run here would destroy something: files that no run has made, its own inputs, its own files.

        Args:
            strangers: names of what no run has made.
            inputs: what the run reads.
            target: where the submission goes, if that is said.
        """
        if strangers:
            yield (
                f"output_dir: {self.root} holds {', '.join(strangers)}, which no run has made and this one "
                "would replace; choose another output_dir"
            )
        if target is not None and target.resolve() != self.submission.resolve() and self._is_own(target):
            yield f"submission.path: {target} is a file that the run itself writes; choose another name"
        for path in inputs:
            if self._is_own(path):
                yield f"output_dir: {path} is read by this run and would be overwritten; choose another output_dir"

    def _is_own(self, path: Path) -> bool:
        place = path.resolve()
        files = (self.config, self.run_json, self.ensemble, self.submission, self.lock)
        folders = (self.predictions_dir, self.work_dir, self.logs_dir)
        return place in [file.resolve() for file in files] or any(
            place.is_relative_to(folder.resolve()) for folder in folders
        )

    def create(self) -> None:
        """Make the directory and prove that it can be written.

        Raises:
            OutputError: it cannot be made, or nothing can be written there.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self.root / f".probe{_TEMPORARY}{os.getpid()}"
            try:
                _claim(probe)
                probe.write_bytes(b"x")
            finally:
                probe.unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(cannot_write("output_dir", self.root, error)) from error

    def tidy(self) -> None:
        """Make the folders and remove the halves of files that a killed run left; what is whole stays."""
        for folder in (self.predictions_dir, self.work_dir, self.logs_dir):
            if folder.is_symlink():
                folder.unlink()
            folder.mkdir(exist_ok=True)
        for path in (*self.work_dir.iterdir(), *self.logs_dir.iterdir()):
            _remove_link(path)
        for folder in (self.root, self.predictions_dir, self.work_dir, *_folders_in(self.work_dir)):
            for leftover in folder.glob(f".*{_TEMPORARY}*"):
                leftover.unlink(missing_ok=True)

    def forget_results(self) -> None:
        """Remove the merged files, so that nothing old can be taken for the result of a run that goes on."""
        for file in (self.ensemble, self.submission):
            file.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all that earlier runs left."""
        self.forget_results()
        self.run_json.unlink(missing_ok=True)
        for folder in (self.predictions_dir, self.work_dir, self.logs_dir):
            if folder.is_dir() and not folder.is_symlink():
                shutil.rmtree(folder)  # what stayed would be taken for this run's work
        self.tidy()

    def remove_work(self, parts_dirs: Iterable[Path]) -> None:
        """Remove these folders of parts, and the published table; of other members' work nothing."""
        if self.work_dir.is_symlink():
            return
        for folder in parts_dirs:
            shutil.rmtree(folder, ignore_errors=True)
        self.table.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # what others have not finished is in it
            self.work_dir.rmdir()


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


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path in the same directory, which becomes ``path`` when the block ends without an error.

    The content is flushed to the disk before the rename and the directory entry after it, so that the name
    stands for a complete file even after a power loss.

    Raises:
        WriteError: the disk is full, the directory is gone, or the like.
    """
    # Random, because two runs in two containers may have the same number and one submission.path.
    temporary = path.with_name(f".{path.name}{_TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}")
    try:
        _claim(temporary)
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
        temporary.unlink(missing_ok=True)


def open_log(path: Path) -> BinaryIO:
    """Open a log to append to it; a link in its place is removed and not followed.

    Raises:
        OSError: it cannot be written.
    """
    _remove_link(path)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666), "ab")


def _claim(temporary: Path) -> None:
    """Make an empty file under a name that could be guessed: no link that waits there is written through."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        os.close(os.open(temporary, flags, 0o666))
    except FileExistsError:
        temporary.unlink()
        os.close(os.open(temporary, flags, 0o666))


def _remove_link(path: Path) -> None:
    """Remove a symbolic link, and a name of a file that has another name elsewhere."""
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_nlink > 1):
            path.unlink()


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a small text file so that its name appears only when it is complete."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def remove_halves(target: Path) -> None:
    """Remove what killed processes left of a file that they were writing; not what a living one writes."""
    for leftover in target.parent.glob(f".{glob.escape(target.name)}{_TEMPORARY}*"):
        pid = leftover.name.rpartition(_TEMPORARY)[2].partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            leftover.unlink(missing_ok=True)


def holder(rundir: RunDir) -> str | None:
    """Who holds the directory, such as "process 12 on a host"; None: nobody."""
    try:
        with _open_lock(rundir, os.O_RDONLY, "r") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return lock.read().strip() or "another process"
    except (OSError, OutputError):
        return None
    return None


@contextlib.contextmanager
def hold(rundir: RunDir) -> Iterator[IO[str]]:
    """Hold the directory for this process; the kernel lets go when the process ends, however it ends.

    Raises:
        OutputInUse: another run holds it; the message names its process.
        OutputError: the lock is a link.
    """
    with _open_lock(rundir, os.O_RDWR | os.O_CREAT, "r+") as lock:
        if not _locked(lock):
            holder = lock.read().strip() or "another process"
            raise OutputInUse(
                f"output_dir: {rundir.root} is in use by {holder}; wait for it, or choose another output_dir"
            )
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        yield lock


def _locked(lock: IO[str]) -> bool:
    for attempt in range(_LOCK_ATTEMPTS):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # perhaps only a look by ``holder``
            time.sleep(0.1 if attempt < _LOCK_ATTEMPTS - 1 else 0)
        else:
            return True
    return False


def _open_lock(rundir: RunDir, flags: int, mode: str) -> IO[str]:
    # Not removed like other links: whoever holds the file behind it would no longer be noticed.
    refused = f"output_dir: {rundir.lock} is a link to another file; remove it"
    try:
        descriptor = os.open(rundir.lock, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OutputError(refused) from None
        raise
    lock = os.fdopen(descriptor, mode, encoding="utf-8", errors="replace")
    if os.fstat(descriptor).st_nlink > 1:
        lock.close()
        raise OutputError(refused)
    return lock


def order_path(parts_dir: Path) -> Path:
    """Where the row numbers of a member stand in the order of its chunks."""
    return parts_dir / "order.npy"


def rows_path(parts_dir: Path) -> Path:
    """Where it stands which rows a member's parts are of."""
    return parts_dir / "rows.bin"


def bad_rows_path(parts_dir: Path) -> Path:
    """Where the rows that a member cannot compute stand, with the reasons."""
    return parts_dir / "bad_rows.json"


def part_name(start: int, stop: int, content: bytes) -> str:
    """What a part is called: the rows it was made for, by their places in the order, and what it must hold."""
    return f"{start:09d}-{stop:09d}.{_digest(content)}.csv"


def read_part(path: Path) -> bytes | None:
    """A part's content; None where that is not what its name says, or cannot be read."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    return content if path.name.endswith(f".{_digest(content)}.csv") else None


def _folders_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]


def part_rows(parts_dir: Path) -> int:
    """How many rows the parts in a folder were made for, by their names alone."""
    done = [re.match(r"(\d+)-(\d+)\.", path.name) for path in parts_dir.glob("*.csv")]
    return sum(int(found[2]) - int(found[1]) for found in done if found)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
