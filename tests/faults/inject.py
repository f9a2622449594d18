"""Faults inside of real worker processes: what shall happen, at which rows or forward pass, how often."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.faults.forked import client
from tests.project import ROOT

Deed = Literal[
    "segfault",
    "kill",  # SIGKILL to itself
    "exit",  # with code 0, as if all were well
    "sleep",
    "wait",  # until the test lets it go on
    "sleep with the interpreter",  # as native code that does not let Python's other threads run
    "start a process",  # that would go on for minutes
    "freeze",  # SIGSTOP to itself
    "raise",
    "nan",  # all that the rows' embeddings hold
    "eat",  # memory
]


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        deed: what happens.
        ids: at forward passes with a row that holds these token ids, and to these rows; none: any row.  An image
            holds the red of its first pixel.
        at: only at this forward pass of a process, from 0 (those by which a worker tries its model count), or at
            the import of transformers.
        times: how often in all, over all processes of the runs; None: always.
        error: for "raise", the exception's class: a builtin, or a name such as "torch.OutOfMemoryError".
        text: its message.
        seconds: for the sleeps.
        bytes: for "eat".
    """

    deed: Deed
    ids: tuple[int, ...] = ()
    at: int | Literal["import"] | None = None
    times: int | None = None
    error: str = "RuntimeError"
    text: str = "a fault that a test asked for"
    seconds: float = 600.0
    bytes: int = 0


class Injected:
    """Faults for the processes that are started with ``environment``.

    Args:
        folder: an existing one, where the processes write down each fault that happens.
    """

    def __init__(self, folder: Path, *faults: Fault) -> None:
        self._journals = [folder / f"fault {number}" for number in range(len(faults))]
        fields = [
            {**dataclasses.asdict(fault), "journal": str(journal)}
            for fault, journal in zip(faults, self._journals, strict=True)
        ]
        self.environment = {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(client.SITE)]),
            "TEST_FAULTS": json.dumps(fields),
        }
        if any(fault.at == "import" for fault in faults):  # long over where workers are forked
            self.environment["TEST_FORK_SERVER"] = ""

    def pids(self, number: int = 0) -> list[int]:
        """The processes that a fault happened in, in order; one that happened twice in a process is there twice."""
        return _numbers(self._journals[number])

    def wait_for(self, number: int = 0) -> None:
        """Until a fault has happened."""
        while not self.pids(number):
            time.sleep(0.01)

    def let_go(self, number: int = 0) -> None:
        """Let processes go on that "wait"."""
        Path(f"{self._journals[number]} go").touch()

    def started(self) -> list[int]:
        """The processes that "start a process" has started."""
        return [pid for journal in self._journals for pid in _numbers(Path(f"{journal} started"))]


def _numbers(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def token_ids(model: Path, word: str) -> tuple[int, ...]:
    """What a word becomes behind a space, by the checkpoint's own tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return tuple(tokenizer.encode(f" {word}", add_special_tokens=False).ids)
