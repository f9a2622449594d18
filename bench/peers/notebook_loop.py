"""The usual notebook: file order, 16 rows a batch, padded to the longest, one model after the other."""

import csv
import gc
import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
with Path(job["table"]).open(newline="", encoding="utf-8") as file:
    texts = [row["text"] for row in csv.DictReader(file)]

for name, path in job["models"].items():
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    model.eval()
    found = []
    with torch.no_grad():
        for start in range(0, len(texts), 16):
            inputs = tokenizer(
                texts[start : start + 16],
                padding=True,
                truncation=True,
                max_length=job["max_length"],
                return_tensors="pt",
            )
            found.append(model(**inputs).logits.softmax(-1))
    np.save(Path(job["output"]) / f"{name}.npy", torch.cat(found).numpy())
    del model, tokenizer
    gc.collect()
