"""Choose how a training fits its device: fewer rows at a time first, then less memory for more time.

Nothing here changes the model: the effective batch stays, and LoRA and 4 bits are advice.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ensemble.common.digests import digest_of
from ensemble.common.files import read_json, write_text
from ensemble.common.text import listed, plural

_ADAMW, _ADAMW_8_BIT = "adamw_torch", "adamw_bnb_8bit"
_CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")
_CHEAPER = {"full": "method: lora, then method: qlora", "lora": "method: qlora"}


@dataclass(frozen=True)
class Rung:
    """Hold what a training may change to need less memory; the fields are of ``TrainerSpec``."""

    micro_batch: int
    gradient_checkpointing: bool = False
    optim: str = _ADAMW

    @property
    def text(self) -> str:
        parts = [f"{plural(self.micro_batch, 'row')} at a time"]
        parts += ["activation checkpointing"] if self.gradient_checkpointing else []
        parts += ["the 8-bit optimizer"] if self.optim == _ADAMW_8_BIT else []
        return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


class Ladder:
    """Hold the rungs of a member's trainings on a kind of device, and keep in a file which of them is known to fit.

    Args:
        spec: the content of a training's spec.
        folder: of the files.
        device: the GPU's name and memory; empty: the CPU.
    """

    def __init__(self, spec: Mapping[str, Any], folder: Path, device: str) -> None:
        train = spec["train"]
        own, self._method = train["training_arguments"], train["method"]
        self._device = device or "this machine"
        self.is_tried = bool(device) and train["per_device_train_batch_size"] == "auto"
        self.top = Rung(train["effective_batch_size"] if self.is_tried else spec["micro_batch"])
        self._base = train["base_model"]
        self._kinds = [self.top]
        if not any(own.get(key) for key in _CHECKPOINTING):
            self._kinds.append(replace(self.top, gradient_checkpointing=True))
        may_be_8_bit = bool(device) and "optim" not in own
        self._lacks_8_bit = may_be_8_bit and find_spec("bitsandbytes") is None
        if may_be_8_bit and not self._lacks_8_bit:
            self._kinds.append(replace(self._kinds[-1], optim=_ADAMW_8_BIT))
        key = digest_of([device, spec["labels"], spec["settings"], train])
        self._file = folder / f"{key[:16]}.json"

    def known(self) -> tuple[Rung, str] | None:
        """Return the rung that is known to fit, and why it was taken, if an earlier training has kept it."""
        content = read_json(self._file)
        with contextlib.suppress(KeyError, TypeError):
            rung = Rung(**content["rung"])
            if replace(rung, micro_batch=self.top.micro_batch) in self._kinds:
                return rung, str(content["why"])
        return None

    def keep(self, rung: Rung, why: str) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_text(self._file, json.dumps({"rung": asdict(rung), "why": why}))

    def forget(self) -> None:
        self._file.unlink(missing_ok=True)

    def below(self, rung: Rung) -> Rung | None:
        """Return the next rung, which needs less memory in any case; None: there is none."""
        if rung.micro_batch > 1:
            return replace(rung, micro_batch=rung.micro_batch // 2)
        lowest = [replace(kind, micro_batch=1) for kind in self._kinds]
        return next(iter(lowest[lowest.index(rung) + 1 :]), None)

    def search(self, attempt: Callable[[Sequence[Rung]], tuple[int, bool] | None]) -> tuple[Rung, str] | None:
        """Return the first rung that fits, and why it was taken; None: none fits.

        Args:
            attempt: try rungs that differ in their rows at a time only, in a process that may die of it; return how
                many it has begun (0: it died before), and whether the last of these fits; None: the time is over.
        """
        for kind in self._kinds:
            rungs = [kind]
            while rungs[-1].micro_batch > 1:
                rungs.append(replace(kind, micro_batch=rungs[-1].micro_batch // 2))
            while rungs:
                trial = attempt(rungs)
                if trial is None:
                    lowest = replace(self._kinds[min(1, len(self._kinds) - 1)], micro_batch=1)
                    return lowest, f"there was no time for a whole trial on {self._device}"
                begun, fits = trial
                if fits:
                    return rungs[begun - 1], f"found by a trial on {self._device}"
                rungs = rungs[begun or len(rungs) :]
        return None

    def advice(self) -> str:
        """Return a sentence for the user when nothing fits."""
        lowest = replace(self._kinds[-1], micro_batch=1)
        text = (
            f"{self._base} cannot be trained on {self._device}: it ran out of memory even with {lowest.text}"
        )
        remedies = [f"train.{_CHEAPER[self._method]}"] if self._method in _CHEAPER else []
        remedies += ["a shorter max_length", "a smaller base_model"]
        if self._lacks_8_bit:
            remedies.append("the 8-bit optimizer, which needs the package bitsandbytes")
        return f"{text}; try {listed(remedies, 9, str)}"
