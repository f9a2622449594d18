"""Define what a classifier learns from rows: micro-batches of token ids, and their loss."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from ensemble.members.huggingface.loading.load import pad_token_id_of
from ensemble.members.huggingface.scoring.batching import make_batches
from ensemble.members.huggingface.scoring.classifier import Classifier, searching
from ensemble.members.huggingface.scoring.encode import Encoded
from ensemble.members.huggingface.training.trainee import Trainee

Rows = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class MicroBatch:
    """Hold sequences that go through the model at a time.

    Attributes:
        inputs: of the model's forward pass, int64 [sequences, width].
        labels: for ``Examples.loss``.
        reads: what ``Examples.reading`` needs: the batch's pad id, or the positions whose logits are read.
    """

    inputs: dict[str, torch.Tensor]
    labels: dict[str, torch.Tensor]
    reads: torch.Tensor


class Examples(ABC):
    """Hold the encoded rows of a training; a row is one sequence or several.

    A kind's class is made of the member, rows that its ``encode`` has encoded, the rows' targets (probabilities by
    the config's labels, or the numbers of a regression, float64 [rows, labels]), the rows' weights in the loss
    (float64 [rows]) and the model.

    Args:
        encoded: the sequences.
        sequences_of_row: their numbers, for each row.
    """

    def __init__(self, encoded: Encoded, sequences_of_row: list[list[int]]) -> None:
        self._encoded = encoded
        self._sequences_of_row = sequences_of_row
        longest = [max(encoded.lengths[numbers].tolist()) for numbers in sequences_of_row]
        self.lengths: Rows = np.array(longest, dtype=np.int64)  # tokens of each row's longest sequence
        self._equal_lengths = False  # whether a micro-batch must have no padding at all
        # What the model gets as its pad id, if its base has none; the saved tokenizer pads with the same token.
        self.new_pad_token_id: int | None = None

    @abstractmethod
    def batch(self, sequences: Rows) -> MicroBatch:
        """Return these sequences, padded to the longest."""

    @abstractmethod
    def reading(self, batch: MicroBatch) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model's forward pass reads the right positions of a batch."""

    @abstractmethod
    def loss(self, outputs: Any, labels: dict[str, torch.Tensor], num_items_in_batch: int) -> torch.Tensor:
        """Return the sum of the rows' losses, times their weights, by the rows of the effective batch."""

    def micro_batches(self, rows: Rows, token_budget: int) -> list[Rows]:
        """Cut the sequences of rows into micro-batches of at most so many tokens, padding included."""
        sequences = np.array([number for row in rows.tolist() for number in self._sequences_of_row[row]])
        lengths = self._encoded.lengths[sequences]
        batches = make_batches(lengths, token_budget, equal_lengths=self._equal_lengths)
        return [sequences[batch] for batch in batches]

    def tokens(self, rows: Rows, token_budget: int) -> tuple[int, int]:
        """Return the tokens of a step with these rows, without and with padding."""
        parts = [self._encoded.lengths[part] for part in self.micro_batches(rows, token_budget)]
        padded_tokens = sum(len(part) * int(part.max()) for part in parts)
        return sum(int(part.sum()) for part in parts), padded_tokens


class ClassifierExamples(Examples):
    """Learn the outputs of a classification head.

    The loss is that of transformers' own heads: softmax cross-entropy, the mean of the labels' binary
    cross-entropies where labels do not exclude each other, the mean squared error for a regression.
    """

    def __init__(
        self, member: Any, encoded: Encoded, targets: Numbers, weights: Numbers, trainee: Trainee
    ) -> None:
        super().__init__(encoded, [[row] for row in range(len(targets))])
        pad_token_id = pad_token_id_of(member.tokenizer)
        self._config = trainee.base.config
        # A whole model is saved with a pad id, as users run it in batches, too: from now on its head goes by that.
        # The config of an adapter's base stays as it is; a head of its own reads by the mask.
        if trainee.head is None and not trainee.has_adapter and self._config.pad_token_id is None:
            self.new_pad_token_id = _unread_token(member.tokenizer, encoded)
            self._config.pad_token_id = self.new_pad_token_id
        self._classifier = self._make_classifier(member, trainee, pad_token_id)
        self._activation = trainee.activation
        self._targets = torch.from_numpy(targets[:, trainee.label_order])
        self._weights = torch.from_numpy(weights)
        # bitsandbytes' layers must not be evaluated before they are trained; see ``StepTrainer.mean_loss``.
        if getattr(trainee.base, "hf_quantizer", None) is None:
            trainee.base.eval()
            tolerance = 1e-3 if trainee.base.dtype == torch.float32 else 0.05
            self._equal_lengths = not self._tolerates_padding(tolerance)

    def _make_classifier(self, member: Any, trainee: Trainee, pad_token_id: int) -> Classifier:
        """Return what would predict with the model."""
        return Classifier(trainee.base, pad_token_id)

    def _tolerates_padding(self, tolerance: float) -> bool:
        """Return whether the shortest row gets the same outputs alone and padded to the longest one's length."""
        pair = np.array([self.lengths.argmin(), self.lengths.argmax()])
        with self.reading(self.batch(pair)):
            alone = self._classifier.logits(self._encoded, pair[:1])
            together = self._classifier.logits(self._encoded, pair)[:1]
        difference = float((alone - together).abs().max())
        return difference <= tolerance * max(1.0, float(alone.abs().max()))

    def batch(self, sequences: Rows) -> MicroBatch:
        arrays, pad_token_id = self._classifier.for_own_head(self._encoded, sequences)
        inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
        labels = {"targets": self._targets[sequences], "weights": self._weights[sequences]}
        return MicroBatch(inputs, labels, torch.tensor(pad_token_id))

    def reading(self, batch: MicroBatch) -> contextlib.AbstractContextManager[None]:
        return searching(self._config, int(batch.reads))

    def _logits(self, outputs: Any, labels: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the head's outputs, [rows, labels], for those of the model's forward pass."""
        logits: torch.Tensor = outputs.logits
        return logits

    def loss(self, outputs: Any, labels: dict[str, torch.Tensor], num_items_in_batch: int) -> torch.Tensor:
        logits = self._logits(outputs, labels).float()
        targets = labels["targets"].to(logits.device, logits.dtype)
        if self._activation == "softmax":
            losses = -(targets * logits.log_softmax(-1)).sum(-1)
        elif self._activation == "sigmoid":
            losses = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(-1)
        else:
            losses = functional.mse_loss(logits, targets, reduction="none").mean(-1)
        weights = labels["weights"].to(losses.device, losses.dtype)
        return torch.dot(losses, weights) / num_items_in_batch


def _unread_token(tokenizer: Any, encoded: Encoded) -> int | None:
    """Return a special token that no row ends with: a head finds its token as the last one that is no pad token.

    Eos is none where the tokenizer adds it to each text: the head would read the token before it, and learn less.
    """
    last_tokens = {int(ids[-1]) for ids in encoded.inputs["input_ids"] if len(ids)}
    names = ("pad_token_id", "eos_token_id", "unk_token_id", "bos_token_id")
    candidates = (getattr(tokenizer, name) for name in names)
    return next((token for token in candidates if token is not None and token not in last_tokens), None)
