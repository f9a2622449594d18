"""Train by transformers' Trainer in steps of whole effective batches, with an order of rows and a loss of ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainingArguments

from ensemble.common.errors import MemberError
from ensemble.members.huggingface.training.arguments import step_count
from ensemble.members.huggingface.training.examples import Examples, MicroBatch, Rows

# Rows are sorted by length within so many steps.
_WINDOW_STEPS = 32


@dataclass(frozen=True)
class Plan:
    """Hold the rows of each step over all epochs; ``token_budget`` is of a micro-batch, padding included."""

    examples: Examples
    steps: Sequence[Rows]
    steps_per_epoch: int
    token_budget: int

    def micro_batches(self, rows: Rows) -> list[MicroBatch]:
        parts = self.examples.micro_batches(rows, self.token_budget)
        return [self.examples.batch(sequences) for sequences in parts]

    def tokens(self) -> npt.NDArray[np.int64]:
        """Return the tokens of the first steps, by their number, int64 [steps + 1, 2]: without and with padding."""
        tokens = [self.examples.tokens(rows, self.token_budget) for rows in self.steps]
        return np.cumsum([(0, 0), *tokens], axis=0)

    def epochs(self, step: int) -> int:
        """Return the epochs that have ended with this step; the training's end ends an epoch, too."""
        return step // self.steps_per_epoch if step < len(self.steps) else -(-step // self.steps_per_epoch)

    def ends_epoch(self, step: int) -> bool:
        return self.epochs(step) > self.epochs(step - 1)


def make_plan(examples: Examples, rows: Rows, train: Mapping[str, Any], micro_batch: int, seed: int) -> Plan:
    """Return the steps over all epochs, for these rows to train on.

    Args:
        train: of the member, as in the config.
        micro_batch: rows at a time on the device if all were as long as the longest.
    """
    size, lengths = train["effective_batch_size"], examples.lengths
    steps_per_epoch = math.ceil(len(rows) / size)
    count = step_count(train["training_arguments"], steps_per_epoch)
    steps: list[Rows] = []
    for epoch in range(math.ceil(count / steps_per_epoch)):
        steps += [rows[some] for some in epoch_steps(lengths[rows], size, seed, epoch)]
    return Plan(examples, steps[:count], steps_per_epoch, micro_batch * int(lengths.max()))


def epoch_steps(lengths: Rows, batch_size: int, seed: int, epoch: int) -> list[Rows]:
    """Return the rows of each step of an epoch, so that rows of similar lengths share a step.

    The same arguments give the same steps: a training that goes on within an epoch sees the rows that are left.
    The very first step has the longest row, so that a device that is too small shows it at once.
    """
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(len(lengths))
    steps: list[Rows] = []
    for start in range(0, len(order), _WINDOW_STEPS * batch_size):
        rows = order[start : start + _WINDOW_STEPS * batch_size]
        rows = rows[np.argsort(-lengths[rows], kind="stable")]
        steps += [rows[first : first + batch_size] for first in range(0, len(rows), batch_size)]
    shuffled = [steps[number] for number in generator.permutation(len(steps))]
    if epoch == 0:
        longest = max(range(len(shuffled)), key=lambda number: int(lengths[shuffled[number]].max()))
        shuffled[0], shuffled[longest] = shuffled[longest], shuffled[0]
    return shuffled


def divide(
    group_of_row: npt.NDArray[Any], has_label: npt.NDArray[np.bool_], share: float, seed: int
) -> tuple[Rows, Rows]:
    """Return the rows for early stopping, a share of all, and those to train on; rows of a group stay together.

    Each label has its share of the slice, and at least one row to train on; a group counts for its rarest label.

    Args:
        has_label: bool [rows, labels]; a row may have several labels, or none.

    Raises:
        ValueError: every group is the only one with some label.
    """
    groups = np.unique(group_of_row, return_inverse=True)[1]
    # A last label, of every row, is the commonest.
    rows, labels = np.nonzero(np.column_stack([has_label, np.ones(len(groups), np.bool_)]))
    pairs = np.unique(np.stack([labels, groups[rows]]), axis=1)  # a label and a group that has it
    order = np.argsort(np.bincount(labels), kind="stable")
    rarity = np.empty_like(order)
    rarity[order] = np.arange(len(order))
    rarest = np.full(groups.max() + 1, len(order))
    np.minimum.at(rarest, pairs[1], rarity[pairs[0]])
    is_only_one = np.bincount(pairs[0])[pairs[0]] == 1
    free = np.setdiff1d(np.arange(len(rarest)), pairs[1, is_only_one])
    if not len(free):
        raise ValueError(
            "early_stopping: no rows can be held back that are not all rows of a label; add rows, or groups"
        )
    shuffled = np.random.default_rng(seed).permutation(free)
    shuffled = shuffled[np.argsort(rarest[shuffled], kind="stable")]
    count = min(max(1, round(share * len(rarest))), len(free))
    is_held = np.zeros(len(rarest), np.bool_)
    is_held[shuffled[((np.arange(count) + 0.5) * len(free) / count).astype(np.int64)]] = True
    for label in np.unique(pairs[0]):
        with_label = pairs[1, pairs[0] == label]
        if is_held[with_label].all():
            is_held[with_label[0]] = False
    return np.flatnonzero(is_held[groups]), np.flatnonzero(~is_held[groups])


