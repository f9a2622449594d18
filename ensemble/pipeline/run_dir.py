"""Define the paths in a run directory, its lock and its log, and recognize a directory that a run has made.

output_dir/
  config.yaml              as given; several files, and what --set says, in one
  run.json                 versions, devices, what each worker did, scores
  predictions/<member>.csv id and one column per label, in the table's order, and <job>.csv if it has views;
                           <member>.json: its manifest, what it was made of; <member>.rows: which rows it is of;
                           <member>.merged: which of these were merged, where not all were
  ensemble.csv             the merged predictions
  submission.csv           the sample submission's columns and row order, where one is named
  report.html              what ran where and what came of it, as a page to look at
  logs/run.log             what the parent did; logs/<model>-<replica>.log: all a worker printed;
                           logs/report.log, <tracker>.log: what went wrong with the report or a tracker
  work/                    the table as Arrow; <job>.<fingerprint>/: which rows, their order, shards, bad
                           rows, what was chosen (choices.json), and in cache/ what the model's workers
                           share; removed when the run is complete
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TextIO

from ensemble.common.errors import RESUMES, EnsembleError, OutputError, OutputInUse, WriteError
from ensemble.common.files import (
    TEMPORARY,
    cannot_write,
    create_empty,
    open_log,
    remove_link,
    without_links,
)
from ensemble.common.redact import RedactingFormatter, Redactor
from ensemble.common.shards import read_shard
from ensemble.common.version import __version__
from ensemble.jobs.job import JobFiles

log = logging.getLogger("ensemble")
# The beginnings of files that only runs write: logs, reports, manifests and files of rows.
_MADE_BY_RUNS = re.compile(
    rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO ensemble \S+ runs as process \d+ on "
    rb'|\{\s*"schema": "ensemble run \d+",'
    rb'|\{\s*"fingerprint": \{\s*"scheme": \d+,\s*"settings": \{'
)


class RunDir(JobFiles):
    """Name the paths below an ``output_dir``; the constructor touches nothing on disk."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.config = root / "config.yaml"
        self.run_json = root / "run.json"
        self.ensemble = root / "ensemble.csv"
        self.submission = root / "submission.csv"
        self.report_page = root / "report.html"
        self.rule_rows = self.predictions_dir / "rules.bits"
        self.allowed_labels = self.predictions_dir / "allowed_labels.bits"
        self.logs_dir = root / "logs"
        self.run_log = self.logs_dir / "run.log"
        self.report_log = self.logs_dir / "report.log"
        self.table = self.work_dir / "table.arrow"
        self.tune_dir = root / "tune"  # of which each trial is a run directory
        self.lock = root / ".lock"
        self._folders = (self.predictions_dir, self.work_dir, self.logs_dir)
        self._results = (self.ensemble, self.submission, self.report_page)
        # All that a run uses, without its lock.
        self._run_paths = (*self._folders, self.config, self.run_json, *self._results)

    def merged_rows(self, member: str) -> Path:
        return self.predictions_dir / f"{member}.merged"

    def log(self, member: str, replica: int) -> Path:
        return self.logs_dir / f"{member}-{replica}.log"

    def shards_dirs(self, member: str) -> list[Path]:
        """Return the folders of the shards of a member's jobs, with any fingerprint."""
        jobs = {path: path.name.rpartition(".")[0] for path in self.work_dir.glob("*.*")}
        return [path for path, job in jobs.items() if job.partition("@")[0] == member]

    def endangered(self, inputs: Iterable[Path], target: Path | None) -> Iterator[str]:
        """Yield why a run here would destroy files: those that no run has made, its inputs, or its own files."""
        files = [self.config, self.run_json, *self._results, self.lock, self.table]
        endings = ".csv", ".json", ".rows", ".merged", ".bits"
        files += (path for path in self.predictions_dir.glob("*.*") if path.suffix in endings)
        for path in (*files, *self.logs_dir.glob("*.log")):
            if path.is_dir() and not path.is_symlink():
                yield f"output_dir: {path} is a folder, and the run writes a file there; remove or rename it"
        for path in self._folders:
            if path.is_file() and not path.is_symlink():
                yield f"output_dir: {path} is a file, and the run makes a folder there; remove or rename it"
        foreign = self.foreign_names()
        if foreign:
            yield (
                f"output_dir: {self.root} holds {', '.join(foreign)}, which no run has made and this one "
                "would replace; choose another output_dir"
            )
        if (
            target is not None
            and without_links(target) != without_links(self.submission)
            and self._is_used(target)
        ):
            yield f"submission.path: {target} is a file that the run itself writes; choose another name"
        for path in inputs:
            if self._is_used(path):
                yield f"output_dir: {path} is read by this run and would be overwritten; choose another output_dir"

    def foreign_names(self) -> list[str]:
        """Return the names of files and folders with content that a run would replace and that no run has made."""
        paths = [path for path in self._run_paths if _has_content(path)]
        return [] if not paths or self.is_made_by_runs() else [path.name for path in paths]

    def is_made_by_runs(self) -> bool:
        """Return whether a file in the directory proves that a run has made it."""
        files = [self.run_json, self.run_log]
        for pattern in ("predictions/*.json", "predictions/*.rows", "work/*/rows.bin"):
            files += self.root.glob(pattern)
        if any(_MADE_BY_RUNS.match(head(path)) for path in files):
            return True
        return any(read_shard(path) is not None for path in self.work_dir.glob("*/*.csv"))

    def demand_free(self, option: str, path: Path) -> None:
        """Raise an OutputError if runs, or ``tune``, write to a file that the user names for something else."""
        if self._is_used(path) or without_links(path).is_relative_to(without_links(self.tune_dir)):
            raise OutputError(f"{option}: runs write {path} themselves; choose another name")

    def _is_used(self, path: Path) -> bool:
        """Return whether runs write to a path."""
        resolved = without_links(path)
        return any(resolved.is_relative_to(without_links(used)) for used in (*self._run_paths, self.lock))

    def create(self) -> None:
        """Make the directory, or raise an OutputError if it cannot be written."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self.root / f".probe{TEMPORARY}{os.getpid()}"
            try:
                create_empty(probe)
                probe.write_bytes(b"x")
            finally:
                probe.unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(cannot_write("output_dir", self.root, error)) from error

    def tidy(self) -> None:
        """Make the folders, and remove links and the incomplete files that a killed run left."""
        for folder in self._folders:
            if folder.is_symlink():
                folder.unlink()
            folder.mkdir(exist_ok=True)
        for path in (*self.work_dir.iterdir(), *self.logs_dir.iterdir()):
            remove_link(path)
        pattern = f".*{TEMPORARY}*"
        of_folders = [path for folder in self._folders for path in folder.rglob(pattern)]
        for leftover in (*self.root.glob(pattern), *of_folders):
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)

    def forget_results(self, keep_submission: bool = False) -> None:
        """Remove merged files and report, so that nobody takes them for the results of the run that goes on."""
        for file in self._results:
            if file != self.submission or not keep_submission:
                file.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove everything that earlier runs left."""
        self.forget_results()
        self.run_json.unlink(missing_ok=True)
        for folder in self._folders:
            if folder.is_dir() and not folder.is_symlink():
                shutil.rmtree(folder)  # raises an error: what stayed would be taken for this run's work
        self.tidy()

    def remove_work(self, shards_dirs: Iterable[Path]) -> None:
        """Remove these folders of shards, and the published table; other members' work stays."""
        if self.work_dir.is_symlink():
            return
        for folder in shards_dirs:
            shutil.rmtree(folder, ignore_errors=True)
        self.table.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it is not empty: it holds other members' work
            self.work_dir.rmdir()


