"""What a measuring on a borrowed GPU leaves behind, whatever ends it."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

LOG_BYTES = 64 << 10  # of the end of each log
_KEEP_SECONDS = 5.0


class Results:
    """A folder of results; without a folder nothing is kept.

    ``results.jsonl`` gets a line as each step ends. ``runs.tar`` has an archive, ``RUN.tar.gz``, for each run that
    has ended, with its run.json, its config, what ``ensemble plan`` said of it, and the ends of its logs; that of a
    run that goes on lies beside it. So there are three files at most, which is easy to carry.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def add(self, **record: Any) -> None:
        """Add a line, which is on the disk when this returns."""
        if self.folder is None:
            return
        with (self.folder / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def keeping(self, run: Path, texts: Mapping[str, str]) -> Iterator[None]:
        """Keep a run at once, then every few seconds, since this process may be killed, and at its end."""
        is_over = Event()

        def keep() -> None:
            while True:
                self.keep_run(run, dict(texts))
                if is_over.wait(_KEEP_SECONDS):
                    return

        thread = Thread(target=keep, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            self.keep_run(run, texts)
            self.close_run(run.name)

    def close_run(self, name: str) -> None:
        """Move the archive of a run that has ended into runs.tar."""
        if self.folder is None:
            return
        kept = self.folder / f"{name}.tar.gz"
        with tarfile.open(self.folder / "runs.tar", "a") as archive:
            archive.add(kept, kept.name)
        kept.unlink()

    def keep_run(self, run: Path, texts: Mapping[str, str]) -> None:
        """Keep what a run has written so far.

        Args:
            run: its output folder, which may be missing.
            texts: other files for the archive, by name.
        """
        if self.folder is None:
            return
        unfinished = self.folder / f".{run.name}.tar.gz"
        with tarfile.open(unfinished, "w:gz") as archive:
            for name, text in texts.items():
                _add(archive, name, text.encode())
            for path in sorted([*run.glob("*.json"), *run.glob("config.yaml")]):
                _add(archive, path.name, path.read_bytes())
            for path in sorted(run.glob("logs/*")):
                _add(archive, f"logs/{path.name}", path.read_bytes()[-LOG_BYTES:])
        unfinished.rename(self.folder / f"{run.name}.tar.gz")


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))
