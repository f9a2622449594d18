"""Train a head: with its backbone in steps, or by scikit-learn on the pooled features with which a member predicts.

Of the second way a process trains one head; its argument is a file with the trainer's spec and the folder
``features``.  There lie the features of all rows of the table, which are computed once for all heads, in blocks of
rows, each a file that is whole or not there: processes that run side by side share the blocks, and one that is
killed leaves what is done.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save_file
from sklearn.linear_model import LogisticRegression
from torch import nn

from ensemble.common.digests import FileDigests, digest_of
from ensemble.common.errors import DataError
from ensemble.common.files import atomic_path, write_text
from ensemble.common.packages import installed_versions
from ensemble.common.protocol import CommonSpec, Counters
from ensemble.common.text import plural, quoted
from ensemble.data.published_table import PublishedTable
from ensemble.members.huggingface.checkpoint.digests import tokenizer_digest, weights_digest
from ensemble.members.huggingface.checkpoint.hub import find_file
from ensemble.members.huggingface.loading.load import Loaded
from ensemble.members.huggingface.scoring.classifier import states_at
from ensemble.members.huggingface.scoring.encode import Encoded
from ensemble.members.huggingface.scoring.forward import Shortcut, compute
from ensemble.members.huggingface.spec import BACKBONE, HEAD_FILE, ModelSettings
from ensemble.members.huggingface.training.examples import ClassifierExamples, MicroBatch, Rows
from ensemble.members.huggingface.training.program import run_program
from ensemble.members.huggingface.training.trainee import Trainee
from ensemble.members.pooled_cls.predictor import PooledClassifier, PooledMember, PooledSpec

_ROWS_OF_BLOCK = 4_096


class PooledExamples(ClassifierExamples):
    """Learn the outputs of a head over a backbone's states, which are pooled as in ``PooledClassifier``."""

    def _make_classifier(self, member: Any, trainee: Trainee, pad_token_id: int) -> PooledClassifier:
        assert trainee.head is not None
        self._head, self._mode = trainee.head, member.pooling_mode
        classifier = PooledClassifier(trainee.base, pad_token_id, trainee.head, self._mode)
        if self._mode == "cls" and Shortcut.NO_MASK in classifier.possible:
            raise ValueError(
                "pooling_mode: cls takes the first token, and in this model no token sees those behind it; choose "
                "lasttoken or mean"
            )
        return classifier

    def batch(self, sequences: Rows) -> MicroBatch:
        batch = super().batch(sequences)
        return replace(batch, labels={**batch.labels, "mask": batch.inputs["attention_mask"]})

    def reading(self, batch: MicroBatch) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # the mask says where a row ends

    def _logits(self, outputs: Any, labels: dict[str, torch.Tensor]) -> torch.Tensor:
        states: torch.Tensor = outputs.last_hidden_state
        mask = labels["mask"].to(states.device)
        if self._mode == "mean":
            total = states.masked_fill(mask[..., None] == 0, 0).sum(1, dtype=torch.float32)
            pooled = total / mask.sum(1, keepdim=True)
        else:
            places = mask if self._mode == "cls" else mask * torch.arange(mask.shape[1], device=mask.device)
            pooled = states_at(states, places.argmax(1)).float()
        logits: torch.Tensor = self._head(pooled.to(next(self._head.parameters()).device))
        return logits


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

    # A pooled_cls member has the key itself.
    mode = spec["settings"]["member"].get("pooling_mode", spec["train"]["pooling_mode"])
    backbone = Backbone(Path(spec["table"]), spec["settings"]["member"], mode)
    rows_of_features, features = compute_features(backbone, Path(spec["features"]), report)
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


