"""Train a member's base model on some rows of the table: the process of one training.

It leaves the checkpoint or the adapter in ``out``, and ``progress.json`` beside it.  Its saves are in
``out/saves`` until it ends; the same command goes on from the newest save.
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from transformers import set_seed
from transformers.utils import logging

from ensemble.common.digests import digest_of
from ensemble.common.files import write_text
from ensemble.common.protocol import CommonSpec
from ensemble.common.shards import file_sha256
from ensemble.data.published_table import PublishedTable
from ensemble.members.huggingface.loading.describe import learnt_positions
from ensemble.members.huggingface.loading.tokenizer import load_tokenizer
from ensemble.members.huggingface.training.arguments import is_checkpointed, training_arguments
from ensemble.members.huggingface.training.callbacks import EarlyStop, Progress, Saves, remove, step_of
from ensemble.members.huggingface.training.examples import Examples, Rows
from ensemble.members.huggingface.training.plan import Plan, divide, make_plan
from ensemble.members.huggingface.training.program import lacks_memory, run_program
from ensemble.members.huggingface.training.step_trainer import NotFinite, StepTrainer
from ensemble.members.huggingface.training.trainee import load_trainee


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
        sizes: rows at a time to try instead of training; see ``Training.try_out``.
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
    sizes: Sequence[int] = ()


def main() -> None:
    """Train by the spec in the file that is the argument, or try what fits."""
    run_program(_train_or_try_out)


def _train_or_try_out(content: dict[str, Any]) -> None:
    training = Training(TrainerSpec(**content))
    if content.get("sizes"):
        training.try_out()
    else:
        training.train()


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
            checkpointing=spec.gradient_checkpointing or is_checkpointed(spec.train["training_arguments"]),
        )
        with np.load(spec.rows) as data:
            rows, targets, weights = data["rows"], data["targets"], data["weights"]
            self._groups = data.get("groups", np.arange(len(rows)))
        # The likeliest of soft labels; numbers of a regression are no labels.
        is_regression = self.trainee.activation == "none"
        self._has_label = (
            (targets == targets.max(axis=1, keepdims=True)) & (targets > 0) & (not is_regression)
        )
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
        trainer = self._make_trainer(plan, saves.folder)
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

    def _make_trainer(self, plan: Plan, folder: Path) -> StepTrainer:
        own, seed = self._spec.train["training_arguments"], self._spec.seed
        arguments = training_arguments(own, self.trainee, self._spec.optim, folder, len(plan.steps), seed)
        return StepTrainer(self.trainee.model, plan, arguments)

    def try_out(self) -> None:
        """Try ``sizes`` as rows at a time, one after another, until one fits.

        ``trial.json`` in ``out`` has how many were begun, before each is, and whether the last of them ``fits``.
        """
        for begun, size in enumerate(self._spec.sizes, 1):
            write_text(self._out / "trial.json", json.dumps({"begun": begun, "fits": False}))
            if self._fits(size):
                write_text(self._out / "trial.json", json.dumps({"begun": begun, "fits": True}))
                return
            # The error is gone by now, which held the tensors of its pass.
            self.trainee.model.zero_grad()
            gc.collect()
            torch.cuda.empty_cache()

    def _fits(self, size: int) -> bool:
        lengths = self.examples.lengths
        # The second micro-batch needs most, since it adds to gradients; and the second step, beside the averages.
        rows = np.full(min(2 * size, self._spec.train["effective_batch_size"]), lengths.argmax())
        plan = Plan(self.examples, [rows, rows], 1, size * int(lengths.max()))
        try:
            with contextlib.suppress(NotFinite):  # of weights that nobody keeps
                self._make_trainer(plan, self._out / "saves" / "trial").train()
        except Exception as error:
            if not lacks_memory(error):
                raise
            return False
        return True
