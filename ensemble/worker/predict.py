"""Batches -> logits -> probabilities: padding, the forward pass, the last token's logits, the activation."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.modeling_layers import GenericForSequenceClassification

from ensemble.protocol import Activation
from ensemble.worker.placement import input_device
from ensemble.worker.prompt import Encoded


class Classifier:
    """A loaded sequence classifier that gives a row the same numbers whatever its neighbours in the batch.

    Decoder checkpoints are classified at their last token.  transformers looks for it by comparing token ids
    with the pad id, which fails where a checkpoint has none (Llama-3) and picks the wrong token where pad
    equals eos and a text ends with eos.  So the position comes from the attention mask here.

    Args:
        model: as ``AutoModelForSequenceClassification`` loads it.
        pad_token_id: what to fill up with; any id, since no result depends on it.
    """

    def __init__(self, model: Any, pad_token_id: int) -> None:
        self._model = model
        self._pad_token_id = pad_token_id
        self._pools_last_token = _has_forward_of_generic(model)
        self._searches_pad_token = not self._pools_last_token and _searches_pad_token(model)
        # On the right, whatever side the tokenizer names: positions start at 0 there, encoders pool their first
        # token, and causal attention does not see it. Only XLNet pools whatever stands last.
        self._pad_left = model.config.model_type == "xlnet"
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.device = input_device(model)

    @torch.inference_mode()
    def logits(self, encoded: Encoded, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """Run one batch.

        Args:
            encoded: token ids.
            rows: which of them, [batch].

        Returns:
            float32 [batch, labels], on the model's device.
        """
        inputs = self._pad(encoded, rows)
        logits = self._last_token_logits(inputs) if self._pools_last_token else self._all_logits(inputs)
        return logits.float()

    def _last_token_logits(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        model = self._model
        backbone = getattr(model, model.base_model_prefix)
        hidden = backbone(**inputs, use_cache=False).last_hidden_state
        last = inputs["attention_mask"].sum(-1) - 1
        pooled = hidden[torch.arange(len(last), device=hidden.device), last.to(hidden.device)]
        logits: torch.Tensor = model.score(pooled)
        return logits

    def _all_logits(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        if self._searches_pad_token:
            config = self._model.config
            config.pad_token_id = config.get_text_config().pad_token_id = self._mark_padding(inputs)
        logits: torch.Tensor = self._model(**inputs).logits
        return logits

    def _mark_padding(self, inputs: dict[str, torch.Tensor]) -> int:
        """Fill the padding with an id that no row of this batch holds, so that looking for it is exact."""
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        used = set(torch.unique(ids[mask.bool()]).tolist())
        free = next(token for token in range(self._vocabulary) if token not in used)
        ids.masked_fill_(mask == 0, free)
        return free

    def _pad(self, encoded: Encoded, rows: npt.NDArray[np.int64]) -> dict[str, torch.Tensor]:
        width = int(encoded.lengths[rows].max())
        padded = {
            name: np.full(
                (len(rows), width), self._pad_token_id if name == "input_ids" else 0, dtype=np.int64
            )
            for name in encoded.inputs
        }
        mask = np.zeros((len(rows), width), dtype=np.int64)
        for index, row in enumerate(rows.tolist()):
            length = int(encoded.lengths[row])
            place = slice(width - length, width) if self._pad_left else slice(0, length)
            mask[index, place] = 1
            for name, arrays in encoded.inputs.items():
                padded[name][index, place] = arrays[row]
        padded["attention_mask"] = mask
        return {name: torch.from_numpy(array).to(self.device) for name, array in padded.items()}


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


def good_rows(values: npt.NDArray[np.float64], activation: Activation) -> npt.NDArray[np.bool_]:
    """Which rows are good: finite, and for probabilities within 0..1, summing to 1 where they exclude each other.

    Args:
        values: float64 [rows, labels].

    Returns:
        bool [rows].
    """
    good = np.isfinite(values).all(axis=1)
    if activation != "none":
        with np.errstate(invalid="ignore"):
            good &= ((values >= 0) & (values <= 1)).all(axis=1)
    if activation == "softmax":
        with np.errstate(invalid="ignore"):
            good &= np.abs(values.sum(axis=1, dtype=np.float64) - 1) < 1e-3
    return np.asarray(good)


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


def _source(function: object) -> str:
    try:
        return inspect.getsource(function) if inspect.isfunction(function) else ""
    except OSError:  # code without a file
        return ""
