"""Cross-validate a classifier as people write it by hand, to hold out-of-fold predictions of ``train`` against."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

from tests.checkpoints import reference

Numbers = npt.NDArray[np.float64]


def out_of_fold(
    base: Path,
    texts: Sequence[str],
    truth: Sequence[str],
    folds: Sequence[int],
    folder: Path,
    **arguments: Any,
) -> tuple[list[str], Numbers]:
    """Train a model for each fold by Trainer, and predict the rows that it has not seen, one at a time.

    Args:
        folds: of each row.
        arguments: of ``TrainingArguments``.

    Returns:
        the labels, and probabilities, float64 [rows, labels].
    """
    labels = sorted(set(truth))
    tokenizer = AutoTokenizer.from_pretrained(base)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.bos_token
    rows = [
        {"input_ids": ids, "labels": labels.index(label)}
        for ids, label in zip(tokenizer(list(texts))["input_ids"], truth, strict=True)
    ]
    probabilities = np.zeros((len(rows), len(labels)))
    set_seed(0)
    for fold in sorted(set(folds)):
        model = AutoModelForSequenceClassification.from_pretrained(
            base,
            id2label=dict(enumerate(labels)),
            label2id={label: number for number, label in enumerate(labels)},
            ignore_mismatched_sizes=True,
            pad_token_id=tokenizer.pad_token_id,
            dtype=torch.float32,
        )
        settings: dict[str, Any] = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
        trainer = Trainer(
            model=model,
            args=TrainingArguments(output_dir=str(folder), use_cpu=True, **settings, **arguments),
            train_dataset=[row for row, of_row in zip(rows, folds, strict=True) if of_row != fold],
            processing_class=tokenizer,
            data_collator=DataCollatorWithPadding(tokenizer),
        )
        trainer.train()
        trainer.save_model(str(folder))
        held_out = [row for row, of_row in enumerate(folds) if of_row == fold]
        probabilities[held_out] = reference(folder, [texts[row] for row in held_out], 512)
    return labels, probabilities


def log_losses(probabilities: Numbers, labels: Sequence[str], truth: Sequence[str]) -> Numbers:
    """Return the log loss of each row, float64 [rows]."""
    numbers = [labels.index(label) for label in truth]
    return np.asarray(-np.log(probabilities[np.arange(len(truth)), numbers]))


def is_worse(losses: Numbers, others: Numbers, margin: float = 0.0) -> bool:
    """Return whether the first losses are larger by more than noise, of the same rows.

    Args:
        margin: by which their means may differ, beside the noise of the rows.
    """
    differences = losses - others - margin
    rows = np.random.default_rng(0).integers(len(differences), size=(1000, len(differences)))
    return bool(np.quantile(differences[rows].mean(axis=1), 0.025) > 0)
