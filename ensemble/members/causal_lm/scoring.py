"""Compute log-probabilities of the labels' texts, and the probability of other tokens, batch by batch.

The model's own forward pass computes the logits, with any change it makes to them, such as Gemma-2's cap.  Only the
positions that tell a label's probability go through the head over the vocabulary: a hook cuts its input.

Where labels have several tokens, the keys and values of a row's prompt are computed once, and the labels' tokens
run behind them.  The numbers equal those of whole rows but for rounding, as matrix products have other shapes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from threading import get_ident
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache

from ensemble.members.huggingface.loading.device_map import on_device
from ensemble.members.huggingface.scoring.beginnings import Behind
from ensemble.members.huggingface.scoring.classifier import Classifier, padded, trial_of
from ensemble.members.huggingface.scoring.encode import Encoded
from ensemble.members.huggingface.scoring.forward import Shortcut
from ensemble.members.huggingface.scoring.key_values import cache_behind, padding_first, reordered


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
        behind: what all of them begin with, and which is computed already.
    """

    encoded: Encoded
    rows: npt.NDArray[np.int64]
    texts: Sequence[LabelTexts]
    with_mask: bool
    behind: Behind


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
        self.possible |= {Shortcut.SHARED_PREFIX}
        self._stored_pad_token_id = None  # so that a row's last token is read
        self._keeps_prompts = True  # whether the chunk's rows leave room for the keys and values of a prompt

    def logits(self, encoded: Encoded, rows: npt.NDArray[np.int64], with_mask: bool = False) -> torch.Tensor:
        """Run forward passes over rows as a batch: their prompts, and behind them the paths.

        Where keys and values are not kept, the prompt is computed again before each path.

        Returns:
            float32 [batch, labels + 1]: the labels' log-probabilities, divided; and the logarithm of the
            probability of first tokens that belong to no label.
        """
        if encoded is not self._chunk:
            self._keeps_prompts = True
        texts = self._texts_of(encoded, rows)
        if not with_mask and self.is_packed(encoded, rows):
            return self._finished(self._packed_rows(encoded, rows, texts), texts)
        try:
            with self._passes(encoded, rows, with_mask) as behind:
                is_kept = Shortcut.KEPT_PROMPT in self.taken and self._keeps_prompts
                is_kept = is_kept and any(of_row.has_several_tokens for of_row in texts)
                compute = self._behind_prompts if is_kept else self._whole_rows
                return self._finished(compute(_Batch(encoded, rows, texts, with_mask, behind)), texts)
        except torch.OutOfMemoryError:
            self._keeps_prompts = self._keeps_prompts and len(rows) > 1
            raise

    def packs(self, encoded: Encoded) -> int:
        # Where rows have choices of their own, these texts have several tokens.
        return 0 if self._texts.has_several_tokens else super().packs(encoded)

    def _packed_rows(
        self, encoded: Encoded, rows: npt.NDArray[np.int64], texts: Sequence[LabelTexts]
    ) -> torch.Tensor:
        """Return what ``_whole_rows`` does for labels of one token, by a pass over rows one behind the other."""
        paths = [RowPath(row, (), range(len(of_row.ids))) for row, of_row in enumerate(texts)]
        scores = self._no_scores(_Batch(encoded, rows, texts, with_mask=False, behind=Behind()))
        with self._packed(encoded, rows) as (inputs, places):
            # The head gets one row, whose places are those of all rows.
            one_pass = _Pass(inputs, places[None], paths, first_token=0)
            logits = self._read(one_pass, None)[0]
            self._add(scores, logits[:, None], one_pass, texts)
        return scores

    def _texts_of(self, encoded: Encoded, rows: npt.NDArray[np.int64]) -> list[LabelTexts]:
        if not isinstance(encoded, EncodedChoices):
            return [self._texts] * len(rows)
        of_rows = [encoded.texts[row] for row in rows.tolist()]
        # Rows with a problem have no texts, and come into no batch.
        return [texts for texts in of_rows if texts is not None]

    def _whole_rows(self, batch: _Batch) -> torch.Tensor:
        """Return the sums of labels' log-probabilities, by passes over prompts with a path behind each."""
        scores = self._no_scores(batch)
        parts = self._parts(_row_paths(batch.texts), len(batch.rows), 1)
        passes = [self._whole(batch, some) for some in parts]
        for one_pass in passes:
            logits = self._read(one_pass, batch.behind.cache())
            self._add(scores, logits, one_pass, batch.texts)
        return scores

    def _behind_prompts(self, batch: _Batch) -> torch.Tensor:
        """Return what ``_whole_rows`` does, by a pass over the prompts, and passes over the paths alone."""
        scores, texts = self._no_scores(batch), batch.texts
        earlier = [part.layers for part in batch.behind.parts]
        prompts = [RowPath(row, (), range(len(of_row.ids))) for row, of_row in enumerate(texts)]
        prompt_pass = self._whole(batch, prompts)
        prefix_tokens = batch.behind.tokens
        lengths = batch.encoded.lengths[batch.rows] - prefix_tokens
        # A pass has no more rows than the prompts' own, and so takes no more memory.
        parts = self._parts([path for path in _row_paths(texts) if path.tokens], len(batch.rows), 0)
        behind = [self._behind_prompt(lengths, some, prefix_tokens) for some in parts]
        cache = cache_behind(earlier, keeps=True) if earlier else DynamicCache()
        self._add(scores, self._read(prompt_pass, cache), prompt_pass, texts)
        # Once for all passes; behind a prefix it is another order for each layer's joined tokens.
        order = None if earlier else padding_first(lengths, int(lengths.max()), 0)
        if order is not None:
            order_on = functools.cache(partial(on_device, order))
            for layer in cache.layers:
                layer.keys = reordered(layer.keys, order_on(layer.keys.device))
                layer.values = reordered(layer.values, order_on(layer.values.device))
        kept = [(layer.keys, layer.values) for layer in cache.layers]
        for one_pass, order in behind:
            rows = np.array([path.row for path in one_pass.paths], dtype=np.int64)
            is_whole_batch = np.array_equal(rows, np.arange(len(batch.rows)))
            cache = cache_behind([*earlier, kept], None if is_whole_batch else rows, order)
            self._add(scores, self._read(one_pass, cache), one_pass, texts)
        return scores

    def _read(self, one_pass: _Pass, cache: Cache | None) -> torch.Tensor:
        """Return the vocabulary's logits at a pass's places, float32 [paths, k, vocabulary]."""
        head = self._model.get_output_embeddings()
        with head_at(head, one_pass.places):
            logits: torch.Tensor = self._model(**one_pass.inputs, **self._cached(cache)).logits
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

    def try_kept(self, encoded: Encoded, tolerance: float) -> None:
        several = [Shortcut.KEPT_PROMPT] if self._texts.has_several_tokens else []
        self._try([Shortcut.SHARED_PREFIX, *several], trial_of(encoded, None), tolerance)

    def _trial_logits(self, trial: Encoded) -> torch.Tensor:
        logits = [super()._trial_logits(trial)]
        if self._texts.has_several_tokens:
            # A pass with a mask shares no prefix.
            logits.append(self.logits(trial, np.arange(len(trial.lengths)), with_mask=True).cpu().double())
        return torch.cat(logits)

    def _whole(self, batch: _Batch, some: Sequence[RowPath]) -> _Pass:
        """Return a pass over the prompts of paths with their tokens, which reads from the prompt's last token on.

        Neither inputs nor places include the prefix; only the attention mask does.
        """
        skipped = batch.behind.tokens
        path_rows = batch.rows[[path.row for path in some]]
        ids = batch.encoded.inputs["input_ids"]
        arrays = self._padded(
            [
                np.concatenate([ids[row], np.array(path.tokens, dtype=np.int64)])
                for row, path in zip(path_rows.tolist(), some, strict=True)
            ]
        )
        tokens = max(len(path.tokens) for path in some)
        places = batch.encoded.lengths[path_rows, None] - skipped - 1 + np.arange(tokens + 1)
        # Places behind a shorter path are read for nothing.
        places = np.minimum(places, arrays["input_ids"].shape[1] - skipped - 1)
        inputs = self._inputs(arrays, batch.with_mask, skipped)
        return _Pass(inputs, on_device(places, self.last_device), some, first_token=0)

    def _behind_prompt(
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
        inputs = {name: on_device(array, self._device) for name, array in arrays.items()}
        return _Pass(inputs, on_device(places, self.last_device), some, first_token=1), order

    def _padded(self, ids: list[npt.NDArray[np.int64]]) -> dict[str, npt.NDArray[np.int64]]:
        lengths = np.array([len(row) for row in ids], dtype=np.int64)
        encoded = Encoded({"input_ids": ids}, lengths, truncated_rows=0)
        return padded(encoded, np.arange(len(ids)), self._pad_token_id)

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


def _rectangle(rows: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return rows of tokens, padded to the longest, and where tokens stand."""
    lengths = np.array([len(row) for row in rows])
    is_token = np.arange(lengths.max()) < lengths[:, None]
    tokens = np.zeros(is_token.shape, dtype=np.int64)
    tokens[is_token] = np.concatenate([np.array(row, dtype=np.int64) for row in rows])
    return tokens, is_token


@contextlib.contextmanager
def head_at(head: nn.Module, positions: torch.Tensor) -> Iterator[None]:
    """Let the head over the vocabulary see only these positions of each row, int64 [rows, k]."""
    thread = get_ident()

    def take(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if get_ident() != thread:  # the one that ``WarmUp.pack`` has left alone may be within its pass
            return None
        states, *others = inputs
        rows = torch.arange(len(states), device=states.device)[:, None]
        return (states[rows, positions.to(states.device)], *others)

    handle = head.register_forward_pre_hook(take)
    try:
        yield
    finally:
        handle.remove()
