"""Scores the demo's table with its Llama: python infer_llama.py --rows test.csv --out llama.csv"""

import argparse
from pathlib import Path

import pandas as pd
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

MODEL = Path(__file__).resolve().parents[2] / "demo" / "models" / "llama"
BATCH_SIZE, MAX_LENGTH = 64, 128

parser = argparse.ArgumentParser()
parser.add_argument("--rows", required=True)
parser.add_argument("--out", required=True)
arguments = parser.parse_args()

test = pd.read_csv(arguments.rows, keep_default_na=False)
test = test.sort_values("gloss", key=lambda glosses: glosses.str.len())  # rows of a batch are as long
tokenizer = AutoTokenizer.from_pretrained(MODEL)
tokenizer.pad_token = tokenizer.bos_token  # rows end with eos, which must count
model = AutoModelForSequenceClassification.from_pretrained(MODEL, dtype=torch.float32)
model.config.pad_token_id = tokenizer.pad_token_id
device = "cuda" if torch.cuda.is_available() else "cpu"
model.to(device).eval()

labels = [model.config.id2label[index] for index in range(model.config.num_labels)]
results = []
for start in range(0, len(test), BATCH_SIZE):
    batch = test[start : start + BATCH_SIZE]
    inputs = tokenizer(
        batch["gloss"].tolist(), padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="pt"
    )
    with torch.inference_mode():
        probabilities = model(**inputs.to(device)).logits.float().softmax(dim=-1)
    results.append(pd.DataFrame(probabilities.cpu().numpy(), index=batch["id"], columns=labels))
    print(f"{start + len(batch)} of {len(test)} rows", flush=True)

pd.concat(results).to_csv(arguments.out)
