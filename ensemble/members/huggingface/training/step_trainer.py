"""Train by transformers' Trainer in steps of whole effective batches, with an order of rows and a loss of ours."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainingArguments

from ensemble.common.errors import MemberError
from ensemble.members.huggingface.training.examples import MicroBatch, Rows
from ensemble.members.huggingface.training.plan import Plan


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
        """Write the weights of a save; those of a whole model by the names that the loaded model has."""
        self.check_finite()
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
