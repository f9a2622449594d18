"""sentence-transformers' CrossEncoder, which sorts by length itself, at its own batch size."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
from sentence_transformers import CrossEncoder

job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
first, second = job["columns"]
with Path(job["table"]).open(newline="", encoding="utf-8") as file:
    pairs = [(row[first], row[second]) for row in csv.DictReader(file)]

for name, path in job["models"].items():
    model = CrossEncoder(path, max_length=job["max_length"], device="cpu")
    scores = model.predict(pairs, show_progress_bar=False)
    np.save(Path(job["output"]) / f"{name}.npy", scores.reshape(-1, 1))
