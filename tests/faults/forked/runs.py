"""Runs of a project from the fork server, each under watch: a second each, where fresh processes take ten."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.faults.inject import Injected
from tests.faults.steps import Judge, Step, Verdict, Watched
from tests.project import ROOT


class ForkedRuns:
    """Runs one after the other; made by ``forked_runs``."""

    def __init__(self, watched: Watched, output: Path) -> None:
        self._watched = watched
        self._output = output
        self._judge: Judge = _go

    def run(
        self, folder: Path, *options: str, judge: Judge | None = None, faults: Injected | None = None
    ) -> int:
        """What ``ensemble run config.yaml OPTIONS`` ends with: an exit code, or the signal as a negative number.

        Args:
            folder: the working directory; steps below it count.
            judge: asked about every step.
            faults: those that happen in the workers; none at the import of transformers, which is long over.
        """
        environment = {} if faults is None else {"TEST_FAULTS": faults.environment["TEST_FAULTS"]}
        asked = {
            "arguments": ["run", "config.yaml", *options],
            "folder": str(folder),
            "output": str(self._output),
            "environment": environment,
        }
        self._watched.forget()
        self._watched.folder = folder.resolve()
        self._judge = judge or _go
        self._watched.first = self._ask(json.dumps(asked))["pid"]
        return self._ask("start")["code"]

    def judge(self, step: Step) -> Verdict:
        """What becomes of a step of the run that goes on."""
        return self._judge(step)

    @property
    def steps(self) -> list[Step]:
        """What the latest run did to the project's files."""
        return self._watched.steps

    @property
    def printed(self) -> str:
        """What the latest run said, as one line: where it breaks lines depends on their words."""
        return " ".join(self._output.read_text(encoding="utf-8").split())

    def _ask(self, line: str) -> dict[str, int]:
        process = self._watched.process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
        answer: dict[str, int] = json.loads(process.stdout.readline())
        return answer


@contextlib.contextmanager
def forked_runs(output: Path, model: Path) -> Iterator[ForkedRuns]:
    """A fork server.

    Args:
        output: a file for what the latest run prints.
        model: loaded once before, so that all modules which models like it need are there.
    """
    made: list[ForkedRuns] = []
    with Watched(
        [sys.executable, "-m", "tests.faults.forked.server", str(model)],
        ROOT,
        lambda step: made[0].judge(step),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as watched:
        made.append(ForkedRuns(watched, output))
        yield made[0]
        watched.process.communicate("")


def _go(step: Step) -> Verdict:
    return Verdict.GO
