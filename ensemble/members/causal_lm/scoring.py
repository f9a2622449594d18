"""Compute log-probabilities of the labels' texts, and the probability of other tokens, batch by batch.

The model's own forward pass computes the logits, with any change it makes to them, such as Gemma-2's cap.  Only the
positions that tell a label's probability go through the head over the vocabulary: a hook cuts its input.

The keys and values of tokens that all prompts begin with, such as an instruction and examples, are computed once.
So are those of a row's prompt where labels have several tokens: their tokens run behind these keys and values.  The
numbers equal those of whole rows but for rounding, as matrix products have other shapes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache

from ensemble.common.torch_errors import Verdict, classify
from ensemble.members.huggingface.scoring.classifier import Classifier, on_device, padded
from ensemble.members.huggingface.scoring.encode import Encoded
from ensemble.members.huggingface.scoring.forward import Shortcut
from ensemble.members.huggingface.scoring.key_values import (
    KeysAndValues,
    LayerBehind,
    padding_first,
    reordered,
)

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


@dataclass(frozen=True)
class Prefix:
    """Hold the tokens of a prefix, int64 [tokens], with the model's keys and values."""

    tokens: npt.NDArray[np.int64]
    layers: list[KeysAndValues]


@dataclass(frozen=True)
class RowPath:
    """Hold tokens that follow the prompt of a batch's row, by its place, and the labels that they tell."""

    row: int
    tokens: tuple[int, ...]
    labels: Sequence[int]


@dataclass(frozen=True)
class LabelTexts:
    """Hold the tokens of a row's labels, by their numbers, and what divides their log-probabilities."""

    ids: Sequence[tuple[int, ...]]
    divisors: Sequence[float]

    @cached_property
    def paths(self) -> list[tuple[tuple[int, ...], list[int]]]:
        return paths(self.ids)

    @cached_property
    def has_several_tokens(self) -> bool:
        """Return whether a label has several, so that tokens run behind a prompt."""
        return any(len(ids) > 1 for ids in self.ids)


@dataclass(frozen=True, kw_only=True)
class EncodedChoices(Encoded):
    """Add to rows the texts that each has for its labels; a row with a problem has None."""

    texts: Sequence[LabelTexts | None]


@dataclass(frozen=True)
class _Batch:
    """Hold rows that are computed together.

    Attributes:
        rows: their numbers in ``encoded``, int64 [rows].
        texts: of each row's labels.
        prefix: which all of them begin with, and which is computed already; None: there is none.
    """

    encoded: Encoded
    rows: npt.NDArray[np.int64]
    texts: Sequence[LabelTexts]
    with_mask: bool
    prefix: Prefix | None