def holder(rundir: RunDir) -> str | None:
    """Return the process that holds the directory, such as "process 12 on a host"; None if there is none."""
    with contextlib.suppress(OSError, OutputError), _open_lock(rundir, os.O_RDONLY, "r") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return lock.read().strip() or "another process"
    return None


def is_held_by(by: str, pid: int) -> bool:
    """Return whether a holder, as ``holder`` names it, is the process of this number."""
    return by.startswith(_process(pid))


def _process(pid: int) -> str:
    return f"process {pid} on "


@contextlib.contextmanager
def hold(rundir: RunDir) -> Iterator[IO[str]]:
    """Lock the directory for this process; the kernel releases the lock when the process ends, however it ends.

    If another run holds it, an OutputInUse names its process.
    """
    with _open_lock(rundir, os.O_RDWR | os.O_CREAT, "r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            process = lock.read().strip() or "another process"
            raise OutputInUse(
                f"output_dir: {rundir.root} is in use by {process}; wait for it, or choose another output_dir"
            ) from None
        except OSError as error:  # on some network file systems
            raise OutputError(
                f"output_dir: the file system of {rundir.root} has no file locks (flock: {error.strerror}), "
                "which keep two runs from writing to one directory; choose an output_dir on another disk"
            ) from error
        try:
            lock.truncate(0)
            lock.write(f"{_process(os.getpid())}{socket.gethostname()}\n")
            lock.flush()
        except OSError as error:
            raise WriteError(cannot_write("output_dir", rundir.lock, error)) from error
        yield lock


@contextlib.contextmanager
def system_errors_in(what: str) -> Iterator[None]:
    """Turn an error of the system into one of this package, with a sentence about ``what``, such as "the run".

    Raises:
        WriteError: a path cannot be used, such as a folder that cannot be made.
        EnsembleError: the error is about no file, but a socket or a process.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            kind = type(error).__name__
            raise EnsembleError(
                f"{what} ended with an error of the system ({kind}: {error}); {RESUMES}"
            ) from error
        raise WriteError(
            f"cannot write to {error.filename} ({error.strerror}); free it or change output_dir"
        ) from error


def _open_lock(rundir: RunDir, flags: int, mode: str) -> IO[str]:
    # It is not removed like other links: a process that holds the file behind it would no longer be noticed.
    if rundir.lock.is_symlink() or (rundir.lock.exists() and rundir.lock.stat().st_nlink > 1):
        raise OutputError(f"output_dir: {rundir.lock} is a link to another file; remove it")
    descriptor = os.open(rundir.lock, flags | os.O_NOFOLLOW, 0o666)
    return os.fdopen(descriptor, mode, encoding="utf-8", errors="replace")


class _LogHandler(logging.StreamHandler[TextIO]):
    """Write the run's log, and leave lines out if the disk is full."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  the name is logging's
        pass


@contextlib.contextmanager
def logging_to(path: Path, redactor: Redactor) -> Iterator[None]:
    """Write the package's log to a file, without secrets, and nowhere else."""
    handler = _LogHandler(io.TextIOWrapper(open_log(path), encoding="utf-8", errors="backslashreplace"))
    handler.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(message)s", redactor))
    log.addHandler(handler)
    level, propagate = log.level, log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False  # otherwise it would show in notebooks that have set up logging
    try:
        log.info("ensemble %s runs as process %d on %s", __version__, os.getpid(), socket.gethostname())
        yield
    finally:
        log.setLevel(level)
        log.propagate = propagate
        log.removeHandler(handler)
        with contextlib.suppress(OSError):
            handler.stream.close()


def head(path: Path) -> bytes:
    """Return the first bytes of a file; none if it is a link or a folder, or does not exist."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)

    with contextlib.suppress(OSError), open(path, "rb", 0, opener=opener) as file:
        return file.read(4_096) or b""
    return b""


def _has_content(path: Path) -> bool:
    if path.is_dir() and not path.is_symlink():
        return any(map(_has_content, path.iterdir()))
    return path.exists() and (path.is_dir() or not path.is_file() or path.stat().st_size > 0)
