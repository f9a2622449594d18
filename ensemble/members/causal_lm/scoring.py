"""Compute log-probabilities of the labels' texts, and the probability of other tokens, batch by batch.

The model's own forward pass computes the logits, with any change it makes to them, such as Gemma-2's cap.  Only the
positions that tell a label's probability go through the head over the vocabulary: a hook cuts its input.

The keys and values of tokens that all prompts begin with, such as an instruction and examples, are computed once.
The numbers equal those of whole rows but for rounding, as matrix products have other shapes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ensemble.common.torch_errors import Verdict, classify
from ensemble.members.huggingface.scoring.classifier import Classifier, last_token_only, on_device, padded
from ensemble.members.huggingface.scoring.encode import Encoded
from ensemble.members.huggingface.scoring.forward import Shortcut

# Fewer tokens or rows are not worth a separate pass.
_MIN_TOKENS, _MIN_ROWS = 32, 4
_NO_TOKENS: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)


def paths(label_ids: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], list[int]]]:
    """Return the fewest paths that cover all labels, the longest first: a path's tokens, and its labels.

    A path's tokens follow a row's prompt in a pass.  A label with the tokens t1, t2, t3 needs t1 and t2: its
    probability is read at the prompt's last token and at these two.
    """
    needed = {ids[:-1] for ids in label_ids}
    prefixes = {tokens[:count] for tokens in needed for count in range(len(tokens))}
    result: list[tuple[tuple[int, ...], list[int]]] = []
    uncovered = dict(enumerate(label_ids))
    for tokens in sorted(needed - prefixes, key=lambda tokens: (-len(tokens), tokens)):
        labels = [label for label, ids in uncovered.items() if tokens[: len(ids) - 1] == ids[:-1]]
        result.append((tokens, labels))
        uncovered = {label: ids for label, ids in uncovered.items() if label not in labels}
    return result


class _SharedLayer(DynamicLayer):  # type: ignore[misc]  # of a library without types
    """Put a layer's keys and values of the prefix, [1, heads, tokens, width], before those of a batch's rows.

    The rows' own keys and values are not kept, so that only one layer's are joined at a time.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.keys, self.values = layer.keys, layer.values
        self.dtype, self.device = layer.keys.dtype, layer.keys.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = len(key_states)
        return (
            torch.cat([self.keys.expand(rows, -1, -1, -1), key_states], dim=-2),
            torch.cat([self.values.expand(rows, -1, -1, -1), value_states], dim=-2),
        )


@dataclass(frozen=True)
class Prefix:
    """Hold the tokens of a prefix, int64 [tokens], with the model's keys and values."""

    tokens: npt.NDArray[np.int64]
    layers: list[_SharedLayer]


