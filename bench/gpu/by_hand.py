"""What a careful person writes by hand: ``python -m bench.gpu.by_hand JOB``, with plain transformers.

Rows sorted by length, batches of a fixed number of padded tokens, half precision. Prints what it measured as JSON.
"""

from __future__ import annotations

import csv
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BitsAndBytesConfig

from bench.gpu.peak import half_precision


def main() -> None:
    """Classify the rows of JOB, which is JSON.

    Its keys: model, table, rows, max_length, tokens (a batch, with padding), attention and quantization.
    """
    job = json.loads(sys.argv[1])
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    dtype = half_precision(device.type == "cuda")
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": job["attention"]}
    if job["quantization"]:
        options["quantization_config"] = BitsAndBytesConfig(
            **job["quantization"], bnb_4bit_compute_dtype=dtype
        )
    began = time.perf_counter()
    tokenizer: Any = AutoTokenizer.from_pretrained(job["model"])
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        job["model"], device_map={"": device}, **options
    ).eval()
    model.config.pad_token_id = tokenizer.pad_token_id
    load_seconds = time.perf_counter() - began
    with Path(job["table"]).open(newline="", encoding="utf-8") as file:
        texts = [row["text"] for row in csv.DictReader(file)][: job["rows"]]

    def classify(texts: list[str]) -> int:
        """Return the number of tokens; the probabilities are thrown away."""
        ids = tokenizer(texts, truncation=True, max_length=job["max_length"])["input_ids"]
        batches: list[list[int]] = []
        for row in sorted(range(len(ids)), key=lambda row: -len(ids[row])):
            if batches and (len(batches[-1]) + 1) * len(ids[batches[-1][0]]) <= job["tokens"]:
                batches[-1].append(row)
            else:
                batches.append([row])
        probabilities = np.empty((len(ids), model.config.num_labels))
        with torch.inference_mode():
            for batch in batches:
                inputs = tokenizer.pad({"input_ids": [ids[row] for row in batch]}, return_tensors="pt")
                logits = model(**inputs.to(device), use_cache=False).logits
                probabilities[batch] = logits.float().softmax(-1).cpu().numpy()
        return sum(map(len, ids))

    classify(texts[:1])  # loads kernels, as workers do before their first chunk
    began = time.perf_counter()
    tokens = classify(texts)
    seconds = time.perf_counter() - began
    measured: dict[str, Any] = {"tokens": tokens, "seconds": seconds, "load_seconds": load_seconds}
    measured["dtype"] = str(dtype).removeprefix("torch.")
    if device.type == "cuda":
        measured["peak_bytes"] = torch.cuda.max_memory_allocated()
    sys.stdout.write(json.dumps(measured) + "\n")


if __name__ == "__main__":
    main()