@dataclass(frozen=True)
class _Pass:
    """Hold a forward pass over paths.

    Attributes:
        places: the positions of each path that are read, int64 [paths, k].
        first_token: the number of the label's token that the first of them tells.
    """

    inputs: dict[str, torch.Tensor]
    places: torch.Tensor
    paths: Sequence[RowPath]
    first_token: int


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

    Args:
        texts: of the labels of all rows that are not ``EncodedChoices``.
        labels: how many columns these have.
        positions: of a row that may go through the vocabulary at a time, unless a single path has more.
    """

    def __init__(self, model: Any, pad_token_id: int, texts: LabelTexts, labels: int, positions: int) -> None:
        super().__init__(model, pad_token_id)
        self._texts = texts
        self._labels = labels
        self._positions = positions
        self.possible -= {Shortcut.LAST_TOKEN}
        self.taken = {Shortcut.LAST_TOKEN}  # nothing else goes through the head
        # transformers 5.24 has given the argument another name.
        has_new_name = "cache" in inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if has_new_name else "past_key_values"
        self._prefix: Prefix | None = None
        self._chunk: Encoded | None = None  # the one that ``_shared`` belongs to
        self._shared = _NO_TOKENS  # that its rows begin with
        self._keeps_prompts = True  # whether the chunk's rows leave room for the keys and values of a prompt
        self.shared_tokens = 0  # tokens of rows that no pass had to compute, padding not counted

    def logits(self, encoded: Encoded, rows: npt.NDArray[np.int64], with_mask: bool = False) -> torch.Tensor:
        """Run forward passes over rows as a batch: their prompts, and behind them the paths.

        Where keys and values are not kept, the prompt is computed again before each path.

        Returns:
            float32 [batch, labels + 1]: the labels' log-probabilities, divided; and the logarithm of the
            probability of first tokens that belong to no label.
        """
        self._find_shared(encoded)
        texts = self._texts_of(encoded, rows)
        try:
            with self._spread.forward_pass(), torch.inference_mode():
                # Passes with a mask may be float32, while the prefix was computed in another type.
                prefix = None if with_mask else self._prefix_of(encoded, rows)
                is_kept = Shortcut.KEPT_PROMPT in self.taken and self._keeps_prompts
                is_kept = is_kept and any(of_row.has_several_tokens for of_row in texts)
                compute = self._behind_prompts if is_kept else self._whole_rows
                scores = self._finished(compute(_Batch(encoded, rows, texts, with_mask, prefix)), texts)
        except torch.OutOfMemoryError:
            if len(rows) == 1 or self._prefix is None:
                # The prefix takes memory, too: this chunk's rows run whole.
                self._prefix, self._shared = None, _NO_TOKENS
            self._keeps_prompts = self._keeps_prompts and len(rows) > 1
            raise
        if prefix is not None:
            self.shared_tokens += len(rows) * len(prefix.tokens)
        return scores

    def _texts_of(self, encoded: Encoded, rows: npt.NDArray[np.int64]) -> list[LabelTexts]:
        if not isinstance(encoded, EncodedChoices):
            return [self._texts] * len(rows)
        of_rows = [encoded.texts[row] for row in rows.tolist()]
        # Rows with a problem have no texts, and come into no batch.
        return [texts for texts in of_rows if texts is not None]

    def _whole_rows(self, batch: _Batch) -> torch.Tensor:
        """Return the sums of labels' log-probabilities, by passes over prompts with a path behind each."""
        scores, prefix = self._no_scores(batch), batch.prefix
        layers = None if prefix is None else [LayerBehind([layer]) for layer in prefix.layers]
        parts = self._parts(_row_paths(batch.texts), len(batch.rows), 1)
        passes = [self._whole(batch, some) for some in parts]
        for one_pass in passes:
            logits = self._read(one_pass, None if layers is None else Cache(layers=layers))
            self._add(scores, logits, one_pass, batch.texts)
        return scores

    def _behind_prompts(self, batch: _Batch) -> torch.Tensor:
        """Return what ``_whole_rows`` does, by a pass over the prompts, and passes over the paths alone."""
        scores, prefix, texts = self._no_scores(batch), batch.prefix, batch.texts
        prompts = [RowPath(row, (), range(len(of_row.ids))) for row, of_row in enumerate(texts)]
        prompt_pass = self._whole(batch, prompts)
        prefix_tokens = 0 if prefix is None else len(prefix.tokens)
        lengths = batch.encoded.lengths[batch.rows] - prefix_tokens
        # A pass has no more rows than the prompts' own, and so takes no more memory.
        parts = self._parts([path for path in _row_paths(texts) if path.tokens], len(batch.rows), 0)
        behind = [self._behind(lengths, some, prefix_tokens) for some in parts]
        if prefix is None:
            cache = DynamicCache()
            self._add(scores, self._read(prompt_pass, cache), prompt_pass, texts)
            # Once for all passes; behind a prefix it is another order for each layer's joined tokens.
            order = padding_first(lengths, int(lengths.max()), 0)
            if order is not None:
                order_on = functools.cache(partial(on_device, order))
                for layer in cache.layers:
                    layer.keys = reordered(layer.keys, order_on(layer.keys.device))
                    layer.values = reordered(layer.values, order_on(layer.values.device))
            kept = [(layer.keys, layer.values) for layer in cache.layers]
        else:
            layers = [LayerBehind([layer], keeps=True) for layer in prefix.layers]
            self._add(scores, self._read(prompt_pass, Cache(layers=layers)), prompt_pass, texts)
            kept = [layer.computed for layer in layers if layer.computed is not None]
        for one_pass, order in behind:
            cache = Cache(layers=self._layers(kept, one_pass.paths, order, prefix))
            self._add(scores, self._read(one_pass, cache), one_pass, texts)
        return scores

    def _layers(
        self,
        kept: Sequence[KeysAndValues],
        some: Sequence[RowPath],
        order: npt.NDArray[np.int64] | None,
        prefix: Prefix | None,
    ) -> list[LayerBehind]:
        """Return the layers of a cache with the prefix, and the prompt of each path's row behind it."""
        path_rows = np.array([path.row for path in some], dtype=np.int64)
        is_whole_batch = np.array_equal(path_rows, np.arange(len(kept[0][0])))
        # Of a model on several GPUs, each has its own copy.
        rows_on = functools.cache(lambda device: None if is_whole_batch else on_device(path_rows, device))
        order_on = functools.cache(lambda device: None if order is None else on_device(order, device))
        layers = []
        for index, prompts in enumerate(kept):
            device = prompts[0].device
            earlier = [prompts] if prefix is None else [prefix.layers[index], prompts]
            layers.append(LayerBehind(earlier, rows_on(device), order_on(device)))
        return layers

    def _read(self, one_pass: _Pass, cache: Cache | None) -> torch.Tensor:
        """Return the vocabulary's logits at a pass's places, float32 [paths, k, vocabulary]."""
        options = {} if cache is None else {self._cache_argument: cache}
        head = self._model.get_output_embeddings()
        with head_at(head, one_pass.places):
            logits: torch.Tensor = self._model(
                **one_pass.inputs, **options, use_cache=cache is not None
            ).logits
        return logits.float()

    def _no_scores(self, batch: _Batch) -> torch.Tensor:
        labels = self._labels if isinstance(batch.encoded, EncodedChoices) else len(self._texts.ids)
        return torch.zeros((len(batch.rows), labels + 1), device=self.last_device)

    def _finished(self, scores: torch.Tensor, texts: Sequence[LabelTexts]) -> torch.Tensor:
        """Return the scores divided; labels that a row does not have get the lowest number, whose softmax is 0."""
        divisors = np.ones(tuple(scores.shape), dtype=np.float32)
        is_missing = np.ones(divisors.shape, dtype=bool)
        is_missing[:, -1] = False
        for row, of_row in enumerate(texts):
            divisors[row, : len(of_row.ids)] = of_row.divisors
            is_missing[row, : len(of_row.ids)] = False
        scores = scores / on_device(divisors, scores.device)
        if not is_missing.any():
            return scores
        return scores.masked_fill(on_device(is_missing, scores.device), torch.finfo(scores.dtype).min)

    def _add(
        self, scores: torch.Tensor, logits: torch.Tensor, one_pass: _Pass, texts: Sequence[LabelTexts]
    ) -> None:
        """Add the log-probabilities of the labels' tokens that a pass tells, and that of other first tokens."""
        first, last = one_pass.first_token, one_pass.first_token + logits.shape[1]
        entries = [
            (place, path.row, label, texts[path.row].ids[label][first:last])
            for place, path in enumerate(one_pass.paths)
            for label in path.labels
            if len(texts[path.row].ids[label]) > first
        ]
        device = logits.device
        tokens, is_token = _rectangle([ids for *_, ids in entries])
        places, rows, labels = (
            on_device(np.array(numbers, dtype=np.int64), device)
            for numbers in list(zip(*entries, strict=True))[:3]
        )
        total = logits.logsumexp(-1)
        positions = torch.arange(tokens.shape[1], device=device)
        of_tokens = logits[places[:, None], positions, on_device(tokens, device)]
        of_tokens = of_tokens - total[places, : tokens.shape[1]]
        scores[rows, labels] += of_tokens.where(on_device(is_token, device), 0).sum(-1)
        if first == 0:
            # Paths of the same row tell the same of its first token.
            batch_rows = [path.row for path in one_pass.paths]
            firsts = [sorted({ids[0] for ids in texts[row].ids}) for row in batch_rows]
            tokens, is_token = _rectangle(firsts)
            of_firsts = logits[:, 0].gather(1, on_device(tokens, device)) - total[:, :1]
            mass = of_firsts.exp().where(on_device(is_token, device), 0).sum(-1)
            others = torch.log1p(-mass.clamp(max=1 - 1e-7))
            scores[on_device(np.array(batch_rows, dtype=np.int64), device), -1] = others

    def skipped_tokens(self, encoded: Encoded) -> npt.NDArray[np.int64]:
        self._find_shared(encoded)
        if not len(self._shared):
            return super().skipped_tokens(encoded)
        rows = np.arange(len(encoded.lengths))
        return np.where(begins_with(encoded, rows, self._shared), len(self._shared), 0)

    def forget(self) -> None:
        self._prefix = self._chunk = None

    def try_kept(self, encoded: Encoded, tolerance: float) -> None:
        """Take the shortcuts that keep keys and values, of a shared prefix and of prompts, if numbers stay."""
        ids = np.resize(np.concatenate(encoded.inputs["input_ids"]), 2 * _MIN_TOKENS)
        # Different ends, of different lengths.
        rows = [np.concatenate([ids[:_MIN_TOKENS], ids[start:]]) for start in (33, 40, 50, 60)]
        trial = Encoded({"input_ids": rows}, np.array([len(row) for row in rows]), truncated_rows=0)
        expected = self._trial_scores(trial)
        self._try(Shortcut.SHARED_PREFIX, trial, expected, tolerance)
        if self._texts.has_several_tokens:
            self._try(Shortcut.KEPT_PROMPT, trial, expected, tolerance)
        self.forget()
        self.shared_tokens = 0

    def _trial_scores(self, trial: Encoded) -> torch.Tensor:
        """Return the scores of texts, with what is kept of their prefix and without, float64 on the host."""
        batch = np.arange(len(trial.lengths))
        # A pass with a mask shares no prefix.
        masks = (False, True) if self._texts.has_several_tokens else (False,)
        scores = [self.logits(trial, batch, with_mask) for with_mask in masks]
        return torch.cat(scores).cpu().double()

    def _try(self, shortcut: Shortcut, trial: Encoded, expected: torch.Tensor, tolerance: float) -> None:
        self.taken.add(shortcut)
        self._chunk = None
        is_same = False
        try:
            difference = (self._trial_scores(trial) - expected).abs().max()
            is_close = bool(difference <= tolerance * max(1.0, float(expected.abs().max())))
            is_same = is_close and (shortcut is not Shortcut.SHARED_PREFIX or self._prefix is not None)
        except Exception as error:  # a model whose layers keep other states than keys and values
            if classify(error) is Verdict.SUSPECT:
                raise
        if not is_same:
            self.taken.discard(shortcut)

    def _find_shared(self, encoded: Encoded) -> None:
        """Find the tokens that a chunk's rows begin with, once; none if prefixes are not shared."""
        if encoded is not self._chunk:
            self._chunk = encoded
            self._keeps_prompts = True
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
            with head_at(self._model.get_output_embeddings(), first_position):
                self._model(input_ids=inputs, use_cache=True, **{self._cache_argument: cache})
            self._prefix = Prefix(self._shared, [(layer.keys, layer.values) for layer in cache.layers])
        return self._prefix

    def _whole(self, batch: _Batch, some: Sequence[RowPath]) -> _Pass:
        """Return a pass over the prompts of paths with their tokens, which reads from the prompt's last token on.

        Neither inputs nor places include the prefix; only the attention mask does.
        """
        skipped = 0 if batch.prefix is None else len(batch.prefix.tokens)
        path_rows = batch.rows[[path.row for path in some]]
        ids = batch.encoded.inputs["input_ids"]
        arrays = self._padded(
            [
                np.concatenate([ids[row][skipped:], np.array(path.tokens, dtype=np.int64)])
                for row, path in zip(path_rows.tolist(), some, strict=True)
            ]
        )
        if Shortcut.NO_MASK in self.taken and not batch.with_mask:
            del arrays["attention_mask"]
        elif skipped:
            seen = np.ones((len(some), skipped), dtype=np.int64)
            arrays["attention_mask"] = np.concatenate([seen, arrays["attention_mask"]], axis=1)
        tokens = max(len(path.tokens) for path in some)
        places = batch.encoded.lengths[path_rows, None] - skipped - 1 + np.arange(tokens + 1)
        # Places behind a shorter path are read for nothing.
        places = np.minimum(places, arrays["input_ids"].shape[1] - 1)
        return self._pass(arrays, places, some, first_token=0)

    def _behind(
        self, lengths: npt.NDArray[np.int64], some: Sequence[RowPath], prefix_tokens: int
    ) -> tuple[_Pass, npt.NDArray[np.int64] | None]:
        """Return a pass over the tokens of paths alone, and the order of its keys and values (``padding_first``).

        Args:
            lengths: of the batch's prompts, without the prefix, int64 [rows].
        """
        arrays = self._padded([np.array(path.tokens, dtype=np.int64) for path in some])
        earlier = prefix_tokens + lengths[[path.row for path in some]]
        earlier_tokens = prefix_tokens + int(lengths.max())
        tokens = arrays["input_ids"].shape[1]
        seen = np.arange(earlier_tokens) >= earlier_tokens - earlier[:, None]
        arrays["attention_mask"] = np.concatenate([seen.astype(np.int64), arrays["attention_mask"]], axis=1)
        arrays["position_ids"] = earlier[:, None] + np.arange(tokens)
        places = np.broadcast_to(np.arange(tokens), arrays["input_ids"].shape).copy()
        order = padding_first(earlier, earlier_tokens, tokens) if prefix_tokens else None
        return self._pass(arrays, places, some, first_token=1), order

    def _padded(self, ids: list[npt.NDArray[np.int64]]) -> dict[str, npt.NDArray[np.int64]]:
        lengths = np.array([len(row) for row in ids], dtype=np.int64)
        encoded = Encoded({"input_ids": ids}, lengths, truncated_rows=0)
        return padded(encoded, np.arange(len(ids)), self._pad_token_id)

    def _pass(
        self,
        arrays: dict[str, npt.NDArray[np.int64]],
        places: npt.NDArray[np.int64],
        some: Sequence[RowPath],
        first_token: int,
    ) -> _Pass:
        inputs = {name: on_device(array, self._device) for name, array in arrays.items()}
        return _Pass(inputs, on_device(places, self.last_device), some, first_token)

    def _parts(self, row_paths: Sequence[RowPath], rows: int, before: int) -> list[list[RowPath]]:
        """Cut paths into passes of at most ``rows`` rows, and of so many positions.

        Args:
            before: positions that are read before a path's own.
        """
        parts: list[list[RowPath]] = []
        width = 0
        for path in row_paths:
            is_full = parts and (
                len(parts[-1]) == rows or (len(parts[-1]) + 1) * width > rows * self._positions
            )
            if not parts or is_full:
                parts.append([])
                width = len(path.tokens) + before
            width = max(width, len(path.tokens) + before)
            parts[-1].append(path)
        return parts


def _row_paths(texts: Sequence[LabelTexts]) -> list[RowPath]:
    """Return the paths of a batch's rows: the first of each row, then the second, and so on."""
    count = max(len(of_row.paths) for of_row in texts)
    return [
        RowPath(row, *of_row.paths[number])
        for number in range(count)
        for row, of_row in enumerate(texts)
        if number < len(of_row.paths)
    ]


def _rectangle(
    rows: Sequence[Sequence[int]],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return rows of tokens, padded to the longest, and where tokens stand."""
    lengths = np.array([len(row) for row in rows])
    is_token = np.arange(lengths.max()) < lengths[:, None]
    tokens = np.zeros(is_token.shape, dtype=np.int64)
    tokens[is_token] = np.concatenate([np.array(row, dtype=np.int64) for row in rows])
    return tokens, is_token


@contextlib.contextmanager
def head_at(head: nn.Module, positions: torch.Tensor) -> Iterator[None]:
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