@dataclass(frozen=True)
class Backbone:
    """Name all that features depend on.

    Attributes:
        table: the published table.
        settings: those of a text model's worker; what a kind adds to them is about its own head.
    """

    table: Path
    settings: Mapping[str, Any]
    pooling_mode: str

    def load(self) -> FeatureMember:
        """Load it onto the devices that this process sees: those of its lease."""
        common = CommonSpec(
            labels=(),
            activation="softmax",
            gpus=torch.cuda.device_count(),
            seed=0,
            table_path=str(self.table),
        )
        shared = {key.name: self.settings[key.name] for key in fields(ModelSettings)}
        head = {"job_heads": [], "head_layer_norm_eps": 0.0}
        settings = {**shared, **head, "pooling_mode": self.pooling_mode, "auto_class": BACKBONE}
        member = FeatureMember(PooledSpec.of(common, settings), PublishedTable(self.table))
        member.load()
        return member

    def digest(self) -> str:
        """Return a digest of all that the features depend on."""
        settings, files = self.settings, FileDigests(whole=False)
        name, runs_code = settings["model_name_or_path"], settings["trust_remote_code"]
        folder = find_file(name, "config.json", settings["revision"]).parent
        digests = [
            FileDigests(whole=True).digest(self.table),
            weights_digest(folder, settings["model_kwargs"], runs_code, files),
            tokenizer_digest(folder, settings["tokenizer_kwargs"], files),
        ]
        others = {key: value for key, value in settings.items() if key != "model_name_or_path"}
        # Devices of different kinds round differently; a head must not learn from a mix.
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        versions = installed_versions(("torch", "transformers"))
        return digest_of([digests, others, self.pooling_mode, device, versions])


def compute_features(
    backbone: Backbone, root: Path, report: Callable[[int, int, Counters], None]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return the rows that have features, ascending, int64 [n], and the features, float32 [n, width].

    Args:
        root: of the folders with blocks.
        report: called now and then with the number of blocks that are done, that of all, and this process's work.

    Raises:
        DataError: no row has any.
    """
    folder = root / backbone.digest()
    folder.mkdir(parents=True, exist_ok=True)
    rows_of_table = PublishedTable(backbone.table).rows
    paths = {start: folder / f"{start}.npz" for start in range(0, rows_of_table, _ROWS_OF_BLOCK)}
    member: FeatureMember | None = None
    counters = Counters()
    # In another order in each process, so that these seldom wait for each other.
    for start in np.random.default_rng().permutation([*paths]).tolist():
        report(sum(path.exists() for path in paths.values()), len(paths), counters)
        with paths[start].with_suffix(".lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until this process ends, if it is killed
            if not paths[start].exists():
                member = member or backbone.load()
                rows = np.arange(start, min(start + _ROWS_OF_BLOCK, rows_of_table))
                rows, values, of_block = member.features(rows)
                counters += of_block
                with atomic_path(paths[start]) as temporary, temporary.open("wb") as file:
                    np.savez(file, rows=rows, values=values)
    report(len(paths), len(paths), counters)
    blocks = [np.load(path) for path in paths.values()]
    blocks = [block for block in blocks if len(block["rows"])]
    if not blocks:
        raise DataError("no row of the table can be computed; see the log")
    rows = np.concatenate([block["rows"] for block in blocks])
    return rows, np.concatenate([block["values"] for block in blocks])


class FeatureMember(PooledMember):
    """Compute what the head would get, for trainings of a head: the same features as in prediction."""

    def _make_classifier(self, loaded: Loaded) -> PooledClassifier:
        return FeatureClassifier(loaded.model, loaded.pad_token_id, nn.Sequential(), self._spec.pooling_mode)

    def _values(self, logits: torch.Tensor) -> npt.NDArray[np.float64]:
        # In proportion to the largest: the warm-up compares values as if they were probabilities.
        return np.asarray((logits / logits.abs().max().clamp(min=1)).cpu().double().numpy())

    def features(
        self, rows: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], Counters]:
        """Return which of the rows can be computed, int64 [n], and their features, float32 [n, width]."""
        encoded = self._encode(self._table.take(rows), lambda: None)
        mode, in_float32 = self._in_float32, self._starts_in_float32
        with self._passes():
            computed = compute(self._classifier, encoded, self._sizes, lambda *_: None, mode, in_float32)
        if computed.mostly_overflows:
            self._start_in_float32()
        is_finite = torch.isfinite(computed.logits).all(dim=1).numpy()
        return rows[computed.rows[is_finite]], computed.logits.numpy()[is_finite], computed.counters


class FeatureClassifier(PooledClassifier):
    """Run a loaded backbone without any head."""

    def logits(self, encoded: Encoded, rows: npt.NDArray[np.int64], with_mask: bool = False) -> torch.Tensor:
        return self.pooled(encoded, rows, with_mask)
