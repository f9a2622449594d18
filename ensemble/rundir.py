"""Every path in a run directory, the lock on it, and writing so that a name means a complete file.

    output_dir/
      config.yaml              as given
      run.json                 versions, devices, what each worker did, scores
      predictions/<member>.csv id and one column per label, in the table's order
      ensemble.csv             the merged predictions
      submission.csv           the sample submission's columns and row order, where one is named
      logs/run.log             what the parent did; logs/<member>-<replica>.log: all a worker printed
      work/                    the table as Arrow, row orders and parts; removed when every member has ended

This module does not know what is in those files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from ensemble.errors import OutputError, OutputInUse, WriteError

_TEMPORARY = ".tmp-"


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

    def log(self, member: str, replica: int) -> Path:
        return self.logs_dir / f"{member}-{replica}.log"

    def order(self, member: str) -> Path:
        return self.work_dir / f"{member}.order.npy"

    def parts_dir(self, member: str) -> Path:
        return self.work_dir / f"{member}.parts"

    def endangered(self, inputs: Iterable[Path]) -> Iterator[str]:
        """Why a run here would destroy something: files that no run has made, or the run's own inputs.

        Args:
            inputs: what the run reads.
        """
        folders = (self.predictions_dir, self.work_dir, self.logs_dir)
        files = (self.config, self.run_json, self.ensemble, self.submission)
        if not self.lock.exists():
            strangers = [path.name for path in (*folders, *files) if path.exists()]
            if strangers:
                yield (
                    f"output_dir: {self.root} holds {', '.join(strangers)}, which no run has made and this one "
                    "would replace; choose another output_dir"
                )
        for path in inputs:
            place = path.resolve()
            if place in [file.resolve() for file in files] or any(
                place.is_relative_to(folder.resolve()) for folder in folders
            ):
                yield f"output_dir: {path} is read by this run and would be lost to it; choose another output_dir"

    def create(self) -> None:
        """Make the directory and prove that it can be written.

        Raises:
            OutputError: it cannot be made, or nothing can be written there.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self.root / f".probe{_TEMPORARY}{os.getpid()}"
            try:
                probe.write_bytes(b"x")
            finally:
                probe.unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(cannot_write("output_dir", self.root, error)) from error

    def clear(self) -> None:
        """Remove what an earlier run left, so that nothing old can be taken for this run's result."""
        for file in (self.run_json, self.ensemble, self.submission):
            file.unlink(missing_ok=True)
        for folder in (self.predictions_dir, self.work_dir, self.logs_dir):
            if folder.is_symlink():
                folder.unlink()
            shutil.rmtree(folder, ignore_errors=True)
        for leftover in self.root.glob(f".*{_TEMPORARY}*"):
            leftover.unlink(missing_ok=True)
        for folder in (self.predictions_dir, self.work_dir, self.logs_dir):
            folder.mkdir(parents=True)

    def remove_work(self) -> None:
        shutil.rmtree(self.work_dir, ignore_errors=True)


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
    temporary = path.with_name(f".{path.name}{_TEMPORARY}{os.getpid()}")
    try:
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


@contextlib.contextmanager
def hold(rundir: RunDir) -> Iterator[IO[str]]:
    """Hold the directory for this process; the kernel lets go when the process ends, however it ends.

    Raises:
        OutputInUse: another run holds it; the message names its process.
    """
    with rundir.lock.open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            raise OutputInUse(
                f"output_dir: {rundir.root} is in use by {holder}; wait for it, or choose another output_dir"
            ) from None
        lock.seek(0)
        lock.truncate()
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        yield lock


def part_path(parts_dir: Path, chunk: int) -> Path:
    """Where a chunk's rows and probabilities stand when it is done."""
    return parts_dir / f"{chunk:06d}.csv"
