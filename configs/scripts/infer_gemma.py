"""Scores the demo's table with its Gemma-2: python infer_gemma.py --rows test.csv --out gemma2.csv"""

import argparse
from pathlib import Path

import pandas as pd
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

MODEL = Path(__file__).resolve().parents[2] / "demo" / "models" / "gemma2"
BATCH_SIZE, MAX_LENGTH = 32, 128

parser = argparse.ArgumentParser()
parser.add_argument("--rows", required=True)
parser.add_argument("--out", required=True)
arguments = parser.parse_args()

test = pd.read_csv(arguments.rows, keep_default_na=False)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForSequenceClassification.from_pretrained(
    MODEL, dtype=torch.float32, attn_implementation="eager"
)
device = "cuda" if torch.cuda.is_available() else "cpu"
model.to(device).eval()

probabilities = []
for start in range(0, len(test), BATCH_SIZE):
    texts = test["gloss"][start : start + BATCH_SIZE].tolist()
    inputs = tokenizer(texts, padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")
    with torch.inference_mode():
        logits = model(**inputs.to(device)).logits.float()
    probabilities += logits.softmax(dim=-1).tolist()
    print(f"{len(probabilities)} of {len(test)} rows", flush=True)

labels = [model.config.id2label[index] for index in range(model.config.num_labels)]
result = pd.DataFrame(probabilities, columns=labels)
result.insert(0, "id", test["id"])
result.to_csv(arguments.out, index=False)
