"""Runs of a project from a fork server of their own, each under watch: every step of theirs can be judged."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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
        return self._run(["run", "config.yaml", *options], folder, judge, faults)

    def train(
        self,
        folder: Path,
        *options: str,
        judge: Judge | None = None,
        faults: Injected | None = None,
        **spec: Any,
    ) -> int:
        """``ensemble train config.yaml OPTIONS``, as ``run``; the faults happen in its trainers, too.

        Args:
            spec: fields of the trainers' specs that replace those which the command has written.
        """
        arguments = ["train", "config.yaml", *options]
        return self._run(arguments, folder, judge, faults, {client.TRAINER_FIELDS: json.dumps(spec)})

    def trainer(self, spec: Path, judge: Judge | None = None, faults: Injected | None = None) -> int:
        """Our trainer alone, by a spec; steps in the folder that the spec is in count."""
        return self._run([str(spec)], spec.parent, judge, faults, module=client.TRAINER)

    def _run(
        self,
        arguments: Sequence[str],
        folder: Path,
        judge: Judge | None,
        faults: Injected | None,
        variables: Mapping[str, str] | None = None,
        module: str = "",
    ) -> int:
        variables = {**os.environ, **client.server_variables(self._address), **(variables or {})}
        if faults is not None:
            variables["TEST_FAULTS"] = faults.environment["TEST_FAULTS"]
        self._watched.forget()
        self._watched.folder = folder.resolve()
        self._judge = judge or _go
        with (
            self._output.open("w") as output,
            client.Command(
                arguments, folder, variables, (None, output.fileno(), output.fileno()), module
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
