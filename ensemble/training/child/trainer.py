"""Train a member's base model on some rows of the table: the process of one training.

It leaves the checkpoint or the adapter in ``out``, and ``progress.json`` beside it.  Its saves are in
``out/saves`` until it ends; the same command goes on from the newest save.  If it fails, it exits with 1 and
``problem.json`` says why.  A second argument, a JSON object, has fields of the spec that
replace the file's.
"""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from transformers import PrinterCallback, set_seed
from transformers.utils import logging

from ensemble.common.digests import digest_of
from ensemble.common.errors import EnsembleError
from ensemble.common.files import write_text
from ensemble.common.protocol import CommonSpec
from ensemble.common.python_process import die_with_parent
from ensemble.common.shards import file_sha256
from ensemble.common.torch_errors import Verdict, classify, is_out_of_memory, one_line
from ensemble.data.published_table import PublishedTable
from ensemble.members.huggingface.checkpoint.adapter_files import LABELS_FILE
from ensemble.members.huggingface.loading.describe import learnt_positions
from ensemble.members.huggingface.loading.tokenizer import load_tokenizer
from ensemble.members.huggingface.training.arguments import is_checkpointed, step_count, training_arguments
from ensemble.members.huggingface.training.examples import Examples, Rows
from ensemble.members.huggingface.training.step_trainer import NotFinite, Plan, StepTrainer, check_finite
from ensemble.members.huggingface.training.trainee import Trainee, load_trainee
from ensemble.training.child.callbacks import EarlyStop, Progress, Saves
from ensemble.training.child.ladder import Rung
from ensemble.training.child.steps import epoch_steps


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
        why: why the rows at a time, the checkpointing and the optimizer are these, for the user.
        sizes: rows at a time to try instead of training; see ``try_out``.
    """

    table: str
    rows: str
    out: str
    labels: tuple[str, ...]
    seed: int
    settings: Mapping[str, Any]
    train: Mapping[str, Any]
    micro_batch: int
    gradient_checkpointing: bool = False
    optim: str = "adamw_torch"
    save_seconds: float = 60.0
    why: str = ""
    sizes: Sequence[int] = ()


def main() -> None:
    """Train by the spec in the file that is the argument."""
    die_with_parent(os.getppid())
    content = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    content |= json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    spec = TrainerSpec(**{**content, "labels": tuple(content["labels"])})
    problem = Path(spec.out) / "problem.json"
    problem.unlink(missing_ok=True)
    try:
        if spec.sizes:
            try_out(spec)
        else:
            train(spec)
    except Exception as error:
        traceback.print_exc()
        write_text(problem, json.dumps({"kind": _kind_of(error), "text": one_line(error)}))
        sys.exit(1)


def _kind_of(error: Exception) -> str:
    """Return what may help: for "memory" smaller batches, for "error" a new process, else another config."""
    if is_out_of_memory(error) or isinstance(error, MemoryError):
        return "memory"
    is_lasting = isinstance(error, ValueError | NotFinite | EnsembleError)
    return "lasting" if is_lasting or classify(error) is Verdict.HOPELESS else "error"


def train(spec: TrainerSpec) -> None:
    """Train, or go on with it, and leave the result in ``out``."""
    logging.set_verbosity_error()
    set_seed(spec.seed)
    member_spec, trainee, examples, data = prepare(spec)
    early_stopping = spec.train.get("early_stopping")
    held_rows, rows = _divide(spec, data, early_stopping["share"] if early_stopping else 0.0)
    plan = make_plan(spec, examples, rows)
    out = Path(spec.out)
    folder = out / "saves" / _digest(spec)
    folder.mkdir(parents=True, exist_ok=True)
    for other in (out / "saves").iterdir():  # of other settings
        if other != folder:
            _remove(other)
    trainer = _trainer(spec, trainee, plan, folder)
    saves = Saves(folder, spec.save_seconds)
    newest = saves.newest()
    step = 0 if newest is None else int(newest.name.partition("-")[2])
    has_ended, early_stop = False, None
    if early_stopping:
        early_stop = EarlyStop(folder, held_rows, early_stopping["patience"], plan, trainer)
        trainer.add_callback(early_stop)
        has_ended = early_stop.has_ended(step)
    rung = Rung(spec.micro_batch, spec.gradient_checkpointing, spec.optim)
    facts = {"notes": trainee.notes, **asdict(rung), "rung": rung.text, "why": spec.why}
    trainer.add_callback(Progress(out / "progress.json", plan, trainer, facts))
    trainer.add_callback(saves)
    if not has_ended:
        trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
        check_finite(trainee.model, trainer.state.global_step)
    if early_stop is not None:
        early_stop.take_best(trainee.model)
    config = trainee.base.config
    if trainee.model is trainee.base:
        trainee.base.to(trainee.dtype)  # as the base is stored
    elif config.problem_type is not None:  # peft stores no names of labels
        labels = {"id2label": config.id2label, "problem_type": config.problem_type}
        write_text(out / LABELS_FILE, json.dumps(labels))
    trainee.model.save_pretrained(out)
    load_tokenizer(member_spec).save_pretrained(out)  # a fresh one: calls leave their settings in a tokenizer
    _remove(folder)
    (out / "saves").rmdir()


def _remove(saves: Path) -> None:
    """Remove a folder of saves, so that a kill meanwhile leaves nothing that looks like a whole save."""
    shutil.rmtree(saves.rename(saves.with_name(f"{saves.name}.removed")))


def _trainer(spec: TrainerSpec, trainee: Trainee, plan: Plan, folder: Path) -> StepTrainer:
    arguments = training_arguments(
        own=spec.train["training_arguments"],
        method=spec.train["method"],
        optim=spec.optim,
        precision=trainee.precision,
        folder=folder,
        steps=len(plan.steps),
        seed=spec.seed,
    )
    trainer = StepTrainer(trainee.model, plan, arguments)
    trainer.remove_callback(PrinterCallback)
    return trainer


def try_out(spec: TrainerSpec) -> None:
    """Try ``spec.sizes`` as rows at a time, one after another, until one fits.

    ``trial.json`` in ``out`` has how many were begun, before each is, and whether the last of them ``fits``.
    """
    logging.set_verbosity_error()
    _, trainee, examples, _ = prepare(spec)
    for begun, size in enumerate(spec.sizes, 1):
        write_text(Path(spec.out) / "trial.json", json.dumps({"begun": begun, "fits": False}))
        # The second micro-batch needs most, since it adds to gradients; and the second step, beside the averages.
        rows = np.full(min(2 * size, spec.train["effective_batch_size"]), examples.lengths.argmax())
        plan = Plan(examples, [rows, rows], 1, size * int(examples.lengths.max()))
        if _fits(spec, trainee, plan):
            write_text(Path(spec.out) / "trial.json", json.dumps({"begun": begun, "fits": True}))
            return
        # The error is gone by now, which held the tensors of its pass.
        trainee.model.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()


def _fits(spec: TrainerSpec, trainee: Trainee, plan: Plan) -> bool:
    try:
        _trainer(spec, trainee, plan, Path(spec.out) / "saves" / "trial").train()
    except NotFinite:  # of weights that nobody keeps
        return True
    except Exception as error:
        if _kind_of(error) != "memory":
            raise
        return False
    return True


def prepare(spec: TrainerSpec) -> tuple[Any, Trainee, Examples, Mapping[str, Any]]:
    """Load the model, and encode the rows as the member does for predictions.

    Returns:
        the member's spec, the model, what it learns, and the content of ``spec.rows``.
    """
    predictor = resolve_name(spec.settings["predictor"])
    common = CommonSpec(
        labels=spec.labels, activation="softmax", gpus=0, seed=spec.seed, table_path=spec.table
    )
    member_spec = predictor.Spec.of(common, spec.settings["member"])
    table = PublishedTable(Path(spec.table))
    member = predictor(member_spec, table)
    own, problem_type = spec.train["training_arguments"], spec.settings["problem_type"]
    checkpointing = spec.gradient_checkpointing or is_checkpointed(own)
    trainee = load_trainee(
        member_spec, spec.train["method"], spec.train["lora_config"], problem_type, checkpointing
    )
    with np.load(spec.rows) as stored:
        data = {name: stored[name] for name in stored.files}
    encoded = member.encode(table.take(data["rows"]), learnt_positions(trainee.base))
    for row, reason in encoded.problems.items():
        raise ValueError(f"row {data['rows'][row]:,} of the training table cannot be read: {reason}")
    examples = resolve_name(spec.settings["examples"])
    return member_spec, trainee, examples(member, encoded, data["targets"], data["weights"], trainee), data


def _divide(spec: TrainerSpec, data: Mapping[str, Any], share: float) -> tuple[Rows, Rows]:
    """Return the rows for early stopping, and those to train on; rows of a group stay together."""
    rows = np.arange(len(data["rows"]))
    if not share:
        return rows[:0], rows
    groups = np.unique(data.get("groups", rows), return_inverse=True)[1]
    order = np.random.default_rng(spec.seed).permutation(groups.max() + 1)
    is_held = np.isin(groups, order[: max(1, round(share * len(order)))])
    if is_held.all():
        raise ValueError("early_stopping: no rows are left to train on; it needs more rows, or more groups")
    return rows[is_held], rows[~is_held]


def make_plan(spec: TrainerSpec, examples: Examples, rows: Rows) -> Plan:
    """Return the steps over all epochs, for these rows to train on."""
    own, size, lengths = (
        spec.train["training_arguments"],
        spec.train["effective_batch_size"],
        examples.lengths,
    )
    steps_per_epoch = math.ceil(len(rows) / size)
    count = step_count(own, steps_per_epoch)
    steps: list[Rows] = []
    for epoch in range(math.ceil(count / steps_per_epoch)):
        steps += [rows[some] for some in epoch_steps(lengths[rows], size, spec.seed, epoch)]
    return Plan(examples, steps[:count], steps_per_epoch, spec.micro_batch * int(lengths.max()))


def _digest(spec: TrainerSpec) -> str:
    """Return a digest of what the saves belong to: another training, or optimizer, cannot go on from them."""
    rows = file_sha256(Path(spec.rows))
    return digest_of([spec.labels, spec.seed, spec.settings, spec.train, spec.optim, rows])[:16]
