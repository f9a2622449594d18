"""transformers' own pipeline at a batch size of 16, one model after the other."""

import csv
import gc
import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import pipeline

job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
with Path(job["table"]).open(newline="", encoding="utf-8") as file:
    texts = [row["text"] for row in csv.DictReader(file)]

for name, path in job["models"].items():
    classify = pipeline("text-classification", model=path, dtype=torch.float32, device="cpu")
    labels = list(classify.model.config.id2label.values())
    answers = classify(texts, batch_size=16, truncation=True, max_length=job["max_length"], top_k=None)
    found = np.empty((len(texts), len(labels)))
    for row, answer in enumerate(answers):
        for one in answer:
            found[row, labels.index(one["label"])] = one["score"]
    np.save(Path(job["output"]) / f"{name}.npy", found)
    del classify
    gc.collect()
