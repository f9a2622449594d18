"""Train a head by scikit-learn: a logistic regression on the pooled features with which a member predicts.

A process trains one head; its argument is a file with the trainer's spec and the folder ``features``, where the
features of all rows of the table lie for all folds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from sklearn.linear_model import LogisticRegression

from ensemble.common.errors import DataError
from ensemble.common.files import atomic_path, write_text
from ensemble.common.protocol import Counters
from ensemble.common.text import plural, quoted
from ensemble.members.huggingface.spec import HEAD_FILE
from ensemble.members.huggingface.training.program import run_program
from ensemble.members.pooled_cls.training.features import Backbone, compute_features, read_features


def main() -> None:
    """Train the head of the spec in the file that is the argument."""
    run_program(train)


def train(spec: Mapping[str, Any]) -> None:
    """Write ``head.safetensors``: weight float32 [labels, width], bias float32 [labels].

    Args:
        spec: the files ``table`` (published), ``rows`` (npz: rows int64 [n], targets float64 [n, labels], weights
            float64 [n]), the folders ``out`` and ``features``, ``labels``, ``seed``, ``settings`` by the
            kind's ``training_settings``, and ``train`` with ``C`` and ``pooling_mode``.

    Raises:
        DataError: no row to train on has one of the labels.
    """
    began, out = time.monotonic(), Path(spec["out"])

    def report(step: int, steps: int, counters: Counters) -> None:
        progress = {
            "step": step,
            "steps": steps,
            "epoch": 0.0,
            "loss": None,
            "seconds": round(time.monotonic() - began, 3),
            "tokens": counters.tokens,
            "padded_tokens": counters.padded_tokens,
        }
        write_text(out / "progress.json", json.dumps(progress))

    backbone = Backbone(Path(spec["table"]), spec["settings"]["member"], spec["train"]["pooling_mode"])
    rows_of_features, features = read_features(compute_features(backbone, Path(spec["features"]), report))
    part = np.load(spec["rows"])
    kept = np.isin(part["rows"], rows_of_features)
    if not kept.all():
        print(f"{plural(int((~kept).sum()), 'row')} cannot be computed and do not count")  # noqa: T201
    inputs = features[np.searchsorted(rows_of_features, part["rows"][kept])]
    targets = part["targets"][kept] * part["weights"][kept, None]
    for label, total in zip(spec["labels"], targets.sum(axis=0).tolist(), strict=True):
        if not total > 0:
            raise DataError(f"no row to train on has the label {quoted(label)}; give it rows in every fold")
    weight, bias = fit_head(inputs, targets, spec["train"]["C"], spec["seed"])
    with atomic_path(out / HEAD_FILE) as temporary:
        # safetensors writes an array's memory as it lies, and scikit-learn's coefficients lie by columns.
        tensors = {"weight": weight, "bias": bias}
        save_file({key: np.ascontiguousarray(value, np.float32) for key, value in tensors.items()}, temporary)


def fit_head(
    features: npt.NDArray[np.float32], targets: npt.NDArray[np.float64], inverse_strength: float, seed: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return coefficients, float64 [labels, width], and intercepts, float64 [labels].

    Args:
        features: float32 [rows, width].
        targets: float64 [rows, labels]: the weight of each label in a row; a row of several labels counts as
            several rows.  Each label has a row.
    """
    rows, labels = np.nonzero(targets)
    # The penalty is L2 in all releases; its two names exclude each other between old and new ones.
    model = LogisticRegression(
        C=inverse_strength,
        solver="lbfgs",
        fit_intercept=True,
        class_weight=None,
        tol=1e-8,
        max_iter=10_000,
        random_state=seed,
    )
    model.fit(features[rows].astype(np.float64), labels, sample_weight=targets[rows, labels])
    if targets.shape[1] > 2:
        return model.coef_, model.intercept_
    # Of two labels it has one row, for the second: its sigmoid is the softmax of these two.
    signs = np.array([[-0.5], [0.5]])
    return signs @ model.coef_, signs[:, 0] * model.intercept_
