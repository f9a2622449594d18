"""Save a training, end it early, and tell its progress."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from ensemble.common.files import atomic_path, read_json, write_text
from ensemble.members.huggingface.training.examples import Rows
from ensemble.members.huggingface.training.step_trainer import StepTrainer

_PROGRESS_SECONDS = 1.0


class Saves(TrainerCallback):  # type: ignore[misc]
    """Save now and then so that saving takes a few per cent of the time, and keep the newest save.

    A save has its name only once it is whole.

    Args:
        folder: of the saves; what is beside it belongs to another training, and is removed.
        seconds: between saves that are made at once; more for those that take long; 0: after each step.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_others(folder)
        self.folder = folder
        self._seconds = seconds
        self._last_duration = 0.0
        self._last_end = self._began = time.monotonic()

    def newest(self) -> Path | None:
        """Return the newest whole save; its name ends with its step."""
        return max(self.folder.glob("save-*"), key=step_of, default=None)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        now = time.monotonic()
        if now - self._last_end >= self._seconds * (1 + self._last_duration):
            self._began = now
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        whole = self.folder / f"save-{state.global_step}"
        (self.folder / f"checkpoint-{state.global_step}").rename(whole)
        _remove_others(whole)
        self._last_end = time.monotonic()
        self._last_duration = self._last_end - self._began


def step_of(save: Path) -> int:
    return int(save.name.partition("-")[2])


def _remove_others(kept: Path) -> None:
    """Remove the folders beside a folder."""
    for other in kept.parent.iterdir():
        if other.is_dir() and other != kept:
            remove(other)


def remove(folder: Path) -> None:
    """Remove a folder of saves, so that a kill meanwhile leaves nothing that looks like a whole one."""
    shutil.rmtree(folder.rename(folder.with_name(f"removed-{folder.name}")))


class EarlyStop(TrainerCallback):  # type: ignore[misc]
    """End a training after epochs without a lower loss on a slice, and keep the weights of the best epoch.

    The losses are on disk: a training that goes on after a kill decides as one that was never killed.
    """

    def __init__(self, folder: Path, rows: Rows, patience: int, trainer: StepTrainer) -> None:
        self._file = folder / "losses.json"
        self._rows = rows
        self._patience = patience
        self._plan = trainer.plan
        self._trainer = trainer

    def has_ended(self, step: int) -> bool:
        """Return whether the training has ended with this step."""
        losses = self._losses(step)
        if not losses or not self._plan.ends_epoch(step):
            return False
        return len(losses) > self._patience + int(np.argmin(losses))

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        step = state.global_step
        if not self._plan.ends_epoch(step):
            return
        losses = [*self._losses(step - 1), self._trainer.mean_loss(self._rows)]
        if int(np.argmin(losses)) == len(losses) - 1:
            parameters = self._trainer.model.named_parameters()
            with atomic_path(self._best(losses)) as temporary:
                torch.save({name: value for name, value in parameters if value.requires_grad}, temporary)
        write_text(self._file, json.dumps({"losses": losses}))
        control.should_training_stop = control.should_training_stop or self.has_ended(step)

    def take_best(self) -> None:
        """Give the model the weights of the best epoch."""
        weights = torch.load(self._best(self._losses()), map_location="cpu", weights_only=True)
        self._trainer.model.load_state_dict(weights, strict=False)

    def _losses(self, step: int | None = None) -> list[float]:
        """Return the losses after the epochs that had ended with a step; None: after all."""
        losses: list[float] = read_json(self._file).get("losses", [])
        return losses if step is None else losses[: self._plan.epochs(step)]

    def _best(self, losses: list[float]) -> Path:
        return self._file.with_name(f"best-{int(np.argmin(losses))}.pt")


class Progress(TrainerCallback):  # type: ignore[misc]
    """Write ``progress.json`` about once a second; ``facts`` of the training are in it as they are."""

    def __init__(self, path: Path, trainer: StepTrainer, facts: Mapping[str, Any]) -> None:
        self._path = path
        self._trainer = trainer
        self._facts = facts
        self._tokens = trainer.plan.tokens()
        self._began = self._last = time.monotonic()
        self._first_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._first_step = state.global_step
        self._began = time.monotonic()
        self._write(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        now = time.monotonic()
        if now - self._last >= _PROGRESS_SECONDS:
            self._last = now
            self._write(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._write(state.global_step)

    def _write(self, step: int) -> None:
        plan = self._trainer.plan
        progress = {
            "step": step,
            "steps": len(plan.steps),
            "epoch": round(step / plan.steps_per_epoch, 4),
            "loss": self._trainer.last_loss,
            "seconds": round(time.monotonic() - self._began, 3),
            "tokens": int(self._tokens[step, 0]),
            "padded_tokens": int(self._tokens[step, 1]),
            "first_step": self._first_step,  # of this process, whose seconds these are
            **self._facts,
        }
        write_text(self._path, json.dumps(progress))
