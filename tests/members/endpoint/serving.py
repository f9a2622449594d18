"""A running stub server, and what it was asked."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.project import ROOT

STUB = [sys.executable, "-m", "tests.members.endpoint.stub"]


@dataclass(frozen=True)
class Stub:
    """A server over the files in a folder.

    Args:
        url: of its API.
    """

    folder: Path
    url: str

    def behave(self, **behaviour: Any) -> None:
        """From now on the server is odd in this way, and counts anew what it was asked."""
        for name in ("requests", "times"):
            (self.folder / name).unlink(missing_ok=True)
        temporary = self.folder / "behaviour.new"
        temporary.write_text(json.dumps(behaviour))
        temporary.rename(self.folder / "behaviour.json")

    def prompts(self) -> list[Any]:
        """The prompts that it has answered, in the order of the answers; of chats the last messages."""
        file = self.folder / "requests"
        lines = file.read_text().splitlines() if file.exists() else []
        bodies = [json.loads(line)[1] for line in lines]
        return [body["prompt"] if "prompt" in body else body["messages"][-1]["content"] for body in bodies]


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Stub]:
    """The stub as a process, on a port that was free."""
    command = [*STUB, "--port", "0", str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().split()[-1]
            # What it prints later, nobody reads.
            yield Stub(folder, f"http://127.0.0.1:{port}/v1")
        finally:
            process.kill()
