"""Run a backbone with a separate head: hidden states -> a vector for each row -> logits.

Pooled values and the head are always float32: they are small, and hand-written heads were mostly trained in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache

from ensemble.common.protocol import Ready
from ensemble.members.huggingface.loading.device_map import last_device, on_device
from ensemble.members.huggingface.loading.load import Loaded
from ensemble.members.huggingface.scoring.classifier import Classifier, padded, states_at
from ensemble.members.huggingface.scoring.encode import Encoded
from ensemble.members.huggingface.scoring.forward import Integers, Shortcut
from ensemble.members.huggingface.scoring.member import TextMember
from ensemble.members.huggingface.spec import CheckpointSpec, ModelSpec
from ensemble.members.pooled_cls.head import LAYER_NORM, LINEAR

Steps: TypeAlias = Sequence[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class PooledSpec(ModelSpec):
    """Add the keys of ``PooledSettings`` and each job's head, its file and the ``steps`` of ``Head``."""

    head_layer_norm_eps: float
    pooling_mode: str
    job_heads: tuple[tuple[str, Steps], ...]


class PooledMember(TextMember[PooledSpec]):
    """Predict with a backbone whose last hidden states are pooled, and a head from a file."""

    Spec: ClassVar[type[CheckpointSpec]] = PooledSpec

    @property
    def pooling_mode(self) -> str:
        return self._spec.pooling_mode

    def load(self) -> Ready:
        ready = super().load()
        assert isinstance(self._classifier, PooledClassifier)
        head_parameters = sum(parameter.numel() for parameter in self._classifier.head.parameters())
        notes = list(ready.notes)
        if self._spec.pooling_mode == "cls" and Shortcut.NO_MASK in self._classifier.taken:
            notes.append(
                "pooling_mode: cls takes the first token, and in this model no token sees those behind it: rows "
                "that begin with the same token get the same numbers; its head was trained on lasttoken or mean"
            )
        return replace(ready, parameters=(ready.parameters or 0) + head_parameters, notes=tuple(notes))

    def _make_classifier(self, loaded: Loaded) -> PooledClassifier:
        spec, device = self._spec, last_device(loaded.model)
        self._heads = [
            make_head(file, steps, spec.head_layer_norm_eps, device) for file, steps in spec.job_heads
        ]
        return PooledClassifier(loaded.model, loaded.pad_token_id, self._heads[0], spec.pooling_mode)

    def use_job(self, job: int) -> None:
        super().use_job(job)
        assert isinstance(self._classifier, PooledClassifier)
        self._classifier.head = self._heads[job]


def make_head(file: str, steps: Steps, layer_norm_eps: float, device: torch.device) -> nn.Sequential:
    """Build the layers of a head's file with the activations between them, in float32."""
    tensors = load_file(file)
    layers: list[nn.Module] = []
    for kind, name in steps:
        if kind not in (LINEAR, LAYER_NORM):
            layers.append(ACT2FN[kind])
            continue
        prefix = f"{name}." if name else ""
        weight, bias = tensors[f"{prefix}weight"], tensors.get(f"{prefix}bias")
        layer: nn.Linear | nn.LayerNorm
        if kind == LINEAR:
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
        else:
            layer = nn.LayerNorm(weight.shape[0], eps=layer_norm_eps)
        layer.weight = nn.Parameter(weight.float().to(device), requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias.float().to(device), requires_grad=False)
        layers.append(layer)
    return nn.Sequential(*layers).eval()


class PooledClassifier(Classifier):
    """Run a loaded backbone and its head, which is on the last device; a row gets the same numbers in any batch."""

    _trial_groups: ClassVar[Integers | None] = None

    def __init__(self, model: Any, pad_token_id: int, head: nn.Sequential, pooling_mode: str) -> None:
        super().__init__(model, pad_token_id)
        self.head = head
        self._mode = pooling_mode
        self.possible -= {Shortcut.LAST_TOKEN}
        self.taken = {Shortcut.LAST_TOKEN}  # the head gets only pooled states
        self._body = model

    def logits(self, encoded: Encoded, rows: npt.NDArray[np.int64], with_mask: bool = False) -> torch.Tensor:
        with torch.inference_mode():
            pooled = self.pooled(encoded, rows, with_mask)
            head_width = next(parameter.shape[-1] for parameter in self.head.parameters())
            if pooled.shape[-1] != head_width:
                raise ValueError(
                    f"its head is made for {head_width:,} numbers, and the backbone has hidden states of "
                    f"{pooled.shape[-1]:,}"
                )
            logits: torch.Tensor = self.head(pooled.to(self.last_device))
            return logits.float()

    def pooled(self, encoded: Encoded, rows: npt.NDArray[np.int64], with_mask: bool = False) -> torch.Tensor:
        """Return what the head gets of rows as a batch, float32 [batch, width of the hidden states]."""
        if not with_mask and self.is_packed(encoded, rows):
            return self._packed_pooled(encoded, rows)
        with self._passes(encoded, rows, with_mask) as behind:
            arrays = padded(encoded, rows, self._pad_token_id, self._pad_left)
            mask = arrays["attention_mask"][:, behind.tokens :]
            lengths = encoded.lengths[rows]
            first = mask.argmax(axis=1)  # padding may be on the left
            # Copied to the last device before the pass begins, so that no pass waits for it.
            is_padding = on_device(mask[..., None] == 0, self.last_device)
            place = on_device(first + self._read_places(encoded, rows) - behind.tokens, self.last_device)
            counts = on_device(lengths, self.last_device)
            states = self._states(arrays, with_mask, behind)
            if self._mode != "mean":
                return states_at(states, place).float()
            total = states.masked_fill_(is_padding.to(states.device), 0).sum(1, dtype=torch.float32)
            total += sum(part.total for part in behind.parts if part.total is not None)
            return total / counts.to(states.device)[:, None]

    def _packed_pooled(self, encoded: Encoded, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return what ``pooled`` does, by a pass over rows one behind the other."""
        with self._packed(encoded, rows) as (inputs, places):
            states: torch.Tensor = self._body(**inputs).last_hidden_state[0]
            if self._mode != "mean":
                return states[places.to(states.device)].float()
            skipped = int(self.skipped_tokens(encoded)[0][rows[0]])
            lengths = encoded.lengths[rows]
            parts = torch.split(states, [skipped, *(lengths - skipped).tolist()])
            shared, *own = (part.sum(0, dtype=torch.float32) for part in parts)
            return (torch.stack(own) + shared) / on_device(lengths, states.device)[:, None]

    def _read_places(self, encoded: Encoded, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        lengths = encoded.lengths[rows]
        return np.zeros_like(lengths) if self._mode == "cls" else lengths - 1

    def _run_beginnings(self, inputs: dict[str, torch.Tensor], cache: Cache) -> torch.Tensor:
        states: torch.Tensor = self._model(**inputs, **self._cached(cache)).last_hidden_state
        return states.sum(1, dtype=torch.float32)
