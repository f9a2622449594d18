"""Define what a short process with transformers tells of a checkpoint (``loading/describe.py``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """Hold the numbers that memory depends on.

    Attributes:
        mlp_width: numbers per token at the peak of a feed-forward part, those of all its experts.
        largest_weight: elements of the largest linear layer.
        max_positions: the longest row; None: positions are not learnt, or not known.
        soft_capping: whether attention scores go through tanh, as in Gemma-2.
        dtype: the stored type (float32, float16, bfloat16); None: not stored.
        quantization: the settings of a checkpoint that is stored quantized; None: it is not.
        masks: attention masks of a forward pass; two where only some layers have a window.
        supports_sdpa: whether torch's fused attention works; None: not known.
        is_old: whether its code has only attention of its own, which takes more.
        experts: of a mixture, that compute a token; 1: it is none.
        position_buckets: half the size of DeBERTa's table of positions; 0: it is none.
        is_causal: whether no token sees a later one, so that what rows begin with is computed once.
        window: tokens that some layers look back at; 0: there is no limit.
    """

    layers: int
    hidden: int
    mlp_width: int
    largest_weight: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int | None
    soft_capping: bool
    dtype: str | None
    quantization: Mapping[str, Any] | None = None
    masks: int = 1
    supports_sdpa: bool | None = None
    is_old: bool = False
    experts: int = 1
    position_buckets: int = 0
    vocabulary: int = 0
    is_causal: bool = False
    window: int = 0


@dataclass(frozen=True)
class Facts:
    """Hold what the installed transformers makes of a checkpoint, without its weights.

    Attributes:
        problems: why it cannot be used; each is a sentence.
        key_problems: what is wrong with keys of the member; each sentence begins with its key.
        training_problems: what is wrong with its training, if it is the base of one; with keys below ``train``.
        warnings: sentences in which ``{name}`` stands for the checkpoint's name.
        architecture: None: not known.
        parameters: of the model; 0: not known.
        trainable: of them, those that the training's adapter adds; None: there is none, or it cannot be made.
        width: of the last hidden states; None: not known.
        patches: of an image classifier that is a plain transformer: its tokens of an image; 0: it is none.
        image_numbers: of the pixels of such an image, in three colours.
        max_length: tokens of a row by the tokenizer's own limit; None: only the worker has the tokenizer.
        text_ids: the tokens of the label texts, and of the fixed text of each template; empty: not known.
    """

    problems: Sequence[str] = ()
    key_problems: Sequence[str] = ()
    training_problems: Sequence[str] = ()
    warnings: Sequence[str] = ()
    architecture: Architecture | None = None
    parameters: int = 0
    trainable: int | None = None
    width: int | None = None
    patches: int = 0
    image_numbers: int = 0
    max_length: int | None = None
    text_ids: Sequence[Sequence[int]] = ()

    @property
    def max_positions(self) -> int | None:
        return None if self.architecture is None else self.architecture.max_positions
