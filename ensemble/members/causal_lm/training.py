"""Define what a language model learns from rows: the tokens of labels' texts behind each prompt."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
from torch import nn

from ensemble.members.causal_lm.scoring import head_at, paths
from ensemble.members.huggingface.loading.load import pad_token_id_of
from ensemble.members.huggingface.scoring.classifier import padded
from ensemble.members.huggingface.scoring.encode import Encoded
from ensemble.members.huggingface.training.examples import Examples, MicroBatch, Numbers, Rows
from ensemble.members.huggingface.training.trainee import Trainee


class LabelTextExamples(Examples):
    """Learn the tokens of labels' texts, and nothing else of a sequence.

    The loss of a row is the mean of its labels' negative log-likelihoods by its targets.  A label's log-likelihood
    is the sum of those of its text's tokens, each over the whole vocabulary.
    """

    def __init__(
        self, member: Any, encoded: Encoded, targets: Numbers, weights: Numbers, trainee: Trainee
    ) -> None:
        ids: list[Rows] = []
        last_of_prompt: list[int] = []
        # Of each sequence: the places behind the prompt's last token, the tokens there, and their weights.
        tokens_of_sequence: list[list[tuple[int, int, float]]] = []
        sequences_of_row: list[list[int]] = []
        for row, prompt in enumerate(encoded.inputs["input_ids"]):
            label_ids = member.label_ids(encoded, row)
            used = np.flatnonzero(targets[row]).tolist()
            if max(used) >= len(label_ids):
                raise ValueError(
                    f"choices: row {row + 1:,} of those to train on has {len(label_ids)} texts, and its label is "
                    f"number {max(used) + 1}; correct one of the two"
                )
            of_labels = [label_ids[label] for label in used]
            row_paths = paths(of_labels)
            sequences_of_row.append(list(range(len(ids), len(ids) + len(row_paths))))
            for path, labels in row_paths:
                ids.append(np.concatenate([prompt, np.array(path, dtype=np.int64)]))
                last_of_prompt.append(len(prompt) - 1)
                tokens_of_sequence.append(
                    [
                        (place, token, float(targets[row, used[label]] * weights[row]))
                        for label in labels
                        for place, token in enumerate(of_labels[label])
                    ]
                )
        lengths = np.array([len(tokens) for tokens in ids], dtype=np.int64)
        super().__init__(Encoded({"input_ids": ids}, lengths, truncated_rows=0), sequences_of_row)
        self._last_of_prompt = np.array(last_of_prompt, dtype=np.int64)
        self._tokens = tokens_of_sequence
        self._pad_token_id = pad_token_id_of(member.tokenizer)
        self._head: nn.Module = trainee.base.get_output_embeddings()

    def batch(self, sequences: Rows) -> MicroBatch:
        arrays = padded(self._encoded, sequences, self._pad_token_id)
        numbers = enumerate(sequences.tolist())
        entries = [(number, *entry) for number, sequence in numbers for entry in self._tokens[sequence]]
        rows, places, tokens, weights = zip(*entries, strict=True)
        # Places behind a shorter label are read for nothing.
        read = self._last_of_prompt[sequences, None] + np.arange(max(places) + 1)
        read = np.minimum(read, arrays["input_ids"].shape[1] - 1)
        labels = {
            "tokens": torch.tensor([rows, places, tokens], dtype=torch.int64),
            "weights": torch.tensor(weights, dtype=torch.float64),
        }
        inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return MicroBatch(inputs, labels, torch.from_numpy(read))

    def reading(self, batch: MicroBatch) -> contextlib.AbstractContextManager[None]:
        return head_at(self._head, batch.reads)

    def loss(self, outputs: Any, labels: dict[str, torch.Tensor], num_items_in_batch: int) -> torch.Tensor:
        scores = outputs.logits.float().log_softmax(-1)
        rows, places, tokens = labels["tokens"].to(scores.device)
        losses = -scores[rows, places, tokens]
        weights = labels["weights"].to(losses.device, losses.dtype)
        return torch.dot(losses, weights) / num_items_in_batch
