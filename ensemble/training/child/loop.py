"""Train by transformers' Trainer; the order of rows, the loss, the saves and the progress are ours."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from ensemble.common.files import atomic_path, read_json, write_text
from ensemble.members.huggingface.training.examples import MicroBatch, Rows
from ensemble.training.child.steps import Plan

_PROGRESS_SECONDS = 1.0


class NotFinite(Exception):
    """Report a loss or weights that are no numbers any more, from which no step leads back."""


class StepTrainer(Trainer):  # type: ignore[misc]
    """Give Trainer a whole effective batch as one batch, and run its micro-batches within a step.

    So Trainer never divides a loss, and its count of batches is that of steps, which a resumed training skips.
    """

    def __init__(self, model: Any, plan: Plan, arguments: TrainingArguments) -> None:
        rows = list(range(len(plan.examples.lengths)))
        super().__init__(
            model=model, args=arguments, train_dataset=rows, compute_loss_func=plan.examples.loss
        )
        self.model_accepts_loss_kwargs = False  # the loss is not the model's
        self._plan = plan
        self.last_loss: float | None = None

    def get_train_dataloader(self) -> Any:
        return DataLoader(
            self.train_dataset,
            batch_sampler=[rows.tolist() for rows in self._plan.steps],
            collate_fn=lambda rows: self._plan.micro_batches(np.array(rows, dtype=np.int64)),
            generator=torch.Generator(),  # of its own: it draws nothing that the model would draw
        )

    def training_step(
        self, model: Any, inputs: list[MicroBatch], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        model.train()
        rows = len(self._plan.steps[self.state.global_step])
        total = torch.zeros((), device=self.args.device)
        for micro_batch in inputs:
            loss = self._loss(model, micro_batch, rows)
            self.accelerator.backward(loss)
            total += loss.detach()
        self.last_loss = total.item()
        if not math.isfinite(self.last_loss):
            raise NotFinite(f"the loss of step {self.state.global_step + 1:,} is {self.last_loss}")
        return total

    def _loss(self, model: Any, micro_batch: MicroBatch, rows: int) -> torch.Tensor:
        tensors = micro_batch.inputs.items()
        inputs: dict[str, Any] = {name: tensor.to(self.args.device) for name, tensor in tensors}
        inputs["labels"] = micro_batch.labels
        with self._plan.examples.reading(micro_batch):
            loss = self.compute_loss(model, inputs, num_items_in_batch=rows)
        assert isinstance(loss, torch.Tensor)
        return loss.to(self.args.device)

    def mean_loss(self, rows: Rows) -> float:
        """Return the mean loss of rows that are not trained on, without dropout."""
        model = self.model_wrapped
        model.eval()
        with torch.no_grad():
            parts = [self._loss(model, part, len(rows)) for part in self._plan.micro_batches(rows)]
        return float(torch.stack(parts).sum())

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights of a save; those of a whole model by the names that the loaded model has."""
        folder = Path(str(output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        if hasattr(self.model, "peft_config"):
            self.model.save_pretrained(folder)
            return
        # save_pretrained may rename weights, and what loads a save would leave out those that it does not find.
        weights = {name: parameter.detach().contiguous() for name, parameter in self.model.named_parameters()}
        save_file(weights, folder / "model.safetensors")

    def floating_point_ops(self, inputs: Any) -> int:
        return 0


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
    """Write ``progress.json`` about once a second."""

    def __init__(self, path: Path, plan: Plan, trainer: StepTrainer, notes: Sequence[str]) -> None:
        self._path = path
        self._plan = plan
        self._trainer = trainer
        self._notes = notes
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
        if now - self._last >= _PROGRESS_SECONDS or state.global_step == len(self._plan.steps):
            self._last = now
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
            "notes": self._notes,
        }
        write_text(self._path, json.dumps(progress))


def check_finite(model: Any, step: int) -> None:
    """Raise NotFinite for weights that are no numbers any more: an earlier save is better than these."""
    for parameter in model.parameters():
        if parameter.requires_grad and not torch.isfinite(parameter).all():
            raise NotFinite(f"step {step:,} made weights that are not finite")
