"""The log of a run: what the parent did, in ``logs/run.log``."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from ensemble import __version__
from ensemble.common.files import open_log
from ensemble.common.redact import RedactingFormatter, Redactor

log = logging.getLogger("ensemble")
# By which ``ownership`` knows the log.
FIRST_LINE = rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO ensemble \S+ runs as process \d+ on "


class _Log(logging.StreamHandler[TextIO]):
    """The run's log; where the disk is full it goes without."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  the name is logging's
        pass


@contextlib.contextmanager
def logging_to(path: Path, redactor: Redactor) -> Iterator[None]:
    """Write the package's log to a file, without secrets, and nowhere else."""
    handler = _Log(io.TextIOWrapper(open_log(path), encoding="utf-8", errors="backslashreplace"))
    handler.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(message)s", redactor))
    log.addHandler(handler)
    level, propagate = log.level, log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False  # or it would stand in the notebook of whoever has set up logging
    try:
        log.info("ensemble %s runs as process %d on %s", __version__, os.getpid(), socket.gethostname())
        yield
    finally:
        log.setLevel(level)
        log.propagate = propagate
        log.removeHandler(handler)
        with contextlib.suppress(OSError):
            handler.stream.close()
