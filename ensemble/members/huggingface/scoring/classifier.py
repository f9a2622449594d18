"""Turn batches into probabilities: the forward pass, the last token's logits, the activation.

What rows of a decoder begin with alike is computed once (``beginnings.py``).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GenericForSequenceClassification

from ensemble.common.protocol import Activation
from ensemble.common.torch_errors import Verdict, classify
from ensemble.members.huggingface.loading.architecture import is_causal, layer_windows
from ensemble.members.huggingface.loading.device_map import on_device
from ensemble.members.huggingface.loading.flex_attention import Packing
from ensemble.members.huggingface.scoring.beginnings import (
    MIN_TOKENS,
    Beginnings,
    Behind,
    Kept,
    find_beginnings,
    shared_tokens,
)
from ensemble.members.huggingface.scoring.encode import Encoded
from ensemble.members.huggingface.scoring.forward import Integers, Scorer, Shortcut
from ensemble.members.huggingface.scoring.key_values import cache_behind
from ensemble.members.huggingface.scoring.packing import lay_out
from ensemble.members.huggingface.spec import FLEX_BLOCK


class Classifier(Scorer[Encoded]):
    """Run a loaded sequence classifier, which gives a row the same numbers in any batch.

    The head of a decoder reads one token: the last one whose id is not the pad id of the checkpoint's config, as
    transformers' own forward has it, and with it whoever has trained the checkpoint.  If pad equals eos and a text
    ends with eos, that is the token before.  Where the config has no pad id (Llama-3), it is the row's last token.
    Only this token's state goes through the head if that is known to give the same numbers.
    """

    _trial_groups: ClassVar[Integers | None] = np.array([0, 0, 1, 1])  # None: rows never come in groups

    def __init__(self, model: Any, pad_token_id: int) -> None:
        super().__init__(model)
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self._stored_pad_token_id = _stored_pad_token_id(model.config, self._vocabulary)
        self._pad_token_id = pad_token_id
        self._is_generic = (
            isinstance(model, GenericForSequenceClassification)
            and type(model).forward is GenericForSequenceClassification.forward
        )
        # Models with an encoder and a decoder pool at eos, and use the pad id for shifting.
        self._is_encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
        # Whether a decoder's own forward finds its token by the pad id (GPT-2, OPT, Falcon, Bloom, ...).  Base
        # classes count, because some classes only delegate to transformers' generic forward.
        self._searches_pad_token = False
        if not self._is_generic and not self._is_encoder_decoder:
            forwards = [vars(base).get("forward") for base in type(model).__mro__]
            self._searches_pad_token = any("pad_token_id" in _names_in(forward) for forward in forwards)
        # Padding is on the right, whatever side the tokenizer names: positions then start at 0, encoders pool their
        # first token, and causal attention does not see it. Only XLNet pools the last position.
        self._pad_left = model.config.model_type == "xlnet"
        # Such a forward runs the body, then the head at every position, and picks one by arange; heads without that
        # take the mean, or the first position.
        body_and_score = {model.base_model_prefix, "score", "arange"}
        if self._searches_pad_token and body_and_score <= _names_in(type(model).forward):
            self.possible |= {Shortcut.LAST_TOKEN}
        if is_causal(model) and not self._pad_left:
            self.possible |= {Shortcut.NO_MASK, Shortcut.SHARED_PREFIX}
        self.taken = {Shortcut.LAST_TOKEN} if self._is_generic else set()
        self._body = getattr(model, model.base_model_prefix, model)
        self._prefix: Kept | None = None
        self._chunk: Encoded | None = None  # the one that ``_beginnings`` belongs to
        self._beginnings: Beginnings | None = None  # of its rows; None: they run whole
        self.shared_tokens = 0  # tokens of rows that no pass had to compute, padding not counted
        self._compiled_tokens = 0  # for which attention over packed rows is compiled

    def logits(self, encoded: Encoded, rows: npt.NDArray[np.int64], with_mask: bool = False) -> torch.Tensor:
        model = self._model
        if Shortcut.LAST_TOKEN not in self.taken:
            arrays, pad_token_id = self.for_own_head(encoded, rows)
            inputs = self._inputs(arrays, with_mask)
            with self._searching(pad_token_id), self._spread.forward_pass(), torch.inference_mode():
                logits: torch.Tensor = model(**inputs).logits
                return logits.float()
        if not with_mask and self.is_packed(encoded, rows):
            with self._packed(encoded, rows) as (inputs, places):
                states = self._body(**inputs).last_hidden_state[0]
                return cast(torch.Tensor, model.score(states[places.to(states.device)])).float()
        # Without a pad id, since some bodies warn of one.
        with self._searching(None), self._passes(encoded, rows, with_mask) as behind:
            # Copied from the host: a copy between GPUs would wait for both.
            read = on_device(self._read_places(encoded, rows) - behind.tokens, self.last_device)
            arrays = padded(encoded, rows, self._pad_token_id, self._pad_left)
            states = self._states(arrays, with_mask, behind)
            last_logits: torch.Tensor = model.score(states_at(states, read))
            return last_logits.float()

    def packs(self, encoded: Encoded) -> int:
        can_pack = {Shortcut.LAST_TOKEN, Shortcut.NO_MASK} <= self.taken and self.stages == 1
        # Not where rows have segments, or groups whose beginnings are kept.
        is_plain = [*encoded.inputs] == ["input_ids"] and encoded.groups is None
        return self.packed_tokens if can_pack and is_plain else 0

    def is_packed(self, encoded: Encoded, rows: Integers) -> bool:
        tokens = self.packs(encoded)
        if not tokens:
            return False
        skipped, widths = self.skipped_tokens(encoded)
        return int(widths[rows].sum() + skipped[rows[0]]) <= tokens

    @contextlib.contextmanager
    def _packed(
        self, encoded: Encoded, rows: Integers
    ) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Return a context for a pass over rows one behind the other, its inputs, and the places that are read.

        What the rows begin with stands before them once.

        Returns:
            int64 [1, tokens] each; int64 [rows], on the device where a pass ends.
        """
        skipped = int(self.skipped_tokens(encoded)[0][rows[0]])
        ids = [encoded.inputs["input_ids"][row] for row in rows.tolist()]
        own = [of_row[skipped:] for of_row in ids]
        # It stays where batches become smaller (``follow``): another length would be compiled anew.
        self._compiled_tokens = max(self._compiled_tokens, -(-self.packed_tokens // FLEX_BLOCK) * FLEX_BLOCK)
        layout = lay_out(ids[0][:skipped], own, self._compiled_tokens)
        places = layout.starts + self._read_places(encoded, rows) - skipped
        arrays = {
            "input_ids": layout.ids,
            "position_ids": layout.positions[: len(layout.ids)].astype(np.int64),
        }
        packing = Packing(layout.ends, layout.positions, self._device)
        inputs = {name: on_device(array[None], self._device) for name, array in arrays.items()}
        read = on_device(places, self.last_device)
        with self._searching(None), packing.used(), self._spread.forward_pass(), torch.inference_mode():
            yield inputs, read
        if set(packing.masks) != layer_windows(self._model.config):
            raise ValueError("its layers do not tell the attention how far they look back")
        self.shared_tokens += skipped * (len(rows) - 1)

    @contextlib.contextmanager
    def _passes(self, encoded: Encoded, rows: Integers, with_mask: bool) -> Iterator[Behind]:
        """Return a context for passes over a batch, and what its rows run behind, which is computed if needed.

        Where memory is too short for what is kept, too, this chunk's rows run whole from now on.
        """
        beginnings = self._find(encoded)
        try:
            with self._spread.forward_pass(), torch.inference_mode():
                behind = Behind()
                # Passes with a mask may be float32, while beginnings were computed in another type.
                if beginnings is not None and not with_mask:
                    behind = self._behind(beginnings, encoded, rows)
                yield behind
        except torch.OutOfMemoryError:
            if len(rows) == 1 or (beginnings is not None and len(beginnings.shared) and self._prefix is None):
                self._prefix = self._beginnings = None
            raise
        self.shared_tokens += behind.saved_tokens(len(rows))

    def _find(self, encoded: Encoded) -> Beginnings | None:
        """Find what a chunk's rows begin with, once; None if nothing is kept."""
        if encoded is not self._chunk:
            self._chunk, self._beginnings = encoded, None
            if Shortcut.SHARED_PREFIX in self.taken and encoded.lengths.any():
                every = np.arange(len(encoded.lengths))
                self._beginnings = find_beginnings(encoded, self._read_places(encoded, every))
        return self._beginnings

    def _behind(self, beginnings: Beginnings, encoded: Encoded, rows: Integers) -> Behind:
        """Return what the rows of a batch run behind, after computing it if needed."""
        shared, skipped = len(beginnings.shared), beginnings.skipped[rows]
        tokens = int(skipped.min())
        parts: list[Kept] = []
        if 0 < shared <= tokens:
            if self._prefix is None or not np.array_equal(self._prefix.tokens[0], beginnings.shared):
                self._prefix = None  # before another one takes memory
                self._prefix = self._keep(beginnings.shared[None], ())
            parts = [self._prefix]
        if encoded.groups is None or tokens == shared or (skipped != tokens).any():
            return Behind(parts)
        _, first, groups = np.unique(encoded.groups[rows], return_index=True, return_inverse=True)
        ids = [encoded.inputs["input_ids"][row][shared:tokens] for row in rows[first].tolist()]
        return Behind([*parts, self._keep(np.stack(ids), parts)], groups)

    def _keep(self, ids: Integers, parts: Sequence[Kept]) -> Kept:
        """Run a pass over beginnings of one length, behind the one that they share, and keep what others need."""
        cache = cache_behind([part.layers for part in parts], keeps=True) if parts else DynamicCache()
        total = self._run_beginnings({"input_ids": on_device(ids, self._device)}, cache)
        return Kept(ids, [(layer.keys, layer.values) for layer in cache.layers], total)

    def _run_beginnings(self, inputs: dict[str, torch.Tensor], cache: Cache) -> torch.Tensor | None:
        """Fill a cache by a pass, and return the ``total`` of ``Kept``."""
        self._body(**inputs, **self._cached(cache))
        return None

    @cached_property
    def _cache_argument(self) -> str:
        # transformers 5.24 has given the argument another name.
        has_new_name = "cache" in inspect.signature(self._body.forward).parameters
        return "cache" if has_new_name else "past_key_values"

    def _cached(self, cache: Cache | None) -> dict[str, Any]:
        """Return the arguments of a pass with a cache, or without one."""
        return {} if cache is None else {self._cache_argument: cache, "use_cache": True}

    def _states(
        self, arrays: dict[str, npt.NDArray[np.int64]], with_mask: bool, behind: Behind
    ) -> torch.Tensor:
        """Return the last hidden states of the tokens behind ``behind``, of the arrays of ``padded``."""
        inputs = self._inputs(arrays, with_mask, behind.tokens)
        states: torch.Tensor = self._body(**inputs, **self._cached(behind.cache())).last_hidden_state
        return states

    def skipped_tokens(self, encoded: Encoded) -> tuple[Integers, Integers]:
        beginnings = self._find(encoded)
        if beginnings is None:
            return super().skipped_tokens(encoded)
        return beginnings.skipped, beginnings.widths

    def may_skip(self, encoded: Encoded, rows: Integers) -> bool:
        if Shortcut.SHARED_PREFIX not in self.taken:
            return False
        places = self._read_places(encoded, np.arange(len(encoded.lengths)))
        return len(shared_tokens(encoded, rows, places)) > 0

    def forget(self) -> None:
        self._prefix = self._chunk = None

    def try_kept(self, encoded: Encoded, tolerance: float) -> None:
        """Take the shortcuts that keep keys and values, if numbers stay."""
        can_skip = Shortcut.SHARED_PREFIX in self.possible and Shortcut.LAST_TOKEN in self.taken
        if can_skip and [*encoded.inputs] == ["input_ids"]:  # what is kept has no segments
            self._try([Shortcut.SHARED_PREFIX], trial_of(encoded, self._trial_groups), tolerance)

    def _try(self, shortcuts: Sequence[Shortcut], trial: Encoded, tolerance: float) -> None:
        self.taken -= set(shortcuts)
        expected = self._trial_logits(trial)
        for shortcut in shortcuts:
            self.taken.add(shortcut)
            self.forget()
            is_same = False
            try:
                difference = (self._trial_logits(trial) - expected).abs().max()
                is_same = bool(difference <= tolerance * max(1.0, float(expected.abs().max())))
                if shortcut is Shortcut.SHARED_PREFIX:
                    is_same = is_same and self.shared_tokens > 0
            except Exception as error:  # a model whose layers keep other states than keys and values
                if classify(error) is Verdict.SUSPECT:
                    raise
            if not is_same:
                self.taken.discard(shortcut)
        self.forget()
        self.shared_tokens = 0

    def _trial_logits(self, trial: Encoded) -> torch.Tensor:
        """Return the logits of texts, with what is kept of their beginnings and without, float64 on the host."""
        return self.logits(trial, np.arange(len(trial.lengths))).cpu().double()

    def _searching(self, pad_token_id: int | None) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a forward pass of the model's own looks for this pad id."""
        if not self._searches_pad_token:
            return contextlib.nullcontext()
        return searching(self._model.config, pad_token_id)

    def _read_places(self, encoded: Encoded, rows: Integers) -> Integers:
        """Return the place of the token that the head reads in each row, int64 [rows].

        It is 0 where a row has nothing but pad tokens, as in transformers.
        """
        stored = self._stored_pad_token_id
        if stored is None:
            return np.asarray(encoded.lengths[rows] - 1)
        ids = (encoded.inputs["input_ids"][row] for row in rows.tolist())
        return np.array([np.flatnonzero(row != stored).max(initial=0) for row in ids], dtype=np.int64)

    def for_own_head(
        self, encoded: Encoded, rows: npt.NDArray[np.int64]
    ) -> tuple[dict[str, npt.NDArray[np.int64]], int]:
        """Return a batch for the model's own forward pass, head included, and its pad id.

        With this id in the model's config the head reads in each row the token that it reads in the row alone.
        """
        pad_token_id, stored = self._pad_token_id, self._stored_pad_token_id
        looks_for_pads = self._searches_pad_token or self._is_generic
        # Heads such as BART's read at eos, and would count the padding.
        shifts_by_pads = self._is_encoder_decoder and stored != self._model.config.eos_token_id
        if stored is not None and (looks_for_pads or shifts_by_pads):
            pad_token_id = stored
        elif looks_for_pads:
            pad_token_id = unused_token(encoded, rows, self._vocabulary)
        return padded(encoded, rows, pad_token_id, self._pad_left), pad_token_id

    def _inputs(
        self, arrays: dict[str, npt.NDArray[np.int64]], with_mask: bool, skipped: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return a batch of ``padded`` on the device where a pass begins, without the tokens that it skips.

        Only the mask has these, too.
        """
        needs_mask = with_mask or Shortcut.NO_MASK not in self.taken
        return {
            name: on_device(array if name == "attention_mask" else array[:, skipped:], self._device)
            for name, array in arrays.items()
            if needs_mask or name != "attention_mask"
        }


def padded(
    encoded: Encoded, rows: npt.NDArray[np.int64], pad_token_id: int, pad_left: bool = False
) -> dict[str, npt.NDArray[np.int64]]:
    """Return each input and ``attention_mask``, int64 [rows, width], padded to the longest row."""
    lengths = encoded.lengths[rows]
    width = int(lengths.max())
    positions = np.arange(width)
    mask = positions >= width - lengths[:, None] if pad_left else positions < lengths[:, None]
    inputs = {}
    for name, arrays in encoded.inputs.items():
        inputs[name] = np.full(mask.shape, pad_token_id if name == "input_ids" else 0, dtype=np.int64)
        inputs[name][mask] = np.concatenate([arrays[row] for row in rows.tolist()])
    return {**inputs, "attention_mask": mask.astype(np.int64)}


def unused_token(encoded: Encoded, rows: npt.NDArray[np.int64], vocabulary: int) -> int:
    """Return a token id that none of the rows holds."""
    used = {token for row in rows.tolist() for token in encoded.inputs["input_ids"][row].tolist()}
    return next(token for token in range(vocabulary) if token not in used)


def _stored_pad_token_id(config: Any, vocabulary: int) -> int | None:
    """Return the pad id that a checkpoint's forward looks for; None where none is stored, or no token has it."""
    stored = (part.pad_token_id for part in (config.get_text_config(), config))
    pad_token_id = next((token_id for token_id in stored if token_id is not None), None)
    return pad_token_id if pad_token_id is not None and 0 <= pad_token_id < vocabulary else None


@contextlib.contextmanager
def searching(config: Any, pad_token_id: int | None) -> Iterator[None]:
    """Let the forward pass of a model with this config look for a pad id."""
    parts = (config, config.get_text_config())
    stored = [part.pad_token_id for part in parts]
    for part in parts:
        part.pad_token_id = pad_token_id
    try:
        yield
    finally:
        for part, before in zip(parts, stored, strict=True):
            part.pad_token_id = before


def probabilities(logits: torch.Tensor, activation: Activation) -> npt.NDArray[np.float64]:
    """Return the logits after the activation, in float64, so that rows sum to 1 as closely as scikit-learn asks."""
    values = logits.cpu().double()
    if activation == "softmax":
        values = values.softmax(-1)
    elif activation == "sigmoid":
        values = values.sigmoid()
    return np.asarray(values.numpy())


def _names_in(function: object) -> set[str]:
    """Return the names of globals and attributes in a function; none if there is no function."""
    return set(inspect.unwrap(function).__code__.co_names) if inspect.isfunction(function) else set()


def states_at(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the state of one token of each row, [rows, numbers], of [rows, tokens, numbers]."""
    return states[torch.arange(len(states), device=states.device), positions.to(states.device)]


def trial_of(encoded: Encoded, groups: Integers | None) -> Encoded:
    """Return four rows of a text's tokens that begin alike, of which each two begin alike for some tokens more."""
    ids = np.resize(np.concatenate(encoded.inputs["input_ids"]), 2 * MIN_TOKENS)
    # Different ends, of different lengths.
    ends = [(7, 50), (7, 54), (21, 57), (21, 60)]
    rows = [np.concatenate([ids[:MIN_TOKENS], ids[own : own + 36], ids[end:]]) for own, end in ends]
    lengths = np.array([len(row) for row in rows])
    return Encoded({"input_ids": rows}, lengths, truncated_rows=0, groups=groups)
