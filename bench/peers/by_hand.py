"""The best one can do by hand in one process: longest rows first, 2,048 padded tokens a batch."""

import csv
import gc
import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

TOKENS_PER_BATCH = 2048

job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
with Path(job["table"]).open(newline="", encoding="utf-8") as file:
    texts = [row["text"] for row in csv.DictReader(file)]

for name, path in job["models"].items():
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    if (
        tokenizer.pad_token is None
    ):  # Llama's; rows may end with the eos, which would then be taken for padding
        tokenizer.pad_token = tokenizer.bos_token
        model.config.pad_token_id = tokenizer.pad_token_id
    ids = tokenizer(texts, truncation=True, max_length=job["max_length"])["input_ids"]
    batches: list[list[int]] = []
    for row in sorted(range(len(ids)), key=lambda row: -len(ids[row])):
        if batches and (len(batches[-1]) + 1) * len(ids[batches[-1][0]]) <= TOKENS_PER_BATCH:
            batches[-1].append(row)
        else:
            batches.append([row])
    found = torch.empty(len(ids), model.config.num_labels)
    with torch.inference_mode():
        for batch in batches:
            inputs = tokenizer.pad({"input_ids": [ids[row] for row in batch]}, return_tensors="pt")
            found[batch] = model(**inputs).logits.softmax(-1)
    np.save(Path(job["output"]) / f"{name}.npy", found.numpy())
    del model, tokenizer
    gc.collect()
