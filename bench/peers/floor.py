"""What no program can be faster than: forward passes over as many tokens as the rows have, and no padding.

The rows are sorted and cut as in ``by_hand``; each batch is then computed as so many rows of the mean length.
Only the forward passes are timed: ``floor.json`` has their ``seconds`` and ``tokens``, over all models.
"""

import csv
import gc
import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

TOKENS_PER_BATCH = 2048
LOWEST_ID = 100  # above the special tokens

job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
with Path(job["table"]).open(newline="", encoding="utf-8") as file:
    texts = [row["text"] for row in csv.DictReader(file)]


def shapes(lengths: list[int]) -> list[tuple[int, int]]:
    """(rows, tokens of each) of batches that hold as many tokens as the rows do, all together."""
    batches: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        if batches and (len(batches[-1]) + 1) * batches[-1][0] <= TOKENS_PER_BATCH:
            batches[-1].append(length)
        else:
            batches.append([length])
    found, owed = [], 0
    for batch in batches:
        each = max(1, round((sum(batch) + owed) / len(batch)))
        owed += sum(batch) - len(batch) * each  # what rounding leaves is for the next batch
        found.append((len(batch), each))
    return found


seconds, tokens = 0.0, 0
for path in job["models"].values():
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    lengths = [
        len(ids) for ids in tokenizer(texts, truncation=True, max_length=job["max_length"])["input_ids"]
    ]
    batches = [torch.randint(LOWEST_ID, model.config.vocab_size, shape) for shape in shapes(lengths)]
    with torch.inference_mode():
        model(input_ids=batches[0])  # what is done once is not part of the floor
        began = time.perf_counter()
        for batch in batches:
            model(input_ids=batch)
        seconds += time.perf_counter() - began
    tokens += sum(batch.numel() for batch in batches)
    del model, tokenizer
    gc.collect()
(Path(job["output"]) / "floor.json").write_text(json.dumps({"seconds": seconds, "tokens": tokens}))
