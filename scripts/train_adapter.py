#!/usr/bin/env python3
"""Train a LoRA adapter over a 4-bit base, and write the table it is for: what configs/lora.yaml runs.

    python scripts/train_adapter.py

The task is a small copy of a common one: which of two answers is better, or are they equal?  A prompt and two
answers are JSON lists of turns; an answer's turns are definitions of ``demo/train.csv`` or ``demo/test.csv``, and
the prompt asks for the one about something alive.  The adapter brings a head of three labels (``modules_to_save``)
for a base whose own head has the demo's topics.  Seeds are fixed; the last digits vary with the processor.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import pandas as pd

DEMO = Path(__file__).resolve().parents[1] / "demo"
BASE, ADAPTER, TABLE = DEMO / "models" / "llama", DEMO / "adapters" / "llama_pairs", DEMO / "pairs.csv"
LABELS = ["winner_model_a", "winner_model_b", "winner_tie"]
ALIVE = ("animal", "person", "plant")
PROMPTS = (
    ["Which answer is about something alive?"],
    ["Here are two answers.", "Which is about a living thing?"],
)
TRAIN_ROWS, TEST_ROWS, EPOCHS, BATCH, MAX_LENGTH, LEARNING_RATE = 8000, 300, 3, 32, 128, 2e-3


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__.partition("\n")[0]
    ).parse_args()  # it takes none; --help must not train
    train = pairs(pd.read_csv(DEMO / "train.csv"), TRAIN_ROWS, seed=1)
    pairs(pd.read_csv(DEMO / "test.csv"), TEST_ROWS, seed=2).to_csv(TABLE, index=False)
    ADAPTER.mkdir(parents=True, exist_ok=True)
    train_adapter(train)


def pairs(glosses: pd.DataFrame, rows: int, seed: int) -> pd.DataFrame:
    """Two answers of one to three definitions a row; in each answer all or none are about something alive."""
    draw = random.Random(seed)
    is_alive = glosses["label"].isin(ALIVE)
    texts = {alive: glosses.loc[is_alive == alive, "gloss"].tolist() for alive in (True, False)}
    table = []
    for row in range(rows):
        label = LABELS[row % 3]
        both = draw.random() < 0.5
        a = both if label == "winner_tie" else label == "winner_model_a"
        b = both if label == "winner_tie" else label == "winner_model_b"
        answers = [draw.sample(texts[alive], draw.randint(1, 3)) for alive in (a, b)]
        table.append([f"p{row:04d}", *map(json.dumps, (draw.choice(PROMPTS), *answers)), label])
    draw.shuffle(table)
    return pd.DataFrame(table, columns=["id", "prompt", "response_a", "response_b", "label"])


def text_of(row: pd.Series) -> str:
    """A row as the config's template has it."""
    prompt, a, b = (" ".join(json.loads(row[column])) for column in ("prompt", "response_a", "response_b"))
    return f"{prompt} <a>: {a} <b>: {b}"


def train_adapter(table: pd.DataFrame) -> None:
    """Train with peft over nf4 weights, as on a GPU that the whole base would not fit, and save the adapter."""
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file, save_file
    from torch.nn import functional
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, BitsAndBytesConfig

    torch.manual_seed(5)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.pad_token = tokenizer.bos_token  # not eos, whose last position is pooled
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = AutoModelForSequenceClassification.from_pretrained(
        BASE,
        num_labels=len(LABELS),
        ignore_mismatched_sizes=True,
        quantization_config=quantization,
        dtype=torch.float32,
        pad_token_id=tokenizer.pad_token_id,
        device_map={"": "cpu"},
    )
    lora = LoraConfig(
        task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules="all-linear", modules_to_save=["score"]
    )
    model = get_peft_model(base, lora)
    ids = tokenizer(table.apply(text_of, axis=1).tolist(), truncation=True, max_length=MAX_LENGTH)[
        "input_ids"
    ]
    truth = torch.tensor([LABELS.index(label) for label in table["label"]])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], LEARNING_RATE)
    steps = EPOCHS * -(-len(ids) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    model.train()
    for epoch in range(1, EPOCHS + 1):
        losses = []
        for chosen in torch.randperm(len(ids)).split(BATCH):  # type: ignore[no-untyped-call]
            inputs = tokenizer.pad({"input_ids": [ids[row] for row in chosen]}, return_tensors="pt")
            loss = functional.cross_entropy(model(**inputs).logits, truth[chosen])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        print(
            f"epoch {epoch} of {EPOCHS}: training log loss {sum(losses) / len(losses):.4f}", file=sys.stderr
        )
    model.peft_config["default"].base_model_name_or_path = f"demo/models/{BASE.name}"
    model.save_pretrained(ADAPTER)
    (ADAPTER / "README.md").unlink(missing_ok=True)  # peft's model card, which nobody has filled in
    path = ADAPTER / "adapter_model.safetensors"
    halves = {name: tensor.to(torch.float16) for name, tensor in load_file(path).items()}
    save_file(halves, path, metadata={"format": "pt"})
    path.chmod(0o644)


if __name__ == "__main__":
    main()
