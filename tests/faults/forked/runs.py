"""Runs of a project from a fork server of their own, each under watch: every step of theirs can be judged."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tests.faults.forked import client
from tests.faults.inject import Injected
from tests.faults.steps import Judge, Step, Verdict, Watched
from tests.project import ROOT


class ForkedRuns:
    """Runs one after the other; made by ``forked_runs``."""

    def __init__(self, watched: Watched, address: str, output: Path) -> None:
        self._watched = watched
        self._address = address
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
        variables = {**os.environ, **client.server_variables(self._address)}
        if faults is not None:
            variables["TEST_FAULTS"] = faults.environment["TEST_FAULTS"]
        self._watched.forget()
        self._watched.folder = folder.resolve()
        self._judge = judge or _go
        with (
            self._output.open("w") as output,
            client.Command(
                ["run", "config.yaml", *options], folder, variables, (None, output.fileno(), output.fileno())
            ) as command,
        ):
            self._watched.first = command.pid
            command.go()
            code = command.wait()
        client.wait_until_idle(self._address)
        return code

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


@contextlib.contextmanager
def forked_runs(output: Path, models: Path) -> Iterator[ForkedRuns]:
    """A fork server.

    Args:
        output: a file for what the latest run prints.
        models: a folder of tiny ones, as ``make_models`` makes them.
    """
    made: list[ForkedRuns] = []
    address = client.new_address()
    with Watched(
        client.server_command(address, models),
        ROOT,
        lambda step: made[0].judge(step),
        **client.server_options(),
    ) as watched:
        assert watched.process.stdout is not None
        watched.process.stdout.readline()
        made.append(ForkedRuns(watched, address, output))
        yield made[0]
        watched.process.communicate()


def _go(step: Step) -> Verdict:
    return Verdict.GO
