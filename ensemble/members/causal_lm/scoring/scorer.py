"""Batches -> log-probabilities of the labels' texts, and the probability that fell on other tokens.

The model's own forward pass computes, with whatever it does to its logits, such as Gemma-2's cap.  Only the
positions that say something of a label go through the head over the vocabulary: what it is given is cut down on
the way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from ensemble.common.torch_errors import Verdict, classify
from ensemble.members.causal_lm.scoring.prefix import MIN_TOKENS, Prefix, begins_with, shared_tokens
from ensemble.members.huggingface.scoring.classifier import (
    Classifier,
    Shortcut,
    last_token_only,
    on_device,
    padded,
)
from ensemble.members.huggingface.scoring.encode import Encoded


@dataclass(frozen=True)
class Path:
    """Tokens that are given behind a row's prompt, and the labels whose probabilities can be read there.

    A label of the tokens t1, t2, t3 needs t1 and t2 to be given: its probability is read at the prompt's last token
    and at these two.
    """

    given: tuple[int, ...]
    labels: tuple[int, ...]


def paths(label_ids: Sequence[tuple[int, ...]]) -> list[Path]:
    """The fewest passes in which every label can be read, the longest first; one where all are single tokens."""
    needed = {ids[:-1] for ids in label_ids}
    longest = [
        one for one in needed if not any(one == other[: len(one)] and one != other for other in needed)
    ]
    found: list[Path] = []
    left = dict(enumerate(label_ids))
    for given in sorted(longest, key=lambda one: (-len(one), one)):
        labels = [label for label, ids in left.items() if given[: len(ids) - 1] == ids[:-1]]
        found.append(Path(given, tuple(labels)))
        left = {label: ids for label, ids in left.items() if label not in labels}
    return found


class LabelScorer(Classifier):
    """A loaded language model that scores each row's labels, whatever its neighbours in the batch.

    Args:
        model: as ``AutoModelForCausalLM`` loads it.
        pad_token_id: what to fill up with; any id, since no token sees the padding behind it.
        label_ids: the tokens of each label, in the config's order.
        divisors: what each label's log-probability is divided by.
    """

    def __init__(
        self,
        model: Any,
        pad_token_id: int,
        label_ids: Sequence[tuple[int, ...]],
        divisors: Sequence[float],
    ) -> None:
        super().__init__(model, pad_token_id)
        self._label_ids, self._paths = label_ids, paths(label_ids)
        self._divisors = torch.tensor(divisors)
        self._first_tokens = sorted({ids[0] for ids in label_ids})
        self.possible -= {Shortcut.LAST_TOKEN}
        self.taken = {Shortcut.LAST_TOKEN}  # nothing else goes through the head
        self._prefix: Prefix | None = None
        self._chunk: Encoded | None = None  # whose rows have been looked at for a prefix
        self._wanted: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)  # of that chunk
        self.shared_tokens = 0  # real ones that no pass has computed

    def logits(
        self,
        encoded: Encoded,
        rows: npt.NDArray[np.int64],
        with_mask: bool = False,
        timing: AbstractContextManager[None] | None = None,
    ) -> torch.Tensor:
        """Forward passes over rows as a batch, one for each path.

        Returns:
            float32 [batch, labels + 1]: the labels' log-probabilities, divided; and the logarithm of the
            probability that a row's first token belongs to no label, on the device where the pass ends.
        """
        self._look_at(encoded)
        alone = self._alone() if len(rows) == 1 else nullcontext()
        with timing or nullcontext(), alone, self._spread.forward_pass(), torch.inference_mode():
            # Float32, to run rows again in, is not what keys and values were computed in; it comes with a mask.
            prefix = None if with_mask else self._take_prefix(encoded, rows)
            batches = [self._batch(encoded, rows, path, with_mask, prefix) for path in self._paths]
            scores: dict[int, torch.Tensor] = {}
            others = None
            for path, (inputs, positions) in zip(self._paths, batches, strict=True):
                # The last layer's parts compute one position of each row.
                is_single = not path.given and Shortcut.LAST_TOKEN_LAYER in self.taken
                parts = self._last_token_parts if is_single else []
                head = self._model.get_output_embeddings()
                before = {} if prefix is None else {"past_key_values": prefix.cache()}
                with last_token_only(parts, positions[:, 0]), _head_at(head, positions):
                    logits = self._model(**inputs, **before, use_cache=bool(before)).logits.float()
                total = logits.logsumexp(-1)
                for label in path.labels:
                    ids = self._label_ids[label]
                    each = [logits[:, place, token] - total[:, place] for place, token in enumerate(ids)]
                    scores[label] = torch.stack(each).sum(0) / self._divisors[label]
                if others is None:
                    mass = (logits[:, 0, self._first_tokens] - total[:, :1]).exp().sum(-1)
                    others = torch.log1p(-mass.clamp(max=1 - 1e-7))
                del logits
            assert others is not None
            if prefix is not None:
                self.shared_tokens += len(rows) * len(prefix.tokens)
            return torch.stack([*(scores[label] for label in sorted(scores)), others], dim=1)

    def skipped_tokens(self, encoded: Encoded) -> npt.NDArray[np.int64]:
        self._look_at(encoded)
        if not len(self._wanted):
            return super().skipped_tokens(encoded)
        every = np.arange(len(encoded.lengths))
        return np.where(begins_with(encoded, every, self._wanted), len(self._wanted), 0)

    def takes_prefix(self, encoded: Encoded, tolerance: float) -> bool:
        """Whether rows keep their numbers, so far from 1, where what they begin with is computed once.

        If so, it is from now on.

        Args:
            encoded: warm-up texts; the rows that are tried are made of their tokens.
        """
        ids = np.concatenate(encoded.inputs["input_ids"])
        ids = np.tile(ids, -(-2 * MIN_TOKENS // len(ids)))[: 2 * MIN_TOKENS]
        # Different ends, of different lengths.
        rows = [np.concatenate([ids[:MIN_TOKENS], ids[start:]]) for start in (33, 40, 50, 60)]
        tried = Encoded({"input_ids": rows}, np.array([len(row) for row in rows]), truncated_rows=0)
        every, stays = np.arange(len(rows)), False
        expected = self.logits(tried, every).cpu().double()
        self.taken |= {Shortcut.SHARED_PREFIX}
        self._chunk = None
        try:
            found = self.logits(tried, every).cpu().double()
            scale = max(1.0, float(expected.abs().max()))
            stays = self._prefix is not None and bool((found - expected).abs().max() <= tolerance * scale)
        except Exception as error:  # a model whose layers keep something else than keys and values
            if classify(error) is Verdict.SUSPECT:
                raise
        finally:
            if not stays:
                self.taken -= {Shortcut.SHARED_PREFIX}
            self._prefix = self._chunk = None
            self.shared_tokens = 0
        return stays

    def _look_at(self, encoded: Encoded) -> None:
        """Find out what a chunk's rows share, once; nothing where that is not to be made use of."""
        if encoded is self._chunk:
            return
        self._chunk, self._wanted = encoded, np.empty(0, dtype=np.int64)
        if Shortcut.SHARED_PREFIX in self.taken:
            known = None if self._prefix is None else self._prefix.tokens
            self._wanted = shared_tokens(encoded, known)

    def _take_prefix(self, encoded: Encoded, rows: npt.NDArray[np.int64]) -> Prefix | None:
        """The chunk's, computed where it is not there yet; None where it has none, or these rows have another."""
        if not len(self._wanted):
            return None
        if self._prefix is None or not np.array_equal(self._prefix.tokens, self._wanted):
            self._prefix = None
            filled: DynamicCache | None = DynamicCache()
            inputs = on_device(self._wanted[None], self._device)
            nowhere = on_device(np.zeros((1, 1), dtype=np.int64), self.last_device)
            try:
                with _head_at(self._model.get_output_embeddings(), nowhere):
                    self._model(input_ids=inputs, past_key_values=filled, use_cache=True)
            except torch.OutOfMemoryError:
                filled = None
            if filled is None:
                # Keys and values of all layers are more than a row's own pass keeps: this chunk's rows run whole.
                self._wanted = self._wanted[:0]
                if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                    torch.cuda.empty_cache()
                return None
            self._prefix = Prefix(self._wanted, filled)
        return self._prefix if begins_with(encoded, rows, self._wanted).all() else None

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """A row that does not fit even so runs once more, then whole: what is kept of a prefix takes room, too."""
        try:
            yield
        except torch.OutOfMemoryError:
            self._prefix, self._wanted = None, self._wanted[:0]
            raise

    def _batch(
        self,
        encoded: Encoded,
        rows: npt.NDArray[np.int64],
        path: Path,
        with_mask: bool,
        prefix: Prefix | None,
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The model's inputs with the path's tokens behind each row, and the positions to read, int64 [rows, k].

        Both without the prefix, which only a mask counts.
        """
        skipped = 0 if prefix is None else len(prefix.tokens)
        given = np.array(path.given, dtype=np.int64)
        ids = encoded.inputs["input_ids"]
        whole = Encoded(
            {"input_ids": [np.concatenate([ids[row][skipped:], given]) for row in rows.tolist()]},
            encoded.lengths[rows] - skipped + len(given),
            truncated_rows=0,
        )
        arrays = padded(whole, np.arange(len(rows)), self._pad_token_id)
        if Shortcut.NO_MASK in self.taken and not with_mask:
            del arrays["attention_mask"]
        elif skipped:
            seen = np.ones((len(rows), skipped), dtype=np.int64)
            arrays["attention_mask"] = np.concatenate([seen, arrays["attention_mask"]], axis=1)
        inputs = {name: on_device(array, self._device) for name, array in arrays.items()}
        positions = encoded.lengths[rows, None] - skipped - 1 + np.arange(len(given) + 1)
        return inputs, on_device(positions, self.last_device)


@contextlib.contextmanager
def _head_at(head: nn.Module, positions: torch.Tensor) -> Iterator[None]:
    """While this lasts, the head over the vocabulary sees these positions of each row alone, int64 [rows, k]."""

    def take(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        states, *others = inputs
        every = torch.arange(len(states), device=states.device)[:, None]
        return (states[every, positions.to(states.device)], *others)

    handle = head.register_forward_pre_hook(take)
    try:
        yield
    finally:
        handle.remove()