def begins_with(
    encoded: Encoded, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Return which of these rows begin with the tokens and have more, bool [rows]."""
    count = len(tokens)
    ids = [encoded.inputs["input_ids"][row] for row in rows.tolist()]
    return np.array([len(row) > count and np.array_equal(row[:count], tokens) for row in ids], dtype=bool)


def shared_tokens(encoded: Encoded) -> npt.NDArray[np.int64]:
    """Return the tokens that a chunk's rows begin with; none if they are too few."""
    rows = np.flatnonzero(encoded.lengths > 0)
    lengths = encoded.lengths[rows]
    # Rows that were cut have the maximal length, and may have lost their beginning: they count only where there are
    # too few others.
    shorter = rows[lengths < lengths.max(initial=0)]
    rows = shorter if len(shorter) >= _MIN_ROWS else rows
    if len(rows) < _MIN_ROWS:
        return _NO_TOKENS
    count = int(encoded.lengths[rows].min()) - 1  # each row needs a token of its own
    beginnings = np.stack([encoded.inputs["input_ids"][row][:count] for row in rows.tolist()])
    differs = (beginnings != beginnings[0]).any(axis=0)
    shared = beginnings[0][: differs.argmax() if differs.any() else count]
    return shared if len(shared) >= _MIN_TOKENS else _NO_TOKENS


class LabelScorer(Classifier):
    """Score labels with a loaded language model; a row's labels get the same scores in any batch.

    ``label_ids`` are the tokens of each label; ``divisors`` divide each label's log-probability.
    """

    def __init__(
        self, model: Any, pad_token_id: int, label_ids: Sequence[tuple[int, ...]], divisors: Sequence[float]
    ) -> None:
        super().__init__(model, pad_token_id)
        self._label_ids = label_ids
        self._paths = paths(label_ids)
        self._divisors = torch.tensor(divisors)
        self._first_tokens = sorted({ids[0] for ids in label_ids})
        self.possible -= {Shortcut.LAST_TOKEN}
        self.taken = {Shortcut.LAST_TOKEN}  # nothing else goes through the head
        self._prefix: Prefix | None = None
        self._chunk: Encoded | None = None  # the one that ``_shared`` belongs to
        self._shared = _NO_TOKENS  # that its rows begin with
        self.shared_tokens = 0  # tokens of rows that no pass had to compute, padding not counted

    def logits(self, encoded: Encoded, rows: npt.NDArray[np.int64], with_mask: bool = False) -> torch.Tensor:
        """Run forward passes over rows as a batch, one for each path.

        Returns:
            float32 [batch, labels + 1]: the labels' log-probabilities, divided; and the logarithm of the
            probability of first tokens that belong to no label.
        """
        self._find_shared(encoded)
        columns: dict[int, torch.Tensor] = {}
        try:
            with self._spread.forward_pass(), torch.inference_mode():
                # Passes with a mask may be float32, while the prefix was computed in another type.
                prefix = None if with_mask else self._prefix_of(encoded, rows)
                batches = [self._batch(encoded, rows, tokens, with_mask, prefix) for tokens, _ in self._paths]
                for (_, labels), (inputs, positions) in zip(self._paths, batches, strict=True):
                    scores = self._label_scores(self._read(inputs, positions, prefix), labels)
                    columns = scores | columns  # other first tokens are those of the first path
        except torch.OutOfMemoryError:
            if len(rows) == 1 or self._prefix is None:
                # The prefix takes memory, too: this chunk's rows run whole.
                self._prefix, self._shared = None, _NO_TOKENS
            raise
        if prefix is not None:
            self.shared_tokens += len(rows) * len(prefix.tokens)
        return torch.stack([columns[column] for column in sorted(columns)], dim=1)

    def _read(
        self, inputs: dict[str, torch.Tensor], positions: torch.Tensor, prefix: Prefix | None
    ) -> torch.Tensor:
        """Return the vocabulary's logits at these positions of each row, float32 [rows, k, vocabulary]."""
        # The last layer's parts can compute one position of each row.
        is_single = positions.shape[1] == 1 and Shortcut.LAST_TOKEN_LAYER in self.taken
        parts = self._last_token_parts if is_single else []
        cache = {} if prefix is None else {"past_key_values": Cache(layers=list(prefix.layers))}
        head = self._model.get_output_embeddings()
        with last_token_only(parts, positions[:, 0]), _head_at(head, positions):
            logits: torch.Tensor = self._model(**inputs, **cache, use_cache=prefix is not None).logits
        return logits.float()

    def _label_scores(self, logits: torch.Tensor, labels: Sequence[int]) -> dict[int, torch.Tensor]:
        """Return the scores of a path's labels, and of other first tokens, by column of ``logits``."""
        total = logits.logsumexp(-1)
        scores = {}
        for label in labels:
            tokens = enumerate(self._label_ids[label])
            log_probabilities = [logits[:, index, token] - total[:, index] for index, token in tokens]
            scores[label] = torch.stack(log_probabilities).sum(0) / self._divisors[label]
        mass = (logits[:, 0, self._first_tokens] - total[:, :1]).exp().sum(-1)
        scores[len(self._label_ids)] = torch.log1p(-mass.clamp(max=1 - 1e-7))
        return scores

    def skipped_tokens(self, encoded: Encoded) -> npt.NDArray[np.int64]:
        self._find_shared(encoded)
        if not len(self._shared):
            return super().skipped_tokens(encoded)
        rows = np.arange(len(encoded.lengths))
        return np.where(begins_with(encoded, rows, self._shared), len(self._shared), 0)

    def forget(self) -> None:
        self._prefix = self._chunk = None

    def try_prefix(self, encoded: Encoded, tolerance: float) -> None:
        """Take the shortcut of shared prefixes if rows keep their numbers."""
        ids = np.resize(np.concatenate(encoded.inputs["input_ids"]), 2 * _MIN_TOKENS)
        # Different ends, of different lengths.
        rows = [np.concatenate([ids[:_MIN_TOKENS], ids[start:]]) for start in (33, 40, 50, 60)]
        trial = Encoded({"input_ids": rows}, np.array([len(row) for row in rows]), truncated_rows=0)
        batch = np.arange(len(rows))
        expected = self.logits(trial, batch).cpu().double()
        self.taken.add(Shortcut.SHARED_PREFIX)
        self._chunk = None
        is_same = False
        try:
            difference = (self.logits(trial, batch).cpu().double() - expected).abs().max()
            is_close = bool(difference <= tolerance * max(1.0, float(expected.abs().max())))
            is_same = self._prefix is not None and is_close
        except Exception as error:  # a model whose layers keep other states than keys and values
            if classify(error) is Verdict.SUSPECT:
                raise
        if not is_same:
            self.taken.discard(Shortcut.SHARED_PREFIX)
        self.forget()
        self.shared_tokens = 0

    def _find_shared(self, encoded: Encoded) -> None:
        """Find the tokens that a chunk's rows begin with, once; none if prefixes are not shared."""
        if encoded is not self._chunk:
            self._chunk = encoded
            self._shared = shared_tokens(encoded) if Shortcut.SHARED_PREFIX in self.taken else _NO_TOKENS

    def _prefix_of(self, encoded: Encoded, rows: npt.NDArray[np.int64]) -> Prefix | None:
        """Return the chunk's prefix, after computing it if needed; None if it has none, or these rows differ."""
        if not len(self._shared) or not begins_with(encoded, rows, self._shared).all():
            return None
        if self._prefix is None or not np.array_equal(self._prefix.tokens, self._shared):
            self._prefix = None
            cache = DynamicCache()
            inputs = on_device(self._shared[None], self._device)
            first_position = on_device(np.zeros((1, 1), dtype=np.int64), self.last_device)
            with _head_at(self._model.get_output_embeddings(), first_position):
                self._model(input_ids=inputs, past_key_values=cache, use_cache=True)
            self._prefix = Prefix(self._shared, [_SharedLayer(layer) for layer in cache.layers])
        return self._prefix

    def _batch(
        self,
        encoded: Encoded,
        rows: npt.NDArray[np.int64],
        path: tuple[int, ...],
        with_mask: bool,
        prefix: Prefix | None,
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return the model's inputs with the path's tokens after each row, and the positions to read, [rows, k].

        Neither includes the prefix; only the attention mask does.
        """
        skipped = 0 if prefix is None else len(prefix.tokens)
        path_tokens = np.array(path, dtype=np.int64)
        ids = encoded.inputs["input_ids"]
        extended = Encoded(
            inputs={
                "input_ids": [np.concatenate([ids[row][skipped:], path_tokens]) for row in rows.tolist()]
            },
            lengths=encoded.lengths[rows] - skipped + len(path_tokens),
            truncated_rows=0,
        )
        arrays = padded(extended, np.arange(len(rows)), self._pad_token_id)
        if Shortcut.NO_MASK in self.taken and not with_mask:
            del arrays["attention_mask"]
        elif skipped:
            seen = np.ones((len(rows), skipped), dtype=np.int64)
            arrays["attention_mask"] = np.concatenate([seen, arrays["attention_mask"]], axis=1)
        inputs = {name: on_device(array, self._device) for name, array in arrays.items()}
        positions = encoded.lengths[rows, None] - skipped - 1 + np.arange(len(path_tokens) + 1)
        return inputs, on_device(positions, self.last_device)


@contextlib.contextmanager
def _head_at(head: nn.Module, positions: torch.Tensor) -> Iterator[None]:
    """Let the head over the vocabulary see only these positions of each row, int64 [rows, k]."""

    def take(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        states, *others = inputs
        rows = torch.arange(len(states), device=states.device)[:, None]
        return (states[rows, positions.to(states.device)], *others)

    handle = head.register_forward_pre_hook(take)
    try:
        yield
    finally:
        handle.remove()
