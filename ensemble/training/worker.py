"""Train in a worker process: each job is a training, whose command runs as a process beneath the worker.

Our own trainer is made to fit its device: by fewer rows at a time first, then by less memory for more time.  That
changes no model: the effective batch stays, and LoRA and 4 bits are advice.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ensemble.common.digests import digest_of
from ensemble.common.errors import MemberError
from ensemble.common.files import read_json, write_text
from ensemble.common.logged_command import CommandFailed, LoggedCommand, OutOfMemory
from ensemble.common.protocol import CommonSpec, Counters, Ready
from ensemble.common.text import listed, plural
from ensemble.members.predictor import Report, Runner

_8_BIT = "adamw_bnb_8bit"
_CHEAPER = {"full": ["train.method: lora, then method: qlora"], "lora": ["train.method: qlora"]}


def import_libraries() -> Mapping[str, str]:
    return {}


def make_predictor(common: CommonSpec, settings: Mapping[str, Any], table: object) -> Runner:
    return Trainings(common, settings)


class Trainings(Runner):
    """Run the commands of trainings.

    ``settings`` are ``jobs`` by number, with fields of ``LoggedCommand`` and ``rungs`` (the folder of a ladder;
    empty: it is not our trainer); for all of them the ladder's ``device``, the ``environment`` and the ``config``.
    """

    def __init__(self, common: CommonSpec, settings: Mapping[str, Any]) -> None:
        self._common = common
        self._settings = settings

    def load(self) -> Ready:
        return Ready(device="GPU" if self._common.gpus else "cpu")

    def run(self, job: int, report: Report) -> Counters:
        """Run the command of a training; raise ChildProcessError if it was killed, else MemberError."""
        training = self._settings["jobs"][job]
        command = LoggedCommand(
            command=training["command"],
            out=Path(training["out"]),
            log=Path(training["log"]),
            resumes=training["resumes"],
            environment=self._settings["environment"],
            settings=self._settings["config"],
        )
        try:
            if training["rungs"]:
                spec = read_json(Path(command.command[-1]))
                _train(command, Ladder(spec, Path(training["rungs"]), self._settings["device"]), report)
            else:
                command.run(report)
        except CommandFailed as failure:
            raise (ChildProcessError if failure.was_killed else MemberError)(
                f"{failure}; its log is {command.log}"
            ) from None
        return command.progress()


def _train(command: LoggedCommand, ladder: Ladder, report: Report) -> None:
    """Run our own trainer, and again with less memory whenever it runs out of it; it goes on from its newest save.

    Its first step has the longest row, so that a device that is too small shows it at once.
    """
    rung: Rung | None = ladder.first()
    while rung is not None:
        fields = json.dumps({**asdict(rung), "rung": rung.text})
        try:
            replace(command, command=[*command.command, fields]).run(report)
            return
        except OutOfMemory:
            rung = ladder.below(rung)
    raise MemberError(ladder.advice())


@dataclass(frozen=True)
class Rung:
    """Hold what a training may change to need less memory, and why it does; the fields are of ``TrainerSpec``."""

    micro_batch: int
    gradient_checkpointing: bool = False
    optim: str = "adamw_torch"
    why: str = field(default="", compare=False)

    @property
    def text(self) -> str:
        parts = [f"{plural(self.micro_batch, 'row')} at a time"]
        parts += ["activation checkpointing"] if self.gradient_checkpointing else []
        parts += ["the 8-bit optimizer"] if self.optim == _8_BIT else []
        *first, last = parts
        return f"{', '.join(first)} and {last}" if first else last

    def halvings(self) -> list[Rung]:
        """Return this rung, and the same with ever fewer rows at a time."""
        times = range(self.micro_batch.bit_length())
        return [replace(self, micro_batch=self.micro_batch // 2**number) for number in times]


class Ladder:
    """Hold the rungs of trainings with this spec on a device, and keep in a file which of them was come down to.

    ``device`` is the GPU's name and memory; empty: the CPU.
    """

    def __init__(self, spec: Mapping[str, Any], folder: Path, device: str) -> None:
        self._train = spec["train"]
        self._device = device or "this machine"
        key = digest_of([device, spec["labels"], spec["settings"], self._train])
        self._file = folder / f"{key[:16]}.json"
        own = self._train["training_arguments"]
        may_be_8_bit = bool(device) and "optim" not in own
        self._lacks_8_bit = may_be_8_bit and find_spec("bitsandbytes") is None
        is_open = bool(device) and self._train["per_device_train_batch_size"] == "auto"
        kinds = [Rung(self._train["effective_batch_size"] if is_open else spec["micro_batch"])]
        if not own.get("gradient_checkpointing") and not own.get("activation_checkpointing"):
            kinds.append(replace(kinds[0], gradient_checkpointing=True))
        if may_be_8_bit and not self._lacks_8_bit:
            kinds.append(replace(kinds[-1], optim=_8_BIT))
        self._rungs = [rung for kind in kinds for rung in kind.halvings()]

    def first(self) -> Rung:
        """Return the rung that an earlier training has come down to, or that of the config."""
        with contextlib.suppress(TypeError):
            known = Rung(**read_json(self._file))
            if known in self._rungs:
                return known
        return self._rungs[0]

    def below(self, rung: Rung) -> Rung | None:
        """Keep and return the next rung; None: none is left, or kept."""
        lower = self._rungs[self._rungs.index(rung) + 1 :]
        if not lower:
            self._file.unlink(missing_ok=True)
            return None
        kept = replace(lower[0], why=f"it ran out of memory with {rung.text}")
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_text(self._file, json.dumps(asdict(kept)))
        return kept

    def advice(self) -> str:
        """Return a sentence for the user when nothing fits."""
        remedies = [*_CHEAPER.get(self._train["method"], ()), "a shorter max_length", "a smaller base_model"]
        if self._lacks_8_bit:
            remedies.append("the 8-bit optimizer, which needs the package bitsandbytes")
        return (
            f"{self._train['base_model']} cannot be trained on {self._device}: it ran out of memory even with "
            f"{self._rungs[-1].text}; try {listed(remedies, 9, str)}"
        )
