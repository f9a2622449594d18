"""A member of configs/winners/jigsaw_42nd.yaml: is a comment nearer to what broke its rule, or to what did not?"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import AutoModel, AutoTokenizer

from ensemble.members.python.child import Context

BROKE = ["positive_example_1", "positive_example_2"]
DID_NOT = ["negative_example_1", "negative_example_2"]
BATCH_ROWS = 64


@dataclass
class Centroids:
    """An encoder of texts, and for each rule the mean directions of its examples."""

    tokenizer: Any
    encoder: Any
    of_rule: dict[str, tuple[np.ndarray, np.ndarray]]


def setup(context: Context) -> Centroids:
    """Encode the examples of each rule of the whole table: which rows share a call changes nothing."""
    folder = context.kwargs["model"]
    encoder = AutoModel.from_pretrained(folder).to(context.device).eval()
    centroids = Centroids(AutoTokenizer.from_pretrained(folder), encoder, {})
    table = pd.read_csv(context.kwargs["table"], dtype=str, keep_default_na=False)
    for rule, rows in table.groupby("rule"):
        sides = [encode(rows[columns].to_numpy().ravel(), centroids, context) for columns in (BROKE, DID_NOT)]
        means = [side.mean(axis=0) for side in sides]
        broke, did_not = (mean / np.linalg.norm(mean) for mean in means)
        centroids.of_rule[str(rule)] = (broke, did_not)
    return centroids


def predict(frame: pd.DataFrame, context: Context) -> np.ndarray:
    """The probability of each label, [rows, labels]; only its order means something, and is merged."""
    of_rule = context.state.of_rule
    bodies = encode(frame["body"].to_numpy(), context.state, context)
    broke = np.array([of_rule[rule][0] for rule in frame["rule"]])
    did_not = np.array([of_rule[rule][1] for rule in frame["rule"]])
    # Vectors of length 1 are at most 2 apart, so that the difference of two distances is from -2 to 2.
    nearer = np.linalg.norm(bodies - did_not, axis=1) - np.linalg.norm(bodies - broke, axis=1)
    yes = (nearer + 2) / 4
    return np.column_stack([yes, 1 - yes])


def encode(texts: np.ndarray, centroids: Centroids, context: Context) -> np.ndarray:
    """Unit vectors of the first token of each text, [texts, hidden]."""
    vectors = []
    for start in range(0, len(texts), BATCH_ROWS):
        inputs = centroids.tokenizer(
            [str(text) for text in texts[start : start + BATCH_ROWS]],
            padding=True,
            truncation=True,
            max_length=context.kwargs["max_length"],
            return_tensors="pt",
        ).to(context.device)
        with torch.inference_mode():
            first = centroids.encoder(**inputs).last_hidden_state[:, 0].float()
        vectors.append(torch.nn.functional.normalize(first, dim=-1).cpu().numpy())
    return np.concatenate(vectors)
