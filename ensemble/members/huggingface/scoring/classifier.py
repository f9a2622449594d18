"""Turn batches into probabilities: the forward pass, the last token's logits, the activation."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.modeling_layers import GenericForSequenceClassification

from ensemble.common.protocol import Activation
from ensemble.members.huggingface.scoring.encode import Encoded
from ensemble.members.huggingface.scoring.forward import Scorer, Shortcut


class Classifier(Scorer[Encoded]):
    """Run a loaded sequence classifier, which gives a row the same numbers in any batch.

    The head of a decoder reads one token: the last one whose id is not the pad id of the checkpoint's config, as
    transformers' own forward has it, and with it whoever has trained the checkpoint.  If pad equals eos and a text
    ends with eos, that is the token before.  Where the config has no pad id (Llama-3), it is the row's last token.
    Only this token's state goes through the head if that is known to give the same numbers.
    """

    def __init__(self, model: Any, pad_token_id: int) -> None:
        super().__init__(model)
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self._stored_pad_token_id = _stored_pad_token_id(model.config, self._vocabulary)
        self._pad_token_id = pad_token_id
        is_generic = (
            isinstance(model, GenericForSequenceClassification)
            and type(model).forward is GenericForSequenceClassification.forward
        )
        self._is_generic = is_generic
        # Models with an encoder and a decoder pool at eos, and use the pad id for shifting.
        is_encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
        self._is_encoder_decoder = is_encoder_decoder
        # Whether a decoder's own forward finds its token by the pad id (GPT-2, OPT, Falcon, Bloom, ...).  Base
        # classes count, because some classes only delegate to transformers' generic forward.
        self._searches_pad_token = False
        if not is_generic and not is_encoder_decoder:
            forwards = [vars(base).get("forward") for base in type(model).__mro__]
            self._searches_pad_token = any("pad_token_id" in _names_in(forward) for forward in forwards)
        # Whether all attention is declared causal: no token sees a later one, nor padding on the right.
        flags = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
        is_causal = not is_encoder_decoder and bool(flags) and all(flag is True for flag in flags)
        # Padding is on the right, whatever side the tokenizer names: positions then start at 0, encoders pool their
        # first token, and causal attention does not see it. Only XLNet pools the last position.
        self._pad_left = model.config.model_type == "xlnet"
        # Such a forward runs the body, then the head at every position, and picks one by arange; heads without that
        # take the mean, or the first position.
        body_and_score = {model.base_model_prefix, "score", "arange"}
        if self._searches_pad_token and body_and_score <= _names_in(type(model).forward):
            self.possible |= {Shortcut.LAST_TOKEN}
        if is_causal and not self._pad_left:
            self.possible |= {Shortcut.NO_MASK}
        self.taken = {Shortcut.LAST_TOKEN} if is_generic else set()

    def logits(self, encoded: Encoded, rows: npt.NDArray[np.int64], with_mask: bool = False) -> torch.Tensor:
        model = self._model
        if Shortcut.LAST_TOKEN not in self.taken:
            arrays, pad_token_id = self.for_own_head(encoded, rows)
            inputs = self._inputs(arrays, with_mask)
            with self._searching(pad_token_id), self._spread.forward_pass(), torch.inference_mode():
                logits: torch.Tensor = model(**inputs).logits
                return logits.float()
        arrays = padded(encoded, rows, self._pad_token_id, self._pad_left)
        # Copied from the host: a copy between GPUs would wait for both.
        read = on_device(self._read_positions(encoded, rows, arrays), self.last_device)
        inputs = self._inputs(arrays, with_mask)
        # Without a pad id, since some bodies warn of one.
        with self._searching(None), self._spread.forward_pass(), torch.inference_mode():
            hidden = getattr(model, model.base_model_prefix)(**inputs, use_cache=False).last_hidden_state
            last_logits: torch.Tensor = model.score(states_at(hidden, read))
            return last_logits.float()

    def _searching(self, pad_token_id: int | None) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a forward pass of the model's own looks for this pad id."""
        return (
            searching(self._model.config, pad_token_id)
            if self._searches_pad_token
            else contextlib.nullcontext()
        )

    def _read_positions(
        self, encoded: Encoded, rows: npt.NDArray[np.int64], arrays: dict[str, npt.NDArray[np.int64]]
    ) -> npt.NDArray[np.int64]:
        """Return the place of the token that the head reads, int64 [rows], in a batch padded on the right.

        It is 0 where a row has nothing but pad tokens, as in transformers.
        """
        if self._stored_pad_token_id is None:
            return encoded.lengths[rows] - 1
        is_read = (arrays["input_ids"] != self._stored_pad_token_id) & (arrays["attention_mask"] == 1)
        places: npt.NDArray[np.int64] = (is_read * np.arange(is_read.shape[1])).max(axis=1)
        return places

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

    def _inputs(self, arrays: dict[str, npt.NDArray[np.int64]], with_mask: bool) -> dict[str, torch.Tensor]:
        """Return a batch on the device where a pass begins; ``arrays`` are those of ``padded``."""
        needs_mask = with_mask or Shortcut.NO_MASK not in self.taken
        return {
            name: on_device(array, self._device)
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


def on_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array to a device; to a GPU from pinned memory, so that the host does not wait."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


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
