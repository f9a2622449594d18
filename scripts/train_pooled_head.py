#!/usr/bin/env python3
"""Train a linear head on a backbone's mean-pooled hidden states, for configs/pooled.yaml.

    python scripts/train_pooled_head.py demo/models/llama demo/train.csv demo/heads/llama_mean.safetensors

The backbone stays as it is; the head is a logistic regression over the labels in alphabetical order.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a linear head on mean-pooled hidden states.")
    parser.add_argument("backbone", type=Path)
    parser.add_argument("table", type=Path, help="a CSV with the columns gloss and label")
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    import numpy as np
    import pandas as pd
    import torch
    from safetensors.torch import save_file
    from sklearn.linear_model import LogisticRegression
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.backbone)
    model = AutoModel.from_pretrained(
        options.backbone, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    table = pd.read_csv(options.table, dtype=str, keep_default_na=False)
    states = []
    with torch.inference_mode():
        for text in table["gloss"]:
            inputs = tokenizer([text], truncation=True, max_length=128, return_tensors="pt")
            states.append(model(**inputs).last_hidden_state[0].mean(0).numpy())
    fitted = LogisticRegression(C=0.01, max_iter=200).fit(np.stack(states), table["label"])
    head = {"weight": fitted.coef_, "bias": fitted.intercept_}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {
            f"fc.{name}": torch.from_numpy(values).to(torch.float16).contiguous()
            for name, values in head.items()
        },
        options.output,
    )
    print(f"{options.output}: a head for {', '.join(fitted.classes_)}", file=sys.stderr)


if __name__ == "__main__":
    main()
