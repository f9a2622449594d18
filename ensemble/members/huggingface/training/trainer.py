"""Train a member's base model on some rows of the table: the process of one training.

It leaves the checkpoint or the adapter in ``out``, and ``progress.json`` beside it.  Its saves are in
``out/saves`` until it ends; the same command goes on from the newest save.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, set_seed
from transformers.utils import logging

from ensemble.common.digests import digest_of
from ensemble.common.files import atomic_path, read_json, write_text
from ensemble.common.protocol import CommonSpec
from ensemble.common.shards import file_sha256
from ensemble.data.published_table import PublishedTable
from ensemble.members.huggingface.loading.architecture import learnt_positions
from ensemble.members.huggingface.loading.tokenizer import load_tokenizer
from ensemble.members.huggingface.training.arguments import is_checkpointed, training_arguments
from ensemble.members.huggingface.training.examples import Examples, Rows
from ensemble.members.huggingface.training.program import run_program
from ensemble.members.huggingface.training.steps import StepTrainer, divide, make_plan
from ensemble.members.huggingface.training.trainee import load_trainee

_PROGRESS_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class TrainerSpec:
    """Hold all that a training must know; sent as JSON.

    Attributes:
        table: the published table.
        rows: npz with ``rows`` int64 [n], their numbers in the table, ``targets`` float64 [n, labels], ``weights``
            float64 [n], and perhaps ``groups`` [n], which early stopping does not divide.
        settings: of the member, by its kind's ``training_settings``.
        train: of the member, as in the config.
        micro_batch: rows at a time on the device if all were as long as the longest; of shorter rows it takes more.
        save_seconds: as ``seconds`` of ``Saves``.
        rung: the rows at a time, the checkpointing and the optimizer, in words for the user.
        why: why they are these.
    """

    table: str
    rows: str
    out: str
    labels: Sequence[str]
    seed: int
    settings: Mapping[str, Any]
    train: Mapping[str, Any]
    micro_batch: int
    gradient_checkpointing: bool = False
    optim: str = "adamw_torch"
    save_seconds: float = 60.0
    rung: str = ""
    why: str = ""


def main() -> None:
    """Train by the spec in the file that is the argument."""
    run_program(lambda spec: Training(TrainerSpec(**spec)).train())


class Training:
    """Hold a loaded model, and its rows as the member encodes them for predictions, and train."""

    def __init__(self, spec: TrainerSpec) -> None:
        logging.set_verbosity_error()
        set_seed(spec.seed)
        self._spec = spec
        self._out = Path(spec.out)
        predictor = resolve_name(spec.settings["predictor"])
        common = CommonSpec(
            labels=tuple(spec.labels), activation="softmax", gpus=0, seed=spec.seed, table_path=spec.table
        )
        settings = {"asks_for_segments": spec.train["method"] != "full", **spec.settings["member"]}
        self.member_spec = predictor.Spec.of(common, settings)
        table = PublishedTable(Path(spec.table))
        member = predictor(self.member_spec, table)
        self.trainee = load_trainee(
            self.member_spec,
            method=spec.train["method"],
            lora=spec.train["lora_config"],
            problem_type=spec.settings["problem_type"],
            head_dropout=spec.settings.get("head_dropout", 0.0),
            checkpointing=spec.gradient_checkpointing or is_checkpointed(spec.train["training_arguments"]),
        )
        with np.load(spec.rows) as data:
            rows, targets, weights = data["rows"], data["targets"], data["weights"]
            self._groups = data.get("groups", np.arange(len(rows)))
        # The likeliest of soft labels; numbers of a regression are no labels.
        is_regression = self.trainee.activation == "none"
        is_likeliest = targets == targets.max(axis=1, keepdims=True)
        self._has_label = is_likeliest & (targets > 0) & (not is_regression)
        encoded = member.encode(table.take(rows), learnt_positions(self.trainee.base))
        for row, reason in encoded.problems.items():
            raise ValueError(f"row {rows[row]:,} of the training table cannot be read: {reason}")
        make_examples = resolve_name(spec.settings["examples"])
        self.examples: Examples = make_examples(member, encoded, targets, weights, self.trainee)

    def train(self) -> None:
        """Train, or go on with it, and leave the result in ``out``."""
        spec, stopping = self._spec, self._spec.train.get("early_stopping")
        held_rows, rows = np.arange(0), np.arange(len(self._groups))
        if stopping:
            held_rows, rows = divide(self._groups, self._has_label, stopping["share"], spec.seed)
        plan = make_plan(self.examples, rows, spec.train, spec.micro_batch, spec.seed)
        saves = Saves(self._out / "saves" / self._digest(held_rows), spec.save_seconds)
        own, count = spec.train["training_arguments"], len(plan.steps)
        arguments = training_arguments(own, self.trainee, spec.optim, saves.folder, count, spec.seed)
        trainer = StepTrainer(self.trainee.model, plan, arguments)
        newest = saves.newest()
        early_stop, has_ended = None, False
        if stopping:
            early_stop = EarlyStop(saves.folder, held_rows, stopping["patience"], trainer)
            has_ended = newest is not None and early_stop.has_ended(step_of(newest))
            trainer.add_callback(early_stop)
        told = ("micro_batch", "gradient_checkpointing", "optim", "rung", "why")
        facts = {"notes": self.trainee.notes, **{key: getattr(spec, key) for key in told}}
        trainer.add_callback(Progress(self._out / "progress.json", trainer, facts))
        trainer.add_callback(saves)
        if not has_ended:
            trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
            trainer.check_finite()
        if early_stop is not None:
            early_stop.take_best()
        self.trainee.save(self._out)
        # A fresh one: calls leave their settings in a tokenizer.
        tokenizer = load_tokenizer(self.member_spec)
        if self.examples.new_pad_token_id is not None:
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(self.examples.new_pad_token_id)
        tokenizer.save_pretrained(self._out)
        remove(saves.folder)
        saves.folder.parent.rmdir()

    def _digest(self, held_rows: Rows) -> str:
        """Return a digest of what saves belong to: another training, or optimizer, cannot go on from them."""
        spec, rows = self._spec, file_sha256(Path(self._spec.rows))
        slices = [held_rows.tolist()] if len(held_rows) else []
        return digest_of([spec.labels, spec.seed, spec.settings, spec.train, spec.optim, rows, *slices])[:16]


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