class NotFinite(MemberError):
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
        self.remove_callback(PrinterCallback)
        self.model_accepts_loss_kwargs = False  # the loss is not the model's
        self.plan = plan
        self.last_loss: float | None = None

    def get_train_dataloader(self) -> Any:
        return DataLoader(
            self.train_dataset,
            batch_sampler=[rows.tolist() for rows in self.plan.steps],
            collate_fn=lambda rows: self.plan.micro_batches(np.array(rows, dtype=np.int64)),
            generator=torch.Generator(),  # of its own: it draws nothing that the model would draw
        )

    def training_step(
        self, model: Any, inputs: list[MicroBatch], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        model.train()
        rows = len(self.plan.steps[self.state.global_step])
        total = torch.zeros((), device=self.args.device)
        for micro_batch in inputs:
            loss = self._loss(model, micro_batch, rows)
            self.accelerator.backward(loss)
            total += loss.detach()
        self.last_loss = total.item()
        if not math.isfinite(self.last_loss):
            raise self._not_finite(f"the loss of step {self.state.global_step + 1:,} is {self.last_loss}")
        return total

    def _loss(self, model: Any, micro_batch: MicroBatch, rows: int) -> torch.Tensor:
        tensors = micro_batch.inputs.items()
        inputs: dict[str, Any] = {name: tensor.to(self.args.device) for name, tensor in tensors}
        inputs["labels"] = micro_batch.labels
        with self.plan.examples.reading(micro_batch):
            loss = self.compute_loss(model, inputs, num_items_in_batch=rows)
        assert isinstance(loss, torch.Tensor)
        return loss.to(self.args.device)

    def mean_loss(self, rows: Rows) -> float:
        """Return the mean loss of rows that are not trained on, without dropout; raise NotFinite if it is none."""
        model = self.model_wrapped
        model.eval()
        for layer in model.modules():
            # On some CPUs bitsandbytes packs 4-bit weights in an evaluation, and has no gradients from then on.
            if hasattr(layer, "compute_type_is_set"):
                layer.train()
        with torch.no_grad():
            parts = [self._loss(model, part, len(rows)) for part in self.plan.micro_batches(rows)]
        loss = float(torch.stack(parts).sum())
        if not math.isfinite(loss):
            step = self.state.global_step
            raise self._not_finite(f"the loss on the slice for early_stopping after step {step:,} is {loss}")
        return loss

    def check_finite(self) -> None:
        """Raise NotFinite for weights that are no numbers any more: an earlier save is better than these."""
        for parameter in self.model.parameters():
            if parameter.requires_grad and not torch.isfinite(parameter).all():
                raise self._not_finite(f"step {self.state.global_step:,} made weights that are not finite")

    def _not_finite(self, what: str) -> NotFinite:
        remedy = "a lower learning_rate in train.training_arguments"
        if self.args.fp16:
            remedy += ", or bf16 in place of fp16"
        return NotFinite(f"{what}; try {remedy}")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights of a save that are trained, by the names that the loaded model has."""
        self.check_finite()
        folder = Path(str(output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        # save_pretrained may rename weights, and what loads a save would leave out those that it does not find.
        parameters = self.model.named_parameters()
        weights = {name: value.detach().contiguous() for name, value in parameters if value.requires_grad}
        save_file(weights, folder / "model.safetensors")

    def floating_point_ops(self, inputs: Any) -> int:
        return 0
