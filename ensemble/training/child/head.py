"""Train a head by scikit-learn: a logistic regression on the pooled features with which a member predicts.

A process trains one head; its argument is a file with the trainer's spec and the folder ``features``, where the
features of all rows of the table lie.  They are computed once for all folds, in blocks of rows, each a file that is
whole or not there: processes that run side by side share the blocks, and one that is killed leaves what is done.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save_file
from sklearn.linear_model import LogisticRegression

from ensemble.common.digests import FileDigests, digest_of
from ensemble.common.errors import DataError, EnsembleError
from ensemble.common.files import atomic_path, write_text
from ensemble.common.packages import installed_versions
from ensemble.common.protocol import CommonSpec, Counters
from ensemble.common.python_process import die_with_parent
from ensemble.common.text import plural, quoted
from ensemble.common.torch_errors import is_out_of_memory, one_line
from ensemble.data.published_table import PublishedTable
from ensemble.members.huggingface.checkpoint.digests import tokenizer_digest, weights_digest
from ensemble.members.huggingface.checkpoint.hub import find_file
from ensemble.members.huggingface.spec import BACKBONE, HEAD_FILE, ModelSettings
from ensemble.members.pooled_cls.predictor import FeatureMember, PooledSpec

_ROWS_OF_BLOCK = 4_096
_POLL_SECONDS = 0.5


def main() -> None:
    """Train the head of the spec that is the argument; if it fails, ``problem.json`` says why, and this exits 1."""
    die_with_parent(os.getppid())
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        train(spec)
    except Exception as error:
        kind = "lasting" if isinstance(error, EnsembleError | ValueError) else "error"
        kind = "memory" if is_out_of_memory(error) else kind
        write_text(Path(spec["out"]) / "problem.json", json.dumps({"kind": kind, "text": one_line(error)}))
        raise


def train(spec: Mapping[str, Any]) -> None:
    """Write ``head.safetensors``: weight float32 [labels, width], bias float32 [labels].

    Args:
        spec: the files ``table`` (published), ``rows`` (npz: rows int64 [n], targets float64 [n, labels], weights
            float64 [n]), the folders ``out`` and ``features``, ``labels``, ``seed``, ``settings`` by the
            kind's ``training_settings``, and ``train`` with ``C`` and ``pooling_mode``.

    Raises:
        DataError: no row to train on has one of the labels.
    """
    rows_of_features, features = read_features(compute_features(spec))
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
    with atomic_path(Path(spec["out"]) / HEAD_FILE) as temporary:
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


def compute_features(spec: Mapping[str, Any]) -> list[Path]:
    """Return the files of all blocks; blocks that other processes are computing are waited for."""
    folder = features_folder(spec)
    folder.mkdir(parents=True, exist_ok=True)
    table = PublishedTable(Path(spec["table"]))
    paths = {start: folder / f"{start}.npz" for start in range(0, table.rows, _ROWS_OF_BLOCK)}
    member: FeatureMember | None = None
    counters, began = Counters(), time.monotonic()
    while True:
        missing = [start for start in paths if not paths[start].exists()]
        progress = {
            "step": len(paths) - len(missing),
            "steps": len(paths),
            "epoch": 0.0,
            "loss": None,
            "seconds": time.monotonic() - began,
            "tokens": counters.tokens,
            "padded_tokens": counters.padded_tokens,
        }
        write_text(Path(spec["out"]) / "progress.json", json.dumps(progress))
        if not missing:
            return [*paths.values()]
        # The first block that no other process computes.
        for start in missing:
            with _locked(paths[start].with_suffix(".lock")) as is_locked:
                if not is_locked or paths[start].exists():
                    continue
                if member is None:
                    member = _feature_member(spec, table)
                    member.load()
                end = min(start + _ROWS_OF_BLOCK, table.rows)
                rows, values, of_block = member.features(np.arange(start, end))
                counters += of_block
                with atomic_path(paths[start]) as temporary, temporary.open("wb") as file:
                    np.savez(file, rows=rows, values=values)
                break
        else:
            time.sleep(_POLL_SECONDS)


def _feature_member(spec: Mapping[str, Any], table: PublishedTable) -> FeatureMember:
    common = CommonSpec(
        labels=tuple(spec["labels"]),
        activation="softmax",
        gpus=torch.cuda.device_count(),  # those of its lease
        memory_limit_bytes=None,
        seed=spec["seed"],
        table_path=spec["table"],
        order_path="",
        shards_dir="",
    )
    # What the member's kind adds to the settings of a text model is about its own head.
    shared = {key.name: spec["settings"]["member"][key.name] for key in fields(ModelSettings)}
    head = {"head": "", "head_steps": [], "head_layer_norm_eps": 0.0}
    pooling = {"pooling_mode": spec["train"]["pooling_mode"], "auto_class": BACKBONE}
    return FeatureMember(PooledSpec.of(common, {**shared, **head, **pooling}), table)


def features_folder(spec: Mapping[str, Any]) -> Path:
    """Return the folder of these features, which is named by all that they depend on."""
    settings, files = spec["settings"]["member"], FileDigests(whole=False)
    name, runs_code = settings["model_name_or_path"], settings["trust_remote_code"]
    folder = find_file(name, "config.json", settings["revision"]).parent
    digests = [
        FileDigests(whole=True).digest(Path(spec["table"])),
        weights_digest(folder, settings["model_kwargs"], settings["gguf_file"], runs_code, files),
        tokenizer_digest(folder, settings["tokenizer_kwargs"], files),
    ]
    others = {key: value for key, value in settings.items() if key != "model_name_or_path"}
    versions = installed_versions(("torch", "transformers"))
    return Path(spec["features"]) / digest_of([digests, others, spec["train"]["pooling_mode"], versions])


def read_features(paths: list[Path]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return the rows that have features, ascending, int64 [n], and the features, float32 [n, width]."""
    blocks = [np.load(path) for path in paths]
    blocks = [block for block in blocks if len(block["rows"])]
    if not blocks:
        raise DataError("no row of the table can be computed; see the log")
    rows = np.concatenate([block["rows"] for block in blocks])
    return rows, np.concatenate([block["values"] for block in blocks])


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock of a file, which ends with this process; yield False if another process has it."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
