"""Batches -> logits -> probabilities: the forward pass, the last token's logits, the activation."""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.modeling_layers import GenericForSequenceClassification

from ensemble.common.protocol import Activation
from ensemble.members.huggingface.loading.device_map import input_device, last_device
from ensemble.members.huggingface.scoring.device_queue import Batch, on_device, padded, unused_token
from ensemble.members.huggingface.scoring.encode import Encoded
from ensemble.members.huggingface.scoring.last_token_layer import last_token_only, last_token_parts


class Shortcut(Enum):
    """Work that some models need not be given; which ones, a rehearsal tells."""

    LAST_TOKEN = "body and head are run apart, the head on each row's last token only"
    NO_MASK = "batches go without an attention mask, as no token sees the padding behind it"
    NARROW = "the last layer computes the last token only, too"


class Classifier:
    """A loaded sequence classifier that gives a row the same numbers whatever its neighbours in the batch.

    Decoder checkpoints are classified at their last token.  transformers looks for it by comparing token ids
    with the pad id, which fails where a checkpoint has none (Llama-3) and picks the wrong token where pad
    equals eos and a text ends with eos.  So the position comes from the rows' lengths here, and only the last
    token's state goes through the head where that is known to be the same.

    Args:
        model: as ``AutoModelForSequenceClassification`` loads it.
        pad_token_id: what to fill up with; any id, since no result depends on it.

    Attributes:
        possible: the shortcuts that can be tried.
        taken: those that are known to leave the model's numbers as they are.
    """

    def __init__(self, model: Any, pad_token_id: int) -> None:
        self._model = model
        self._pad_token_id = pad_token_id
        is_generic = _has_forward_of_generic(model)
        self._searches_pad_token = not is_generic and _searches_pad_token(model)
        self._last_token_parts = last_token_parts(model)
        # On the right, whatever side the tokenizer names: positions start at 0 there, encoders pool their first
        # token, and causal attention does not see it. Only XLNet pools whatever stands last.
        self._pad_left = model.config.model_type == "xlnet"
        can_be = {
            Shortcut.LAST_TOKEN: self._searches_pad_token and _has_body_and_score(model),
            Shortcut.NO_MASK: not self._pad_left and _is_causal(model),
            Shortcut.NARROW: bool(self._last_token_parts),
        }
        self.possible = frozenset(shortcut for shortcut, it_can in can_be.items() if it_can)
        self.taken = {Shortcut.LAST_TOKEN} if is_generic else set()
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.device = input_device(model)
        self.last_device = last_device(model)

    def batch(self, encoded: Encoded, rows: npt.NDArray[np.int64], with_mask: bool = False) -> Batch:
        """Rows padded and on their way to the model's device.

        Args:
            encoded: token ids.
            rows: which of them, [batch].
            with_mask: although the model may do without.
        """
        filler = self._pad_token_id
        if self._searches_pad_token and Shortcut.LAST_TOKEN not in self.taken:
            filler = unused_token(encoded, rows, self._vocabulary)
        arrays = padded(encoded, rows, filler, self._pad_left)
        if Shortcut.NO_MASK in self.taken and not with_mask:
            del arrays["attention_mask"]
        inputs = {name: on_device(array, self.device) for name, array in arrays.items()}
        return Batch(inputs, on_device(encoded.lengths[rows] - 1, self.device), filler)

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor:
        """A forward pass; float32 [batch, labels], on the device where it ends."""
        if Shortcut.LAST_TOKEN in self.taken:
            return self._last_token_logits(batch).float()
        return self._own_logits(batch).float()

    def logits(self, encoded: Encoded, rows: npt.NDArray[np.int64], with_mask: bool = False) -> torch.Tensor:
        """``batch`` and ``run`` in one."""
        return self.run(self.batch(encoded, rows, with_mask))

    def _last_token_logits(self, batch: Batch) -> torch.Tensor:
        model = self._model
        backbone = getattr(model, model.base_model_prefix)
        if self._searches_pad_token:  # nobody looks for it here, and some bodies warn of it
            model.config.pad_token_id = model.config.get_text_config().pad_token_id = None
        with last_token_only(self._last_token_parts if Shortcut.NARROW in self.taken else [], batch.last):
            hidden = backbone(**batch.inputs, use_cache=False).last_hidden_state
        last = batch.last.to(hidden.device)
        pooled = hidden[torch.arange(len(last), device=hidden.device), last]
        logits: torch.Tensor = model.score(pooled)
        return logits

    def _own_logits(self, batch: Batch) -> torch.Tensor:
        if self._searches_pad_token:  # an id that no row of this batch holds, so that looking for it is exact
            config = self._model.config
            config.pad_token_id = config.get_text_config().pad_token_id = batch.pad_token_id
        logits: torch.Tensor = self._model(**batch.inputs).logits
        return logits


def probabilities(logits: torch.Tensor, activation: Activation) -> npt.NDArray[np.float64]:
    """What the logits stand for.

    In float64, so that rows sum to 1 as closely as readers such as scikit-learn ask for.

    Args:
        logits: float32 [rows, labels].
    """
    values = logits.cpu().double()
    if activation == "softmax":
        values = values.softmax(-1)
    elif activation == "sigmoid":
        values = values.sigmoid()
    return np.asarray(values.numpy())


def _has_forward_of_generic(model: Any) -> bool:
    return isinstance(model, GenericForSequenceClassification) and (
        type(model).forward is GenericForSequenceClassification.forward
    )


def _searches_pad_token(model: Any) -> bool:
    """Whether a decoder's own forward finds the last token by the pad id (GPT-2, OPT, Falcon, Bloom, ...)."""
    if getattr(model.config, "is_encoder_decoder", False):
        return False  # these pool at eos and use the pad id for shifting
    # Along the inheritance, because some only delegate to transformers' generic forward.
    return any("pad_token_id" in _source(vars(kind).get("forward")) for kind in type(model).__mro__)


def _has_body_and_score(model: Any) -> bool:
    """Whether a decoder's own forward is written as its body and then ``score`` at every position."""
    body = model.base_model_prefix
    text = _source(type(model).forward)
    # The last is how transformers picks a position; heads without it take the mean, or the first.
    parts = (f"self.{body}(", "self.score(hidden_states", "logits[torch.arange(")
    return all(part in text for part in parts) and isinstance(getattr(model, "score", None), torch.nn.Module)


def _is_causal(model: Any) -> bool:
    """Whether all of its attention says of itself that no token sees a later one, padding on the right included."""
    if getattr(model.config, "is_encoder_decoder", False):
        return False
    said = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    return bool(said) and all(value is True for value in said)


def _source(function: object) -> str:
    try:
        return inspect.getsource(function) if inspect.isfunction(function) else ""
    except OSError:  # code without a file
        return ""
