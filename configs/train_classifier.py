"""Train a classifier on one CSV with plain transformers: the command of configs/train_command.yaml.

By hand:  python configs/train_classifier.py --base MODEL --train train.csv --text-column text --out FOLDER
On two processes:  accelerate launch --num_processes 2 configs/train_classifier.py --base MODEL ...
"""

from __future__ import annotations

import argparse

import pandas as pd
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a classifier on two columns of a CSV: a text and its label."
    )
    parser.add_argument("--base", required=True, help="the checkpoint to start from")
    parser.add_argument("--train", required=True, help="a CSV of the rows to train on")
    parser.add_argument("--out", required=True, help="the folder that gets the trained checkpoint")
    parser.add_argument("--text-column", default="text", help="the column of the texts")
    parser.add_argument("--label-column", default="label", help="the column of the labels")
    parser.add_argument("--fold", type=int, default=-1, help="the fold that is held out, for the seed")
    parser.add_argument("--epochs", type=float, default=3)
    options = parser.parse_args()
    table = pd.read_csv(options.train, dtype=str, keep_default_na=False)
    texts, answers = table[options.text_column].tolist(), table[options.label_column].tolist()
    labels = sorted({*answers})
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.bos_token
    model = AutoModelForSequenceClassification.from_pretrained(
        options.base,
        # Predictions go by these names, whatever their order.
        id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)},
        ignore_mismatched_sizes=True,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    encoded = tokenizer(texts, truncation=True, max_length=128)["input_ids"]
    rows = [
        {"input_ids": ids, "labels": labels.index(label)} for ids, label in zip(encoded, answers, strict=True)
    ]
    arguments = TrainingArguments(
        output_dir=options.out,
        learning_rate=2e-3,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=16,
        warmup_steps=10,
        seed=options.fold + 1,  # -1: all rows
        save_strategy="no",
        # Otherwise Trainer multiplies the loss of a classifier by the number of processes.
        average_tokens_across_devices=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    print(f"{len(rows)} rows, process {arguments.process_index + 1} of {arguments.world_size}", flush=True)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    trainer.train()
    trainer.save_model(options.out)


if __name__ == "__main__":
    main()
