"""Save a training, end it early, and tell its progress."""

from __future__ import annotations

import json
import math
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
from ensemble.members.huggingface.training.step_trainer import NotFinite, Plan, StepTrainer, check_finite

_PROGRESS_SECONDS = 1.0


class Saves(TrainerCallback):  # type: ignore[misc]
    """Save now and then so that saving takes a few per cent of the time, and keep the newest save.

    A save has its name only once it is whole.

    Args:
        folder: of the saves.
        seconds: between saves that are made at once; more for those that take long; 0: after each step.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder = folder
        self._seconds = seconds
        self._last_duration = 0.0
        self._last_end = self._began = time.monotonic()

    def newest(self) -> Path | None:
        """Return the newest whole save."""
        saves = sorted(self._folder.glob("save-*"), key=lambda path: int(path.name.partition("-")[2]))
        return saves[-1] if saves else None

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        now = time.monotonic()
        if now - self._last_end >= self._seconds * (1 + self._last_duration):
            check_finite(others["model"], state.global_step)
            self._began = now
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        whole = self._folder / f"save-{state.global_step}"
        (self._folder / f"checkpoint-{state.global_step}").rename(whole)
        for other in self._folder.iterdir():
            if other.is_dir() and other != whole:
                shutil.rmtree(other)
        self._last_end = time.monotonic()
        self._last_duration = self._last_end - self._began


class EarlyStop(TrainerCallback):  # type: ignore[misc]
    """End a training after epochs without a lower loss on a slice, and keep the weights of the best epoch.

    The losses are on disk: a training that goes on after a kill decides as one that was never killed.
    """

    def __init__(self, folder: Path, rows: Rows, patience: int, plan: Plan, trainer: StepTrainer) -> None:
        self._file = folder / "losses.json"
        self._rows = rows
        self._patience = patience
        self._plan = plan
        self._trainer = trainer

    def _losses(self, epochs: int) -> list[float]:
        """Return the losses after each of the first epochs."""
        return list(read_json(self._file).get("losses", []))[:epochs]

    def has_ended(self, step: int) -> bool:
        """Return whether the training has ended with this step."""
        losses = self._losses(self._plan.epochs(step)) if self._plan.ends_epoch(step) else []
        return bool(losses) and len(losses) - 1 - int(np.argmin(losses)) >= self._patience

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        step = state.global_step
        if not self._plan.ends_epoch(step):
            return
        epoch = self._plan.epochs(step)
        losses = [*self._losses(epoch - 1), self._trainer.mean_loss(self._rows)]
        if not math.isfinite(losses[-1]):
            raise NotFinite(f"the loss on the slice for early_stopping after step {step:,} is {losses[-1]}")
        if int(np.argmin(losses)) == epoch - 1:
            model = others["model"]
            weights = {name: value for name, value in model.named_parameters() if value.requires_grad}
            with atomic_path(self._best(epoch)) as temporary:
                torch.save(weights, temporary)
        write_text(self._file, json.dumps({"losses": losses}))
        control.should_training_stop = control.should_training_stop or self.has_ended(step)

    def _best(self, epoch: int) -> Path:
        return self._file.with_name(f"best-{epoch}.pt")

    def take_best(self, model: Any) -> int:
        """Give the model the weights of the best epoch, and return its number, from 1."""
        epoch = 1 + int(np.argmin(self._losses(len(self._plan.steps))))
        model.load_state_dict(
            torch.load(self._best(epoch), map_location="cpu", weights_only=True), strict=False
        )
        return epoch


class Progress(TrainerCallback):  # type: ignore[misc]
    """Write ``progress.json`` about once a second; ``facts`` of the training are in it as they are."""

    def __init__(self, path: Path, plan: Plan, trainer: StepTrainer, facts: Mapping[str, Any]) -> None:
        self._path = path
        self._plan = plan
        self._trainer = trainer
        self._facts = facts
        tokens = [plan.examples.tokens(rows, plan.token_budget) for rows in plan.steps]
        self._tokens = np.cumsum([(0, 0), *tokens], axis=0)  # of all steps before each, and with padding
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
        progress = {
            "step": step,
            "steps": len(self._plan.steps),
            "epoch": round(step / self._plan.steps_per_epoch, 4),
            "loss": self._trainer.last_loss,
            "seconds": round(time.monotonic() - self._began, 3),
            "tokens": int(self._tokens[step, 0]),
            "padded_tokens": int(self._tokens[step, 1]),
            "first_step": self._first_step,  # of this process, whose seconds these are
            **self._facts,
        }
        write_text(self._path, json.dumps(progress))
